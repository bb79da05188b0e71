"""An engine for asyncio: operations are awaited, and each operation's events go to the task that asked for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from troupe._in_loop import InLoop
from troupe._waiters import Waiters
from troupe.engine import Engine
from troupe.errors import ErrorCode, TroupeError
from troupe.events import (
    Allocated,
    Call,
    Done,
    Event,
    Failed,
    Info,
    MemberEvent,
    Operation,
    Outcome,
    Placed,
    Unpinned,
    Value,
)
from troupe.members import name_of

__all__ = ["AsyncEngine"]

_CALLS = 4096  # bound on untaken calls, including those whose callers have given up


class _Track:
    """What is known of one operation."""

    __slots__ = ("ended", "error", "events", "outcome", "streamed", "two_steps", "waiters")

    def __init__(self, two_steps: bool) -> None:
        self.two_steps = two_steps  # send and receive: the end is `Unpinned`
        self.events: deque[Event] = deque()
        self.outcome = Outcome()
        self.error: TroupeError | None = None
        self.ended = False
        self.streamed = False  # its events go to `AsyncEngine.events`
        self.waiters = Waiters()


class _Member:
    """The pending events of one node: the end of the reported life, and the present life."""

    __slots__ = ("end", "there", "told")

    def __init__(self) -> None:
        self.told: MemberEvent | None = None  # the last event of a life whose end was not reported
        self.end: MemberEvent | None = None
        self.there: MemberEvent | None = None

    def waits(self) -> bool:
        if self.end is not None:
            return True
        if self.there is None:
            return False
        told = self.told
        return told is None or (told.incarnation, told.state) != (self.there.incarnation, self.there.state)


class _Members:
    """Events of members that no task has taken yet, merged as the engine itself merges them."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._turns: dict[str, None] = {}  # names with pending events, the oldest first

    def put(self, event: MemberEvent) -> None:
        member = self._members.setdefault(event.node, _Member())
        if event.state != "gone":
            member.there = event
            if member.end is not None and member.end.incarnation == event.incarnation:
                member.end = None  # it is back before its end was reported
        else:
            member.there = None
            if member.told is not None and member.told.incarnation == event.incarnation:
                member.end = event
        self._settle(event.node)

    def pop(self) -> MemberEvent | None:
        """The next event, which counts as reported then."""
        name = next(iter(self._turns), None)
        if name is None:
            return None
        member = self._members[name]
        if member.end is not None:
            event, member.end, member.told = member.end, None, None
        else:
            assert member.there is not None
            event = member.told = member.there
        self._settle(name)
        return event

    def clear(self) -> None:
        self._members.clear()
        self._turns.clear()

    def _settle(self, name: str) -> None:
        member = self._members[name]
        if member.waits():
            self._turns[name] = None
        else:
            self._turns.pop(name, None)
        if member.end is None and member.there is None:
            del self._members[name]


