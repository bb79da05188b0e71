"""The common part of an engine and an agent in an event loop: begun in a thread, watching a descriptor, ended once."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, Protocol, TypeVar


class _Watched(Protocol):
    def fileno(self) -> int: ...


Started = TypeVar("Started", bound=_Watched)
Own = TypeVar("Own", bound="InLoop[Any]")


class InLoop(Generic[Started]):
    """Use it only from the loop's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started: Started | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def begin(self: Own) -> Own:
        """Begins it, as `async with` does, in a thread, since allocating a large cache takes a while. Raises what the
        constructor of `Engine` or `Agent` raises."""
        if self._started is not None:
            raise RuntimeError(f"{self._name} has begun already")
        started = await asyncio.to_thread(self._start)
        self._started = started
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(started.fileno(), self._drain)
        return self

    async def __aenter__(self: Own) -> Own:
        return await self.begin()

    async def __aexit__(self, *_: object) -> None:
        await self._end_once()

    @property
    def _begun(self) -> Started:
        if self._started is None:
            raise RuntimeError(f"{self._name} has not begun: use `async with`")
        return self._started

    def _start(self) -> Started:
        """In a thread."""
        raise NotImplementedError

    def _drain(self) -> None:
        """Takes the events that the descriptor signals."""
        raise NotImplementedError

    async def _end(self, started: Started) -> None:
        raise NotImplementedError

    async def _end_once(self) -> None:
        if self._started is None:
            return
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(self._started))
        await asyncio.shield(self._ending)  # it goes on even if a caller is cancelled

    def _stop_watching(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._begun.fileno())
