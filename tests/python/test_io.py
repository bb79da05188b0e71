"""One-sided agents from Python: in one process, and in two."""

from __future__ import annotations

import array
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import troupe
from conftest import PATIENCE, pattern
from troupe import io

SIZE = 1 << 16
# No peer is lost on a busy machine.
PATIENT = {"peer_silence": PATIENCE, "connect_timeout": PATIENCE}


class Both:
    """Two agents of this process; `b` lends its memory."""

    def __init__(self, **more: object) -> None:
        self.a = io.Agent("a", **PATIENT, **more)  # type: ignore[arg-type]
        self.b = io.Agent("b", **PATIENT, **more)  # type: ignore[arg-type]
        self.ours, self.theirs = pattern(SIZE), bytearray(SIZE)
        self.kv = self.a.register(self.ours)
        self.lent = self.b.register(self.theirs)
        self.peer = self.a.add_peer(self.b.describe())
        self.session = self.peer.session(self.kv, self.lent.number)

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def both() -> Iterator[Both]:
    agents = Both()
    yield agents
    agents.close()


def refused(code: troupe.ErrorCode) -> pytest.RaisesContext[troupe.TroupeError]:
    return pytest.raises(troupe.TroupeError, match=code.name.lower())


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_bytes_arrive_and_the_notice_behind_them(backend: str) -> None:
    agents = Both(backends=[backend])
    assert agents.peer.connect(PATIENCE) == backend
    sent = agents.session.write(notice=b"all of it")
    (notice,) = agents.b.take_notices(timeout=PATIENCE)
    assert (notice.sender, notice.data) == ("a", b"all of it")
    assert agents.theirs == agents.ours
    assert sent.wait(PATIENCE) == io.Status(io.State.DONE, SIZE)
    agents.theirs[100:200] = bytes(100)
    agents.session.read([(0, 100, 50), (50, 150, 50)]).wait(PATIENCE)
    assert agents.ours[:100] == bytes(100)
    notice.peer.notify(b"thanks")  # the greeted agent answers
    assert [one.data for one in agents.a.take_notices(timeout=PATIENCE)] == [b"thanks"]
    agents.close()


def test_prepared_lists_are_made_of_tuples_and_of_arrays_and_posted_again(both: Both) -> None:
    here, there = both.kv.address, both.lent.address
    rows = array.array("q", [number for i in range(64) for number in (here + i * 64, 64)])
    local = both.a.prepare(memoryview(rows).cast("B").cast("q", (64, 2)))
    remote = both.peer.prepare([(there + i * 64, 64) for i in range(63)] + [(there + 63 * 64, 64, 0, 1)])
    order = array.array("i", range(63, -1, -1))
    transfer = both.a.make("write", local, remote, local_index=order, remote_index=range(64), merge=True)
    assert transfer.status.state is io.State.PREPARED
    local.release()
    local.release()
    for _ in range(3):
        transfer.post(b"", deadline=PATIENCE)
        assert both.a.wait([transfer], PATIENCE) == 1
    assert transfer.status.bytes_moved == 64 * 64
    assert transfer.run(b"and a notice", deadline=PATIENCE, timeout=PATIENCE) == io.Status(io.State.DONE, 64 * 64)
    assert both.b.take_notices(timeout=PATIENCE)[0].data == b"and a notice"
    for i in range(64):
        assert both.theirs[i * 64 : (i + 1) * 64] == both.ours[(63 - i) * 64 : (64 - i) * 64]
    pieces = both.a.prepare_pieces([(both.kv, 0, 8, 16, 4)])
    both.a.make("read", pieces, both.peer.prepare([(there, 8, 8, 4)])).post()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_few_bytes_that_run_again_and_again_are_the_newest_each_time_or_fail(backend: str) -> None:
    both = Both(backends=[backend])
    here, there = both.kv.address, both.lent.address

    def transfer(number: int) -> io.Transfer:
        place = number * 4096
        return both.a.make("write", both.a.prepare([(here + place, 64)]), both.peer.prepare([(there + place, 64)]))

    def run(number: int, transfer: io.Transfer) -> None:
        place = slice(number * 4096, number * 4096 + 64)
        for i in range(50):
            both.ours[place] = bytes([number * 50 + i]) * 64
            assert transfer.run(timeout=PATIENCE) == io.Status(io.State.DONE, 64)
            assert both.theirs[place] == both.ours[place]

    with ThreadPoolExecutor(4) as threads:
        ended = [threads.submit(run, number, transfer(number)) for number in range(4)]
        for one in ended:
            one.result(PATIENCE)
    last = transfer(5)
    last.run(timeout=PATIENCE)
    assert last.run(b"noted", deadline=PATIENCE, timeout=PATIENCE).bytes_moved == 64
    assert both.b.take_notices(timeout=PATIENCE)[0].data == b"noted"
    both.lent.deregister(PATIENCE)
    with refused(troupe.ErrorCode.GRANT_REVOKED):
        last.run(timeout=PATIENCE)
    both.kv.deregister(PATIENCE)
    with refused(troupe.ErrorCode.ABORTED):
        last.run(timeout=PATIENCE)
    both.close()


