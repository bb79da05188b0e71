"""A cluster, as a frontend sees it."""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from troupe import _abi
from troupe.engine import _host_and_port, placement_request
from troupe.errors import ErrorCode
from troupe.members import Member, owned_members
from troupe.placement import NodeInfo, Placement, node_of, owned_placement, placement_at

__all__ = ["Attempt", "CallDraft", "Carried", "Cluster", "Stop"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The present placement of a carried request. `source`: its name for `send` and `receive` at both engines. `left`:
    seconds until its deadline."""

    placement: Placement
    source: str
    left: float


@dataclass(frozen=True, slots=True)
class CallDraft:
    """The call to an engine: a method and a payload of at most 1 MiB."""

    method: str
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Carried:
    """The outcome of a carried request. Answers are in rank order; the answer of a prefill that was lost after decode
    had all it needed is empty. `prefills`: how often the prompt was computed."""

    placement: Placement
    prefill: tuple[bytes, ...]
    decode: tuple[bytes, ...]
    attempts: int
    prefills: int


class Stop:
    """Gives up the requests that it was given to, from any thread."""

    __slots__ = ("__weakref__", "_handle", "_lib")

    def __init__(self) -> None:
        self._lib = _abi.library()
        self._handle = ctypes.c_void_p()
        self._lib.check(self._lib.stop_new(ctypes.byref(self._handle)))
        weakref.finalize(self, _abi.free, self._lib.stop_free, self._handle)

    def request(self) -> None:
        self._lib.check(self._lib.stop_request(self._handle))


class Cluster:
    """A connection to a cluster's supervisor. Blocking calls, each with a bound on its time; from any thread. For
    asyncio: `await asyncio.to_thread(cluster.place, ...)`. The next call opens a broken connection again.

    Every call raises `TroupeError`: PEER_UNREACHABLE, DEADLINE, PEER_LOST, UNAUTHORIZED, or the other side's own error.
    """

    __slots__ = ("__weakref__", "_finalizer", "_handle", "_lib")

    def __init__(
        self,
        *,
        file: str | os.PathLike[str] | None = None,
        text: str | None = None,
        supervisor: str | None = None,
        timeout: float = 3.0,
        lazy: bool = False,
    ) -> None:
        """Connects to the supervisor of the deployment in `file` or `text`, which also gives the credentials.

        `supervisor`: "host:port" in place of the deployment's; alone it reaches clusters of security mode `none`.
        `timeout`: seconds of every step that has no deadline of its own. `lazy`: connects at the first call.
        """
        lib = _abi.library()
        if file is not None and text is not None:
            raise ValueError("name the deployment by file or by text, not by both")
        host, port = _host_and_port(supervisor)
        options = _abi.ClusterOptions(
            size=ctypes.sizeof(_abi.ClusterOptions),
            flags=1 if lazy else 0,
            deployment_file=None if file is None else os.fsencode(file),
            deployment_text=_abi.optional("text", text),
            host=_abi.optional("supervisor", host),
            port=port,
            timeout_ms=max(1, min(_abi.milliseconds("timeout", timeout, 2**32), 2**32 - 1)),
        )
        self._lib = lib
        self._handle = ctypes.c_void_p()
        lib.check(lib.cluster_connect(ctypes.byref(options), ctypes.byref(self._handle)))
        self._finalizer = weakref.finalize(self, _abi.free, lib.cluster_free, self._handle)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close: the connection ends with the last reference."""

    def members(self) -> dict[str, Any]:
        """cluster, epoch, supervisor, supervisor_incarnation, and `nodes`: every node that registered, its state and
        newest load, with the keys of `troupe status --json`; a node of an open stage also has `replica_name`,
        `fingerprint` (32 digits) and, if it has any, `labels`."""
        return self._json(self._lib.cluster_members, self._handle)

    def find_label(self, key: str, value: str) -> list[Member]:
        """The members that are not down and have exactly this label (`Announcement.labels`)."""
        out = ctypes.c_void_p()
        self._lib.check(
            self._lib.cluster_find_label(
                self._handle, _abi.encoded("key", key), _abi.encoded("value", value), ctypes.byref(out)
            )
        )
        return owned_members(self._lib, out)

    def report(self, node: str) -> dict[str, Any]:
        """What one node owns and does, from that node. NOT_FOUND: no node of that name ever registered."""
        return self._json(self._lib.cluster_report, self._handle, _abi.encoded("node", node))

    def events(self, after: int = 0, max_events: int = 1000) -> dict[str, Any]:
        """supervisor_incarnation, newest (a sequence number), and `events` after number `after`, oldest first, each
        with the keys of `troupe events --json`."""
        return self._json(
            self._lib.cluster_events,
            self._handle,
            _abi.number("after", after, 2**64),
            _abi.number("max_events", max_events),
        )

    def place(
        self,
        request: str,
        *,
        from_stage: str | None = None,
        to_stage: str | None = None,
        affinity: str | None = None,
        timeout: float = 0.0,
        failed: Sequence[str] = (),
        keep_source: bool = False,
    ) -> Placement:
        """Places a request, waiting `timeout` seconds while no replica is up. Call `finished` when it has ended.

        Args:
            failed: places the same request again, because it lost these nodes of its earlier placement. Their replicas
                are avoided while others are up; a replica that lost no node is kept. Counts against the deployment's
                `limits.retry_budget`: beyond it PEER_LOST.
            keep_source: with `failed`: the prefill replica holds the sealed cache and is placed on again while it is up
                in the same life (`Placement.same_source`).
        """
        raw = placement_request(
            request, from_stage, to_stage, affinity, timeout, failed=failed, keep_source=keep_source
        )
        out = ctypes.c_void_p()
        self._lib.check(self._lib.cluster_place(self._handle, ctypes.byref(raw), ctypes.byref(out)))
        return owned_placement(self._lib, out)

    def finished(self, request: str) -> None:
        """Reports that a placed request ended, with or without success."""
        self._lib.check(self._lib.cluster_finished(self._handle, _abi.encoded("request", request)))

    def call(self, node: str, method: str, payload: bytes = b"", *, timeout: float | None = None) -> bytes:
        """Calls the engine of a node, with at most 1 MiB each way; the engine gets it as a `Call`."""
        raw = bytes(payload)
        out, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._lib.check(
            self._lib.cluster_call(
                self._handle,
                _abi.encoded("node", node),
                _abi.encoded("method", method),
                raw or None,
                len(raw),
                min(_abi.milliseconds("timeout", timeout, 0), 2**32 - 1),
                ctypes.byref(out),
                ctypes.byref(size),
            )
        )
        answer = _abi.bytes_at(out.value, size.value)
        self._lib.free(out)
        return answer

    def drain(self, node: str, *, deadline: float) -> None:
        """Stops placing requests on the node's replica, which leaves when its requests have ended, or after `deadline`
        seconds. Returns at once."""
        limit = min(_abi.milliseconds("deadline", deadline, 2**32), 2**32 - 1)
        self._lib.check(self._lib.cluster_drain(self._handle, _abi.encoded("node", node), limit))

    def cancel_drain(self, node: str) -> None:
        """Lets the node serve again. NOT_FOUND: it is not being drained; PEER_LOST: too late."""
        self._lib.check(self._lib.cluster_cancel_drain(self._handle, _abi.encoded("node", node)))

    def carry(
        self,
        request: str,
        *,
        from_stage: str,
        to_stage: str,
        prefill: Callable[[Attempt, NodeInfo], CallDraft],
        decode: Callable[[Attempt, NodeInfo], CallDraft],
        abort: Callable[[Attempt, NodeInfo], CallDraft] | None = None,
        deadline: float = 30.0,
        affinity: str | None = None,
        source_is_kept: bool = False,
        stop: Stop | None = None,
    ) -> Carried:
        """Places a request, calls the engines of both sides, and places it again elsewhere when it loses nodes.

        The callbacks set the call to each rank. They run on this thread and must not block; an exception in one gives
        the request up and is raised here. `source_is_kept`: the deployment's `limits.retry_window` is not 0. Returns at
        the deadline at the latest. Errors: the engines' own; DEADLINE; PEER_LOST (the retry budget is used up); ABORTED
        (`stop`).
        """
        lib = self._lib
        raised: list[BaseException] = []

        def adapter(function: Callable[[Attempt, NodeInfo], CallDraft]) -> Any:
            def call(user: object, now: Any, node: Any, draft: int) -> int:
                try:
                    at = now.contents
                    attempt = Attempt(placement_at(lib, at.where), _abi.text_of(at.source), at.left_ms / 1000)
                    wanted = function(attempt, node_of(node.contents))
                    payload = bytes(wanted.payload)
                    return int(
                        lib.call_draft_set(draft, _abi.encoded("method", wanted.method), payload or None, len(payload))
                    )
                except BaseException as why:  # C must not see it
                    raised.append(why)
                    return int(ErrorCode.ABORTED)

            return _abi.CarriedCall(call)

        raw = _abi.CarriedRequest(
            size=ctypes.sizeof(_abi.CarriedRequest),
            source_is_kept=1 if source_is_kept else 0,
            request=_abi.encoded("request", request),
            from_=_abi.encoded("from_stage", from_stage),
            to=_abi.encoded("to_stage", to_stage),
            affinity=_abi.optional("affinity", affinity),
            deadline_ms=_abi.milliseconds("deadline", deadline, 0),
            prefill=adapter(prefill),
            decode=adapter(decode),
            stop=None if stop is None else stop._handle,
        )
        if abort is not None:
            raw.abort = adapter(abort)
        out = ctypes.c_void_p()
        status = lib.cluster_carry(self._handle, ctypes.byref(raw), ctypes.byref(out))
        if raised:
            lib.carried_free(out)
            raise raised[0]
        lib.check(status)
        try:
            return _carried(lib, out)
        finally:
            lib.carried_free(out)

    def _json(self, function: Any, *arguments: Any) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self._lib.text(function, *arguments))
        return document


def _carried(lib: _abi.Library, handle: ctypes.c_void_p) -> Carried:
    info = _abi.CarriedInfo(size=ctypes.sizeof(_abi.CarriedInfo))
    lib.check(lib.carried_read(handle, ctypes.byref(info)))

    def answer(side: int, index: int) -> bytes:
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        lib.check(lib.carried_answer(handle, side, index, ctypes.byref(address), ctypes.byref(size)))
        return _abi.bytes_at(address.value, size.value)

    where = ctypes.c_void_p()
    lib.check(lib.carried_placement(handle, ctypes.byref(where)))
    return Carried(
        placement=owned_placement(lib, where),
        prefill=tuple(answer(0, i) for i in range(info.prefill_count)),
        decode=tuple(answer(1, i) for i in range(info.decode_count)),
        attempts=int(info.attempts),
        prefills=int(info.prefills),
    )
