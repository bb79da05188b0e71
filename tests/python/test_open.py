"""Engines that no file names: they join an open stage, transfer, are placed, and are found by their labels."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import troupe
from conftest import (
    PATIENCE,
    RECEIVED,
    SENT,
    TOKENS,
    Supervisor,
    assert_same_cache,
    open_deployment,
    pattern,
    small_layout,
)

LABELS = {"engine": "one", "http": "10.0.0.1:8000"}
# No supervisor listens at this port; engines start anyway.
NOBODY = 9


class Two:
    """Two engines that joined, in this process; the first one with labels."""

    def __init__(self, supervisor: Supervisor) -> None:
        layout = small_layout()
        self.sent = pattern(layout.region_sizes()[0])
        self.received = bytearray(len(self.sent))
        self.a = troupe.Engine(
            join=troupe.Announcement("engines", "a", labels=LABELS),
            text=supervisor.text,
            layout=layout,
            regions=[self.sent],
        )
        self.b = troupe.Engine(
            join=troupe.Announcement("engines", "b"), text=supervisor.text, layout=layout, regions=[self.received]
        )
        self.a.wait_registered(PATIENCE)
        self.b.wait_registered(PATIENCE)

    def stop(self) -> None:
        self.a.stop()
        self.b.stop()


@pytest.fixture
def two(open_supervisor: Supervisor) -> Iterator[Two]:
    both = Two(open_supervisor)
    yield both
    both.stop()


@pytest.fixture
def cluster(two: Two, open_supervisor: Supervisor) -> troupe.Cluster:
    return troupe.Cluster(text=open_supervisor.text, timeout=PATIENCE)


def finish(engine: troupe.Engine, send: troupe.Operation) -> None:
    engine.layers_ready(send, 0, 2, TOKENS)
    engine.seal(send, TOKENS, b"aux")


def test_an_engine_that_joined_receives_from_another_that_joined(two: Two) -> None:
    assert (two.a.name, two.b.name) == ("engines.a.0", "engines.b.0")
    send = two.a.send("r", SENT)
    receive = two.b.receive("r", sources=[two.a.name], tokens=TOKENS, blocks=RECEIVED, mode="read")
    finish(two.a, send)
    assert two.b.wait(receive, PATIENCE).aux == b"aux"
    two.a.wait(send, PATIENCE)
    assert_same_cache(memoryview(two.received), memoryview(two.sent))
    with pytest.raises(troupe.TroupeError, match="is this node itself") as itself:
        two.a.receive("r", sources=[two.a.name], tokens=TOKENS, blocks=RECEIVED, mode="read")
    assert itself.value.code == troupe.ErrorCode.INVALID_CONFIG


_OTHER = """
import sys, troupe
sys.path.insert(0, sys.argv[2])
from conftest import PATIENCE, SENT, TOKENS, pattern, small_layout
layout = small_layout()
join = troupe.Announcement(stage="engines", replica="other")
with troupe.Engine(join=join, text=sys.argv[1], layout=layout, regions=[pattern(layout.region_sizes()[0])]) as engine:
    engine.wait_registered(PATIENCE)
    print("joined", flush=True)
    send = engine.send("r", SENT)
    engine.layers_ready(send, 0, 2, TOKENS)
    engine.seal(send, TOKENS)
    engine.wait(send, PATIENCE)
