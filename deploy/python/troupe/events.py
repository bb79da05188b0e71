"""What an engine hears of its operations."""

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

#: What an engine started and will hear the end of. An `int`, unique within one engine, never 0.
Operation = NewType("Operation", int)


@dataclass(slots=True)
class Allocated:
    """Of a receive that named no blocks: the node's pool gave these. The engine frees them (`Engine.free_blocks`)."""

    operation: Operation
    owner: int
    blocks: list[int]


@dataclass(slots=True)
class Layers:
    """Of a receive: layers [layer_begin, layer_end) at tokens [token_begin, token_end) are complete from every rank."""

    operation: Operation
    layer_begin: int
    layer_end: int
    token_begin: int
    token_end: int


@dataclass(slots=True)
class Done:
    """The one outcome of a send, receive, put or remove that succeeded.

    `bytes_moved`: of a receive, and of a send in write mode. `aux`: of a receive, what the prefill engine sealed with.
    Of a send or receive: `waited`, seconds until the first byte moved; `moving`, from then until the last one had;
    `segments`, in how many pieces, at the side that plans them (send in write mode, receive in read mode); `backend` of
    the link with the first rank, "shm".
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
    """After the outcome of a send or a receive: the network can touch its blocks no more.

    An engine that allocates blocks itself may reuse them from here on, not before.
    """

    operation: Operation


@dataclass(slots=True)
class Value:
    """Outcome of a get. `data` is read-only memory of the store, mapped where it lies; it is pinned while any view of
    it is referenced. Copy it (`bytes(event.data)`) to keep it without pinning it."""

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
    """Of a send with `tell_wanted`: a decode rank asks for it.

    `rank` of `ranks` of the decode replica; `expected`: decode ranks that the send will serve in all; the tokens before
    `token_begin` are at the decode side already.
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
    """Another node of the cluster has come, is in another state, or is gone (`Engine(..., watch=True)`).

    Told life by life: the first event of an `incarnation` tells that it is there, in whichever state; the last one that
    it is gone, exactly once, and before the node's next incarnation is told. What changes while nobody takes events is
    told as it ended: a life that came and went meanwhile not at all. Nothing is told of the supervisor or of the engine
    itself. The cluster may take a node for dead that only could not be heard, and take the same life in again: that is
    told as there once more, after its "gone".

    Attributes:
        operation: 0: it belongs to none.
        node, stage: names.
        replica, rank: the replica's number in the stage (of an open one each supervisor's own), and the node's rank
            within it.
        incarnation: of that life of the node, as `lives` of a receive names it.
        state: "joining", "up", "suspect" (heartbeats are missing), "down" (it reports a failure of its own, and its
            process lives), "leaving" (it stops in good order, or is drained) or "gone" (it left, was lost, or another
            life has its name).
        labels: of its `Announcement`; none of a node that a file names.
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
        """Answers with an error. That a wait here was over is told as DEADLINE."""
        code = ErrorCode.DEADLINE if error.code == ErrorCode.TIMED_OUT else error.code
        self._reply(int(code), error.reason, b"")


#: Ignore what you do not know: later releases add to it.
Event = Union[Allocated, Layers, Done, Failed, Unpinned, Value, Info, Placed, Wanted, MemberEvent, Call]  # noqa: UP007


@dataclass(slots=True)
class Outcome:
    """How an operation that succeeded ended (`Engine.wait`). What it has not is empty, 0 or None.

    `bytes_moved`: receive, and send in write mode. `waited`, `moving`, `segments`, `backend`: send and receive; seconds
    since the engine began it until the first byte moved, and from then on until the last one had; the pieces are
    counted by the side that plans them (send in write mode, receive in read mode). `aux`: receive. `owner`, `blocks`:
    receive that named no blocks. `data`: get, as `Value.data`. `size`, `ttl`: query. `placement`: place.
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
