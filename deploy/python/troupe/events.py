"""Events of an engine's operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType, Union

from troupe.errors import ErrorCode, TroupeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from troupe.placement import Placement

__all__ = [
    "Allocated",
    "Call",
    "Done",
    "Event",
    "Failed",
    "Info",
    "Layers",
    "MemberEvent",
    "Operation",
    "Outcome",
    "Placed",
    "Unpinned",
    "Value",
    "Wanted",
]

#: An operation that an engine started and whose outcome it will get. An `int`, unique within one engine, never 0.
Operation = NewType("Operation", int)


@dataclass(slots=True)
class Allocated:
    """For a receive without blocks of its own: the node's pool allocated these. The engine frees them
    (`Engine.free_blocks`)."""

    operation: Operation
    owner: int
    blocks: list[int]


@dataclass(slots=True)
class Layers:
    """For a receive: layers [layer_begin, layer_end) at tokens [token_begin, token_end) have arrived from every rank.
    """

    operation: Operation
    layer_begin: int
    layer_end: int
    token_begin: int
    token_end: int


@dataclass(slots=True)
class Done:
    """The one outcome of a send, receive, put or remove that succeeded.

    `bytes_moved`: for a receive, and for a send in write mode. `aux`: for a receive, the prefill engine's `aux` of
    `seal`. For a send or receive: `waited`, seconds until the first byte; `moving`, from there to the last byte;
    `segments`, the number of pieces, at the side that plans them (send in write mode, receive in read mode); `backend`,
    of the link to the first rank, "shm".
    """

    operation: Operation
    bytes_moved: int
    aux: bytes
    waited: float = 0.0
    moving: float = 0.0
    segments: int = 0
    backend: str = ""


@dataclass(slots=True)
class Failed:
    """The one outcome of anything that failed."""

    operation: Operation
    error: TroupeError


@dataclass(slots=True)
class Unpinned:
    """After the outcome of a send or a receive: the network can no longer touch its blocks.

    An engine that allocates blocks itself may reuse them from here on, not before.
    """

    operation: Operation


@dataclass(slots=True)
class Value:
    """Outcome of a get. `data` is read-only memory of the store, mapped in place; it is pinned while any view of it is
    referenced. Copy it (`bytes(event.data)`) to keep it without pinning it."""

    operation: Operation
    data: memoryview


@dataclass(slots=True)
class Info:
    """Outcome of a query. `size` in bytes; `ttl` in seconds, None: no end."""

    operation: Operation
    size: int
    ttl: float | None


@dataclass(slots=True)
class Placed:
    """Outcome of a place."""

    operation: Operation
    placement: Placement


@dataclass(slots=True)
class Wanted:
    """For a send with `tell_wanted`: a decode rank asks for it.

    `rank` of `ranks` of the decode replica; `expected`: decode ranks that the send will serve in all; the decode side
    already has the tokens before `token_begin`.
    """

    operation: Operation
    node: str
    rank: int
    ranks: int
    expected: int
    token_begin: int
    token_end: int


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """Another node of the cluster has come, changed its state, or is gone (`Engine(..., watch=True)`).

    Events come per incarnation of a node: the first one, in whatever state, says that the incarnation is there; the
    last one, "gone", comes exactly once, before the node's next incarnation. While no events are taken, intermediate
    states are merged, and a life that came and went is not reported. There are no events for the supervisor or the
    engine itself. The cluster may lose a node that was only unreachable, and take the same life in again: that life is
    then reported as there again, after its "gone".

    Attributes:
        operation: 0: it belongs to none.
        node, stage: names.
        replica, rank: the replica's number in the stage (in an open stage per supervisor), and the node's rank within
            it.
        incarnation: of that life of the node, as in `lives` of a receive.
        state: "joining", "up", "suspect" (heartbeats are missing), "down" (it reported its own failure, and its process
            lives), "leaving" (it stops cleanly, or is drained) or "gone" (it left, was lost, or another life has its
            name).
        labels: of its `Announcement`; none for a node that a file names.
        reason: why it is in that state.
    """

    operation: Operation
    node: str
    stage: str
    replica: int
    rank: int
    incarnation: int
    state: str
    labels: dict[str, str] = field(default_factory=dict, hash=False)
    reason: str = ""


@dataclass(slots=True)
class Call:
    """A frontend calls the engine (`Engine(..., calls=True)`). Answer once, from any thread.

    `operation` is 0: it belongs to none.
    """

    operation: Operation
    method: str
    payload: bytes
    _reply: Callable[[int, str, bytes], None] = field(repr=False, compare=False)

    def reply(self, payload: bytes = b"") -> None:
        """Answers with up to 1 MiB. `TroupeError` NOT_FOUND: answered already, or the caller is gone."""
        self._reply(0, "", payload)

    def fail(self, error: TroupeError) -> None:
        """Answers with an error. A `WaitTimeout` is sent as DEADLINE."""
        code = ErrorCode.DEADLINE if error.code == ErrorCode.TIMED_OUT else error.code
        self._reply(int(code), error.reason, b"")


#: Ignore unknown events: later releases add some.
Event = Union[Allocated, Layers, Done, Failed, Unpinned, Value, Info, Placed, Wanted, MemberEvent, Call]  # noqa: UP007


@dataclass(slots=True)
class Outcome:
    """The outcome of an operation that succeeded (`Engine.wait`). Missing fields are empty, 0 or None.

    `bytes_moved`: receive, and send in write mode. `waited`, `moving`, `segments`, `backend`: send and receive; seconds
    from the engine's call to the first byte, and from there to the last byte; the pieces are counted by the side that
    plans them (send in write mode, receive in read mode). `aux`: receive. `owner`, `blocks`: receive without blocks of
    its own. `data`: get, as `Value.data`. `size`, `ttl`: query. `placement`: place.
    """

    bytes_moved: int = 0
    waited: float = 0.0
    moving: float = 0.0
    segments: int = 0
    backend: str = ""
    aux: bytes = b""
    owner: int = 0
    blocks: list[int] = field(default_factory=list)
    data: memoryview | None = None
    size: int = 0
    ttl: float | None = None
    placement: Placement | None = None
