"""Many transfers, many threads and the death of a peer must leave nothing behind.

TROUPE_TRANSFERS: how many transfers, one after another (5,000); 100,000 by hand.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import troupe
from conftest import PATIENCE, RECEIVED, TOKENS, Pair, Supervisor, in_threads, small_layout

# Depends on how far the link had come.
ENDS_OF_A_PEER = (troupe.ErrorCode.PEER_LOST, troupe.ErrorCode.LINK_BROKEN, troupe.ErrorCode.PEER_UNREACHABLE)
_PR_SET_THP_DISABLE = 41  # linux/prctl.h
TRANSFERS = int(os.environ.get("TROUPE_TRANSFERS", "5000"))


def keep_pages_small() -> None:
    """As in tests/support/process_memory.hpp: pages that the kernel merges are no growth of ours."""
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def held_by_this_process() -> tuple[int, int, int]:
    """Counts of bytes of memory, descriptors and threads."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_transfers_one_after_the_other_leave_nothing(pair: Pair) -> None:
    def transfer(number: int) -> None:
        request = f"request {number}"
        send, receive = pair.send(request), pair.receive(request)
        pair.finish(send, aux=b"first token")
        assert pair.decode.wait(receive, PATIENCE).aux == b"first token"
        pair.prefill.wait(send, PATIENCE)

    keep_pages_small()
    # The bounded record of recent transfers is full after part of them.
    begin = max(TRANSFERS // 5, 1000)
    for number in range(begin):
        transfer(number)
    memory, descriptors, threads = held_by_this_process()
    for number in range(begin, TRANSFERS):
        transfer(number)
    memory_after, *others = held_by_this_process()
    # Memory that the allocator keeps is no growth; 64 bytes for each transfer would be.
    assert memory_after - memory < 64 * (TRANSFERS - begin) + (2 << 20)
    assert others == [descriptors, threads]


_PREFILL = """
import sys, time, troupe
sys.path.insert(0, sys.argv[2])
from conftest import SENT, TOKENS, pattern, small_layout
troupe.configure_logging(level="off")
layout = small_layout()
engine = troupe.Engine("prefill-0", text=sys.argv[1], layout=layout, regions=[pattern(layout.region_sizes()[0])])
engine.wait_registered(120)
send = engine.send("r", SENT)
if sys.argv[3] == "half":
    engine.layers_ready(send, 0, 1, TOKENS)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("progress", ["nothing", "half"])
def test_a_killed_peer_ends_what_waits_for_it_by_name(supervisor: Supervisor, progress: str) -> None:
    layout = small_layout()
    here = os.path.dirname(os.path.abspath(__file__))
    peer = subprocess.Popen(
        [sys.executable, "-B", "-c", _PREFILL, supervisor.text, here, progress], stdout=subprocess.PIPE, text=True
    )
    try:
        with troupe.Engine("decode-0", text=supervisor.text, layout=layout, allocate="ordinary") as engine:
            engine.wait_registered(PATIENCE)
            assert peer.stdout is not None
            assert peer.stdout.readline() == "ready\n"
            receive = engine.receive("r", sources=["prefill-0"], tokens=TOKENS, blocks=RECEIVED)
            if progress == "half":
                while not any(isinstance(event, troupe.Layers) for event in engine.take(timeout=PATIENCE)):
                    pass
            peer.kill()
            with pytest.raises(troupe.TroupeError) as why:
                engine.wait(receive, PATIENCE)
            assert why.value.code in ENDS_OF_A_PEER, why.value
            assert "prefill-0" in why.value.reason
    finally:
        peer.kill()
        peer.wait(PATIENCE)


def test_wrong_calls_from_64_threads_at_once_are_refused_each_by_its_own_words(pair: Pair) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        block, operation, nobody = 1000 + number, troupe.Operation(10**9 + number), f"nobody-{number}"
        for _ in range(50):
            for call, words in (
                (lambda: pair.prefill.send(f"r{number}", [block]), str(block)),
                (lambda: pair.prefill.layers_ready(operation, 0, 1, 1), str(operation)),
                (lambda: pair.decode.receive("r", sources=[nobody], tokens=1, blocks=[0]), nobody),
            ):
                try:
                    call()
                    wrong.append("taken")
                except troupe.TroupeError as why:
                    if words not in why.reason:
                        wrong.append(why)

    in_threads(64, work)
    assert not wrong, wrong[:3]
    send, receive = pair.send(), pair.receive()
    pair.finish(send)
    pair.decode.wait(receive, PATIENCE)
    pair.prefill.wait(send, PATIENCE)