class AsyncEngine(InLoop[Engine]):
    """An `Engine` in an event loop.

        async with AsyncEngine("decode-0", file="troupe.yaml") as engine:
            await engine.wait_registered()
            outcome = await engine.wait(engine.receive("r1", sources=["prefill-0"], tokens=100))

    Arguments are those of `Engine`, which is begun by `async with` (or `begin`). Use it only from the loop's thread.
    Calls that begin an operation are those of `Engine`; they are plain methods, as they return at once. Every operation
    must be waited for, by `wait` or `events`, or dropped by `forget`: until then its events are kept.
    """

    def __init__(self, name: str | None = None, **arguments: Any) -> None:
        super().__init__(name_of(name, arguments.get("join")))
        self._given_name = name
        self._arguments = arguments
        self._tracks: dict[Operation, _Track] = {}
        self._calls: asyncio.Queue[Call | None] = asyncio.Queue()  # None ends it
        self._members = _Members()
        self._member_waiters = Waiters()
        self._stopped = False

    def _start(self) -> Engine:
        return Engine(self._given_name, **self._arguments)

    @property
    def engine(self) -> Engine:
        """The node itself: for `layout`, `region`, `report`, `identity`, `layers_ready`, `seal` and so on. Do not call
        its `take` and `wait`, which this object uses."""
        return self._begun

    async def wait_registered(self, timeout: float = 30.0) -> None:
        """As `Engine.wait_registered`, in a thread."""
        await asyncio.to_thread(self.engine.wait_registered, timeout)

    async def stop(self) -> None:
        """Leaves the cluster. Awaited operations end with their outcome or with ABORTED. A second call does nothing."""
        await self._end_once()

    async def _end(self, started: Engine) -> None:
        self._stopped = True
        await asyncio.to_thread(started.stop)
        self._drain()
        self._stop_watching()
        for track in self._tracks.values():
            if not track.ended:
                track.error = track.error or TroupeError(ErrorCode.ABORTED, f"{self._name} was stopped")
                track.ended = True
            track.waiters.wake()
        self._members.clear()
        self._member_waiters.wake()
        self._calls.put_nowait(None)

    # -- beginning operations

    def send(self, request: str, blocks: Iterable[int] = (), **more: Any) -> Operation:
        """As `Engine.send`."""
        return self._track(self.engine.send(request, blocks, **more), two_steps=True)

    def receive(self, request: str | None = None, **more: Any) -> Operation:
        """As `Engine.receive`."""
        return self._track(self.engine.receive(request, **more), two_steps=True)

    def release(self, request: str, sources: Sequence[str], **more: Any) -> Operation:
        """As `Engine.release`."""
        return self._track(self.engine.release(request, sources, **more))

    def hold(self, request: str, sources: Sequence[str], **more: Any) -> Operation:
        """As `Engine.hold`."""
        return self._track(self.engine.hold(request, sources, **more))

    def put(self, peer: str, key: str, value: object, **more: Any) -> Operation:
        """As `Engine.put`."""
        return self._track(self.engine.put(peer, key, value, **more))

    def get(self, peer: str, key: str) -> Operation:
        """As `Engine.get`."""
        return self._track(self.engine.get(peer, key))

    def query(self, peer: str, key: str) -> Operation:
        """As `Engine.query`."""
        return self._track(self.engine.query(peer, key))

    def remove(self, peer: str, key: str) -> Operation:
        """As `Engine.remove`."""
        return self._track(self.engine.remove(peer, key))

    def place(self, request: str, **more: Any) -> Operation:
        """As `Engine.place`."""
        return self._track(self.engine.place(request, **more))

    def layers_ready(self, send: Operation, layer_begin: int, layer_end: int, token_end: int, **more: Any) -> None:
        """As `Engine.layers_ready`."""
        self.engine.layers_ready(send, layer_begin, layer_end, token_end, **more)

    def add_blocks(self, send: Operation, blocks: Iterable[int], *, group: int = 0) -> None:
        """As `Engine.add_blocks`."""
        self.engine.add_blocks(send, blocks, group=group)

    def seal(self, send: Operation, tokens: int, aux: bytes = b"") -> None:
        """As `Engine.seal`."""
        self.engine.seal(send, tokens, aux)

    def abort(self, operation: Operation, reason: str = "") -> None:
        """As `Engine.abort`."""
        self.engine.abort(operation, reason)

    # -- outcomes and events

    async def wait(self, operation: Operation) -> Outcome:
        """The operation's outcome, once the operation is completely over (`Engine.wait`). If the task is cancelled, the
        operation goes on and may be awaited again. A failed receive frees the blocks that the pool gave it, unless
        `events` reported them.

        Raises `TroupeError`: that of the operation; NOT_FOUND: never begun here, or its outcome was taken.
        """
        track = self._of(operation)
        while not track.ended:
            await track.waiters.wait()
        self._tracks.pop(operation, None)
        if track.error is None:
            return track.outcome
        owner = track.outcome.owner
        if owner and not track.streamed:
            track.outcome.owner = 0  # other tasks may wait for it, too
            with contextlib.suppress(TroupeError):  # the engine was stopped and no longer owns them
                self.engine.free_blocks(owner, track.outcome.blocks)
        raise track.error

    async def events(self, operation: Operation) -> AsyncIterator[Event]:
        """Each event of the operation as it comes, to its last. A failure comes as `Failed`; it is not raised."""
        track = self._of(operation)
        while True:
            while track.events:
                event = track.events.popleft()
                track.streamed = track.streamed or isinstance(event, Allocated)
                yield event
            if track.ended:
                self._tracks.pop(operation, None)
                return
            await track.waiters.wait()

    def forget(self, operation: Operation) -> None:
        """Drops the operation's outcome and events. Blocks that the pool gives it are freed."""
        track = self._tracks.get(operation)
        if track is not None and self._loop is not None:
            self._loop.create_task(self._discard(operation))

    async def calls(self) -> AsyncIterator[Call]:
        """Calls of frontends, for engines with `calls=True`. Ends when the engine is stopped."""
        while True:
            call = await self._calls.get()
            if call is None:
                self._calls.put_nowait(None)  # for other tasks that ask
                return
            yield call

    async def members(self) -> AsyncIterator[MemberEvent]:
        """Members of the cluster as they come, change and go, for engines with `watch=True`; the present ones come
        first. Ends when the engine is stopped. Each event goes to one task. While no task asks, intermediate states are
        merged."""
        while not self._stopped:
            event = self._members.pop()
            if event is not None:
                yield event
            else:
                await self._member_waiters.wait()

    # -- the descriptor

    def _track(self, operation: Operation, *, two_steps: bool = False) -> Operation:
        self._tracks[operation] = _Track(two_steps)
        return operation

    def _of(self, operation: Operation) -> _Track:
        try:
            return self._tracks[operation]
        except KeyError:
            raise TroupeError(
                ErrorCode.NOT_FOUND, f"operation {operation} was not begun here, or its outcome was already reported"
            ) from None

    async def _discard(self, operation: Operation) -> None:
        track = self._tracks.get(operation)
        if track is None:
            return
        with contextlib.suppress(TroupeError):
            await self.wait(operation)
        # After a failed receive, `wait` does not free blocks that were reported to a task.
        owner, track.outcome.owner = track.outcome.owner, 0
        if owner:
            with contextlib.suppress(TroupeError):
                self.engine.free_blocks(owner, track.outcome.blocks)

    def _keep_call(self, call: Call) -> None:
        if self._calls.qsize() < _CALLS:
            self._calls.put_nowait(call)
            return
        with contextlib.suppress(TroupeError):  # its caller may be gone
            call.fail(TroupeError(ErrorCode.OVERLOADED, f"{_CALLS} calls already wait for the engine to take them"))

    def _drain(self) -> None:
        while True:
            events = self.engine.take()
            if not events:
                return
            for event in events:
                if isinstance(event, Call):
                    self._keep_call(event)
                    continue
                if isinstance(event, MemberEvent):
                    self._members.put(event)
                    self._member_waiters.wake()
                    continue
                track = self._tracks.get(event.operation)
                if track is not None:
                    _record(track, event)
                    track.waiters.wake()


def _record(track: _Track, event: Event) -> None:
    track.events.append(event)
    outcome = track.outcome
    if isinstance(event, Allocated):
        outcome.owner, outcome.blocks = event.owner, event.blocks
    elif isinstance(event, Done):
        outcome.bytes_moved, outcome.aux = event.bytes_moved, event.aux
        outcome.waited, outcome.moving = event.waited, event.moving
        outcome.segments, outcome.backend = event.segments, event.backend
    elif isinstance(event, Failed):
        track.error = event.error
    elif isinstance(event, Value):
        outcome.data = event.data
    elif isinstance(event, Info):
        outcome.size, outcome.ttl = event.size, event.ttl
    elif isinstance(event, Placed):
        outcome.placement = event.placement
    if isinstance(event, Unpinned) or (not track.two_steps and isinstance(event, (Done, Failed, Value, Info, Placed))):
        track.ended = True
