"""Bounded waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["end", "within"]

_Result = TypeVar("_Result")


async def within(seconds: float, work: Coroutine[Any, Any, _Result], *ends: asyncio.Future[Any]) -> _Result:
    """The result of the work. `asyncio.TimeoutError`: it took longer, or one of `ends` came first, or it was cancelled
    from elsewhere; the work has ended then.

    Before Python 3.12 `asyncio.wait_for` may lose a cancellation that coincides with a result: the request of a client
    that has gone would then be served to its end.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.cancelled():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        await end(task)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels running tasks, and returns when all have ended. Their exceptions are ignored."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as retrieved
