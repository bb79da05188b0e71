"""A queue of bounded length where requests wait until engines have room for them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from troupe.router.choice import Chooser, Seat, Wanted
from troupe.router.errors import ApiError
from troupe.router.instances import Fleet
from troupe.router.settings import Limits

__all__ = ["Line"]

_LONGEST_RETRY_AFTER = 60
_LOOK_AGAIN = 0.1  # seconds: the end of an engine's rest has no event
_WEIGHT = 0.1  # weight of the newest request in the mean


@dataclass(eq=False)
class _Waiter:
    wanted: Wanted
    seat: asyncio.Future[Seat] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Line:
    """`running`: number of requests that have a seat."""

    def __init__(self, fleet: Fleet, chooser: Chooser, limits: Limits, patience: float) -> None:
        self._chooser = chooser
        self._limits = limits
        self._patience = patience
        self._waiting: deque[_Waiter] = deque()
        self._mean = 1.0  # mean seconds of a request
        self.running = 0
        fleet.on_change = self.serve

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether new requests are refused."""
        return self.running >= self._limits.running and len(self._waiting) >= self._limits.waiting

    def can(self, wanted: Wanted) -> bool:
        """Whether any engine could serve it, with or without room."""
        return self._chooser.can(wanted)

    @contextlib.asynccontextmanager
    async def seat(self, wanted: Wanted, *, again: bool = False) -> AsyncIterator[Seat]:
        """Room at the engines for as long as the context lasts.

        `again`: the request ran before, and lost its engine: it goes before all others, however many they are, and
        waits for engines to come back. `ApiError`: 429 the line is full, or no engine had room in time; 503 no engine
        is there.
        """
        seat = await self._take(wanted, again=again)
        began = time.monotonic()
        try:
            yield seat
        finally:
            self.running -= 1
            self._leave(seat)
            self._mean += _WEIGHT * (time.monotonic() - began - self._mean)
            self.serve()

    def leave_prefill(self, seat: Seat) -> None:
        """Frees the prefill engine's room: the prompt is computed."""
        if seat.prefill is not None:
            seat.prefill.outstanding -= 1
            seat.prefill = None
            self.serve()

    def serve(self) -> None:
        """Gives seats to the waiting requests that can have one now, in the order in which they came."""
        in_vain = set()  # kinds without room
        for waiter in list(self._waiting):
            if self.running >= self._limits.running:
                return
            if waiter.seat.done() or waiter.wanted.kind in in_vain:
                continue
            seat = self._chooser.choose(waiter.wanted)
            if seat is None:
                in_vain.add(waiter.wanted.kind)
            else:
                self._waiting.remove(waiter)
                self._enter(seat)
                waiter.seat.set_result(seat)

    def retry_after(self) -> int:
        """Seconds until a new request may find room: when those that wait now have been served."""
        rounds = (len(self._waiting) + 1) / max(1, self.running)
        return max(1, min(_LONGEST_RETRY_AFTER, math.ceil(rounds * self._mean)))

    # -- parts

    async def _take(self, wanted: Wanted, *, again: bool) -> Seat:
        if not again:
            if not self._chooser.can(wanted):
                raise ApiError(503, "there is no engine that could serve this request", retry_after=5)
            if not self._waiting and self.running < self._limits.running:
                seat = self._chooser.choose(wanted)
                if seat is not None:
                    self._enter(seat)
                    return seat
            if len(self._waiting) >= self._limits.waiting:
                raise ApiError(429, f"{len(self._waiting)} requests already wait", retry_after=self.retry_after())
        waiter = _Waiter(wanted)
        if again:
            self._waiting.appendleft(waiter)
        else:
            self._waiting.append(waiter)
        try:
            self.serve()
            limit = time.monotonic() + self._patience
            while not waiter.seat.done() and (left := limit - time.monotonic()) > 0:
                await asyncio.wait({waiter.seat}, timeout=min(left, _LOOK_AGAIN) if again else left)
                self.serve()
        except asyncio.CancelledError:
            self._drop(waiter)
            raise
        if waiter.seat.done():
            return waiter.seat.result()
        self._drop(waiter)
        if self._chooser.can(wanted):
            said = f"no engine had room within {self._patience:g} s"
            raise ApiError(429, said, retry_after=self.retry_after())
        raise ApiError(503, f"no engine became available within {self._patience:g} s", retry_after=5)

    def _drop(self, waiter: _Waiter) -> None:
        """Removes a waiter, which may have been given a seat a moment ago."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiter)
        if waiter.seat.done():
            self.running -= 1
            self._leave(waiter.seat.result())
            self.serve()

    def _enter(self, seat: Seat) -> None:
        self.running += 1
        for one in (seat.prefill, seat.decode):
            if one is not None:
                one.outstanding += 1

    def _leave(self, seat: Seat) -> None:
        for one in (seat.prefill, seat.decode):
            if one is not None:
                one.outstanding -= 1
