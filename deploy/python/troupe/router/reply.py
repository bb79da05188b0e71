"""The reply to a client: one answer, or one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from troupe.router.errors import ApiError, error_document
from troupe.router.waiting import within

__all__ = ["ClientGoneError", "Reply"]

# Time to read the rest after the request has ended: of a stream, most of which the client has; of an answer. A client
# that does not read at all would hold it for ever.
_STREAM_SECONDS = 10.0
_ANSWER_SECONDS = 60.0


class ClientGoneError(Exception):
    """The client no longer reads the answer."""


class Reply:
    """`status`: the status sent to the client, None: nothing yet. `streams`: a stream, in which errors are events.
    `broken`: the stream had an error."""

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
        """Sends an answer with its status, or, if a stream has begun, an event, which is its last."""
        if self._stream is not None:
            self.broken = True
            said = b"data: " + error_document(why.status, why.message) + b"\n\n"
            await self._at_last(self.event(said), _STREAM_SECONDS)
            return
        self.status = why.status
        headers = {**self._headers, "Content-Type": "application/json"}
        if why.retry_after is not None:
            headers["Retry-After"] = str(why.retry_after)
        self._whole = web.Response(status=why.status, body=why.document(), headers=headers)

    async def end(self) -> Any:
        """What the server's handler returns."""
        if self._stream is not None:
            await self._at_last(self._stream.write_eof(), _STREAM_SECONDS)
            return self._stream
        await self._at_last(self._answer(), _ANSWER_SECONDS)
        return self._whole

    def abandoned(self) -> Any:
        """As `end`, for a client that has gone."""
        begun = self._whole if self._stream is None else self._stream
        return web.Response(status=499) if begun is None else begun

    # -- parts

    async def _answer(self) -> None:
        await self._whole.prepare(self._request)
        await self._whole.write_eof()

    async def _at_last(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        try:
            await within(seconds, work)
        except asyncio.TimeoutError:
            # Or at once, where what it did not read before was cancelled: aiohttp waits for both by one future.
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGoneError("it does not read its answer") from None
        except ConnectionError as why:
            raise ClientGoneError(str(why)) from None
