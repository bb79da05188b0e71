"""Placements of requests."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from troupe import _abi

__all__ = ["NodeInfo", "Placement"]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node (one rank) of a placement or of a list of members.

    For a node of an open stage, `replica_name` is the engine's own id, `fingerprint` that of its layout
    (`Layout.fingerprint`; all 0: no layout), and `labels` are those it announced. For a node that a file names: "", all
    0, and none.
    """

    name: str
    stage: str
    host: str
    port: int
    incarnation: int
    replica: int
    rank: int
    ranks: int
    pid: int
    replica_name: str = ""
    fingerprint: bytes = bytes(16)
    labels: dict[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes that serve a request, chosen by the supervisor. A plain value: it can be compared and pickled.

    `mode` is "write" or "read". `supervisor_incarnation` and `epoch` are what a receive that follows the placement in
    another process gives as `placed_by` and `placed_at`. `attempt` counts from 1. `same_source`: the prefill replica is
    that of the attempt before, in the same life. `prefill` and `decode`: every rank of the chosen replicas, in order.
    `fingerprint`: of the layout of both replicas, if a stage is open; else all 0.
    """

    request: str
    mode: str
    supervisor_incarnation: int
    epoch: int
    attempt: int
    same_source: bool
    prefill: tuple[NodeInfo, ...]
    decode: tuple[NodeInfo, ...]
    fingerprint: bytes = bytes(16)


def placement_at(lib: _abi.Library, handle: object) -> Placement:
    """Copies a placement of C."""
    info = _abi.PlacementInfo(size=ctypes.sizeof(_abi.PlacementInfo))
    lib.check(lib.placement_read(handle, ctypes.byref(info)))
    return Placement(
        request=_abi.text_of(info.request),
        mode="read" if info.mode == 2 else "write",
        supervisor_incarnation=int(info.supervisor_incarnation),
        epoch=int(info.epoch),
        attempt=int(info.attempt),
        same_source=bool(info.same_source),
        prefill=tuple(_node(lib, handle, 0, i) for i in range(info.prefill_count)),
        decode=tuple(_node(lib, handle, 1, i) for i in range(info.decode_count)),
        fingerprint=bytes(info.fingerprint),
    )


def owned_placement(lib: _abi.Library, handle: object) -> Placement:
    """Copies a placement of C and frees it."""
    try:
        return placement_at(lib, handle)
    finally:
        lib.placement_free(handle)


def _node(lib: _abi.Library, handle: object, side: int, index: int) -> NodeInfo:
    raw = _abi.CNodeInfo(size=ctypes.sizeof(_abi.CNodeInfo))
    lib.check(lib.placement_node(handle, side, index, ctypes.byref(raw)))
    return node_of(raw)


def node_of(raw: _abi.CNodeInfo) -> NodeInfo:
    return NodeInfo(
        name=_abi.text_of(raw.name),
        stage=_abi.text_of(raw.stage),
        host=_abi.text_of(raw.host),
        port=int(raw.port),
        incarnation=int(raw.incarnation),
        replica=int(raw.replica),
        rank=int(raw.rank),
        ranks=int(raw.ranks),
        pid=int(raw.pid),
        replica_name=_abi.text_of(raw.replica_name),
        fingerprint=bytes(raw.fingerprint),
        labels=labels_of(raw.labels, raw.label_count),
    )


def labels_of(raw: Any, count: int) -> dict[str, str]:
    """Labels of C, copied."""
    return {_abi.text_of(raw[i].key): _abi.text_of(raw[i].value) for i in range(count)}