def test_memory_that_the_agent_allocates_is_seen_and_named(both: Both) -> None:
    with both.b.allocate(4096, name="own", rights="read") as own:
        view = own.view
        view[:3] = b"own"
        assert len(view) == own.size == 4096
        assert both.a.add_peer(own.describe()) == both.peer
        remote = both.peer.memories()[-1]
        assert (remote.number, remote.address, remote.size, remote.rights) == (own.number, own.address, 4096, "read")
        with refused(troupe.ErrorCode.UNAUTHORIZED):
            both.peer.session(both.kv, remote).write([(0, 0, 3)])
        both.peer.session(both.kv, remote).read([(0, 0, 3)]).wait(PATIENCE)
        assert both.ours[:3] == b"own"
        view.release()
    with refused(troupe.ErrorCode.NOT_FOUND):
        own.deregister()


def test_what_fails_says_why_and_which_entries(both: Both) -> None:
    both.lent.deregister(PATIENCE)
    sent = both.session.write([(0, 0, 8), (8, 8, 8)])
    with refused(troupe.ErrorCode.GRANT_REVOKED):
        sent.wait(PATIENCE)
    status = sent.status
    assert status.state is io.State.FAILED
    assert status.bad_entries == (0, 1)
    assert status.error is not None
    assert status.error.code == troupe.ErrorCode.GRANT_REVOKED
    with refused(troupe.ErrorCode.OUT_OF_RANGE):
        both.session.write([(0, SIZE - 1, 2)])
    with refused(troupe.ErrorCode.UNKNOWN_REGION):
        both.a.prepare([(1, 8)])