"""


def test_an_engine_of_another_process_joins(open_supervisor: Supervisor, two: Two) -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    other = subprocess.Popen(
        [sys.executable, "-B", "-c", _OTHER, open_supervisor.text, here], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "joined\n"
    receive = two.b.receive("r", sources=["engines.other.0"], tokens=TOKENS, blocks=RECEIVED, mode="read")
    two.b.wait(receive, PATIENCE)
    assert other.wait(PATIENCE) == 0
    assert_same_cache(memoryview(two.received), memoryview(pattern(len(two.received))))


def test_a_placement_says_of_its_nodes_what_they_announced(cluster: troupe.Cluster) -> None:
    placement = cluster.place("r", timeout=PATIENCE)
    fingerprint = small_layout().fingerprint()
    assert placement.mode == "read"
    assert placement.fingerprint == fingerprint
    nodes = {node.name: node for node in placement.prefill + placement.decode}
    assert set(nodes) == {"engines.a.0", "engines.b.0"}
    assert (nodes["engines.a.0"].replica_name, nodes["engines.b.0"].replica_name) == ("a", "b")
    assert (nodes["engines.a.0"].labels, nodes["engines.b.0"].labels) == (LABELS, {})
    assert {node.fingerprint for node in nodes.values()} == {fingerprint}
    assert placement in {placement}
    cluster.finished("r")


def test_a_node_is_found_by_each_of_its_labels(cluster: troupe.Cluster, two: Two) -> None:
    cluster.place("r", timeout=PATIENCE)  # they are up now
    for key, value in LABELS.items():
        (found,) = cluster.find_label(key, value)
        assert found.state == "up", found.reason
        assert found.node.name == "engines.a.0"
        assert found.node.incarnation == two.a.identity().incarnation
        assert found.node.labels == LABELS
        assert found.node.fingerprint == small_layout().fingerprint()
    assert cluster.find_label("http", "10.0.0.1") == []
    with pytest.raises(troupe.TroupeError, match="`key` is empty"):
        cluster.find_label("", "one")
    with pytest.raises(TypeError, match="value is a str"):
        cluster.find_label("engine", 1)  # type: ignore[arg-type]


def test_members_and_reports_say_what_they_announced(cluster: troupe.Cluster, two: Two) -> None:
    nodes = {node["name"]: node for node in cluster.members()["nodes"]}
    assert nodes["engines.a.0"]["role"] == "both"
    assert nodes["engines.a.0"]["replica_name"] == "a"
    assert nodes["engines.a.0"]["labels"] == LABELS
    assert bytes.fromhex(nodes["engines.a.0"]["fingerprint"]) == small_layout().fingerprint()
    assert "labels" not in nodes["engines.b.0"]
    assert two.a.report()["labels"] == LABELS


def test_engines_that_joined_are_awaited(open_supervisor: Supervisor) -> None:
    async def main() -> None:
        layout = small_layout()
        sent = pattern(layout.region_sizes()[0])
        received = bytearray(len(sent))
        a = troupe.AsyncEngine(
            join=troupe.Announcement("engines", "a"), text=open_supervisor.text, layout=layout, regions=[sent]
        )
        b = troupe.AsyncEngine(
            join=troupe.Announcement("engines", "b"), text=open_supervisor.text, layout=layout, regions=[received]
        )
        async with a, b:
            await asyncio.gather(a.wait_registered(PATIENCE), b.wait_registered(PATIENCE))
            receive = b.receive("r", sources=[a.engine.name], tokens=TOKENS, blocks=RECEIVED, mode="read")
            send = a.send("r", SENT)
            finish(a.engine, send)
            await asyncio.wait_for(asyncio.gather(a.wait(send), b.wait(receive)), PATIENCE)
            assert_same_cache(memoryview(received), memoryview(sent))

    asyncio.run(main())


def told_until(engine: troupe.Engine, node: str, state: str) -> list[troupe.MemberEvent]:
    """The member events up to the one that shows that node in that state, which is the last."""
    told: list[troupe.MemberEvent] = []
    while not told or (told[-1].node, told[-1].state) != (node, state):
        (event,) = engine.take(1, timeout=PATIENCE)
        assert isinstance(event, troupe.MemberEvent)
        told.append(event)
    return told


def test_an_engine_that_watches_is_told_of_the_others_life_by_life(open_supervisor: Supervisor, two: Two) -> None:
    watching = troupe.Engine(join=troupe.Announcement("engines", "w"), text=open_supervisor.text, watch=True)
    life = two.a.identity().incarnation
    there = told_until(watching, "engines.a.0", "up")
    assert there[-1] == troupe.MemberEvent(
        troupe.Operation(0),
        node="engines.a.0",
        stage="engines",
        replica=there[-1].replica,
        rank=0,
        incarnation=life,
        state="up",
        labels=LABELS,
        reason=there[-1].reason,
    )
    assert there[-1] in set(there)
    two.a.stop()
    ended = told_until(watching, "engines.a.0", "gone")
    assert (ended[-1].incarnation, ended[-1].reason, ended[-1].labels) == (life, "left", LABELS)
    assert {event.node for event in there + ended} <= {"engines.a.0", "engines.b.0"}
    put = watching.put("engines.w.0", "key", b"value")
    two.b.stop()
    watching.wait(put, PATIENCE)  # takes no member event
    told_until(watching, "engines.b.0", "gone")
    watching.stop()
    assert watching.take() == []


def test_members_are_awaited(open_supervisor: Supervisor) -> None:
    async def main() -> None:
        watching = troupe.AsyncEngine(join=troupe.Announcement("engines", "w"), text=open_supervisor.text, watch=True)
        other = troupe.AsyncEngine(join=troupe.Announcement("engines", "o"), text=open_supervisor.text)
        async with watching:
            await watching.wait_registered(PATIENCE)
            states: list[str] = []
            async with other:
                await other.wait_registered(PATIENCE)
                async for member in watching.members():
                    assert member.node == "engines.o.0"
                    states.append(member.state)
                    if member.state == "up":
                        break
            async for member in watching.members():
                states.append(member.state)
                if member.state == "gone":
                    break
            assert states.index("up") < states.index("gone") == len(states) - 1
            for _ in range(3):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(watching.members()), 0.01)
            assert not watching._member_waiters, "of those who do not wait any more nothing is kept"
            waiting = asyncio.ensure_future(anext(watching.members(), None))
            await asyncio.sleep(0)
            await watching.stop()
            assert await asyncio.wait_for(waiting, PATIENCE) is None

    asyncio.run(main())


def member(node: str, incarnation: int, state: str) -> troupe.MemberEvent:
    return troupe.MemberEvent(troupe.Operation(0), node, "engines", 0, 0, incarnation, state)


def test_members_that_nobody_asks_for_wait_as_two_events_a_name() -> None:
    waiting = troupe.aio._Members()

    def told() -> list[tuple[str, int, str]]:
        events = iter(waiting.pop, None)
        return [(event.node, event.incarnation, event.state) for event in events]

    for life in range(1, 100):
        waiting.put(member("a", life, "joining"))
        waiting.put(member("a", life, "up"))
        waiting.put(member("a", life, "gone"))
    assert told() == []
    waiting.put(member("b", 1, "up"))
    waiting.put(member("a", 100, "up"))
    assert told() == [("b", 1, "up"), ("a", 100, "up")]
    waiting.put(member("a", 100, "gone"))
    waiting.put(member("a", 101, "joining"))
    waiting.put(member("b", 1, "suspect"))
    waiting.put(member("b", 1, "up"))
    assert told() == [("a", 100, "gone"), ("a", 101, "joining")]
    waiting.put(member("a", 101, "gone"))
    waiting.put(member("a", 101, "joining"))
    assert told() == [], "it is back before anybody heard that it was gone"
    waiting.put(member("a", 101, "gone"))
    waiting.put(member("b", 1, "gone"))
    assert told() == [("a", 101, "gone"), ("b", 1, "gone")]
    assert not waiting._members


def start(join: troupe.Announcement, **more: object) -> troupe.Engine:
    arguments: dict[str, object] = {"text": open_deployment(NOBODY), "layout": small_layout(), "allocate": "ordinary"}
    return troupe.Engine(join=join, **{**arguments, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("join", "code", "words"),
    [
        (troupe.Announcement("elsewhere", "a"), troupe.ErrorCode.NOT_FOUND, "elsewhere"),
        (troupe.Announcement("", "a"), troupe.ErrorCode.INVALID_CONFIG, "`options.join.stage` is empty"),
        (troupe.Announcement("engines", "a.b"), troupe.ErrorCode.INVALID_CONFIG, r"a\.b"),
        (troupe.Announcement("engines", "a", rank=1), troupe.ErrorCode.INVALID_CONFIG, "rank 1 of 1"),
        (troupe.Announcement("engines", "a", ranks=2), troupe.ErrorCode.INVALID_CONFIG, "rank 0 of 2"),
        (
            troupe.Announcement("engines", "a", labels={str(i): "" for i in range(17)}),
            troupe.ErrorCode.INVALID_CONFIG,
            "at most 16 labels",
        ),
        (troupe.Announcement("engines", "a", labels={"": "v"}), troupe.ErrorCode.INVALID_CONFIG, "key` is empty"),
        (troupe.Announcement("engines", "a", labels={"k": "v" * 257}), troupe.ErrorCode.INVALID_CONFIG, "257"),
    ],
)
def test_what_is_announced_wrongly_is_refused_by_name(
    join: troupe.Announcement, code: troupe.ErrorCode, words: str
) -> None:
    with pytest.raises(troupe.TroupeError, match=words) as refused:
        start(join)
    assert refused.value.code == code


def test_wrong_arguments_of_an_announcement_are_named() -> None:
    good = troupe.Announcement(stage="engines", replica="a")
    assert good.name == "engines.a.0"
    with pytest.raises(ValueError, match=r"name is 'x', and join is given: .* engines\.a\.0"):
        start(good, name="x")
    with pytest.raises(TypeError, match=r"join is a troupe\.Announcement, not dict"):
        start({"stage": "engines"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="replica is a str"):
        start(troupe.Announcement("engines", 7))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank is -1"):
        start(troupe.Announcement("engines", "a", rank=-1))
    with pytest.raises(ValueError, match="ranks is 0"):
        start(troupe.Announcement("engines", "a", ranks=0))
    with pytest.raises(TypeError, match="labels is a mapping"):
        start(troupe.Announcement("engines", "a", labels=["k"]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="label k is a str"):
        start(troupe.Announcement("engines", "a", labels={"k": 1}))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="or give join"):
        troupe.AsyncEngine(text=open_deployment(NOBODY))
    start(good, name="").stop()


def test_an_engine_receives_from_a_pipeline_and_refuses_one_that_lacks_a_part(open_supervisor: Supervisor) -> None:
    shape = troupe.LayerShape(kv_heads=2, head_dim=8)

    def layout_of(first: int, count: int) -> troupe.Layout:
        return troupe.Layout.packed(
            [shape] * count, dtype="bf16", block_tokens=4, blocks=8, first_layer=first, total_layers=3
        )

    def start_rank(replica: str, rank: int, ranks: int, layout: troupe.Layout, memory: bytearray) -> troupe.Engine:
        engine = troupe.Engine(
            join=troupe.Announcement("engines", replica, rank=rank, ranks=ranks),
            text=open_supervisor.text,
            layout=layout,
            regions=[memory],
        )
        engine.wait_registered(PATIENCE)
        return engine

    parts = [layout_of(0, 1), layout_of(1, 2)]
    whole = layout_of(0, 3)
    sent = [pattern(layout.region_sizes()[0]) for layout in parts]
    received = bytearray(whole.region_sizes()[0])
    with (
        start_rank("p", 0, 2, parts[0], sent[0]) as first,
        start_rank("p", 1, 2, parts[1], sent[1]) as second,
        start_rank("d", 0, 1, whole, received) as decode,
    ):
        sends = [engine.send("r", blocks=SENT) for engine in (first, second)]
        for engine, send in zip((first, second), sends, strict=True):
            engine.seal(send, TOKENS)

        def receive(*sources: str) -> troupe.Operation:
            return decode.receive("r", sources=sources, tokens=TOKENS, blocks=RECEIVED, mode="read")

        lacks = receive("engines.p.0")
        with pytest.raises(troupe.TroupeError, match="layers 1 to 2 of the model's 3 are held by none") as refused:
            decode.wait(lacks)
        assert refused.value.code == troupe.ErrorCode.LAYOUT_MISMATCH
        assert received == bytearray(len(received))
        decode.wait(receive("engines.p.0", "engines.p.1"))
        for engine, send in zip((first, second), sends, strict=True):
            engine.wait(send)
    expected = bytearray(len(received))
    for layer, plane, token, head in itertools.product(range(3), range(2), range(TOKENS), range(2)):
        part = 0 if layer == 0 else 1
        where = {"plane": plane, "token": token, "head": head}
        _, at, size = parts[part].locate(SENT, layer=layer - parts[part].first_layer, **where)
        _, to, _ = whole.locate(RECEIVED, layer=layer, **where)
        expected[to : to + size] = sent[part][at : at + size]
    assert received == expected
