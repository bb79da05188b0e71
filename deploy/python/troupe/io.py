"""One-sided agents, for programs that bring a protocol of their own and want memory moved.

An `Agent` registers memory and describes it in bytes, which the program carries to its peers in its own way; a peer
with these bytes reads and writes that memory. No cluster, no deployment:

    with Agent("writer") as agent:
        kv = agent.register(tensor)
        peer = agent.add_peer(descriptor)
        sent = peer.session(kv, peer.memories()[0]).write(notice=b"all of it")
        sent.wait(10)
"""

from __future__ import annotations

import array
import ctypes
import enum
import json
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from troupe import _abi, _io_abi, _tables
from troupe.errors import ErrorCode, TroupeError
from troupe.memory import Memory, unreachable, view_of

__all__ = [
    "Agent",
    "Event",
    "Notice",
    "NoticesLost",
    "NoticesWait",
    "Peer",
    "PeerLost",
    "Plan",
    "RegisteredMemory",
    "RemoteMemory",
    "Security",
    "Session",
    "State",
    "Status",
    "Transfer",
    "TransferEnded",
]

_BATCH = 64
_SIGNALS = 200  # milliseconds that a wait may keep signals waiting
_BRIEF = 64 * 1024  # bytes that are copied faster than Python switches threads
_BACKENDS = {"shm": 1, "tcp": 2, "rdma": 3, "xgmi": 4}
_BACKEND_NAMES = {number: name for name, number in _BACKENDS.items()}
_RIGHTS = {"read": 1, "write": 2, "read_write": 3}
_RIGHT_NAMES = {number: name for name, number in _RIGHTS.items()}
_DIRECTIONS = {"write": 1, "read": 2}
_MODES = {"open": 0, "secret": 1, "tls": 2}
_POLLING = 1
_MERGE = 1
_ALL, _ANY = 0, 1
_NOTICE_SIZE = ctypes.sizeof(_io_abi.IoNotice)
_EVENT_SIZE = ctypes.sizeof(_io_abi.IoEvent)
_STATUS_SIZE = ctypes.sizeof(_io_abi.IoStatus)


@dataclass(frozen=True, slots=True)
class Security:
    """How agents authenticate each other, like nodes of a cluster (docs/security.md).

    Attributes:
        mode: "open" or "secret" (loopback addresses only), or "tls".
        cluster: in mode tls, the cluster that a certificate must name, as the URI `troupe:CLUSTER`.
        secret, certificate, key, ca: paths; "" if the mode does not need the file.
    """

    mode: str = "open"
    cluster: str = ""
    secret: str | os.PathLike[str] = ""
    certificate: str | os.PathLike[str] = ""
    key: str | os.PathLike[str] = ""
    ca: str | os.PathLike[str] = ""


class State(enum.Enum):
    """The state of a transfer."""

    PREPARED = 0  #: not posted yet
    ACTIVE = 1  #: bytes may move
    DONE = 2  #: every byte is where it belongs
    FAILED = 3  #: with `Status.error`; the destination's bytes are undefined
    CANCELLED = 4  #: by `Transfer.cancel`; the destination's bytes are undefined


_STATES = tuple(State)
_DONE = State.DONE.value


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a transfer. `bytes_moved`: known to have moved. `bad_entries`: numbers of the entries that may not
    have arrived; none unless it failed or was cancelled."""

    state: State
    bytes_moved: int = 0
    error: TroupeError | None = None
    bad_entries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Memory that a peer has described. `address` is the peer's; `rights`: "read", "write" or "read_write"."""

    number: int
    address: int
    size: int
    rights: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A message of a peer, with a transfer or alone. `sender`: the name of the peer's agent."""

    peer: Peer
    sender: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A transfer has ended, with or without success: `Transfer.number`."""

    transfer: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer is gone, or cannot be reached; notices that waited for a link to it were dropped."""

    peer: Peer
    error: TroupeError


@dataclass(frozen=True, slots=True)
class NoticesWait:
    """`Agent.take_notices` has notices. The next such event comes only after all were taken."""


