"""Programs written for NIXL's Python API, over `troupe.nixl`."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, pattern
from test_arguments import Tensor
from troupe import nixl
from troupe.memory import Memory
from troupe.nixl import _exchange

SIZE = 1 << 16


def test_a_program_written_for_nixl_runs_when_its_import_is_changed(tmp_path: Path) -> None:
    program = (Path(__file__).parent / "nixl_pair.py").read_text()
    changed = program.replace("from nixl._api import", "from troupe.nixl import")
    assert changed != program
    at = tmp_path / "pair.py"
    at.write_text(changed)
    ended = subprocess.run([sys.executable, at], capture_output=True, text=True, timeout=PATIENCE * 2, check=False)
    assert ended.stdout.splitlines() == [
        "added target True",
        "read DONE 7 7",
        "write DONE",
        "write again DONE",
        "the target saw it",
        "target ended 0",
    ], ended.stderr


class Pair:
    """Two agents of this process that know each other."""

    def __init__(self, **more: Any) -> None:
        config = nixl.nixl_agent_config(**more)
        self.polled = not config.enable_pthread
        self.a, self.b = nixl.nixl_agent("a", config), nixl.nixl_agent("b", config)
        self.ours, self.theirs = pattern(SIZE), bytearray(SIZE)
        self.here, self.there = Memory.of(self.ours).address, Memory.of(self.theirs).address
        self.kv = self.a.register_memory([(self.here, SIZE, 0, "")], "DRAM")
        self.lent = self.b.register_memory([(self.there, SIZE, 0, "")], "DRAM")
        assert self.a.add_remote_agent(self.b.get_agent_metadata()) == b"b"
        assert self.b.add_remote_agent(self.a.get_agent_metadata()) == b"a"

    def write(self, notif: bytes = b"") -> nixl.nixl_xfer_handle:
        return self.a.initialize_xfer("WRITE", self.kv.trim(), self.lent.trim(), "b", notif)

    def moved(self, handle: nixl.nixl_xfer_handle) -> str:
        self.a.transfer(handle)
        return self.ended(handle)

    def ended(self, handle: nixl.nixl_xfer_handle) -> str:
        end = time.monotonic() + PATIENCE
        while (state := self.a.check_xfer_state(handle)) == "PROC" and time.monotonic() < end:
            if self.polled:
                self.b.update_notifs()
        return state

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    both.close()


def until(done: Callable[[], object]) -> bool:
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("prog_thread", [True, False])
def test_bytes_and_notifications(prog_thread: bool) -> None:
    both = Pair(enable_prog_thread=prog_thread, backends=["SHM"])
    handle = both.write(b"one")
    with pytest.raises(nixl.nixlNotPostedError):
        both.a.check_xfer_state(handle)
    both.a.transfer(handle)
    assert both.ended(handle) == "DONE"
    assert both.theirs == both.ours
    both.a.transfer(handle, "two")
    assert both.ended(handle) == "DONE"
    assert until(lambda: both.b.update_notifs().get("a") == [b"one", b"two"])
    assert not both.b.check_remote_xfer_done("a", b"w")
    assert both.b.check_remote_xfer_done("a", b"w", tag_is_prefix=False)
    assert both.b.notifs == {"a": [b"one"]}
    both.a.send_notif("b", "text")
    assert until(lambda: both.b.get_new_notifs() == {"a": [b"text"]})
    assert both.a.query_xfer_backend(handle) == "SHM"
    both.a.release_xfer_handle(handle)
    both.close()


def test_indices_choose_and_a_strided_list_has_an_entry_for_each_block(pair: Pair) -> None:
    class Array:
        """The part of a numpy array's interface that is used."""

        def tolist(self) -> list[list[int]]:
            return [[pair.here, 64, 0, 128, 4]]

    local = pair.a.prep_xfer_dlist("NIXL_INIT_AGENT", Array(), "DRAM")
    remote = pair.a.prep_xfer_dlist("b", [(pair.there + i * 64, 64, 0) for i in range(4)], "DRAM")
    handle = pair.a.make_prepped_xfer("WRITE", local, [3, 0], remote, [0, 1])
    pair.a.transfer(handle)
    assert pair.ended(handle) == "DONE"
    assert pair.theirs[:128] == pair.ours[384:448] + pair.ours[:64]
    for indices, error in (([4], nixl.nixlInvalidParamError), ([-1], nixl.nixlInvalidParamError)):
        with pytest.raises(error):
            pair.a.make_prepped_xfer("WRITE", local, indices, remote, [0])
    with pytest.raises(nixl.nixlInvalidParamError, match="0 local indices"):
        pair.a.make_prepped_xfer("WRITE", local, [], remote, [])
    with pytest.raises(KeyError):
        pair.a.make_prepped_xfer("MOVE", local, [0], remote, [0])
    with pytest.raises(nixl.nixlInvalidParamError, match="first side"):
        pair.a.make_prepped_xfer("READ", remote, [0], local, [0])


