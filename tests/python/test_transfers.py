"""Transfers: two processes, two engines, events, aborts."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import select
import subprocess
import sys
import threading
import time

import pytest
import troupe
from conftest import (
    PATIENCE,
    RECEIVED,
    SENT,
    TOKENS,
    Pair,
    Supervisor,
    assert_same_cache,
    grouped_layout,
    in_threads,
    opaque_layout,
    pattern,
    small_layout,
)

MOVED = TOKENS * 2 * 2 * 2 * 16

_PREFILL = """
import sys, troupe
text, tokens, blocks = sys.argv[1], int(sys.argv[2]), [int(b) for b in sys.argv[3].split(",")]
layout = troupe.Layout.packed([troupe.LayerShape(kv_heads=2, head_dim=8)] * 2, dtype="bf16", block_tokens=4, blocks=8)
memory = bytearray((i * 7 + 1) % 251 for i in range(layout.region_sizes()[0]))
with troupe.Engine("prefill-0", text=text, layout=layout, regions=[memory]) as engine:
    engine.wait_registered(120)
    send = engine.send("r", blocks)
    for layer in range(2):
        engine.layers_ready(send, layer, layer + 1, tokens)
    engine.seal(send, tokens, aux=b"first token")
    print(engine.wait(send).bytes_moved)
