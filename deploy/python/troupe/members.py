"""Nodes that no file names: their announcements, and how they are found by them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

from troupe import _abi
from troupe.placement import NodeInfo, node_of

__all__ = ["Announcement", "Member"]

_STATES = {1: "joining", 2: "up", 3: "suspect", 4: "down", 5: "leaving", 6: "gone"}


@dataclass(frozen=True, slots=True)
class Announcement:
    """How a node that no file names joins an open stage of the deployment (`Engine(join=...)`).

    Attributes:
        stage: a stage that is `open` in the deployment.
        replica: the engine's own id, 1 to 64 of a-z 0-9 _ -; all its ranks say the same.
        rank, ranks: within the replica, as in the engine's layout: of P parts of T tensor-parallel ranks each,
            tensor-parallel rank t of part p is p * T + t of P * T.
        labels: at most 16, of 1 to 64 bytes, with values of at most 256: identify the engine outside of Troupe, such as
            its id or the address of its HTTP server. Used only by `Cluster.find_label`.
    """

    stage: str
    replica: str
    rank: int = 0
    ranks: int = 1
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The node's name: STAGE.REPLICA.RANK."""
        return f"{self.stage}.{self.replica}.{self.rank}"


@dataclass(frozen=True, slots=True)
class Member:
    """A snapshot of a member of a cluster.

    `state`: "joining", "up", "suspect", "down" or "leaving", and `reason` why. `queue_length`: requests that wait or
    run in its engine, last reported.
    """

    node: NodeInfo
    state: str
    queue_length: int
    reason: str


def state_of(number: int) -> str:
    """The name of a state number of C."""
    return _STATES.get(number, "unknown")


def name_of(name: str | None, join: Announcement | None) -> str:
    """The name of a node that is either named or joins."""
    if join is None:
        if name is None:
            raise ValueError("name a node of the deployment, or give join")
        return name
    if not isinstance(join, Announcement):
        raise TypeError(f"join is a troupe.Announcement, not {type(join).__name__}")
    if name:
        raise ValueError(f"name is {name!r}, and join is given: a node that joins is called {join.name}")
    return join.name


def announced(join: Announcement) -> _abi.CAnnouncement:
    """An announcement for C, which keeps everything that it points to alive."""
    if not isinstance(join.labels, Mapping):
        raise TypeError(f"labels is a mapping of str to str, not {type(join.labels).__name__}")
    labels = [
        _abi.CLabel(_abi.encoded("a label", key), _abi.encoded(f"label {key}", value))
        for key, value in join.labels.items()
    ]
    ranks = _abi.number("ranks", join.ranks)
    if ranks == 0:
        raise ValueError("ranks is 0; give 1 or more")
    return _abi.CAnnouncement(
        size=ctypes.sizeof(_abi.CAnnouncement),
        label_count=len(labels),
        stage=_abi.encoded("stage", join.stage),
        replica=_abi.encoded("replica", join.replica),
        rank=_abi.number("rank", join.rank),
        ranks=ranks,
        labels=(_abi.CLabel * len(labels))(*labels),
    )


def owned_members(lib: _abi.Library, handle: object) -> list[Member]:
    """Copies members of C and frees them."""
    try:
        count = ctypes.c_uint32()
        lib.check(lib.members_count(handle, ctypes.byref(count)))
        return [_member(lib, handle, i) for i in range(count.value)]
    finally:
        lib.members_free(handle)


def _member(lib: _abi.Library, handle: object, index: int) -> Member:
    info = _abi.MemberInfo(size=ctypes.sizeof(_abi.MemberInfo))
    lib.check(lib.members_read(handle, index, ctypes.byref(info)))
    node = _abi.CNodeInfo(size=ctypes.sizeof(_abi.CNodeInfo))
    lib.check(lib.members_node(handle, index, ctypes.byref(node)))
    return Member(
        node=node_of(node),
        state=state_of(info.state),
        queue_length=int(info.queue_length),
        reason=_abi.text_of(info.reason),
    )