def test_an_agent_moves_within_itself(pair: Pair) -> None:
    half = SIZE // 2
    local = pair.a.prep_xfer_dlist("", [(pair.here, half, 0)], "DRAM")
    remote = pair.a.prep_xfer_dlist("a", [(pair.here + half, half, 0)], "DRAM")
    handle = pair.a.make_prepped_xfer("WRITE", local, [0], remote, [0], b"to myself")
    pair.a.transfer(handle)
    assert pair.ended(handle) == "DONE"
    assert pair.ours[:half] == pair.ours[half:]
    assert pair.a.get_new_notifs() == {"a": [b"to myself"]}
    assert pair.a.query_xfer_backend(handle) == "UCX"


def test_memory_that_its_owner_has_deregistered_is_not_written(pair: Pair) -> None:
    handle = pair.write()
    pair.b.deregister_memory(pair.lent)
    with pytest.raises(nixl.nixlNotAllowedError):
        pair.moved(handle)
    assert pair.theirs == bytes(SIZE)
    with pytest.raises(nixl.nixlNotFoundError, match="not registered"):
        pair.b.deregister_memory(pair.lent)


def test_memory_is_registered_twice_and_partly_described(pair: Pair) -> None:
    again = pair.b.register_memory(pair.lent)
    pair.b.deregister_memory(again)
    other = nixl.nixl_agent("other")
    more, unnamed = bytearray(100), bytearray(10)
    extra = other.register_memory(Tensor(more))
    other.register_memory([(Memory.of(unnamed).address, 10, 0, "")], "DRAM")
    assert not pair.a.check_remote_metadata("other")
    pair.a.add_remote_agent(other.get_partial_agent_metadata(None))
    assert pair.a.check_remote_metadata(b"other")
    assert not pair.a.check_remote_metadata("other", extra.trim())
    pair.a.add_remote_agent(other.get_partial_agent_metadata(extra))
    assert pair.a.check_remote_metadata("other", extra.trim())
    pair.a.remove_remote_agent("other")
    pair.a.remove_remote_agent("other")
    with pytest.raises(nixl.nixlNotFoundError, match="other"):
        pair.a.send_notif("other", b"x")
    other.close()


def test_a_new_life_of_a_name_is_taken_in_once_the_old_one_is_removed_or_lost(pair: Pair) -> None:
    reborn = nixl.nixl_agent("b")
    pair.a.make_connection("b")
    with pytest.raises(nixl.nixlNotAllowedError, match="another life"):
        pair.a.add_remote_agent(reborn.get_agent_metadata())
    assert pair.a.add_remote_agent(pair.b.get_agent_metadata()) == b"b"
    handle = pair.write()
    pair.b.close()
    with pytest.raises(nixl.nixlRemoteDisconnectError):
        pair.moved(handle)
    assert pair.a.add_remote_agent(reborn.get_agent_metadata()) == b"b"
    reborn.close()


_TARGET = """
import sys, time
from troupe.nixl import nixl_agent, nixl_agent_config
from troupe.memory import Memory
agent = nixl_agent("target", nixl_agent_config(backends=["TCP"]))
memory = bytearray(1 << 16)
agent.register_memory([(Memory.of(memory).address, 1 << 16, 0, "")], "DRAM")
described = agent.get_agent_metadata()
sys.stdout.buffer.write(b"%d %d\\n" % (len(described), Memory.of(memory).address) + described)
sys.stdout.flush()
time.sleep(600)
"""


