"""One-sided agents in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import troupe
from conftest import PATIENCE, pattern
from troupe import io
from troupe.async_agent import Loss

SIZE = 1 << 16
# No peer is lost on a busy machine.
PATIENT = {"peer_silence": PATIENCE, "connect_timeout": PATIENCE}


def agent(name: str, **more: object) -> troupe.AsyncAgent:
    return troupe.AsyncAgent(name, **{**PATIENT, **more})


class Both:
    """Two agents of this loop; `b` lends its memory."""

    def __init__(self, a: troupe.AsyncAgent, b: troupe.AsyncAgent) -> None:
        self.a, self.b = a, b
        self.ours, self.theirs = pattern(SIZE), bytearray(SIZE)
        self.kv = a.agent.register(self.ours)
        self.lent = b.agent.register(self.theirs)
        self.peer = a.agent.add_peer(b.agent.describe())
        self.session = self.peer.session(self.kv, self.lent.number)


@asynccontextmanager
async def both(**more: object) -> AsyncIterator[Both]:
    async with agent("a", **more) as a, agent("b", **more) as b:
        yield Both(a, b)


async def soon(what: object) -> object:
    return await asyncio.wait_for(what, PATIENCE)  # type: ignore[arg-type]


def notify_as_much_as_it_takes(peer: io.Peer) -> list[bytes]:
    sent: list[bytes] = []
    while len(sent) < 10_000:
        data = b"%d" % len(sent)
        try:
            peer.notify(data)
        except troupe.TroupeError as error:
            assert error.code == troupe.ErrorCode.OVERLOADED  # noqa: PT017
            return sent
        sent.append(data)
    raise AssertionError("a peer that reads nothing takes everything")


async def notify_when_there_is_room(peer: io.Peer, data: bytes) -> None:
    """The sender does not know at once that earlier notices were read."""
    while True:
        try:
            return peer.notify(data)
        except troupe.TroupeError as error:
            if error.code != troupe.ErrorCode.OVERLOADED:
                raise
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_transfers_are_awaited_and_notices_iterated_over(backend: str) -> None:
    async def main() -> None:
        async with both(backends=[backend]) as two:
            assert await two.a.connect(two.peer, PATIENCE) == backend
            said = asyncio.ensure_future(anext(two.b.notices()))
            sent = [two.session.write([(at, at, SIZE // 8)]) for at in range(0, SIZE, SIZE // 8)]
            last = two.session.write([(0, 0, 8)], notice=b"all of it")
            told = await soon(asyncio.gather(*(two.a.wait(one) for one in [*sent, last])))
            assert told == [io.Status(io.State.DONE, SIZE // 8)] * 8 + [io.Status(io.State.DONE, 8)]
            assert two.theirs == two.ours
            notice = await soon(said)
            assert isinstance(notice, io.Notice)
            assert (notice.sender, notice.data) == ("a", b"all of it")
            assert await soon(two.a.wait(last)) == io.Status(io.State.DONE, 8)  # repeating it is allowed
            await two.b.deregister(two.lent, PATIENCE)
            with pytest.raises(troupe.TroupeError, match="grant_revoked"):
                await soon(two.a.wait(two.session.write([(0, 0, 8)])))

    asyncio.run(main())


def test_a_transfer_is_posted_and_awaited_again_and_again() -> None:
    async def main() -> None:
        async with both() as two:
            local = two.a.agent.prepare([(two.kv.address, SIZE)])
            remote = two.peer.prepare([(two.lent.address, SIZE)])
            transfer = two.a.agent.make("write", local, remote)
            for turn in range(200):
                two.ours[:] = bytes([turn % 251]) * SIZE
                transfer.post()
                await soon(two.a.wait(transfer))
                assert two.theirs == two.ours

    asyncio.run(main())


def test_a_cancelled_wait_leaves_the_transfer_as_it_is() -> None:
    async def main() -> None:
        async with both(backends=["tcp"]) as two:
            silent = io.Agent("silent", threads=0, backends=["tcp"], **PATIENT)  # it is never driven
            lent = silent.allocate(SIZE)
            peer = two.a.agent.add_peer(silent.describe())
            sent = peer.session(two.kv, lent.number).write()
            for _ in range(20):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(two.a.wait(sent), 0.005)
            assert not two.a._transfers, "they add up for as long as nothing comes"
            waits = [asyncio.ensure_future(two.a.wait(sent)) for _ in range(2)]
            await asyncio.sleep(0)
            sent.cancel()
            for told in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(told, troupe.TroupeError)
                assert told.code == troupe.ErrorCode.ABORTED
            silent.close()

    asyncio.run(main())


def test_whoever_awaits_a_transfer_hears_that_another_task_has_released_it() -> None:
    async def main() -> None:
        async with both(backends=["tcp"]) as two:
            silent = io.Agent("silent", threads=0, backends=["tcp"], **PATIENT)  # it is never driven
            lent = silent.allocate(SIZE)
            peer = two.a.agent.add_peer(silent.describe())
            sent = peer.session(two.kv, lent.number).write()
            waits = [asyncio.ensure_future(two.a.wait(sent)) for _ in range(2)]
            await asyncio.sleep(0)
            sent.cancel()
            sent.release()  # before the loop has seen its end
            for told in await soon(asyncio.gather(*waits, return_exceptions=True)):  # type: ignore[attr-defined]
                assert isinstance(told, troupe.TroupeError)
                assert told.code == troupe.ErrorCode.NOT_FOUND
            assert not two.a._transfers
            silent.close()

    asyncio.run(main())


def test_notices_that_nobody_asks_for_stay_at_the_agent_and_none_is_told_twice() -> None:
    async def main() -> None:
        async with both(max_notices=64) as two:
            await soon(two.a.wait(two.session.write([(0, 0, 8)])))
            sent = notify_as_much_as_it_takes(two.peer)
            assert len(sent) >= 64
            heard = []
            while len(heard) < len(sent):  # each time with another reader
                notice = await soon(anext(two.b.notices()))
                assert isinstance(notice, io.Notice)
                heard.append(notice.data)
            assert heard == sent
            waiting = [asyncio.ensure_future(anext(two.b.notices())) for _ in range(2)]
            await asyncio.sleep(0.01)
            assert not any(one.done() for one in waiting)
            for number in range(2):
                await soon(notify_when_there_is_room(two.peer, b"again %d" % number))
            told = await soon(asyncio.gather(*waiting))
            assert isinstance(told, list)
            assert sorted(one.data for one in told) == [b"again 0", b"again 1"]

    asyncio.run(main())


def test_a_peer_that_is_lost_is_told_of() -> None:
    async def main() -> None:
        async with both() as two:
            await soon(two.a.wait(two.session.write()))
            lost = asyncio.ensure_future(anext(two.a.losses()))
            await two.b.close()
            told = await soon(lost)
            assert isinstance(told, io.PeerLost)
            assert told.peer == two.peer
            with pytest.raises(troupe.TroupeError):
                await soon(two.a.wait(two.session.write()))

    asyncio.run(main())


def test_whoever_waits_hears_that_the_agent_was_closed() -> None:
    async def main() -> None:
        async with both(backends=["tcp"]) as two:
            silent = io.Agent("silent", threads=0, backends=["tcp"], **PATIENT)  # it is never driven
            silent.allocate(SIZE)
            peer = two.a.agent.add_peer(silent.describe())
            sent = peer.session(two.kv, peer.memories()[0]).write()

            async def all_losses() -> list[Loss]:
                return [one async for one in two.a.losses()]

            async def all_notices() -> list[io.Notice]:
                return [one async for one in two.a.notices()]

            waits = asyncio.gather(two.a.wait(sent), all_losses(), all_notices(), return_exceptions=True)
            await asyncio.sleep(0.01)
            await asyncio.gather(two.a.close(), two.a.close())
            told = await soon(waits)
            assert isinstance(told, list)
            assert isinstance(told[0], troupe.TroupeError)
            assert told[0].code == troupe.ErrorCode.ABORTED
            assert told[1:] == [[], []]
            await two.a.close()
            silent.close()

    asyncio.run(main())


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="threads is 0"):
        troupe.AsyncAgent("a", threads=0)
    with pytest.raises(RuntimeError, match="has not begun"):
        agent("a").agent.report()

    async def main() -> None:
        async with agent("a") as begun:
            with pytest.raises(RuntimeError, match="has begun already"):
                await begun.begin()
        with pytest.raises(troupe.TroupeError, match="invalid_config"):
            await agent("").begin()

    asyncio.run(main())
