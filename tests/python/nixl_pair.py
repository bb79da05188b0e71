"""A program written for NIXL's Python API, which test_nixl.py runs with another import: a target in a process of
its own lends blocks of memory; an initiator reads and writes them. Prints a line for each success."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

from nixl._api import nixl_agent, nixl_agent_config

BLOCK, BLOCKS = 4096, 64
SIZE = BLOCK * BLOCKS
SECONDS = 120


def filled(value: int) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * SIZE)(*([value] * SIZE))


def put(stream: object, data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)  # type: ignore[attr-defined]
    stream.flush()  # type: ignore[attr-defined]


def get(stream: object) -> bytes:
    return stream.read(int.from_bytes(stream.read(8), "little"))  # type: ignore[attr-defined,no-any-return]


def wait(agent: nixl_agent, handle: object, notif: bytes = b"") -> str:
    state = agent.transfer(handle, notif)
    end = time.monotonic() + SECONDS
    while state == "PROC" and time.monotonic() < end:
        state = agent.check_xfer_state(handle)
    return state


def wait_for_notif(agent: nixl_agent, sender: str, tag: bytes) -> None:
    end = time.monotonic() + SECONDS
    while not agent.check_remote_xfer_done(sender, tag):
        if time.monotonic() > end:
            raise SystemExit(f"{tag!r} of {sender} did not come")
        time.sleep(0.001)


def target() -> None:
    # NIXL writes its log to standard output.
    wire = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    agent = nixl_agent("target", nixl_agent_config(backends=["UCX"]))
    memory = filled(7)
    registered = agent.register_memory([(ctypes.addressof(memory), SIZE, 0, "lent")], "DRAM")
    put(wire, agent.get_agent_metadata())
    put(wire, agent.get_serialized_descs(registered.trim()))
    initiator = agent.add_remote_agent(get(sys.stdin.buffer)).decode()
    wait_for_notif(agent, initiator, b"written")
    places = [memory[i * BLOCK] for i in range(BLOCKS)]
    agent.send_notif(initiator, b"right" if places == [9 if i % 2 else 7 for i in range(BLOCKS)] else b"wrong")
    wait_for_notif(agent, initiator, b"end")
    agent.deregister_memory(registered)
    agent.remove_remote_agent(initiator)


def initiator(other: subprocess.Popen[bytes]) -> None:
    agent = nixl_agent("initiator", nixl_agent_config(backends=["UCX"]))
    memory = filled(0)
    base = ctypes.addressof(memory)
    registered = agent.register_memory([(base, SIZE, 0, "")], "DRAM")
    name = agent.add_remote_agent(get(other.stdout)).decode()
    print("added", name, agent.check_remote_metadata(name))
    remote = agent.deserialize_descs(get(other.stdout))
    put(other.stdin, agent.get_agent_metadata())
    agent.make_connection(name)

    read = agent.initialize_xfer("READ", registered.trim(), remote, name, b"read")
    print("read", wait(agent, read), memory[0], memory[SIZE - 1])
    agent.release_xfer_handle(read)

    ctypes.memset(base, 9, SIZE)
    blocks = [(base + i * BLOCK, BLOCK, 0) for i in range(BLOCKS)]
    there = remote[0][0]
    local_side = agent.prep_xfer_dlist("", agent.get_xfer_descs(blocks, "DRAM"))
    remote_side = agent.prep_xfer_dlist(name, [(there + i * BLOCK, BLOCK, 0) for i in range(BLOCKS)], "DRAM")
    odd = list(range(1, BLOCKS, 2))
    write = agent.make_prepped_xfer("WRITE", local_side, odd, remote_side, odd)
    print("write", wait(agent, write, b"first"))
    print("write again", wait(agent, write, b"written"))
    wait_for_notif(agent, name, b"right")
    print("the target saw it")
    agent.release_xfer_handle(write)
    agent.release_dlist_handle(local_side)
    agent.release_dlist_handle(remote_side)
    agent.send_notif(name, b"end")
    print("target ended", other.wait(SECONDS))
    agent.remove_remote_agent(name)
    agent.deregister_memory(registered)


if __name__ == "__main__":
    if sys.argv[1:] == ["target"]:
        target()
    else:
        with subprocess.Popen(
            [sys.executable, __file__, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            try:
                initiator(child)
            finally:
                child.kill()