def test_a_target_that_is_killed_is_disconnected(pair: Pair) -> None:
    with subprocess.Popen([sys.executable, "-c", _TARGET], stdout=subprocess.PIPE) as target:
        assert target.stdout is not None
        size, address = map(int, target.stdout.readline().split())
        pair.a.add_remote_agent(target.stdout.read(size))
        remote = pair.a.get_xfer_descs([(address, SIZE, 0)], "DRAM")
        handle = pair.a.initialize_xfer("WRITE", pair.kv.trim(), remote, "target")
        pair.a.transfer(handle)
        assert pair.ended(handle) == "DONE"
        os.kill(target.pid, signal.SIGKILL)
        target.wait(PATIENCE)
        with pytest.raises(nixl.nixlRemoteDisconnectError):
            pair.moved(handle)


def test_lists_of_descriptors(pair: Pair) -> None:
    rows = [(4096, 16, 0), (8192, 32, 1)]
    descs = pair.a.get_xfer_descs(rows, "VRAM")
    assert (list(descs), len(descs), descs.descCount(), descs[1]) == (rows, 2, 2, rows[1])
    assert pair.a.get_xfer_descs(descs) is descs
    assert pair.a.deserialize_descs(pair.a.get_serialized_descs(descs)) == descs
    registered = pair.a.get_reg_descs([(4096, 16, 0, "name")], "DRAM")
    assert pair.a.deserialize_descs(pair.a.get_serialized_descs(registered)) == registered
    assert registered[0] == (4096, 16, 0, b"name")
    assert list(registered.trim()) == [(4096, 16, 0)]
    assert descs.index(rows[1]) == 1
    with pytest.raises(nixl.nixlNotFoundError):
        descs.index((1, 2, 3))
    assert list(pair.a.get_remote_descs([(4096, 16, 0, "b")], "DRAM")) == [(4096, 16, 0, "b")]
    tensors = [Tensor(bytearray(10)), Tensor(bytearray(20))]
    assert [row[1] for row in pair.a.get_xfer_descs(tensors)] == [10, 20]
    # An invalid argument gives None and a line in the log, as in NIXL.
    scattered = Tensor(bytearray(4), contiguous=False)
    for given, kind in ((rows, None), ([(1, 2)], "DRAM"), (registered, None), (scattered, None)):
        assert pair.a.get_xfer_descs(given, kind) is None
    with pytest.raises(KeyError):
        pair.a.get_xfer_descs(rows, "TAPE")
    with pytest.raises(nixl.nixlMismatchError, match="pickle"):
        pair.a.deserialize_descs(pickle.dumps(rows))
    whole = pair.a.get_serialized_descs(registered)
    for cut in range(len(whole)):
        with pytest.raises(nixl.nixlMismatchError):
            pair.a.deserialize_descs(whole[:cut])


def test_what_has_no_meaning_says_so(pair: Pair) -> None:
    for call, error, word in (
        (lambda: nixl.nixl_agent(""), ValueError, "empty"),
        (lambda: nixl.nixl_agent("x", nixl.nixl_agent_config(backends=["GDS"])), nixl.nixlNotFoundError, "UCX, SHM"),
        (lambda: nixl.nixl_agent_config(sync_mode=1), TypeError, "sync_mode"),
        (lambda: pair.a.create_backend("GDS"), nixl.nixlNotFoundError, "no backend 'GDS'"),
        (lambda: pair.a.create_backend("UCX", {"x": "1"}), nixl.nixlNotSupportedError, "no parameters"),
        (lambda: pair.a.register_memory([(1, 1, 0, "")], "FILE"), nixl.nixlNotSupportedError, "no files"),
        (lambda: pair.a.register_memory(pair.kv, backends=["TCP"]), nixl.nixlNotFoundError, "was not created"),
        (
            lambda: pair.a.register_memory([(pair.here, 2**64 - 1, 0, b"")], "DRAM"),
            nixl.nixlInvalidParamError,
            "behind the last address",
        ),
        (lambda: pair.a.prep_mem_view(pair.kv), nixl.nixlNotSupportedError, "device code"),
        (pair.a.send_local_metadata, nixl.nixlNotSupportedError, "etcd"),
        (lambda: pair.a.fetch_remote_metadata("b", "10.0.0.1"), nixl.nixlNotSupportedError, "loopback"),
        (lambda: pair.a.add_remote_agent(pair.a.get_agent_metadata()), nixl.nixlInvalidParamError, "itself"),
        (lambda: pair.a.add_remote_agent(b"garbage"), nixl.nixlMismatchError, ""),
        (lambda: pair.a.prep_xfer_dlist("nobody", pair.kv.trim()), nixl.nixlNotFoundError, "nobody"),
        (lambda: pair.a.prep_xfer_dlist("b", [(1, 1, 0)], "DRAM"), nixl.nixlNotFoundError, ""),
        (lambda: pair.a.query_memory(pair.kv, "OBJ"), ValueError, "OBJ"),
        (lambda: pair.a.get_xfer_telemetry(pair.write()), nixl.nixlNoTelemetryError, "capture_telemetry"),
    ):
        with pytest.raises(error, match=word):
            call()
    assert pair.a.get_plugin_list()[0] == "UCX"
    assert pair.a.get_plugin_mem_types("UCX") == ["DRAM", "VRAM"]
    assert pair.a.get_plugin_mem_types("GDS") == []
    assert pair.a.get_backend_params("UCX") == {}
    assert pair.a.query_memory(pair.kv, "UCX") == [None]
    assert pair.a.estimate_xfer_cost(pair.write()) == (0, 0, "UNKNOWN")


