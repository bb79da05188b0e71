"""The bodies of requests: bounded each and in total."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from troupe.router.errors import ApiError
from troupe.router.reply import ClientGoneError
from troupe.router.settings import Limits
from troupe.router.waiting import within

__all__ = ["Bodies", "Room"]

_SECONDS = 60.0  # for a body to arrive


class Bodies:
    """`held`: bytes of all requests in progress."""

    def __init__(self, limits: Limits) -> None:
        self.each, self.all = limits.body, limits.bodies
        self.held = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[Room]:
        """Bytes read in the room are counted until it ends, that is, as long as the request goes on."""
        made = Room(self)
        try:
            yield made
        finally:
            self.held -= made.size


class Room:
    """The room of one request."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = 0

    async def read(self, request: Any) -> bytes:
        """`ApiError`: 413 it is too long, 429 all bodies together are, 408 it does not arrive, 400 it contradicts its
        headers."""
        if (request.content_length or 0) > self._bodies.each:
            raise self._too_long()
        try:
            return await within(_SECONDS, self._read(request))
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_SECONDS:g} s") from None
        except web.RequestPayloadError as why:
            raise ApiError(400, f"the body does not match its headers: {why}") from None
        except ConnectionError as why:
            raise ClientGoneError(str(why)) from None

    async def _read(self, request: Any) -> bytes:
        parts = []
        while part := await request.content.readany():
            parts.append(part)
            self.size += len(part)
            self._bodies.held += len(part)
            if self.size > self._bodies.each:
                raise self._too_long()
            if self._bodies.held > self._bodies.all:
                raise ApiError(429, f"the requests in progress have more than {self._bodies.all} bytes", retry_after=5)
        return b"".join(parts)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._bodies.each} bytes")
