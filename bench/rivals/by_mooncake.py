"""Mooncake's transfer engine for side.py: the one that its Python API documents, over tcp. Each call takes the lists,
since nothing is prepared; the call returns when everything has moved."""
import importlib.metadata

from mooncake.engine import TransferEngine

from refused import Refused

HOST = "127.0.0.1"


def version():
    for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


class Side:
    version = f"Mooncake {version()}"

    def __init__(self, options):
        self._engine = TransferEngine()
        check("initialize", self._engine.initialize(HOST, "P2PHANDSHAKE", options["transport"], ""))
        self._array = None
        self._peer = ""
        self._there = 0

    def allocate(self, size):
        raise Refused("has no memory that others map")

    def register(self, array):
        self._array = array
        check("register_memory", self._engine.register_memory(array.ctypes.data, len(array)))

    def describe(self):
        return {"session": f"{HOST}:{self._engine.get_rpc_port()}", "address": self._array.ctypes.data}

    def meet(self, peer):
        self._peer, self._there = peer["session"], peer["address"]
        return "tcp"

    def plan(self, write, blocks):
        here = self._array.ctypes.data
        move = self._engine.batch_transfer_sync_write if write else self._engine.batch_transfer_sync_read
        return (move, [here + place for place in blocks.local.tolist()],
                [self._there + place for place in blocks.remote.tolist()], [blocks.size] * len(blocks.local))

    def move(self, plan):
        move, local, remote, sizes = plan
        code = move(self._peer, local, remote, sizes)
        if code != 0:
            raise Refused(f"{move.__name__} returned {code}")


def check(what, code):
    if code != 0:
        raise Refused(f"{what} returned {code}")
