"""The connector that vLLM-Omni calls."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase

from troupe.errors import ErrorCode, TroupeError
from troupe.events import Operation
from troupe.omni.keys import Name, claim_of, name_of, requests_of
from troupe.omni.node import Node, acquire, release
from troupe.omni.payload import Header, PayloadError, payload_of, restored
from troupe.omni.settings import settings_of
from troupe.omni.shelf import Parcel, is_full

__all__ = ["TroupeOmniConnector"]

logger = init_logger(f"vllm.{__name__}")

INLINE = 32 << 10  # bytes of a header and its payload that go in one message
PATIENCE = 0.2  # seconds that one `get` waits for nodes to say whether they have a payload
SLOW = 0.1  # seconds of silence, after which no `get` waits for a node until it has answered
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1  # seconds until the same nodes are asked for the same payload again
OTHERS_PAUSE = 1.0  # seconds until nodes of other stages are asked again
STEPS = (0.001, 0.005)  # seconds between two polls of a waiting get: for the first fifty, and later
ROOM_STEP = 0.01  # seconds between two checks for room
FORGOTTEN = 60.0  # seconds until an unused search is forgotten
SAID_AGAIN = 10.0  # seconds until it is logged again that a payload does not fit: some callers poll every millisecond
REAPED = 64  # payloads that one call checks; the node checks all of them
CLAIMED = 5.0  # seconds for a node to say whether a payload is this reader's


@dataclass
class _Search:
    """The search for a payload that is wanted and not here yet. `lock`: held by the one thread that searches."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    asks: dict[str, Operation] = field(default_factory=dict)  # nodes that have not answered yet
    pause: float = FIRST_PAUSE
    again: float = 0.0  # when the nodes of the stage are asked next
    others: float = 0.0  # when those of other stages are asked next
    touched: float = 0.0
    said: float = -math.inf  # when it was logged that there is no room for it here


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The arguments of a get. `deadline`: a time of `time.monotonic`."""

    name: Name
    stage: str
    metadata: dict[str, Any] | None
    deadline: float


@dataclass
class _Counts:
    puts: int = 0
    gets: int = 0
    bytes_put: int = 0
    bytes_got: int = 0
    errors: int = 0


class TroupeOmniConnector(OmniConnectorBase):  # type: ignore[misc]
    """Hands payloads from one stage of vLLM-Omni to another, between processes and machines.

    `put` copies a payload into memory of this process's node. `get` finds the node of the stage that has it, moves the
    payload once, and takes it: only one of several readers gets it. Bytes and tensors come as a `RawPayload` over the
    memory that they were moved to; other payloads come as the original object.

    Thread-safe. No call waits longer than `timeout` of its settings, or its own deadline.
    """

    supports_raw_data = True

    def __init__(self, config: dict[str, Any]) -> None:
        """`config`: `extra` of vLLM-Omni's YAML. Starts the process's node, or shares one that is running.

        `ValueError`: a key of `config` is wrong. `TroupeError`: the node does not start, and why.
        """
        self._node: Node | None = None  # `close` may be called before `__init__` has finished
        self._closing = threading.Lock()
        self._lock = threading.Lock()
        self._searches: dict[bytes, _Search] = {}  # by the identity of the payload
        self._pruned = time.monotonic()
        self._counts = _Counts()
        self._settings = settings_of(config)
        #: Stages read their own keys from this.
        self.config = config
        #: vLLM-Omni's number of this process's stage; -1 if it was not given.
        self.stage_id = config.get("stage_id", -1)
        if self._settings.unread:
            logger.info("TroupeOmniConnector leaves %s to the stage's own code", ", ".join(self._settings.unread))
        self._node = acquire(self._settings)

    # -- called by vLLM-Omni

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Keeps `data` here until a reader takes it, or for `ttl` seconds from the newest payload of its request.

        `data`: bytes, a tensor of the host or of a GPU (waits for its stream), or anything that vLLM-Omni serializes.
        The caller may change it when this returns. It replaces a payload of the same key; a reader that is already
        reading the old one gets all of it.

        Returns whether it is kept, its size in bytes, and metadata that readers do not need. (False, 0, None): there
        was no room for `timeout` seconds, and the log says which request takes it. `TypeError`, `ValueError`: naming
        the argument. `TroupeError`: the node has failed, or the connector is closed.
        """
        name = name_of(from_stage, to_stage, put_key)
        node = self._live()
        payload = payload_of(data, self.serialize_obj)
        number = node.shelf.next_number()
        header = payload.header(name.identity, number, apart=False)
        raw = header.encode()
        body: Any = b""
        if len(raw) + payload.size <= INLINE:
            raw += payload.bytes()
        else:
            raw, body = payload.header(name.identity, number, apart=True).encode(), payload.memory
        ttl = self._settings.ttl
        parcel = Parcel(name.header, raw, body, payload.size, number, requests_of(put_key), ttl)
        if not self._stored(node, put_key, parcel):
            self._counts.errors += 1
            return False, 0, None
        node.tell(str(to_stage), name.notice)
        self._counts.puts += 1
        self._counts.bytes_put += payload.size
        return True, payload.size, {"troupe": {"node": node.name, "key": put_key, "size": payload.size}}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Takes the payload; returns it and its size in bytes. None: no node of the stage has it yet, or another reader
        was faster.

        `metadata` is what `put` returned, and saves a search. Without it, or with another connector's, every node of
        `from_stage` is asked. `PayloadError`: the bytes under this key are not a payload, and are removed.
        `TroupeError` OUT_OF_RANGE: the payload is larger than the memory here; raised again only after ten seconds,
        with None returned meanwhile.
        """
        name = name_of(from_stage, to_stage, get_key)
        return self._get(_Wanted(name, str(from_stage), metadata, time.monotonic() + self._settings.timeout))

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """As `get`, but waits for the payload until `deadline`, a time of `time.monotonic`. None: it has not arrived by
        then; it can be got later."""
        wanted = _Wanted(name_of(from_stage, to_stage, get_key), str(from_stage), metadata, deadline)
        looks = 0
        while True:
            found = self._get(wanted)
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            time.sleep(min(left, STEPS[looks > 50]))
            looks += 1

    def abandon_get(self, get_key: str) -> None:
        """Gives up getting a payload, from any stage: pending searches are dropped. A payload that is being moved is
        moved to its end."""
        self._forget_searches(lambda identity, _: _key_of(identity) == get_key)

    def cleanup(self, request_id: str) -> bool:
        """Drops a request's payloads that this process has put and no reader has taken, and its searches here. Returns
        whether there were any. A reader that has begun to move a payload gets all of it."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is a str, not {type(request_id).__name__}")
        node = self._node
        if node is None or node.pid != os.getpid():
            return False
        self._forget_searches(lambda identity, _: request_id in requests_of(_key_of(identity)))
        return node.shelf.drop(request_id)

    def reap_consumed(self) -> None:
        """Forgets some payloads that readers have taken; the node forgets all of them within a second. Raises nothing.
        """
        node = self._node
        if node is not None and node.pid == os.getpid():
            with contextlib.suppress(TroupeError):
                node.shelf.sweep(REAPED)

    def health(self) -> dict[str, Any]:
        """`status`: "healthy", "degraded" (it works, and `reason` says what does not) or "unhealthy" (it does not
        work); also the node's contents, in payloads and bytes. Raises nothing."""
        counts = vars(self._counts).copy()
        node = self._node
        if node is None or node.stopped or node.pid != os.getpid():
            return {"status": "unhealthy", "reason": self._unusable(node), **counts}
        try:
            report = node.report()
        except TroupeError as error:
            return {"status": "unhealthy", "reason": str(error), "node": node.name, **counts}
        pool = report["pool"]
        held, held_bytes, _ = node.shelf.held()
        reasons = [f"{peer} does not answer: {why}" for peer, why in sorted(node.trouble().items())]
        if not report["supervisor_reachable"]:
            reasons.insert(0, "the supervisor does not answer; nodes that start now are not found")
        return {
            "status": "degraded" if reasons else "healthy",
            "reason": "; ".join(reasons),
            "node": node.name,
            "stage_id": self.stage_id,
            "supervisor": bool(report["supervisor_reachable"]),
            "links": [
                {"peer": link["peer"], "backend": link["backend"], "state": link["state"]}
                for link in report.get("links", [])
            ],
            "values": held,
            "values_bytes": held_bytes,
            "memory_bytes": int(pool["store_bytes"]),
            "memory_used": int(pool["store_used"]),
            **counts,
        }

    def close(self) -> None:
        """Releases the process's node; the last connector stops it, and payloads that were not taken are lost. Received
        payloads stay valid. A second call does nothing."""
        with self._closing:
            node, self._node = self._node, None
            if node is None:
                return
            if node.pid == os.getpid():
                self._forget_searches(lambda *_: True, node)
            release(node)

    def __del__(self) -> None:
        if getattr(self, "_node", None) is None:
            return
        # The garbage of a cycle is collected in whatever thread allocates, which may hold the locks that `close` takes.
        try:
            threading.Thread(target=self.close, name="troupe-omni-close").start()
        except RuntimeError:  # the interpreter ends: no other thread runs
            self.close()

    # -- parts of a put

    def _stored(self, node: Node, key: str, parcel: Parcel) -> bool:
        """Stores a payload, waiting for readers to make room."""
        wanted = max(len(parcel.header), parcel.size)
        limit = time.monotonic() + self._settings.timeout
        while wanted <= node.memory:
            try:
                node.shelf.put(parcel)
                return True
            except TroupeError as error:
                if not is_full(error):
                    raise
            node.shelf.sweep()
            if time.monotonic() > limit:
                break
            time.sleep(ROOM_STEP)
        count, held, largest = node.shelf.held()
        logger.error(
            "%s has no room for %r: %d bytes are wanted, and %d of %d are in use, %d of them by %d payloads that "
            "no stage has fetched, most of them of %s; raise `memory`, or see why the next stage does not fetch them",
            node.name,
            key,
            wanted,
            int(node.report()["pool"]["store_used"]),
            node.memory,
            held,
            count,
            largest,
        )
        return False

    # -- parts of a get

    def _get(self, wanted: _Wanted) -> tuple[Any, int] | None:
        node, identity = self._live(), wanted.name.identity
        with self._lock:
            search = self._searches.get(identity)
            if search is None:
                search = self._searches[identity] = _Search()
        search.touched = time.monotonic()
        self._prune()
        if not search.lock.acquire(blocking=False):  # pylint: disable=consider-using-with
            return None  # another thread is getting it
        try:
            if self._searches.get(identity) is not search:
                return None  # another thread has got it meanwhile
            found = self._found(node, search, wanted)
            if found is not None:
                self._end_search(node, identity, search)
                self._counts.gets += 1
                self._counts.bytes_got += found[1]
            return found
        except (PayloadError, TroupeError):
            self._counts.errors += 1
            raise
        finally:
            search.lock.release()

    def _found(self, node: Node, search: _Search, wanted: _Wanted) -> tuple[Any, int] | None:
        now = time.monotonic()
        limit = min(wanted.deadline, now + PATIENCE)
        for peer in self._hinted(node, wanted):
            raw = self._answer(node, search, peer, wanted.name, limit)
            if raw is not None and (taken := self._take(node, search, peer, raw, wanted)) is not None:
                return taken
        if now >= search.again:
            search.again, search.pause = now + search.pause, min(2 * search.pause, LONGEST_PAUSE)
            peers, others = node.peers(wanted.stage)
            if now >= search.others:
                # Processes that put for a stage other than their own are found as well, if later.
                peers, search.others = [*peers, *others], now + OTHERS_PAUSE
            for peer in peers:
                self._ask(node, search, peer, wanted.name)
        for peer in list(search.asks):
            raw = self._answer(node, search, peer, wanted.name, limit)
            if raw is not None and (taken := self._take(node, search, peer, raw, wanted)) is not None:
                return taken
        return None

    def _hinted(self, node: Node, wanted: _Wanted) -> Iterator[str]:
        """Nodes that have the payload, according to metadata or notices."""
        name, metadata = wanted.name, wanted.metadata
        if node.shelf.has(name.header):
            yield node.name
        told = node.told(name.notice)
        if told is not None:
            node.remove_own(name.notice)  # a late node is asked again with all others
            if node.knows(told):
                yield told
        own = metadata.get("troupe") if isinstance(metadata, dict) else None
        named = own.get("node") if isinstance(own, dict) else None
        if isinstance(named, str) and named not in {told, node.name} and node.knows(named):
            yield named

    def _ask(self, node: Node, search: _Search, peer: str, name: Name) -> None:
        if peer in search.asks:
            return
        try:
            search.asks[peer] = node.begin_get(peer, name.header)
        except TroupeError as error:
            node.failed(peer, error)

    def _answer(self, node: Node, search: _Search, peer: str, name: Name, limit: float) -> memoryview | None:
        """The header of the payload, from a node that has it. None: the node does not have it, or has not answered by
        `limit`."""
        self._ask(node, search, peer, name)
        operation = search.asks.get(peer)
        if operation is None:
            return None
        wait = 0.0 if node.is_slow(peer) else max(0.0, limit - time.monotonic())
        try:
            outcome = node.result(operation, wait)
        except TroupeError as error:
            del search.asks[peer]
            if error.code == ErrorCode.NOT_FOUND:
                node.has_answered(peer)
            elif is_full(error):
                if _is_time(search):
                    logger.warning("%s has no memory to read from %s: %s", node.name, peer, error)
            else:
                node.failed(peer, error)
            return None
        if outcome is None:
            if wait >= SLOW:
                node.set_slow(peer)
            return None
        del search.asks[peer]
        node.has_answered(peer)
        return outcome.data

    def _take(
        self, node: Node, search: _Search, peer: str, raw: memoryview, wanted: _Wanted
    ) -> tuple[Any, int] | None:
        """Takes the payload. None: it stays where it is, or another reader has it."""
        name, deadline = wanted.name, wanted.deadline
        try:
            header, body = Header.decode(raw)
            if header.identity != name.identity:
                raise PayloadError(f"the payload is called {_key_of(header.identity)!r}")
        except PayloadError as error:
            node.remove(peer, name.header, CLAIMED)
            raise PayloadError(f"{_key_of(name.identity)!r} at {peer}: {error}") from None
        if header.apart and header.size > node.memory:
            if not _is_time(search):
                return None
            raise TroupeError(
                ErrorCode.OUT_OF_RANGE,
                f"{_key_of(name.identity)!r} at {peer} has {header.size} bytes, and {node.name} has memory for "
                f"{node.memory}: raise `memory` of this stage's connector",
            )
        claim = claim_of(header.number)
        try:
            if header.apart:
                moved = node.get(peer, claim, min(deadline - time.monotonic(), self._settings.timeout))
                if moved is None:
                    return None
                body = moved
        except TroupeError as error:
            if is_full(error):
                if _is_time(search):
                    key = _key_of(name.identity)
                    logger.warning("%s has no room yet for %r of %d bytes; release others", node.name, key, header.size)
            elif error.code != ErrorCode.DEADLINE:
                node.failed(peer, error)
            return None
        if not self._claimed(node, peer, claim, max(PATIENCE, deadline - time.monotonic())):
            return None
        try:
            return restored(header, body, self.deserialize_obj), header.size
        except PayloadError as error:
            raise PayloadError(f"{_key_of(name.identity)!r} at {peer}: {error}") from None

    def _claimed(self, node: Node, peer: str, claim: str, seconds: float) -> bool:
        """Claims a payload: only one of several readers succeeds. If the node can no longer answer, this reader has the
        bytes."""
        try:
            return node.remove(peer, claim, min(seconds, CLAIMED))
        except TroupeError as error:
            node.failed(peer, error)
            return True

    def _end_search(self, node: Node, identity: bytes, search: _Search) -> None:
        with self._lock:
            self._searches.pop(identity, None)
        asks, search.asks = search.asks, {}
        for operation in asks.values():
            node.discard(operation)

    def _prune(self) -> None:
        """Forgets old searches, since aborts of requests are not reported."""
        now = time.monotonic()
        if now - self._pruned > FORGOTTEN:
            self._pruned = now
            self._forget_searches(lambda _, search: now - search.touched > FORGOTTEN)

    def _forget_searches(self, which: Any, node: Node | None = None) -> None:
        with self._lock:
            searches = [(one, search) for one, search in self._searches.items() if which(one, search)]
        node = node or self._node
        for identity, search in searches:
            # A thread that is searching for it ends its own search.
            if node is not None and search.lock.acquire(blocking=False):  # pylint: disable=consider-using-with
                try:
                    self._end_search(node, identity, search)
                finally:
                    search.lock.release()

    # -- its node

    def _live(self) -> Node:
        node = self._node
        if node is None or node.stopped or node.pid != os.getpid():
            raise TroupeError(ErrorCode.ABORTED, f"the connector cannot be used: {self._unusable(node)}")
        return node

    @staticmethod
    def _unusable(node: Node | None) -> str:
        if node is not None and node.pid != os.getpid():
            return "this process was forked from the one that made it; make connectors after the fork"
        return "it was closed"


def _is_time(search: _Search) -> bool:
    """Whether it is time to log again that the payload does not fit."""
    now = time.monotonic()
    if now - search.said < SAID_AGAIN:
        return False
    search.said = now
    return True


def _key_of(identity: bytes) -> str:
    """vLLM-Omni's key, or printable text for bytes that are not one."""
    key = identity.split(b"\0", 2)[-1]
    try:
        return key.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return key.decode("utf-8", "backslashreplace")
