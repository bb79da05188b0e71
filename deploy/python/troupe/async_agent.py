"""One-sided agents for asyncio: transfers are awaited, notices and losses are iterated over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Union

from troupe._in_loop import InLoop
from troupe._waiters import Waiters
from troupe.errors import TroupeError
from troupe.io import (
    Agent,
    Notice,
    NoticesLost,
    NoticesWait,
    Peer,
    PeerLost,
    RegisteredMemory,
    State,
    Status,
    Transfer,
    TransferEnded,
)

__all__ = ["AsyncAgent", "Loss"]

Loss = Union[PeerLost, NoticesLost]  # noqa: UP007


class AsyncAgent(InLoop[Agent]):
    """An `io.Agent` in an event loop.

        async with AsyncAgent("writer") as writer:
            kv = writer.agent.register(tensor)
            peer = writer.agent.add_peer(descriptor)
            await writer.wait(peer.session(kv, peer.memories()[0]).write(notice=b"all of it"))

    Arguments are those of `io.Agent`, which is begun by `async with` (or `begin`) and makes progress on threads of its
    own. Use it only from the loop's thread. Call methods that return at once on `agent`, its peers, sessions and
    transfers; await the others here.
    """

    def __init__(self, name: str, **arguments: Any) -> None:
        if arguments.get("threads", 1) == 0:
            raise ValueError("threads is 0: an event loop makes no progress for an agent, give it 1 or more")
        super().__init__(name)
        self._arguments = arguments
        self._closed = False
        self._transfers: dict[int, Waiters] = {}  # by number, of transfers that a task waits for
        self._notices: deque[Notice] = deque()  # taken, but not asked for yet
        self._notice_waiters = Waiters()
        self._losses: dict[tuple[type, int], Loss] = {}  # by peer: reported once, even if repeated before a task asks
        self._loss_waiters = Waiters()

    def _start(self) -> Agent:
        agent = Agent(self._name, **self._arguments)
        agent._on_release = self._released
        return agent

    @property
    def agent(self) -> Agent:
        """The agent itself: for `register`, `describe`, `add_peer`, `prepare`, `make`, `report` and so on. Do not call
        its `take`, `take_notices` and `close`, which this object uses."""
        return self._begun

    async def close(self) -> None:
        """As `io.Agent.close`, in a thread. Awaited calls raise ABORTED, iterations end. A second call does nothing."""
        await self._end_once()

    async def _end(self, started: Agent) -> None:
        self._be_closed()
        await asyncio.to_thread(started.close)
        self._wake_all()

    # -- transfers, links, memory

    async def wait(self, transfer: Transfer) -> Status:
        """As `Transfer.wait`. If the task is cancelled, the transfer goes on and may be awaited again. NOT_FOUND:
        another task has released it."""
        number = transfer.number  # 0 once it is released
        while (status := transfer.status).state is State.ACTIVE:
            waiters = self._transfers.setdefault(number, Waiters())
            try:
                await waiters.wait()
            finally:
                if not waiters and self._transfers.get(number) is waiters:
                    del self._transfers[number]
        return transfer._outcome_of(status)

    async def connect(self, peer: Peer, timeout: float = 10.0) -> str:
        """As `Peer.connect`, in a thread."""
        return await asyncio.to_thread(peer.connect, timeout)

    async def deregister(self, memory: RegisteredMemory, timeout: float | None = None) -> None:
        """As `RegisteredMemory.deregister`, in a thread."""
        await asyncio.to_thread(memory.deregister, timeout)

    # -- notices and losses

    async def notices(self) -> AsyncIterator[Notice]:
        """Notices as they come, each to one task. Notices that no task asks for stay unread at the agent, whose peers
        get OVERLOADED when there are too many. Ends when the agent is closed."""
        while True:
            if not self._notices and not self._closed:
                self._notices.extend(self.agent.take_notices())
            if self._notices:
                yield self._notices.popleft()
            elif self._closed:
                return
            else:
                await self._notice_waiters.wait()

    async def losses(self) -> AsyncIterator[Loss]:
        """Peers that are lost, and peers whose notices may be lost, each to one task. Repeated losses of a peer are
        reported once until a task asks. Ends when the agent is closed."""
        while True:
            if self._losses:
                yield self._losses.pop(next(iter(self._losses)))
            elif self._closed:
                return
            else:
                await self._loss_waiters.wait()

    # -- the descriptor

    def _drain(self) -> None:
        agent = self.agent
        try:
            while events := agent.take():
                for event in events:
                    self._tell(event)
        except TroupeError:  # it was closed, not through this object
            self._be_closed()
            self._wake_all()

    def _tell(self, event: TransferEnded | NoticesWait | Loss) -> None:
        if isinstance(event, TransferEnded):
            if (waiters := self._transfers.get(event.transfer)) is not None:
                waiters.wake()
        elif isinstance(event, NoticesWait):
            self._notice_waiters.wake()
        else:
            self._losses[type(event), event.peer.number] = event
            self._loss_waiters.wake()

    def _released(self, transfer: int) -> None:
        if (waiters := self._transfers.get(transfer)) is not None:
            waiters.wake()

    def _be_closed(self) -> None:
        if not self._closed:
            self._closed = True
            self.agent._on_release = None
            self._stop_watching()

    def _wake_all(self) -> None:
        for waiters in (*self._transfers.values(), self._notice_waiters, self._loss_waiters):
            waiters.wake()
