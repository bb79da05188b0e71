"""Engines that no file names: they join an open stage, transfer, are placed, and are found by their labels."""

from __future__ import annotations

import asyncio
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
#: Nobody listens there; engines start all the same.
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
