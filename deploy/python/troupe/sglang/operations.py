"""The common part of a room's sends and receives: an operation for each cache, and one outcome."""

from __future__ import annotations

from troupe.events import Operation
from troupe.sglang.node import Nodes

__all__ = ["RoomOperations"]


class RoomOperations:
    """Methods with an underscore are called under the lock of the nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._live: dict[int, Operation] = {}  # by the number of the cache, until nothing pins its pages
        self._running: set[int] = set()  # those of them without an outcome yet
        self._over = False

    def abort(self, reason: str) -> None:
        """Aborts the operations without reporting an outcome. A second call does nothing."""
        with self._nodes.lock:
            self._end(reason)

    def _begun(self, number: int, operation: Operation) -> None:
        self._live[number] = operation
        self._running.add(number)

    def _end(self, reason: str) -> None:
        if self._over:
            return
        self._over = True
        for number in self._running:
            self._nodes.abort(number, self._live[number], reason)
