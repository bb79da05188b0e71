"""Writes a megabyte into the memory that its input describes."""
import sys

from troupe.io import Agent

memory = bytearray([7]) * (1 << 20)
with Agent("writer") as agent:
    kv = agent.register(memory, name="kv", rights="read")
    peer = agent.add_peer(sys.stdin.buffer.read())
    session = peer.session(kv, peer.memories()[0])
    sent = session.write(notice=b"all")  # or some: [(local offset, remote offset, size), ...]
    print("writer:", sent.wait(10).state.name.lower())
