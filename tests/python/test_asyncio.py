"""The same node in an event loop."""

from __future__ import annotations

import asyncio

import pytest
import troupe
from conftest import PATIENCE, RECEIVED, SENT, TOKENS, Supervisor, assert_same_cache, pattern, small_layout

MOVED = TOKENS * 2 * 2 * 2 * 16


def engines(supervisor: Supervisor) -> tuple[troupe.AsyncEngine, troupe.AsyncEngine, bytearray, bytearray]:
    layout = small_layout()
    sent = pattern(layout.region_sizes()[0])
    received = bytearray(len(sent))
    return (
        troupe.AsyncEngine("prefill-0", text=supervisor.text, layout=layout, regions=[sent]),
        troupe.AsyncEngine("decode-0", text=supervisor.text, layout=layout, regions=[received]),
        sent,
        received,
    )


async def finish(prefill: troupe.AsyncEngine, send: troupe.Operation) -> None:
    prefill.layers_ready(send, 0, 2, TOKENS)
    prefill.seal(send, TOKENS, b"aux")


def test_a_transfer_is_awaited_at_both_sides(supervisor: Supervisor) -> None:
    async def main() -> None:
        prefill, decode, sent, received = engines(supervisor)
        async with prefill, decode:
            await asyncio.gather(prefill.wait_registered(PATIENCE), decode.wait_registered(PATIENCE))
            placed = await decode.wait(decode.place("r", timeout=PATIENCE))
            assert placed.placement is not None
            receive = decode.receive(placement=placed.placement, tokens=TOKENS, blocks=RECEIVED)
            send = prefill.send("r", SENT)
            waiting = asyncio.gather(decode.wait(receive), prefill.wait(send))
            await finish(prefill, send)
            got, gave = await asyncio.wait_for(waiting, PATIENCE)
            assert (got.bytes_moved, got.aux, gave.bytes_moved) == (MOVED, b"aux", MOVED)
            assert got.backend == gave.backend != ""
            assert_same_cache(memoryview(received), memoryview(sent))
            with pytest.raises(troupe.TroupeError) as told:
                await decode.wait(receive)
            assert told.value.code == troupe.ErrorCode.NOT_FOUND

    asyncio.run(main())


def test_events_of_an_operation_come_to_whoever_asks(supervisor: Supervisor) -> None:
    async def main() -> None:
        prefill, decode, _, _ = engines(supervisor)
        async with prefill, decode:
            await asyncio.gather(prefill.wait_registered(PATIENCE), decode.wait_registered(PATIENCE))
            receive = decode.receive("r", sources=["prefill-0"], tokens=TOKENS, blocks=RECEIVED)
            send = prefill.send("r", SENT)
            await finish(prefill, send)
            kinds = [type(event) async for event in decode.events(receive)]
            assert kinds[-2:] == [troupe.Done, troupe.Unpinned]
            assert set(kinds[:-2]) == {troupe.Layers}
            await prefill.wait(send)

    asyncio.run(main())


def test_a_cancelled_wait_leaves_the_operation_as_it_is(supervisor: Supervisor) -> None:
    async def main() -> None:
        prefill, decode, _, _ = engines(supervisor)
        async with prefill, decode:
            await asyncio.gather(prefill.wait_registered(PATIENCE), decode.wait_registered(PATIENCE))
            send = prefill.send("r", SENT)
            for _ in range(20):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(prefill.wait(send), 0.005)
            assert not prefill._tracks[send].waiters, "they add up for as long as nothing comes"
            prefill.abort(send, "enough")
            with pytest.raises(troupe.TroupeError) as aborted:
                await asyncio.wait_for(prefill.wait(send), PATIENCE)
            assert aborted.value.code == troupe.ErrorCode.ABORTED

    asyncio.run(main())


def test_blocks_of_the_pool_come_back_whoever_was_told_of_them(supervisor: Supervisor) -> None:
    model = "model: {layers: 2, kv_heads: 2, head_dim: 8, dtype: bf16, block_tokens: 4}"
    text = supervisor.text.replace("stages:", f"{model}\nstages:").replace(
        "role: decode, engine: external", "role: decode, engine: external, pool: {size: 4KiB}"
    )

    async def main() -> None:
        async with troupe.AsyncEngine("decode-0", text=text) as decode:
            await decode.wait_registered(PATIENCE)

            def free() -> int:
                return int(decode.engine.report()["pool"]["blocks_free"])

            async def are_back(all_of_them: int) -> bool:
                for _ in range(int(PATIENCE / 0.01)):
                    if free() == all_of_them:
                        return True
                    await asyncio.sleep(0.01)
                return False

            before = free()

            def begin(request: str) -> troupe.Operation:
                return decode.receive(request, sources=["prefill-0"], tokens=TOKENS)

            # No consumer was told: the events came before there was one.
            left = begin("left")
            first = asyncio.ensure_future(anext(decode.events(left)))
            first.cancel()
            decode.abort(left, "enough")
            both = await asyncio.gather(decode.wait(left), decode.wait(left), return_exceptions=True)
            for told in both:  # each gets its own error, not that of the blocks which the other one gave back
                assert isinstance(told, troupe.TroupeError)
                assert told.code == troupe.ErrorCode.ABORTED, told
            assert await are_back(before)

            # A consumer was told, and forgets the operation.
            told_of = begin("told")
            async for event in decode.events(told_of):
                assert isinstance(event, troupe.Allocated)
                break
            decode.forget(told_of)
            decode.abort(told_of, "enough")
            assert await are_back(before)

    asyncio.run(main())


def test_keyed_values_and_many_operations_at_once(supervisor: Supervisor) -> None:
    async def main() -> None:
        prefill, decode, _, _ = engines(supervisor)
        async with prefill, decode:
            await asyncio.gather(prefill.wait_registered(PATIENCE), decode.wait_registered(PATIENCE))

            async def one(number: int) -> None:
                key = f"key-{number}"
                await decode.wait(decode.put("prefill-0", key, key.encode()))
                got = await decode.wait(decode.get("prefill-0", key))
                assert got.data == key.encode()
                await decode.wait(decode.remove("prefill-0", key))
                with pytest.raises(troupe.TroupeError):
                    await decode.wait(decode.query("prefill-0", key))

            await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(100))), PATIENCE)
            decode.forget(decode.put("prefill-0", "left", b"1"))

    asyncio.run(main())


def test_a_stop_that_is_cancelled_goes_on_for_whoever_stops_again(supervisor: Supervisor) -> None:
    async def main() -> None:
        engine = await troupe.AsyncEngine("prefill-0", text=supervisor.text, calls=True).begin()
        calls = asyncio.ensure_future(anext(engine.calls(), None))
        first = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(engine.stop(), PATIENCE)
        with pytest.raises(troupe.TroupeError):
            engine.send("r")
        assert await asyncio.wait_for(calls, PATIENCE) is None

    asyncio.run(main())


def test_what_is_awaited_ends_with_the_engine(supervisor: Supervisor) -> None:
    async def main() -> None:
        prefill, _, _, _ = engines(supervisor)
        async with prefill:
            await prefill.wait_registered(PATIENCE)
            waiting = asyncio.ensure_future(prefill.wait(prefill.send("r", SENT)))
            await asyncio.sleep(0)
            await prefill.stop()
            with pytest.raises(troupe.TroupeError) as ended:
                await asyncio.wait_for(waiting, PATIENCE)
            assert ended.value.code == troupe.ErrorCode.ABORTED

    asyncio.run(main())
