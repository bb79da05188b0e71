"""Lends a megabyte, which it describes on its output, and waits for who writes: reader.py | writer.py"""
import os
import sys

from troupe.io import Agent

memory = bytearray(1 << 20)  # or a torch tensor, of the CPU or of a GPU
with Agent("reader") as agent, agent.register(memory, name="kv", rights="write"):
    os.write(1, agent.describe())
    os.close(1)
    for notice in agent.take_notices(timeout=10):  # every byte is there
        print(f"{notice.sender} wrote {memory[-1]}", file=sys.stderr)
