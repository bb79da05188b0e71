"""Accepts clients: as many connections at once as there is room for."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from troupe.router.settings import Limits

__all__ = ["Door", "connections_of"]

logger = logging.getLogger("troupe.router")

# Open files of the process other than connections with clients and engines.
_OWN_FILES = 128
_MOST_LEAVING = 64  # of those files: connections being refused
_LEAVE_SECONDS = 1.0

_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)


def connections_of(limits: Limits) -> int:
    """How many clients may be connected. The files needed for connections to engines are reserved: otherwise clients
    that only connect would take the engines away from everyone."""
    own = 2 * limits.running + _OWN_FILES
    wanted = limits.connections + own
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = wanted if soft == resource.RLIM_INFINITY else max(soft - own, soft // 2)
    if room < limits.connections:
        logger.warning("%d open files are allowed: only %d clients may be connected at once", soft, room)
    return min(limits.connections, room)


class Door:
    """Called for every connection. `server`: of aiohttp. `refusal`: the answer to clients for whom there is no room."""

    def __init__(self, server: Any, most: int, refusal: bytes) -> None:
        self._server = server
        self._most = most
        self._refusal = _REFUSAL % (len(refusal), refusal)
        self._leaving: set[_Entering] = set()

    def __call__(self) -> _Entering:
        return _Entering(self)

    def enter(self, entering: _Entering, transport: asyncio.Transport) -> None:
        if len(self._server.connections) < self._most:
            handler = self._server()
            transport.set_protocol(handler)
            handler.connection_made(transport)
            return
        transport.write(self._refusal)
        if len(self._leaving) >= _MOST_LEAVING:
            transport.close()
            return
        # Its request is read for a moment: otherwise our answer may be lost.
        self._leaving.add(entering)
        transport.write_eof()
        asyncio.get_running_loop().call_later(_LEAVE_SECONDS, transport.close)

    def left(self, entering: _Entering) -> None:
        self._leaving.discard(entering)


class _Entering(asyncio.Protocol):
    """The protocol of a connection until it is known whether there is room, and of refused ones."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._door.enter(self, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.left(self)
