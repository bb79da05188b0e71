"""What a client gets: one answer, or one stream."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from troupe.router.errors import ApiError, error_document

__all__ = ["ClientGoneError", "Reply"]


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


class Reply:
    """`status`: what the client was told, None: nothing yet. `streams`: by a stream, in which errors are events.
    `broken`: it had one."""

    def __init__(self, request: web.Request, request_id: str) -> None:
        self._request = request
        self._headers = {"X-Request-Id": request_id}
        self._stream: Any = None
        self._whole: Any = None
        self.status: int | None = None
        self.broken = False

    @property
    def streams(self) -> bool:
        return self._stream is not None

    async def event(self, data: bytes) -> None:
        """One or more events of a stream, which begins with the first of them. Waits while the client reads slowly."""
        try:
            if self._stream is None:
                self._stream = web.StreamResponse(
                    headers={
                        **self._headers,
                        "Content-Type": "text/event-stream; charset=utf-8",
                        "Cache-Control": "no-cache",
                        "X-Accel-Buffering": "no",
                    }
                )
                self.status = 200
                await self._stream.prepare(self._request)
            await self._stream.write(data)
        except ConnectionError as why:
            raise ClientGoneError(str(why)) from None

    def whole(self, body: bytes, content_type: str) -> None:
        self.status = 200
        self._whole = web.Response(body=body, headers={**self._headers, "Content-Type": content_type})

    async def error(self, why: ApiError) -> None:
        """An answer with its status; an event where a stream has begun, and nothing behind it."""
        if self._stream is not None:
            self.broken = True
            await self.event(b"data: " + error_document(why.status, why.message) + b"\n\n")
            return
        self.status = why.status
        headers = {**self._headers, "Content-Type": "application/json"}
        if why.retry_after is not None:
            headers["Retry-After"] = str(why.retry_after)
        self._whole = web.Response(status=why.status, body=why.document(), headers=headers)

    async def end(self) -> Any:
        """What the server's handler returns."""
        if self._stream is None:
            return self._whole
        try:
            await self._stream.write_eof()
        except ConnectionError as why:
            raise ClientGoneError(str(why)) from None
        return self._stream