def test_a_wait_that_is_over_raises_and_the_transfer_can_be_cancelled(both: Both) -> None:
    stopped = subprocess.Popen(
        [sys.executable, "-c", _LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    assert stopped.stdin is not None
    assert stopped.stdout is not None
    try:
        peer = both.a.add_peer(stopped.stdout.read(int(stopped.stdout.readline())))
        session = peer.session(both.kv, peer.memories()[0])
        session.write([(0, 0, 8)]).wait(PATIENCE)
        os.kill(stopped.pid, signal.SIGSTOP)
        _wait_for_stop(stopped.pid)
        tcp = both.a.report()["peers"]
        assert [one["backend"] for one in tcp if one["peer"] == peer.number] == ["tcp"]
        sent = session.write()
        with pytest.raises(troupe.WaitTimeout):
            sent.wait(0.01)
        os.kill(stopped.pid, signal.SIGCONT)
        sent.cancel()
        both.a.wait([sent], PATIENCE)
        assert sent.status.state in (io.State.CANCELLED, io.State.DONE)
    finally:
        stopped.kill()
        stopped.wait(PATIENCE)


def test_agents_know_each_other_by_a_secret(both: Both, tmp_path: Path) -> None:
    def agent(name: str, secret: str) -> io.Agent:
        at = tmp_path / secret
        at.write_text(secret * 32 + "\n")
        at.chmod(0o600)
        return io.Agent(name, security=io.Security("secret", secret=at), **PATIENT)

    with agent("lender", "a") as lender, agent("friend", "a") as friend, agent("stranger", "b") as stranger:
        lent = lender.allocate(64)
        described = lender.describe()
        peer = friend.add_peer(described)
        peer.session(friend.allocate(64), lent).write().wait(PATIENCE)
        for other in (stranger, both.a):  # knows only the descriptor
            with refused(troupe.ErrorCode.UNAUTHORIZED):
                other.add_peer(described).connect(PATIENCE)
    with pytest.raises(troupe.TroupeError, match="no/such/secret"):
        io.Agent("x", security=io.Security("secret", secret="no/such/secret"))
    with pytest.raises(troupe.TroupeError, match=r"options.secret` is given"):
        io.Agent("x", security=io.Security("open", secret="no/such/secret"))


def _wait_for_stop(pid: int) -> None:
    """Waits until every thread of it is stopped."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        while (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)


_LENDER = """
import sys
from troupe import io
with io.Agent("lender", peer_silence=120, backends=["tcp"]) as agent:
    lent = agent.allocate(1 << 16)
    described = agent.describe()
    sys.stdout.buffer.write(b"%d\\n" % len(described) + described)
    sys.stdout.flush()
    for notice in iter(lambda: agent.take_notices(1, timeout=None)[0], None):
        if notice.data == b"end":
            break
        notice.peer.notify(bytes(lent.view[:8]))
"""


def test_two_processes(both: Both) -> None:
    lender = subprocess.Popen([sys.executable, "-c", _LENDER], stdout=subprocess.PIPE)
    assert lender.stdout is not None
    try:
        peer = both.a.add_peer(lender.stdout.read(int(lender.stdout.readline())))
        both.ours[:8] = b"8 bytes!"
        peer.session(both.kv, peer.memories()[0]).write(notice=b"look").wait(PATIENCE)
        (answer,) = both.a.take_notices(timeout=PATIENCE)
        assert (answer.sender, answer.data) == ("lender", b"8 bytes!")
        peer.notify(b"end")
        assert lender.wait(PATIENCE) == 0
        lost = _event(both.a, io.PeerLost)
        assert isinstance(lost, io.PeerLost)
        assert lost.peer == peer
    finally:
        lender.kill()
        lender.wait(PATIENCE)


def _event(agent: io.Agent, kind: type) -> io.Event:
    """The next event of this kind."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for event in agent.take(1, timeout=1):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__} came")


def test_events_can_be_watched(both: Both) -> None:
    assert both.a.take() == []
    sent = both.session.write([(0, 0, 8)], notice=b"x")
    assert select.select([both.a], [], [], PATIENCE)[0]
    assert _event(both.a, io.TransferEnded) == io.TransferEnded(sent.number)
    assert _event(both.b, io.NoticesWait) == io.NoticesWait()


def test_who_waits_hears_signals_and_lets_other_threads_run(both: Both) -> None:
    class Heard(Exception):  # noqa: N818
        pass

    def hear(*_: object) -> None:
        raise Heard

    before = signal.signal(signal.SIGALRM, hear)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Heard):
            both.b.take_notices(timeout=None)
    finally:
        signal.signal(signal.SIGALRM, before)
    sends = threading.Timer(0.05, lambda: both.session.write(notice=b"from a thread"))
    sends.start()
    assert both.b.take_notices(timeout=PATIENCE)[0].data == b"from a thread"
    sends.join()