"""


def test_three_blocks_arrive_from_another_process(supervisor: Supervisor) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", _PREFILL, supervisor.text, str(TOKENS), ",".join(map(str, SENT))],
        stdout=subprocess.PIPE,
        text=True,
    )
    layout = small_layout()
    memory = bytearray(layout.region_sizes()[0])
    with troupe.Engine("decode-0", text=supervisor.text, layout=layout, regions=[memory]) as engine:
        engine.wait_registered(PATIENCE)
        place = engine.place("r", timeout=PATIENCE)
        placement = engine.wait(place).placement
        assert placement is not None
        assert [node.name for node in placement.prefill] == ["prefill-0"]
        assert pickle.loads(pickle.dumps(placement)) == placement
        outcome = engine.wait(engine.receive(placement=placement, tokens=TOKENS, blocks=RECEIVED))
        engine.placed_request_ended("r")
        assert outcome.bytes_moved == MOVED
        assert outcome.aux == b"first token"
        assert outcome.backend in ("shm", "tcp", "rdma")
        assert outcome.waited > 0
        out, _ = other.communicate(timeout=PATIENCE)
    assert other.returncode == 0
    assert int(out) == MOVED
    assert_same_cache(memoryview(memory), memoryview(pattern(len(memory))))


def test_events_of_one_operation_come_in_order_through_the_descriptor(pair: Pair) -> None:
    send = pair.send()
    receive = pair.receive()
    pair.finish(send, b"aux")
    events: list[troupe.Event] = []
    while not events or not isinstance(events[-1], troupe.Unpinned):
        assert select.select([pair.decode], [], [], PATIENCE)[0], "no event came"
        events += pair.decode.take()
    assert {event.operation for event in events} == {receive}
    assert isinstance(events[-2], troupe.Done)
    assert (events[-2].bytes_moved, events[-2].aux) == (MOVED, b"aux")
    assert events[-2].backend in {"shm", "tcp"}
    layers = [event for event in events if isinstance(event, troupe.Layers)]
    assert max(event.layer_end for event in layers) == 2
    assert pair.decode.take() == []
    assert pair.prefill.wait(send, PATIENCE).bytes_moved == MOVED
    assert_same_cache(memoryview(pair.received), memoryview(pair.sent))


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["begun", "ready", "sealed"])
def test_an_abort_ends_both_sides_or_comes_too_late(pair: Pair, side: str, when: str) -> None:
    # The prefill side hears nothing of a receive that never reached it: its send ends at its deadline.
    send = pair.prefill.send("r", SENT, deadline=2.0 if when == "begun" else None)
    receive = pair.receive()
    if when != "begun":
        pair.prefill.layers_ready(send, 0, 1, TOKENS)
        landed = pair.decode.take(timeout=PATIENCE)
        assert isinstance(landed[0], troupe.Layers)
    if when == "sealed":
        pair.prefill.seal(send, TOKENS)
    # A source that was not asked yet hears nothing of an abandoned receive, so its engine gives it up, too.
    whole = [(pair.prefill, send), (pair.decode, receive)]
    for engine, operation in whole[:1] if side == "prefill" else reversed(whole):
        with contextlib.suppress(troupe.TroupeError):  # it has ended already
            engine.abort(operation, "the client is gone")
    codes = set()
    for waiting, what in ((pair.prefill, send), (pair.decode, receive)):
        try:
            waiting.wait(what, PATIENCE)
            codes.add(None)
        except troupe.WaitTimeout:
            raise
        except troupe.TroupeError as why:
            codes.add(why.code)
    if when == "sealed":
        assert codes <= {None, troupe.ErrorCode.ABORTED}
    elif when == "ready":
        assert codes == {troupe.ErrorCode.ABORTED}
    else:
        assert troupe.ErrorCode.ABORTED in codes
        assert codes <= {troupe.ErrorCode.ABORTED, troupe.ErrorCode.DEADLINE}
    # Nothing is left: the same blocks carry the next request.
    send, receive = pair.send("again"), pair.receive("again")
    pair.finish(send)
    assert pair.decode.wait(receive, PATIENCE).bytes_moved == MOVED
    assert pair.prefill.wait(send, PATIENCE).bytes_moved == MOVED


def test_layers_of_a_receive_that_has_ended_are_there_or_its_error_is_raised(pair: Pair) -> None:
    send, receive = pair.send(), pair.receive()
    pair.finish(send)
    pair.decode.wait(receive, PATIENCE)
    pair.decode.await_layers(receive, 0, 2, TOKENS)
    failed = pair.receive("never sent")
    pair.decode.abort(failed, "not wanted")
    for call in (
        lambda: pair.decode.wait(failed, PATIENCE),
        lambda: pair.decode.await_layers(failed, 0, 2, TOKENS),
    ):
        with pytest.raises(troupe.TroupeError) as why:
            call()
        assert why.value.code == troupe.ErrorCode.ABORTED
        assert "not wanted" in why.value.reason


def test_a_failure_is_an_event_with_its_error(pair: Pair) -> None:
    receive = pair.receive()
    pair.decode.abort(receive, "not wanted")
    events: list[troupe.Event] = []
    while not events or not isinstance(events[-1], troupe.Unpinned):
        events += pair.decode.take(timeout=PATIENCE)
    failed = events[-2]
    assert isinstance(failed, troupe.Failed)
    assert failed.error.code == troupe.ErrorCode.ABORTED
    assert "not wanted" in failed.error.reason
    copied = pickle.loads(pickle.dumps(failed.error))
    assert (copied.code, copied.reason) == (failed.error.code, failed.error.reason)


def test_a_wait_that_is_over_takes_nothing_and_other_threads_run(pair: Pair) -> None:
    send, receive = pair.send(), pair.receive()
    with pytest.raises(troupe.WaitTimeout) as why:
        pair.decode.wait(receive, 0.01)
    assert isinstance(why.value, TimeoutError)
    outcomes: list[troupe.Outcome] = []
    waiting = threading.Thread(target=lambda: outcomes.append(pair.decode.wait(receive)))
    waiting.start()
    pair.finish(send)  # while the other thread waits in C
    waiting.join(PATIENCE)
    assert outcomes[0].bytes_moved == MOVED
    pair.prefill.wait(send, PATIENCE)


def test_blocks_that_are_allocated_by_troupe_are_told_and_freed(supervisor: Supervisor) -> None:
    text = supervisor.text.replace(
        "stages:", "model: {layers: 2, kv_heads: 2, head_dim: 8, block_tokens: 4}\nstages:"
    ).replace("engine: external}", "engine: external, pool: {size: 64KiB}}")
    with troupe.Engine("prefill-0", text=text) as prefill, troupe.Engine("decode-0", text=text) as decode:
        prefill.wait_registered(PATIENCE)
        decode.wait_registered(PATIENCE)
        owner, blocks = prefill.allocate_blocks(3)
        cache = prefill.region(0)
        cache[:] = bytes(i % 251 for i in range(len(cache)))
        send = prefill.send("r", blocks)
        receive = decode.receive("r", sources=["prefill-0"], tokens=TOKENS)
        prefill.layers_ready(send, 0, 2, TOKENS)
        prefill.seal(send, TOKENS)
        outcome = decode.wait(receive, PATIENCE)
        prefill.wait(send, PATIENCE)
        assert len(outcome.blocks) == 3
        layout = decode.layout()
        theirs = decode.region(0)
        for token in range(TOKENS):
            _, at, length = layout.locate(blocks, layer=1, plane=1, token=token, head=1)
            _, to, _ = layout.locate(outcome.blocks, layer=1, plane=1, token=token, head=1)
            assert cache[at : at + length] == theirs[to : to + length]
        decode.free_blocks(outcome.owner, outcome.blocks)
        with pytest.raises(troupe.TroupeError) as twice:
            decode.free_blocks(outcome.owner, outcome.blocks)
        assert twice.value.code == troupe.ErrorCode.NOT_FOUND
        prefill.free_blocks(owner, blocks)


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_layer_that_only_the_engine_understands_arrives_by_whole_blocks(supervisor: Supervisor, mode: str) -> None:
    text = supervisor.text.replace("mode: write", f"mode: {mode}")
    layout = opaque_layout()
    sent = [pattern(size) for size in layout.region_sizes()]
    received = [bytearray(size) for size in layout.region_sizes()]
    with (
        troupe.Engine("prefill-0", text=text, layout=layout, regions=sent) as prefill,
        troupe.Engine("decode-0", text=text, layout=layout, regions=received) as decode,
    ):
        prefill.wait_registered(PATIENCE)
        decode.wait_registered(PATIENCE)
        send = prefill.send("r", SENT)
        receive = decode.receive("r", sources=["prefill-0"], tokens=TOKENS, blocks=RECEIVED, mode=mode)
        prefill.layers_ready(send, 0, 2, 6)  # in the middle of the second block
        prefill.layers_ready(send, 0, 2, TOKENS)
        prefill.seal(send, TOKENS)
        assert decode.wait(receive, PATIENCE).bytes_moved == TOKENS * 2 * 2 * 16 + len(SENT) * 2 * 24
        prefill.wait(send, PATIENCE)
    expected = [bytearray(len(region)) for region in received]
    for (layer, plane), token, head in itertools.product([(0, 0), (0, 1), (1, 0)], range(TOKENS), range(2)):
        region, at, length = layout.locate(SENT, layer=layer, plane=plane, token=token, head=head)
        _, to, _ = layout.locate(RECEIVED, layer=layer, plane=plane, token=token, head=head)
        expected[region][to : to + length] = sent[region][at : at + length]
    assert received == expected


def test_engines_whose_layers_are_packed_otherwise_move_nothing(supervisor: Supervisor) -> None:
    here, there = opaque_layout("tiles"), opaque_layout("planes")
    received = [bytearray(size) for size in there.region_sizes()]
    with (
        troupe.Engine("prefill-0", text=supervisor.text, layout=here, allocate="ordinary") as prefill,
        troupe.Engine("decode-0", text=supervisor.text, layout=there, regions=received) as decode,
    ):
        prefill.wait_registered(PATIENCE)
        decode.wait_registered(PATIENCE)
        receive = decode.receive("r", sources=["prefill-0"], tokens=TOKENS, blocks=RECEIVED)
        with pytest.raises(troupe.TroupeError, match="layer 1 packing") as unlike:
            decode.wait(receive, PATIENCE)
        assert unlike.value.code == troupe.ErrorCode.LAYOUT_MISMATCH


def test_memory_that_troupe_allocates_stays_while_a_view_of_it_lives(supervisor: Supervisor) -> None:
    engine = troupe.Engine("prefill-0", text=supervisor.text, layout=small_layout(), allocate="ordinary")
    view = engine.region(0)
    assert len(view) == small_layout().region_sizes()[0]
    assert bytes(view) == bytes(len(view))
    part = view[8:16]
    del view
    engine.stop()
    del engine
    part[0] = 7
    assert part[0] == 7


def test_keyed_values_are_put_asked_for_read_and_removed(pair: Pair) -> None:
    value = pattern(100_000)
    pair.decode.wait(pair.decode.put("prefill-0", "key", value, ttl=3600), PATIENCE)
    told = pair.decode.wait(pair.decode.query("prefill-0", "key"), PATIENCE)
    assert told.size == len(value)
    assert told.ttl is not None
    got = pair.decode.wait(pair.decode.get("prefill-0", "key"), PATIENCE)
    assert got.data is not None
    assert got.data.readonly
    assert got.data == value
    pair.decode.wait(pair.decode.remove("prefill-0", "key"), PATIENCE)
    operation = pair.decode.get("prefill-0", "key")
    events = pair.decode.take(timeout=PATIENCE)
    assert [type(event) for event in events] == [troupe.Failed]
    assert events[0].operation == operation
    assert bytes(got.data) == bytes(value), "what was read outlives the key"
    pair.decode.wait(pair.decode.put("prefill-0", "empty", b""), PATIENCE)
    assert pair.decode.wait(pair.decode.query("prefill-0", "empty"), PATIENCE).size == 0


def test_a_value_that_is_not_stored_is_kept_by_nobody(pair: Pair) -> None:
    pair.decode.wait(pair.decode.put("prefill-0", "known", b"first"), PATIENCE)
    for _ in range(3):
        with pytest.raises(troupe.TroupeError) as told:
            pair.decode.wait(pair.decode.put("prefill-0", "known", b"second"), PATIENCE)
        assert told.value.code == troupe.ErrorCode.ALREADY_EXISTS
    assert not pair.decode._values


def test_two_threads_that_wait_for_one_operation_are_told_apart(pair: Pair) -> None:
    send = pair.send()
    told: list[BaseException] = []

    def wait() -> None:
        try:
            pair.prefill.wait(send, PATIENCE)
        except BaseException as why:
            told.append(why)

    first = threading.Thread(target=wait)
    first.start()
    end = time.monotonic() + PATIENCE
    while send not in pair.prefill._waiting and time.monotonic() < end:
        time.sleep(0.001)
    with pytest.raises(troupe.TroupeError, match=f"another thread waits for operation {send}") as second:
        pair.prefill.wait(send, 0)
    assert second.value.code == troupe.ErrorCode.ALREADY_EXISTS
    pair.prefill.abort(send)
    first.join(PATIENCE)
    assert [type(why) for why in told] == [troupe.TroupeError]
    assert isinstance(told[0], troupe.TroupeError)
    assert told[0].code == troupe.ErrorCode.ABORTED
    assert not pair.prefill._waiting


def test_no_time_is_no_default(pair: Pair) -> None:
    receive = pair.decode.receive("never sent", sources=["prefill-0"], tokens=TOKENS, blocks=RECEIVED, deadline=0)
    with pytest.raises(troupe.TroupeError) as late:
        pair.decode.wait(receive, PATIENCE)
    assert late.value.code == troupe.ErrorCode.DEADLINE
    pair.decode.wait(pair.decode.put("prefill-0", "gone", b"at once", ttl=0), PATIENCE)

    def is_there() -> bool:
        query = pair.decode.query("prefill-0", "gone")
        try:
            pair.decode.wait(query, PATIENCE)
        except troupe.TroupeError as error:
            return error.code != troupe.ErrorCode.NOT_FOUND
        return True

    for _ in range(int(PATIENCE / 0.01)):
        if not is_there():
            return
        time.sleep(0.01)
    raise AssertionError("it is stored for good")


def test_many_threads_each_have_their_own_outcomes(pair: Pair) -> None:
    def work(number: int) -> None:
        for round_ in range(10):
            key = f"{number}.{round_}"
            pair.decode.wait(pair.decode.put("prefill-0", key, key.encode()), PATIENCE)
            got = pair.decode.wait(pair.decode.get("prefill-0", key), PATIENCE).data
            assert got == key.encode()

    in_threads(64, work)


def test_a_send_grows_and_tells_who_wants_it(pair: Pair) -> None:
    send = pair.prefill.send("r", SENT[:1], grows=True, tell_wanted=True)
    life = pair.prefill.identity().incarnation
    receive = pair.decode.receive(
        "r",
        sources=["prefill-0"],
        tokens=TOKENS,
        blocks=RECEIVED,
        lives=[life],
        park=PATIENCE,
        expect=b"tok",
        again=True,
    )
    (wanted,) = pair.prefill.take(1, timeout=PATIENCE)
    assert wanted == troupe.Wanted(send, "decode-0", 0, 1, 1, 0, TOKENS)
    with pytest.raises(troupe.TroupeError, match="do not fit the blocks"):
        pair.prefill.seal(send, TOKENS)
    pair.prefill.add_blocks(send, SENT[1:])
    pair.finish(send, b"token")
    assert pair.decode.wait(receive).aux == b"token"
    pair.prefill.wait(send)
    assert_same_cache(memoryview(pair.received), memoryview(pair.sent))
    with pytest.raises(troupe.TroupeError) as ended:
        pair.prefill.add_blocks(send, SENT)
    assert ended.value.code == troupe.ErrorCode.NOT_FOUND


def test_terms_that_are_not_met_fail_the_receive_by_name(pair: Pair) -> None:
    def failure(**terms: object) -> troupe.TroupeError:
        receive = pair.decode.receive("r", sources=["prefill-0"], tokens=TOKENS, blocks=RECEIVED, **terms)  # type: ignore[arg-type]
        with pytest.raises(troupe.TroupeError) as failed:
            pair.decode.wait(receive)
        return failed.value

    assert failure(park=0).code == troupe.ErrorCode.NOT_FOUND
    assert failure(lives=[pair.prefill.identity().incarnation + 1]).code == troupe.ErrorCode.STALE_INCARNATION
    pair.finish(pair.send(), b"hash-1")
    unexpected = failure(expect=b"hash-2")
    assert unexpected.code == troupe.ErrorCode.LAYOUT_MISMATCH
    for part in (b"hash-1", b"hash-2"):
        assert part.hex() in unexpected.reason
    with pytest.raises(ValueError, match="give one for each"):
        failure(lives=[1, 2])


def test_a_request_is_held_and_given_back(pair: Pair) -> None:
    sources = ["prefill-0"]
    assert pair.decode.identity().supervisor_incarnation == pair.prefill.identity().supervisor_incarnation != 0
    send = pair.send()
    held = pair.decode.hold("r", sources, lives=[pair.prefill.identity().incarnation])
    with pytest.raises(troupe.TroupeError) as twice:
        pair.decode.hold("r", sources)
    assert twice.value.code == troupe.ErrorCode.ALREADY_EXISTS
    receive = pair.receive()
    assert pair.decode.wait(held).bytes_moved == 0
    pair.finish(send)
    pair.decode.wait(receive)
    pair.prefill.wait(send)
    unwanted = pair.send("unwanted")
    pair.decode.wait(pair.decode.release("unwanted", sources))
    with pytest.raises(troupe.TroupeError, match="decode-0 gave request `unwanted` back") as given_back:
        pair.prefill.wait(unwanted)
    assert given_back.value.code == troupe.ErrorCode.ABORTED
    with pytest.raises(troupe.TroupeError) as unknown:
        pair.decode.wait(pair.decode.hold("nobody's", sources))
    assert unknown.value.code == troupe.ErrorCode.NOT_FOUND


def test_of_each_group_of_layers_what_the_decode_side_keeps_arrives_and_nothing_else(supervisor: Supervisor) -> None:
    layout = grouped_layout()
    sent = pattern(layout.region_sizes()[0])
    received = bytearray(len(sent))
    here = [troupe.GroupBlocks(0, [5, 0, 2]), troupe.GroupBlocks(0, [1, 3, 4])]
    there = [troupe.GroupBlocks(0, [1, 7, 3]), troupe.GroupBlocks(8, [6])]
    with (
        troupe.Engine("prefill-0", text=supervisor.text, layout=layout, regions=[sent]) as prefill,
        troupe.Engine("decode-0", text=supervisor.text, layout=layout, regions=[received]) as decode,
    ):
        prefill.wait_registered(PATIENCE)
        decode.wait_registered(PATIENCE)
        send = prefill.send("r", groups=[here[0], troupe.GroupBlocks(0, [1, 3])], grows=True)
        receive = decode.receive("r", sources=["prefill-0"], tokens=TOKENS, groups=there)
        prefill.add_blocks(send, [4], group=1)
        prefill.seal(send, TOKENS)
        assert decode.wait(receive).bytes_moved == 2 * 2 * 2 * 16 * (TOKENS + 2)
        with pytest.raises(troupe.TroupeError, match="the layout has 2 groups: name one table for each"):
            decode.receive("s", sources=["prefill-0"], tokens=TOKENS, blocks=[0, 1, 2])
        twice = [there[0], troupe.GroupBlocks(0, [7, 5, 6])]
        with pytest.raises(troupe.TroupeError, match="block 7 is named twice"):
            decode.receive("s", sources=["prefill-0"], tokens=TOKENS, groups=twice)
        with pytest.raises(troupe.TroupeError, match="group 2 of layers, of 2"):
            prefill.add_blocks(send, [4], group=2)
    expected = bytearray(len(sent))
    for layer, plane, token, head in itertools.product(range(4), range(2), range(TOKENS), range(2)):
        held, kept = here[layer % 2], there[layer % 2]
        if token < kept.first_token:
            continue
        where = {"layer": layer, "plane": plane, "head": head}
        _, at, size = layout.locate(held.blocks, token=token, **where)
        _, to, _ = layout.locate(kept.blocks, token=token - kept.first_token, **where)
        expected[to : to + size] = sent[at : at + size]
    assert received == expected
