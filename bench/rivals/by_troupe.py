"""`troupe.io` for side.py."""
import base64

import numpy as np
import troupe
from refused import Refused
from troupe.io import Agent


class Side:
    version = f"Troupe {troupe.library_version()}"

    def __init__(self, options):
        self._wanted = options["transport"]
        self._agent = Agent(options["name"], backends=[options["transport"]], threads=0 if options["polling"] else 1)
        self._own = self._peer = None
        self._there = 0

    def allocate(self, size):
        self._own = self._agent.allocate(size)
        return np.frombuffer(self._own.view, np.uint8)

    def register(self, array):
        self._own = self._agent.register(array)

    def describe(self):
        return {"descriptor": base64.b64encode(self._own.describe()).decode()}

    def meet(self, peer):
        self._peer = self._agent.add_peer(base64.b64decode(peer["descriptor"]))
        self._there = self._peer.memories()[0].address
        backend = self._peer.connect()
        if backend != self._wanted:
            raise Refused(f"moves over {backend}")
        return backend

    def plan(self, write, blocks):
        local = self._agent.prepare(blocks.rows(self._own.address, blocks.local))
        remote = self._peer.prepare(blocks.rows(self._there, blocks.remote))
        return self._agent.make("write" if write else "read", local, remote)

    def move(self, transfer):
        transfer.run()

    def poll(self):
        self._agent.poll()
