"""Clusters as a frontend sees them, and calls that come as events."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import troupe
from conftest import PATIENCE, Pair, Supervisor


@pytest.fixture
def serving(supervisor: Supervisor) -> Iterator[Pair]:
    """Engines that answer each call with its method and payload."""
    pair = Pair(supervisor, calls=True)
    over = threading.Event()

    def serve(engine: troupe.Engine) -> None:
        while not over.is_set():
            for event in engine.take(timeout=0.02):
                assert isinstance(event, troupe.Call)
                if event.method == "refuse":
                    event.fail(troupe.TroupeError(troupe.ErrorCode.OVERLOADED, "not today"))
                elif event.method != "sleep":
                    event.reply(event.method.encode() + b":" + event.payload)
                    with pytest.raises(troupe.TroupeError):
                        event.reply(b"twice")

    threads = [threading.Thread(target=serve, args=(engine,)) for engine in (pair.prefill, pair.decode)]
    for thread in threads:
        thread.start()
    yield pair
    over.set()
    for thread in threads:
        thread.join(PATIENCE)
    pair.stop()


@pytest.fixture
def cluster(serving: Pair, supervisor: Supervisor) -> troupe.Cluster:
    return troupe.Cluster(text=supervisor.text, timeout=PATIENCE)


def test_status_and_events_have_the_keys_of_the_command(cluster: troupe.Cluster) -> None:
    members = cluster.members()
    assert members["cluster"] == "python"
    assert {node["name"]: node["state"] for node in members["nodes"]} == {"prefill-0": "up", "decode-0": "up"}
    assert cluster.report("decode-0")["operations_open"] == 0
    events = cluster.events()
    assert {event["event"] for event in events["events"]} >= {"up"}
    assert cluster.events(after=events["newest"])["events"] == []
    with pytest.raises(troupe.TroupeError) as unknown:
        cluster.report("decode-9")
    assert unknown.value.code == troupe.ErrorCode.NOT_FOUND


def test_a_placement_is_a_plain_value(cluster: troupe.Cluster) -> None:
    placement = cluster.place("r", timeout=PATIENCE)
    assert placement.request == "r"
    assert placement.mode == "write"
    assert [node.name for node in placement.decode] == ["decode-0"]
    assert placement.supervisor_incarnation
    cluster.finished("r")


def test_a_request_is_placed_once_more_without_the_nodes_that_failed(cluster: troupe.Cluster) -> None:
    assert cluster.place("r", timeout=PATIENCE).attempt == 1
    again = cluster.place("r", timeout=PATIENCE, failed=["decode-0"], keep_source=True)
    assert (again.attempt, again.same_source) == (2, True)
    again = cluster.place("r", timeout=PATIENCE, failed=["decode-0", "prefill-0"], keep_source=True)
    assert (again.attempt, again.same_source) == (3, False)
    with pytest.raises(troupe.TroupeError, match="retry_budget") as spent:
        cluster.place("r", failed=["decode-0"])
    assert spent.value.code == troupe.ErrorCode.PEER_LOST
    with pytest.raises(TypeError, match="failed is a sequence of str"):
        cluster.place("r", failed="decode-0")
    cluster.finished("r")


def test_calls_are_answered_or_refused(cluster: troupe.Cluster) -> None:
    assert cluster.call("prefill-0", "echo", b"hello") == b"echo:hello"
    with pytest.raises(troupe.TroupeError, match="not today") as refused:
        cluster.call("prefill-0", "refuse")
    assert refused.value.code == troupe.ErrorCode.OVERLOADED
    with pytest.raises(troupe.TroupeError) as late:
        cluster.call("prefill-0", "sleep", timeout=0.1)
    assert late.value.code == troupe.ErrorCode.DEADLINE


def test_a_request_is_carried_to_its_answers(cluster: troupe.Cluster) -> None:
    seen: list[str] = []

    def draft(now: troupe.Attempt, node: troupe.NodeInfo) -> troupe.CallDraft:
        seen.append(node.name)
        assert now.source.startswith("r#")
        assert now.left > 0
        return troupe.CallDraft("carried", node.name.encode())

    done = cluster.carry("r", from_stage="prefill", to_stage="decode", prefill=draft, decode=draft, deadline=PATIENCE)
    assert sorted(seen) == ["decode-0", "prefill-0"]
    assert done.decode == (b"carried:decode-0",)
    assert done.prefill == (b"carried:prefill-0",)
    assert (done.attempts, done.prefills) == (1, 1)


def test_what_a_callback_raises_is_raised(cluster: troupe.Cluster) -> None:
    def broken(now: troupe.Attempt, node: troupe.NodeInfo) -> troupe.CallDraft:
        raise LookupError(node.name)

    with pytest.raises(LookupError, match="-0"):
        cluster.carry("r", from_stage="prefill", to_stage="decode", prefill=broken, decode=broken, deadline=PATIENCE)


def test_a_stop_ends_what_is_carried(cluster: troupe.Cluster) -> None:
    stop = troupe.Stop()

    def draft(now: troupe.Attempt, node: troupe.NodeInfo) -> troupe.CallDraft:
        stop.request()
        return troupe.CallDraft("sleep")

    with pytest.raises(troupe.TroupeError) as stopped:
        cluster.carry("r", from_stage="prefill", to_stage="decode", prefill=draft, decode=draft, deadline=20, stop=stop)
    assert stopped.value.code == troupe.ErrorCode.ABORTED