def test_an_agent_that_is_closed_tells_who_waits(both: Both) -> None:
    closes = threading.Timer(0.05, both.b.close)
    closes.start()
    with refused(troupe.ErrorCode.ABORTED):
        both.b.take(timeout=None)
    closes.join()
    with refused(troupe.ErrorCode.ABORTED):
        both.b.describe()
    both.b.close()


def test_what_nobody_references_is_released_once_it_has_ended() -> None:
    agents = Both(max_transfers=8)
    for _ in range(100):
        agents.session.write([(0, 0, 64)]).wait(PATIENCE)
        agents.a.prepare([(agents.kv.address, 8)])
    gc.collect()
    agents.a.prepare([(agents.kv.address, 8)])
    report = agents.a.report()
    assert report["transfers"] <= 1
    assert report["plans"] <= 3
    agents.close()


def test_registered_memory_is_kept_and_given_back(both: Both) -> None:
    memory = bytearray(100)
    registered = both.a.register(memory)
    with pytest.raises(BufferError):
        memory.extend(b"x")
    registered.deregister(PATIENCE)
    memory.extend(b"x")


def test_memory_of_a_gpu_needs_a_library_with_code_for_gpus(both: Both) -> None:
    memory = bytearray(64)
    on_gpu = troupe.Memory(troupe.Memory.of(memory).address, 64, memory, on_gpu=True)
    reasons = {one["name"]: one["reason"] for one in both.a.report()["backends"]}
    if reasons["xgmi"].startswith("not built"):
        with refused(troupe.ErrorCode.NO_DEVICE):
            both.a.register(on_gpu)


def test_a_peer_that_answers_no_question_for_its_memory_is_given_up_after_grant_timeout() -> None:
    with io.Agent("hurried", **PATIENT, grant_timeout=0.05) as hurried, io.Agent("mute", **PATIENT, threads=0) as mute:
        own, lent = hurried.allocate(4096), mute.allocate(4096)
        peer = hurried.add_peer(mute.describe())
        with ThreadPoolExecutor(1) as pool:
            linked = pool.submit(peer.connect, PATIENCE)
            while not linked.done():
                mute.poll()
            linked.result()
        # From here on nobody drives the peer.
        sent = peer.session(own, lent.number).write([(0, 0, 8)])
        with pytest.raises(troupe.TroupeError, match=r"50 ms \(grant_timeout\)") as told:
            sent.wait(PATIENCE)
        assert told.value.code == troupe.ErrorCode.PEER_UNREACHABLE


def test_the_report_counts_notices_that_were_dropped(both: Both) -> None:
    assert both.a.report()["notices_dropped"] == 0


def test_a_polled_agent_moves_while_it_is_polled() -> None:
    agents = Both(threads=0, backends=["shm"])
    sent = agents.session.write(notice=b"x")
    end = time.monotonic() + PATIENCE
    while sent.status.state is io.State.ACTIVE and time.monotonic() < end:
        agents.a.poll()
        agents.b.poll()
    assert sent.status.state is io.State.DONE
    agents.close()


