"""Waits with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["end", "within"]

_Result = TypeVar("_Result")


async def within(seconds: float, work: Coroutine[Any, Any, _Result], *ends: asyncio.Future[Any]) -> _Result:
    """What the work gives. `asyncio.TimeoutError`: it took longer, or one of `ends` came first, or somebody else
    cancelled it; the work has ended then.

    `asyncio.wait_for` may take a cancellation for a result before Python 3.12, where both come at once: the request of
    a client that has gone would then be served to its end.
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
    """Cancels those that go on, and returns when all have ended. What they raised is of no interest any more."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # somebody has seen it
