"""NIXL's Python agent for side.py, by UCX: descriptor lists are prepared once, a transfer is posted repeatedly.

There is no call that waits: a program polls the state until it changes.
"""
import base64
import importlib.metadata

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from refused import Refused


class Side:
    version = f"NIXL {importlib.metadata.version('nixl')}"

    def __init__(self, options):
        sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if options["threads"] > 1 else None
        self._agent = nixl_agent(options["name"], nixl_agent_config(backends=["UCX"], sync_mode=sync))
        if "UCX" not in self._agent.backends:
            raise Refused("no UCX backend")
        self._array = None
        self._peer = ""
        self._there = 0

    def allocate(self, size):
        raise Refused("has no memory of its own")

    def register(self, array):
        self._array = array
        self._agent.register_memory([(array.ctypes.data, len(array), 0, "")], "DRAM")

    def describe(self):
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
                "address": self._array.ctypes.data}

    def meet(self, peer):
        self._peer = self._agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        if isinstance(self._peer, bytes):
            self._peer = self._peer.decode()
        self._agent.make_connection(self._peer)
        self._there = peer["address"]
        return "UCX"

    def plan(self, write, blocks):
        local = self._agent.prep_xfer_dlist("", blocks.rows(self._array.ctypes.data, blocks.local, 3), "DRAM")
        remote = self._agent.prep_xfer_dlist(self._peer, blocks.rows(self._there, blocks.remote, 3), "DRAM")
        every = np.arange(len(blocks.local), dtype=np.int32)
        transfer = self._agent.make_prepped_xfer("WRITE" if write else "READ", local, every, remote, every)
        return transfer, local, remote

    def move(self, plan):
        agent, transfer = self._agent, plan[0]
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise Refused(f"the transfer ended as {state}")
