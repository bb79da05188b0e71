"""The router as a process: its parts, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator

from aiohttp import web

from troupe.router.attempts import Parts
from troupe.router.choice import Chooser
from troupe.router.door import Door, connections_of
from troupe.router.errors import error_document
from troupe.router.front import Front
from troupe.router.instances import Fleet
from troupe.router.line import Line
from troupe.router.members import Members
from troupe.router.metrics import Metrics
from troupe.router.settings import Settings
from troupe.router.upstream import Upstream
from troupe.router.watch import Watch

__all__ = ["run"]

logger = logging.getLogger("troupe.router")

_BACKLOG = 1024
_IDLE = 75.0  # seconds that a connection may have no request, or an incomplete head
_FIRST_LOOK = 3.0  # seconds for the cluster and each engine to answer once before the first client is accepted
_LAST_WORDS = 5.0  # seconds for requests that the router ends when it stops


async def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, lets running requests end, and returns. A second signal does not wait. `OSError`:
    the address is taken, or libtroupe is missing."""
    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def stopped() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped)
    with contextlib.suppress(asyncio.CancelledError):
        async with _parts(settings) as parts:
            await _look_around(parts, stop)
            async with _listens(settings, parts):
                await stop.wait()
                logger.info("stops; requests in progress may go on for %g s", settings.times.stop)


async def _look_around(parts: Parts, stop: asyncio.Event) -> None:
    """Waits for the engines: a client accepted before any is known would be told that there is none."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + _FIRST_LOOK
    while loop.time() < limit and not stop.is_set():
        if (parts.members is None or parts.members.has_looked) and all(one.has_been_asked for one in parts.fleet):
            return
        await asyncio.sleep(_FIRST_LOOK / 100)


@contextlib.asynccontextmanager
async def _listens(settings: Settings, parts: Parts) -> AsyncIterator[None]:
    """Leaving the context stops accepting requests and waits for those that run."""
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(
        Front(parts).application(),
        handler_cancellation=True,  # a client that goes away ends its request
        access_log=None,
        keepalive_timeout=_IDLE,
        shutdown_timeout=settings.times.stop + _LAST_WORDS,
    )
    await runner.setup()
    try:
        most = connections_of(settings.limits)
        door = Door(runner.server, most, error_document(503, f"{most} clients are connected already"))
        listener = await loop.create_server(door, settings.host, settings.port, backlog=_BACKLOG)
        try:
            host, port = listener.sockets[0].getsockname()[:2]
            print(f"troupe router listens at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
            yield
        finally:
            listener.close()
            loop.call_later(settings.times.stop, parts.over.set_result, None)
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _parts(settings: Settings) -> AsyncIterator[Parts]:
    fleet = Fleet(settings.engines)
    line = Line(fleet, Chooser(fleet, settings.limits.per_engine), settings.limits, settings.times.patience)
    members = Members(settings, fleet) if settings.has_cluster else None
    upstream = Upstream(settings.times)
    watchers = [asyncio.create_task(Watch(fleet, upstream, settings.times).run())]
    if members is not None:
        watchers.append(asyncio.create_task(members.watch()))
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        yield Parts(settings, fleet, line, upstream, Metrics(), members, over)
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await upstream.close()
        if members is not None:
            members.close()