@dataclass(frozen=True, slots=True)
class NoticesLost:
    """A link ended, and notices of `Peer.notify` on that link may be lost. The peer lives."""

    peer: Peer


#: Ignore unknown events: later releases add some.
Event = Union[TransferEnded, PeerLost, NoticesWait, NoticesLost]  # noqa: UP007


class Agent:
    """Starts with the object, ends with `close` or the end of its `with`, which deregister all memory.

    Every method may be called from any thread. Methods that wait say so, let other Python threads run, and handle
    signals.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security | None = None,
        backends: Iterable[str] = (),
        threads: int = 1,
        lanes: int = 0,
        peer_silence: float = 3.0,
        connect_timeout: float = 2.0,
        grant_timeout: float = 30.0,
        max_peers: int = 0,
        max_transfers: int = 0,
        max_notices: int = 0,
        max_notice_bytes: int = 0,
    ) -> None:
        """Listens for peers.

        Args:
            name: 1 to 256 bytes; peers see it in notices.
            host: the address that peers dial; not the wildcard address. An address beyond loopback needs `security` of
                mode tls.
            port: the port that peers dial; 0: the OS chooses.
            security: None: `Security()`, open.
            backends: "shm", "xgmi", "rdma", "tcp", the preferred one first; none: the best that reaches the peer.
            threads: how many make progress; 0: `poll` and the calls that wait make it.
            lanes: sockets or queue pairs of a link; 0: 4.
            peer_silence: seconds; a peer silent for this long is lost.
            connect_timeout: seconds for a greeting, and for making a link.
            grant_timeout: seconds that a peer may leave the oldest question for its memory unanswered; after that,
                transfers that wait for the answer fail with PEER_UNREACHABLE. A peer may register memory with a device
                before it answers.
            max_peers, max_transfers, max_notices (unread, of one peer), max_notice_bytes (in those): bounds, beyond
                which calls fail with OVERLOADED; 0: 4096, 65536, 65536, 16 MiB.

        Raises:
            TroupeError: INVALID_CONFIG, ALREADY_EXISTS (the port is taken), STALE_INCARNATION (forked from a process
                that has an agent or an engine).
            TypeError, ValueError: naming the argument.
        """
        lib = _abi.library()
        how = security if security is not None else Security()
        if how.mode not in _MODES:
            raise ValueError(f"security.mode is {how.mode!r}; give one of {', '.join(_MODES)}")
        if isinstance(backends, str):
            raise TypeError("backends is a sequence of names: put a single one into a list")
        kinds = array.array("I", [_number_of("a backend", one, _BACKENDS) for one in backends])
        address, count = kinds.buffer_info()
        options = _io_abi.IoOptions(
            size=ctypes.sizeof(_io_abi.IoOptions),
            flags=0 if _abi.number("threads", threads) else _POLLING,
            name=_abi.encoded("name", name),
            host=_abi.encoded("host", host),
            port=_abi.number("port", port, 65536),
            security=_MODES[how.mode],
            cluster=_abi.encoded("security.cluster", how.cluster) or None,
            secret=os.fsencode(how.secret) or None,
            certificate=os.fsencode(how.certificate) or None,
            key=os.fsencode(how.key) or None,
            ca=os.fsencode(how.ca) or None,
            backends=address if count else None,
            backend_count=count,
            threads=threads,
            lanes=_abi.number("lanes", lanes),
            peer_silence_ms=min(_abi.milliseconds("peer_silence", peer_silence, 0), 2**32 - 1),
            connect_timeout_ms=min(_abi.milliseconds("connect_timeout", connect_timeout, 0), 2**32 - 1),
            grant_timeout_ms=min(_abi.milliseconds("grant_timeout", grant_timeout, 0), 2**32 - 1),
            max_peers=_abi.number("max_peers", max_peers, 2**64),
            max_transfers=_abi.number("max_transfers", max_transfers, 2**64),
            max_notices=_abi.number("max_notices", max_notices, 2**64),
            max_notice_bytes=_abi.number("max_notice_bytes", max_notice_bytes, 2**64),
        )
        handle = ctypes.c_void_p()
        lib.check(lib.io_agent_create(ctypes.byref(options), ctypes.byref(handle)))
        self._lib = lib
        self._handle = handle
        self._name = name
        self._memory: dict[object, Memory] = {}  # by number: memory that peers may touch
        self._dropped: deque[tuple[Any, int]] = deque()  # how to release it, its number
        self._on_release: Callable[[int], None] | None = None  # told of transfers that are released, by number
        self._closed = False
        # The finalizer holds the memory, which so outlives the agent, even when the interpreter ends.
        self._finalizer = weakref.finalize(self, _end, lib, handle, self._memory)
        fd = ctypes.c_int()
        lib.check(lib.io_event_fd(handle, ctypes.byref(fd)))
        self._fd = fd.value

    # -- life

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Agent {self._name}>"

    @property
    def name(self) -> str:
        return self._name

    def close(self) -> None:
        """Deregisters all memory and ends the agent: when this returns, no peer touches the memory any more. Waits for
        peers in the middle of a copy, 5 s at most. Later calls, and waits in other threads, raise ABORTED. Views of
        memory that the agent allocated become invalid. A second call does nothing."""
        if self._closed or self._handle.value is None:  # or the interpreter has freed it
            return
        self._lib.check(self._lib.io_agent_close(self._handle))
        self._closed = True
        self._memory.clear()

    def report(self) -> dict[str, Any]:
        """What the agent owns, which `backends` it can use (name, usable, reason), which `peers` it knows (name,
        backend, reason of that choice, lost), and `notices_dropped`: unread ones of peers that had left, dropped to
        make room."""
        said: dict[str, Any] = json.loads(self._lib.text(self._lib.io_report, self._handle))
        return said

    # -- memory

    def register(self, what: object, *, name: str = "", rights: str = "read_write") -> RegisteredMemory:
        """Registers memory for peers with these rights ("read", "write" or "read_write").

        `what`: a torch tensor or storage, a numpy array, a buffer, `Memory`; contiguous, and writable unless `rights`
        is "read". Referenced until it is deregistered or the agent is closed. Registrations may overlap or be equal:
        each is a memory of its own. `TroupeError` NO_DEVICE: the memory is a GPU's, and the library was built without
        code for GPUs.
        """
        allowed = _number_of("rights", rights, _RIGHTS)
        memory = Memory.of(what, writable=allowed != _RIGHTS["read"])
        if memory.on_gpu:
            backends = {one["name"]: one["reason"] for one in self.report()["backends"]}
            if backends["xgmi"].startswith("not built"):
                raise unreachable("the memory", backends["xgmi"])
        called = _abi.encoded("name", name)
        out = ctypes.c_uint64()
        # Kept before it is lent: the handler of a signal may raise right after.
        lent = object()
        self._memory[lent] = memory
        status = self._lib.io_register(
            self._handle, memory.address, memory.size, called, allowed, ctypes.byref(out)
        )
        if not status:
            self._memory[out.value] = memory
        self._memory.pop(lent, None)
        self._lib.check(status)
        return RegisteredMemory(self, out.value, memory.address, memory.size)

    def allocate(self, size: int, *, name: str = "", rights: str = "read_write") -> RegisteredMemory:
        """Allocates zeroed host memory, which peers of this host map: `RegisteredMemory.view`. Freed when it is
        deregistered or the agent is closed."""
        allowed = _number_of("rights", rights, _RIGHTS)
        number = self._new(self._lib.io_allocate, _abi.number("size", size, 2**64), _abi.encoded("name", name), allowed)
        raw = _abi.CMemory()
        self._lib.check(self._lib.io_bytes(self._handle, number, ctypes.byref(raw)))
        return RegisteredMemory(self, number, int(raw.data or 0), int(raw.size))

    def describe(self, *only: RegisteredMemory) -> bytes:
        """Describes this agent and these memories (none given: all of them) for a peer, in at most 1 MiB. Valid for
        this life of the agent, and secret: its holder may use the memories in it and greet other agents as this one."""
        ids = array.array("Q", [one.number for one in only])
        address, count = ids.buffer_info()
        bytes_at, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._lib.check(
            self._lib.io_describe(
                self._handle, address if count else None, count, ctypes.byref(bytes_at), ctypes.byref(size)
            )
        )
        described = _abi.bytes_at(bytes_at.value, size.value)
        self._lib.free(bytes_at)
        return described

    # -- peers

    def add_peer(self, descriptor: bytes) -> Peer:
        """Adds the agent that made the descriptor. Another descriptor of the same life adds its memories and gives the
        same peer. Sends nothing. `TroupeError` INVALID_CONFIG (not a descriptor), VERSION_MISMATCH, UNAUTHORIZED (a
        forged token of a known life)."""
        raw = bytes(descriptor)
        return Peer(self, self._new(self._lib.io_add_peer, raw, len(raw)))

    # -- plans and transfers

    def prepare(self, entries: Any) -> Plan:
        """Places in memory of this agent, checked once: rows of (address, size), or of (address, size, stride, count),
        all in bytes; tuples in a list or an array of N x 2 or N x 4. If several memories contain an entry, the newest
        serves it. `TroupeError` UNKNOWN_REGION, OUT_OF_RANGE."""
        rows = _tables.table("entries", entries, 2, 4)
        return self._plan(self._lib.io_prepare_local, rows, 4)

    def prepare_pieces(self, pieces: Iterable[Sequence[Any]]) -> Plan:
        """As `prepare`, by memory: rows of (memory, offset, size), or of (memory, offset, size, stride, count)."""
        rows = _tables.table("pieces", [(_memory_number(row[0]), *row[1:]) for row in pieces], 3, 5)
        return self._plan(self._lib.io_prepare_pieces, rows, 5)

    def make(
        self,
        direction: str,
        local: Plan,
        remote: Plan,
        *,
        local_index: Iterable[int] = (),
        remote_index: Iterable[int] = (),
        merge: bool = False,
    ) -> Transfer:
        """Makes a transfer ("write": to the peer, "read": from it) between entry `local_index[i]` of one plan and entry
        `remote_index[i]` of the other; without indices, between entries of equal number. `merge`: neighbours that are
        contiguous on both sides move as one. Nothing moves before `Transfer.post`. `TroupeError` OUT_OF_RANGE,
        UNAUTHORIZED (the rights of a remote memory do not allow the direction)."""
        here, there = _tables.indices("local_index", local_index), _tables.indices("remote_index", remote_index)
        here_at, here_count = here.buffer_info()
        there_at, there_count = there.buffer_info()
        self._release_dropped()
        number = self._new(
            self._lib.io_make,
            _number_of("direction", direction, _DIRECTIONS),
            local.number,
            here_at if here_count else None,
            here_count,
            remote.number,
            there_at if there_count else None,
            there_count,
            _MERGE if merge else 0,
        )
        return Transfer(self, number)

    def wait(self, transfers: Iterable[Transfer], timeout: float | None = None, *, for_any: bool = False) -> int:
        """Waits until all of the transfers, or any one, have ended, and returns how many have. `WaitTimeout`: `timeout`
        seconds passed. Each transfer's `status` says how it ended."""
        ids = array.array("Q", [one.number for one in transfers])
        return self._wait(ids, _ANY if for_any else _ALL, timeout)

    # -- notices and events

    def take_notices(self, max_notices: int = _BATCH, *, timeout: float | None = 0.0) -> list[Notice]:
        """Takes up to `max_notices` (64 at most) notices, oldest first, waiting up to `timeout` seconds for the first
        one (0: not at all; None: no limit). Empty: none came."""
        raw = (_io_abi.IoNotice * _BATCH)()
        count = self._take(self._lib.io_take_notices, raw, _NOTICE_SIZE, max_notices, timeout)
        notices = [
            Notice(Peer(self, one.peer), _abi.text_of(one.from_), _abi.bytes_at(one.bytes, one.byte_count))
            for one in raw[:count]
        ]
        self._lib.io_notices_free(ctypes.addressof(raw), _NOTICE_SIZE, count)
        return notices

    def take(self, max_events: int = _BATCH, *, timeout: float | None = 0.0) -> list[Event]:
        """Takes up to `max_events` (64 at most) events, as `take_notices` takes notices."""
        raw = (_io_abi.IoEvent * _BATCH)()
        count = self._take(self._lib.io_take, raw, _EVENT_SIZE, max_events, timeout)
        events = [event for event in map(self._event, raw[:count]) if event is not None]
        self._lib.io_events_free(ctypes.addressof(raw), _EVENT_SIZE, count)
        return events

    def fileno(self) -> int:
        """Readable while events wait (level-triggered): for select, poll, epoll, asyncio. Never read or close it."""
        return self._fd

    def poll(self) -> bool:
        """Makes progress on the calling thread; returns whether it did something. For agents with `threads=0`."""
        worked = ctypes.c_uint32()
        self._lib.check(self._lib.io_poll(self._handle, ctypes.byref(worked)))
        return bool(worked.value)

    # -- of this module's own

    def _plan(self, prepare: Any, rows: array.array[int], width: int, *before: int) -> Plan:
        self._release_dropped()
        address, count = rows.buffer_info()
        return Plan(self, self._new(prepare, *before, address if count else None, count // width))

    def _new(self, function: Any, *arguments: Any) -> int:
        """Calls a function that numbers what it makes."""
        out = ctypes.c_uint64()
        self._lib.check(function(self._handle, *arguments, ctypes.byref(out)))
        return out.value

    def _release_dropped(self) -> None:
        """Releases plans and transfers that are no longer referenced. `__del__`, which may run at any time and so takes
        no lock, only notes them; active ones stay until they have ended."""
        for _ in range(len(self._dropped)):
            try:
                release, number = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            if release(self._handle, number) == ErrorCode.OVERLOADED:
                self._dropped.append((release, number))

    def _wait(self, ids: array.array[int], how_many: int, timeout: float | None) -> int:
        address, count = ids.buffer_info()
        left = _abi.milliseconds("timeout", timeout, _abi.FOREVER)
        ended = ctypes.c_size_t()
        while True:
            step = min(left, _SIGNALS)
            status = self._lib.io_wait(
                self._handle, address if count else None, count, how_many, step, ctypes.byref(ended)
            )
            left -= step
            if status != _abi.TIMED_OUT or left == 0:
                break
        self._lib.check(status)
        return int(ended.value)

    def _take(self, take: Any, raw: Any, size: int, most: int, timeout: float | None) -> int:
        if most < 1:
            raise ValueError(f"the most to take is {most}; give 1 or more")
        left = 0 if timeout == 0 else _abi.milliseconds("timeout", timeout, _abi.FOREVER)
        count = ctypes.c_size_t()
        while True:
            step = min(left, _SIGNALS)
            self._lib.check(
                take(self._handle, ctypes.addressof(raw), size, min(most, _BATCH), step, ctypes.byref(count))
            )
            left -= step
            if count.value or left == 0:
                return int(count.value)

    def _event(self, raw: Any) -> Event | None:
        if raw.kind == 1:
            return TransferEnded(int(raw.transfer))
        if raw.kind == 2:
            return PeerLost(Peer(self, int(raw.peer)), TroupeError(raw.code, _abi.text_of(raw.reason)))
        if raw.kind == 3:
            return NoticesWait()
        if raw.kind == 4:
            return NoticesLost(Peer(self, int(raw.peer)))
        return None  # of a newer library


class RegisteredMemory:
    """Memory of an agent that peers may use. As a context manager, it is deregistered at the end of the `with`."""

    __slots__ = ("address", "agent", "number", "size")

    agent: Agent
    number: int
    address: int
    size: int

    def __init__(self, agent: Agent, number: int, address: int, size: int) -> None:
        self.agent = agent
        self.number = number
        self.address = address
        self.size = size

    def __enter__(self) -> RegisteredMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.deregister()

    def __repr__(self) -> str:
        return f"<RegisteredMemory {self.number} of {self.agent.name}: {self.size} bytes>"

    @property
    def view(self) -> memoryview:
        """The writable bytes of host memory. If the agent allocated it, valid until it is deregistered or the agent is
        closed."""
        return view_of(self.address, self.size, self)

    def describe(self) -> bytes:
        """`Agent.describe` for this memory only."""
        return self.agent.describe(self)

    def deregister(self, timeout: float | None = None) -> None:
        """Withdraws the memory: no new transfer may use it; this agent's transfers that use it fail with ABORTED,
        peers' with GRANT_REVOKED. When this returns, nothing touches the memory any more. `TroupeError` DEADLINE: after
        `timeout` seconds a peer or a transfer still may; the memory stays withdrawn, call again. NOT_FOUND: it was
        deregistered before."""
        agent = self.agent
        left = 0 if timeout == 0 else _abi.milliseconds("timeout", timeout, _abi.FOREVER)
        while True:
            step = min(left, _SIGNALS)
            status = agent._lib.io_deregister(agent._handle, self.number, step)
            left -= step
            if status != ErrorCode.DEADLINE or left == 0:
                break
        agent._lib.check(status)
        agent._memory.pop(self.number, None)


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of another agent, or of this agent itself."""

    agent: Agent = field(repr=False)
    number: int

    def memories(self) -> list[RemoteMemory]:
        """The memories that the peer has described, in that order, without those known to be deregistered."""
        lib, handle = self.agent._lib, self.agent._handle
        count = ctypes.c_size_t(_BATCH)
        while True:
            raw = (_io_abi.IoRemoteMemory * count.value)()
            capacity = count.value
            lib.check(
                lib.io_remote_memories(handle, self.number, ctypes.addressof(raw), capacity, ctypes.byref(count))
            )
            if count.value <= capacity:
                break
        return [
            RemoteMemory(int(one.number), int(one.address), int(one.length), _RIGHT_NAMES.get(one.rights, "read"))
            for one in raw[: count.value]
        ]

    def connect(self, timeout: float = 10.0) -> str:
        """Makes the link now rather than at the first transfer, waits for it, and returns the name of its backend."""
        lib, handle = self.agent._lib, self.agent._handle
        left = _abi.milliseconds("timeout", timeout, _abi.FOREVER)
        backend = ctypes.c_uint32()
        while True:
            step = min(left, _SIGNALS)
            begin = time.monotonic()
            status = lib.io_connect(handle, self.number, step, ctypes.byref(backend))
            left -= step
            # An unresponsive peer is a DEADLINE, too, and no reason to go on.
            early = time.monotonic() - begin < step / 1000
            if status != ErrorCode.DEADLINE or left == 0 or early:
                break
        lib.check(status)
        return _BACKEND_NAMES.get(backend.value, "")

    def prepare(self, entries: Any) -> Plan:
        """Places in the peer's memory, as `Agent.prepare`. If several memories contain an entry, the one described last
        serves it."""
        rows = _tables.table("entries", entries, 2, 4)
        return self.agent._plan(self.agent._lib.io_prepare_remote, rows, 4, self.number)

    def session(self, local: RegisteredMemory, remote: RemoteMemory | RegisteredMemory | int) -> Session:
        """A session between a memory of this agent and one of the peer (or its number): bytes then move by offsets."""
        agent = self.agent
        agent._release_dropped()
        number = _abi.number("remote", remote if isinstance(remote, int) else remote.number, 2**64)
        return Session(agent, agent._new(agent._lib.io_session, local.number, self.number, number), local.size)

    def notify(self, data: bytes) -> None:
        """Sends a notice (at most 64 KiB) without a transfer, in order with other calls of this method for that peer.
        When this returns, the notice need not have arrived (`NoticesLost`, `PeerLost`). `TroupeError` OVERLOADED: the
        peer has too many unread notices."""
        raw = bytes(data)
        self.agent._lib.check(self.agent._lib.io_notify(self.agent._handle, self.number, raw, len(raw)))

    def remove(self) -> None:
        """Forgets the peer and its unread notices. Its transfers fail with ABORTED."""
        self.agent._lib.check(self.agent._lib.io_remove_peer(self.agent._handle, self.number))


class _Owned:
    """An object that an agent keeps under a number until it is released, at the latest when it is no longer referenced.
    """

    __slots__ = ("agent", "number")

    agent: Agent
    number: int
    _release = ""

    def __init__(self, agent: Agent, number: int) -> None:
        self.agent = agent
        self.number = number

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number} of {self.agent.name}>"

    def __del__(self) -> None:
        if self.number:
            self.agent._dropped.append((getattr(self.agent._lib, self._release), self.number))

    def release(self) -> None:
        """Releases it now. A second call does nothing."""
        if self.number:
            self.agent._lib.check(getattr(self.agent._lib, self._release)(self.agent._handle, self.number))
            self.number = 0


class Plan(_Owned):
    """A checked list of places in memory. Transfers made from it go on without it."""

    __slots__ = ()
    _release = "io_release_plan"


class Session(_Owned):
    """A memory of this agent and one of a peer. Offsets count from the beginning of each."""

    __slots__ = ("size",)
    _release = "io_release_plan"
    size: int  #: of the local memory, in bytes

    def __init__(self, agent: Agent, number: int, size: int) -> None:
        super().__init__(agent, number)
        self.size = size

    def write(self, segments: Any = None, *, notice: bytes = b"", deadline: float | None = None) -> Transfer:
        """Moves bytes to the peer. `segments`: rows of (local offset, remote offset, size), or followed by local
        stride, remote stride and count; tuples in a list or an array of N x 3 or N x 6. None: all of the local memory,
        to the beginning of the remote one. `notice`, `deadline`: as in `Transfer.post`."""
        return self._move("write", segments, notice, deadline)

    def read(self, segments: Any = None, *, notice: bytes = b"", deadline: float | None = None) -> Transfer:
        """Moves bytes from the peer, as `write`."""
        return self._move("read", segments, notice, deadline)

    def _move(self, direction: str, segments: Any, notice: bytes, deadline: float | None) -> Transfer:
        lib = self.agent._lib
        self.agent._release_dropped()
        rows = _tables.table("segments", [(0, 0, self.size)] if segments is None else segments, 3, 6)
        address, count = rows.buffer_info()
        said = bytes(notice)
        out = ctypes.c_uint64()
        lib.check(
            lib.io_move(
                self.agent._handle,
                _DIRECTIONS[direction],
                self.number,
                address if count else None,
                count // 6,
                said,
                len(said),
                _abi.milliseconds("deadline", deadline, 0),
                ctypes.byref(out),
            )
        )
        return Transfer(self.agent, out.value)


class Transfer(_Owned):
    """Bytes that move between memory of this agent and of a peer. It goes on even if it is no longer referenced."""

    __slots__ = ("_at_once", "_done")
    _release = "io_release_transfer"
    _at_once: bool  # whether so few bytes end within the posting call, once tried
    _done: Status | None  # the result of `run` once all bytes have moved

    def __init__(self, agent: Agent, number: int) -> None:
        super().__init__(agent, number)
        self._at_once = True
        self._done = None

    def release(self) -> None:
        """Releases it now. A second call does nothing. OVERLOADED: it is active."""
        number = self.number
        super().release()
        # The event of its end, if nobody has taken it yet, went with it.
        if number and self.agent._on_release is not None:
            self.agent._on_release(number)

    def post(self, notice: bytes = b"", *, deadline: float | None = None) -> None:
        """Starts the transfer; it may be started again after its end. The peer gets the notice (at most 64 KiB; empty:
        none) when every byte has arrived. `deadline`: seconds until it fails with DEADLINE; None: none. `TroupeError`
        OVERLOADED (it is active, or the peer has too many unread notices), ABORTED (a local memory was deregistered).
        Other failures are in the transfer's status."""
        said = bytes(notice)
        lib = self.agent._lib
        lib.check(
            lib.io_post(self.agent._handle, self.number, said, len(said), _abi.milliseconds("deadline", deadline, 0))
        )

    @property
    def status(self) -> Status:
        """The status of the transfer."""
        lib = self.agent._lib
        raw = _io_abi.IoStatus(_STATUS_SIZE)
        lib.check(lib.io_read_status(self.agent._handle, self.number, ctypes.addressof(raw), None, 0))
        return self._status_of(raw)

    def wait(self, timeout: float | None = None) -> Status:
        """Waits until it is done.

        Raises:
            WaitTimeout: `timeout` seconds passed; the transfer goes on.
            TroupeError: why it failed; ABORTED if it was cancelled.
        """
        left = _abi.milliseconds("timeout", timeout, _abi.FOREVER)
        step = min(left, _SIGNALS)
        raw = _io_abi.IoStatus(_STATUS_SIZE)
        said = self.agent._lib.io_finish(self.agent._handle, self.number, step, ctypes.addressof(raw))
        return self._finished(said, left - step, raw)

    def run(self, notice: bytes = b"", *, deadline: float | None = None, timeout: float | None = None) -> Status:
        """`post` and `wait` in one call, which saves time on small transfers: copies that take microseconds do not let
        other Python threads run meanwhile."""
        agent, done = self.agent, self._done
        lib = agent._lib
        left = _abi.FOREVER if timeout is None else _abi.milliseconds("timeout", timeout, _abi.FOREVER)
        limit = 0 if deadline is None else _abi.milliseconds("deadline", deadline, 0)
        raw = _io_abi.IoStatus(_STATUS_SIZE)
        data = bytes(notice)
        if done is None or done.bytes_moved > _BRIEF or not self._at_once:
            step = min(left, _SIGNALS)
            said = lib.io_run(agent._handle, self.number, data, len(data), limit, step, ctypes.addressof(raw))
            status = self._finished(said, left - step, raw)
            if status.state is State.DONE:  # another thread may have posted it again meanwhile
                self._done = status
            return status
        said = lib.io_run_at_once(agent._handle, self.number, data, len(data), limit, 0, ctypes.addressof(raw))
        if said == _abi.TIMED_OUT:
            self._at_once = False
        return done if not said and raw.state == _DONE else self._finished(said, left, raw)

    def _finished(self, said: int, left: int, raw: _io_abi.IoStatus) -> Status:
        """Goes on waiting, in steps that let signals be handled, if the first step was too short."""
        lib = self.agent._lib
        while said == _abi.TIMED_OUT and left > 0:
            step = min(left, _SIGNALS)
            said = lib.io_finish(self.agent._handle, self.number, step, ctypes.addressof(raw))
            left -= step
        lib.check(said)
        return self._outcome_of(self._status_of(raw))

    def _status_of(self, raw: _io_abi.IoStatus) -> Status:
        if not raw.code and not raw.bad_count:
            return Status(_STATES[raw.state], raw.bytes)
        numbers = (ctypes.c_uint32 * raw.bad_count)()
        lib = self.agent._lib
        lib.check(
            lib.io_read_status(
                self.agent._handle, self.number, ctypes.addressof(raw), ctypes.addressof(numbers), len(numbers)
            )
        )
        error = TroupeError(raw.code, _abi.text_of(raw.reason)) if raw.code else None
        return Status(_STATES[raw.state], raw.bytes, error, tuple(numbers[: raw.bad_count]))

    def _outcome_of(self, status: Status) -> Status:
        if status.error is not None:
            raise status.error
        if status.state is State.CANCELLED:
            raise TroupeError(ErrorCode.ABORTED, f"transfer {self.number} was cancelled")
        return status

    def cancel(self) -> None:
        """Ends the transfer as `State.CANCELLED`, unless it ends otherwise first. After its end none of its bytes move
        in memory of this agent."""
        self.agent._lib.check(self.agent._lib.io_cancel(self.agent._handle, self.number))


def _number_of(what: str, name: object, numbers: dict[str, int]) -> int:
    if name not in numbers:
        raise ValueError(f"{what} is {name!r}; give one of {', '.join(numbers)}")
    return numbers[str(name)]


def _memory_number(of: object) -> object:
    return of.number if isinstance(of, RegisteredMemory) else of


def _end(lib: _abi.Library, handle: ctypes.c_void_p, memory: dict[object, Memory]) -> None:
    _abi.free(lib.io_agent_free, handle)
    memory.clear()
