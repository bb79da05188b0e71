"""Forks, spawns and the end of the interpreter."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import troupe
from conftest import PATIENCE, Pair, Supervisor, run_python


def in_child(body: object) -> int:
    """The exit code of a forked child that runs it: 0 if it returns True."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            code = 0 if body() else 2  # type: ignore[operator]
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def is_refused(call: object) -> bool:
    try:
        call()  # type: ignore[operator]
    except troupe.TroupeError as why:
        return why.code == troupe.ErrorCode.STALE_INCARNATION and "fork" in why.reason
    return False


def test_a_forked_child_is_told_and_never_waits(pair: Pair, supervisor: Supervisor) -> None:
    send = pair.send()

    def child() -> bool:
        return all(
            is_refused(call)
            for call in (
                pair.prefill.take,
                lambda: pair.prefill.wait(send),
                lambda: pair.send("another"),
                pair.prefill.stop,
                lambda: troupe.Engine("prefill-0", text=supervisor.text),
                lambda: troupe.Cluster(text=supervisor.text),
            )
        )

    assert in_child(child) == 0
    receive = pair.receive()
    pair.finish(send)
    pair.decode.wait(receive, PATIENCE)
    pair.prefill.wait(send, PATIENCE)


def test_a_child_that_forgets_its_parents_engine_ends(pair: Pair) -> None:
    def child() -> bool:
        pair.__dict__.clear()  # the finalizers run
        return True

    assert in_child(child) == 0


_OF_ITS_OWN = """
import multiprocessing, sys, troupe

def serve(text):
    with troupe.Engine("prefill-0", text=text) as engine:
        engine.wait_registered(120)

troupe.library_version()  # the parent has the library, and no engine yet
child = multiprocessing.get_context("fork").Process(target=serve, args=(sys.argv[1],))
child.start()
child.join(120)
print(child.exitcode)
serve(sys.argv[1])
"""


def test_a_child_that_is_forked_before_the_first_engine_has_one_of_its_own(supervisor: Supervisor) -> None:
    ended = run_python(_OF_ITS_OWN, supervisor.text)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def _serve(text: str) -> None:
    with troupe.Engine("prefill-0", text=text) as engine:
        engine.wait_registered(PATIENCE)


def test_a_spawned_child_of_a_process_with_engines_has_one_of_its_own(supervisor: Supervisor) -> None:
    ours = troupe.Engine("decode-0", text=supervisor.text)
    child = multiprocessing.get_context("spawn").Process(target=_serve, args=(supervisor.text,))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    ours.stop()


_ENDS = """
import sys, threading, troupe
layout = troupe.Layout.packed([troupe.LayerShape(kv_heads=2, head_dim=8)] * 2, dtype="bf16", block_tokens=4, blocks=8)
engine = troupe.Engine("prefill-0", text=sys.argv[1], layout=layout, regions=[bytearray(layout.region_sizes()[0])])
engine.wait_registered(120)
send = engine.send("r", [5, 0, 2])
engine.layers_ready(send, 0, 1, 4)
threading.Thread(target=lambda: engine.wait(send), daemon=True).start()
threading.Thread(target=lambda: engine.take(timeout=None), daemon=True).start()
print("begun", flush=True)
"""


def test_an_interpreter_that_ends_with_transfers_under_way_ends_in_good_order(supervisor: Supervisor) -> None:
    ended = run_python(_ENDS, supervisor.text)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "begun\n"


_STOPS_AT_THE_END = """
import atexit, sys
atexit.register(lambda: (engine.stop(), print("stopped", flush=True)))
import troupe
engine = troupe.Engine("prefill-0", text=sys.argv[1])
"""


def test_an_engine_may_be_stopped_after_the_interpreter_has_ended_it(supervisor: Supervisor) -> None:
    """Functions registered with atexit before the first engine run after the engines' own end."""
    ended = run_python(_STOPS_AT_THE_END, supervisor.text)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "stopped\n"


def test_a_take_without_a_limit_ends_with_the_engine(supervisor: Supervisor) -> None:
    engine = troupe.Engine("prefill-0", text=supervisor.text)
    taken: list[list[troupe.Event]] = []
    taker = threading.Thread(target=lambda: taken.append(engine.take(timeout=None)))
    taker.start()
    engine.stop()
    taker.join(PATIENCE)
    assert taken == [[]]


def test_importing_starts_nothing_and_loads_no_library() -> None:
    ended = run_python(
        "import os, threading\n"
        "os.environ['TROUPE_LIBRARY'] = '/no/such/library'\n"
        "import troupe\n"
        "assert threading.active_count() == 1\n"
        "assert 'libtroupe' not in open('/proc/self/maps').read()\n"
        "try:\n    troupe.library_version()\nexcept ImportError as why:\n    print(why)\n"
    )
    assert ended.returncode == 0, ended.stderr
    assert "TROUPE_LIBRARY" in ended.stdout


def test_eight_engines_one_after_the_other_leave_nothing_open(supervisor: Supervisor) -> None:
    def once() -> None:
        with troupe.Engine("prefill-0", text=supervisor.text) as engine:
            engine.wait_registered(PATIENCE)

    once()
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(8):
        once()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    limit = time.monotonic() + PATIENCE
    while len(os.listdir("/proc/self/task")) > threads:  # a joined thread is still listed for a moment
        assert time.monotonic() < limit, "threads are left"
        time.sleep(0.01)