def test_arguments_that_are_none_are_named(both: Both) -> None:
    for call, word in (
        (lambda: io.Agent("a", backends=["ucx"]), "a backend is 'ucx'"),
        (lambda: io.Agent("a", port=70_000), "port is 70000"),
        (lambda: io.Agent("a", security=io.Security("none")), "security.mode is 'none'"),
        (lambda: io.Agent("a\0b"), "name has a null character"),
        (lambda: both.a.register(bytearray(8), rights="all"), "rights is 'all'"),
        (lambda: both.a.register(b"read only"), "read-only"),
        (lambda: both.a.prepare([(1, 2, 3)]), "a row of entries has 3 numbers"),
        (lambda: both.a.prepare([(-1, 2)]), "negative"),
        (lambda: both.a.make("up", both.a.prepare([]), both.peer.prepare([])), "direction is 'up'"),
        (lambda: both.a.take(0), "give 1 or more"),
        (lambda: both.session.write(deadline=-1), "deadline is -1"),
    ):
        with pytest.raises(ValueError, match=word):
            call()
    for call, word in (
        (lambda: io.Agent(5), "name is a str"),  # type: ignore[arg-type]
        (lambda: io.Agent("a", backends="tcp"), "backends is a sequence"),
        (lambda: both.a.register(5), "int is no memory"),
        (lambda: both.a.prepare("entries"), "entries are rows"),
        (lambda: both.a.prepare([1, 2]), "entries are rows"),
    ):
        with pytest.raises(TypeError, match=word):
            call()
    for call, code in (
        (lambda: io.Agent(""), troupe.ErrorCode.INVALID_CONFIG),
        (lambda: io.Agent("a", host="0.0.0.0"), troupe.ErrorCode.INVALID_CONFIG),
        (lambda: both.a.add_peer(b"no descriptor"), troupe.ErrorCode.INVALID_CONFIG),
        (lambda: both.peer.notify(bytes(65_537)), troupe.ErrorCode.OUT_OF_RANGE),
        (lambda: both.peer.session(both.kv, 4711), troupe.ErrorCode.NOT_FOUND),
        (lambda: both.a.register(troupe.Memory(0x1000, 2**64 - 1)), troupe.ErrorCode.INVALID_CONFIG),
    ):
        with refused(code):
            call()
    both.peer.remove()
    with refused(troupe.ErrorCode.NOT_FOUND):
        both.peer.notify(b"x")


def test_memory_is_kept_where_a_signal_comes_as_it_is_registered(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = both.a._lib.io_register

    def interrupted(*arguments: object) -> int:
        assert register(*arguments) == 0
        raise KeyboardInterrupt

    lent = array.array("Q", range(64))
    gone = weakref.ref(lent)
    monkeypatch.setattr(both.a._lib, "io_register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        both.a.register(lent)
    del lent
    gc.collect()
    assert gone() is not None, "peers may touch memory that is none"
    both.a.close()
    gc.collect()
    assert gone() is None


def authority(folder: Path) -> io.Security:
    """How agents recognise each other if their certificates come from one new authority."""
    subprocess.run(
        [os.environ["TROUPE_COMMAND"], "certs", "init", folder, "--cluster", "demo"], check=True, capture_output=True
    )
    files = {"secret": "cluster.secret", "certificate": "node.crt", "key": "node.key", "ca": "ca.crt"}
    return io.Security("tls", "demo", **{use: folder / name for use, name in files.items()})


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_agents_with_certificates_reach_those_of_their_authority_alone(tmp_path: Path, backend: str) -> None:
    ours = authority(tmp_path / "ours")
    agents = Both(backends=[backend], security=ours)
    agents.session.write(notice=b"sealed").wait(PATIENCE)
    assert agents.theirs == agents.ours
    assert [one.data for one in agents.b.take_notices(timeout=PATIENCE)] == [b"sealed"]
    for how in (authority(tmp_path / "others"), io.Security()):
        with io.Agent("stranger", backends=[backend], security=how, **PATIENT) as stranger:
            stranger.register(bytearray(SIZE))
            for one, other in ((agents.a, stranger), (stranger, agents.a)):
                with refused(troupe.ErrorCode.UNAUTHORIZED):
                    one.add_peer(other.describe()).connect(PATIENCE)
    agents.close()


def test_a_key_that_others_can_read_is_refused_by_name(tmp_path: Path) -> None:
    ours = authority(tmp_path / "ours")
    os.chmod(ours.key, 0o644)
    with pytest.raises(troupe.TroupeError, match=r"node.key"):
        io.Agent("a", security=ours)


def test_a_forked_child_is_told(both: Both) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        told = 0
        for call in (both.a.describe, both.a.close, lambda: both.a.take_notices(timeout=None)):
            try:
                call()
            except troupe.TroupeError as why:
                told += why.code == troupe.ErrorCode.STALE_INCARNATION
        os._exit(0 if told == 3 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    both.session.write().wait(PATIENCE)
