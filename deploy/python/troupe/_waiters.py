"""Tasks of an event loop that wait for the same thing."""

from __future__ import annotations

import asyncio


class Waiters:
    """Woken together, in their order. Use it only from the loop's thread."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[waiter] = None
        try:
            await waiter
        finally:  # also after a timeout
            self._futures.pop(waiter, None)

    def wake(self) -> None:
        for waiter in self._futures:
            if not waiter.done():
                waiter.set_result(None)
        self._futures.clear()