def test_telemetry() -> None:
    both = Pair(capture_telemetry=True)
    handle = both.write()
    with pytest.raises(nixl.nixlNoTelemetryError):
        both.a.get_xfer_telemetry(handle)
    both.a.transfer(handle)
    both.ended(handle)
    told = both.a.get_xfer_telemetry(handle)
    assert (told.totalBytes, told.descCount) == (SIZE, 1)
    assert told.startTime > 0
    assert told.xferDuration >= 0
    both.close()


def test_a_transfer_that_was_cancelled_is_not_done() -> None:
    both = Pair(capture_telemetry=True)
    silent = nixl.nixl_agent("silent", nixl.nixl_agent_config(enable_prog_thread=False))  # it is never driven
    lent = silent.register_memory([(both.there, SIZE, 0, "")], "DRAM")
    both.a.add_remote_agent(silent.get_agent_metadata())
    handle = both.a.initialize_xfer("WRITE", both.kv.trim(), lent.trim(), "silent")
    assert both.a.transfer(handle) == "PROC"
    handle._transfer.cancel()
    for call in (both.a.check_xfer_state, both.a.get_xfer_telemetry):
        with pytest.raises(nixl.nixlCancelledError, match="cancelled"):
            call(handle)
    silent.close()
    both.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_metadata_goes_over_listeners() -> None:
    port = free_port()
    target = nixl.nixl_agent("target", nixl.nixl_agent_config(enable_listen_thread=True, listen_port=port))
    initiator = nixl.nixl_agent("initiator")
    memory = bytearray(SIZE)
    registered = target.register_memory([(Memory.of(memory).address, SIZE, 0, "")], "DRAM")
    initiator.fetch_remote_metadata("target", "127.0.0.1", port)
    initiator.send_local_metadata("127.0.0.1", port)
    assert until(lambda: initiator.check_remote_metadata("target", registered.trim()))
    assert until(lambda: target.check_remote_metadata("initiator"))
    initiator.invalidate_local_metadata("127.0.0.1", port)
    assert until(lambda: not target.check_remote_metadata("initiator"))
    with pytest.raises(nixl.nixlBackendError, match="listen_port"):
        nixl.nixl_agent("other", nixl.nixl_agent_config(enable_listen_thread=True, listen_port=port))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"garbage\n")
        assert stranger.recv(1) == b""
    initiator.close()
    target.close()


def test_a_request_that_comes_byte_by_byte_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exchange, "_SECONDS", 0.5)
    listener = _exchange.Listener(0, lambda: b"described", lambda metadata: None, lambda name: None)
    with socket.create_connection(("127.0.0.1", listener.port)) as slow:
        slow.settimeout(0.05)

        def is_hung_up_on() -> bool:
            try:
                slow.sendall(b"x")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        assert until(is_hung_up_on)
    listener.close()
