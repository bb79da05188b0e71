"""The payloads that this process has put and no reader has taken yet."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from troupe.errors import ErrorCode, TroupeError
from troupe.omni.keys import claim_of

if TYPE_CHECKING:
    from troupe.omni.node import Node

__all__ = ["Parcel", "Shelf", "is_full"]

SWEPT = 4096  # payloads that one sweep checks
_FULL = (ErrorCode.POOL_EXHAUSTED, ErrorCode.OVERLOADED)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A payload that is put.

    `key`: of its header, whose bytes are `header`. `body`: the payload if it is apart, else empty. `size`: of the
    payload, in bytes. `number`: from `Shelf.next_number`. `requests`: the requests of vLLM-Omni that it may belong to,
    the likeliest first. `ttl`: seconds that the newest payload of a request is kept.
    """

    key: str
    header: bytes
    body: Any
    size: int
    number: int
    requests: tuple[str, ...]
    ttl: float


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    size: int
    requests: tuple[str, ...]
    ttl: float


class Shelf:
    """An index over the node's own values. Thread-safe.

    A payload is two values: the header under its name, and its claim, which exists until a reader takes it. The name
    can be given to another payload at once: a reader of the earlier one removes only that one's claim. Readers do not
    notify the index, which checks the claims once a second, and when there is no room.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by the header's key; the least recently checked first
        self._requests: dict[str, dict[str, None]] = {}  # keys of headers
        self._last: dict[str, float] = {}  # when a request's newest payload was put
        self._numbers = 0

    def next_number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def has(self, header: str) -> bool:
        return header in self._entries

    def put(self, parcel: Parcel) -> None:
        """Stores a payload, replacing one with the same key. `TroupeError` POOL_EXHAUSTED: there is no room, and
        nothing is stored."""
        claim = claim_of(parcel.number)
        self._node.put_own(claim, parcel.body)
        try:
            with self._lock:
                self._replace(parcel.key, parcel.header)
                self._entries[parcel.key] = _Entry(parcel.number, parcel.size, parcel.requests, parcel.ttl)
                for request in parcel.requests:
                    self._requests.setdefault(request, {})[parcel.key] = None
                self._last[parcel.requests[0]] = time.monotonic()
        except BaseException:
            self._node.remove_own(claim)
            raise

    def drop(self, request: str) -> bool:
        """Removes the payloads of a request of vLLM-Omni; returns whether there were any. Readers that have begun go
        on."""
        with self._lock:
            keys = list(self._requests.get(request, ()))
            for key in keys:
                self._remove(key)
            return bool(keys)

    def sweep(self, most: int = SWEPT) -> None:
        """Forgets taken payloads, and drops requests whose newest payload is older than its time to live."""
        now = time.monotonic()
        for _ in range(min(most, len(self._entries))):
            with self._lock:
                key = next(iter(self._entries), None)
                if key is None:
                    return
                self._entries.move_to_end(key)
                entry = self._entries[key]
                late = now - self._last.get(entry.requests[0], now) > entry.ttl
                if late or not self._node.has_own(claim_of(entry.number)):
                    self._remove(key)

    def held(self) -> tuple[int, int, str]:
        """The number of payloads, their bytes, and the request that has most of them."""
        with self._lock:
            sizes: dict[str, int] = {}
            for entry in self._entries.values():
                sizes[entry.requests[0]] = sizes.get(entry.requests[0], 0) + entry.size
            largest = max(sizes, key=sizes.__getitem__, default="")
            whose = f"{largest} ({sizes[largest]} bytes)" if largest else "nobody"
            return len(self._entries), sum(sizes.values()), whose

    def _replace(self, key: str, header: bytes) -> None:
        try:
            self._node.put_own(key, header)
            return
        except TroupeError as error:
            if error.code != ErrorCode.ALREADY_EXISTS:
                raise
        self._remove(key)
        self._node.remove_own(key)  # even if it is in no entry
        self._node.put_own(key, header)

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        for value in (key, claim_of(entry.number)):
            self._node.remove_own(value)
        for request in entry.requests:
            keys = self._requests.get(request, {})
            keys.pop(key, None)
            if not keys:
                self._requests.pop(request, None)
                self._last.pop(request, None)


def is_full(error: TroupeError) -> bool:
    """Whether the error means that there is no room yet."""
    return error.code in _FULL
