"""One node of a deployment, inside the process of an inference engine."""

from __future__ import annotations

import array
import ctypes
import json
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from troupe import _abi
from troupe._tables import indices
from troupe.errors import ErrorCode, TroupeError
from troupe.events import (
    Allocated,
    Call,
    Done,
    Event,
    Failed,
    Info,
    Layers,
    MemberEvent,
    Operation,
    Outcome,
    Placed,
    Unpinned,
    Value,
    Wanted,
)
from troupe.layout import GroupBlocks, Layout
from troupe.members import Announcement, announced, name_of, state_of
from troupe.memory import Memory, unreachable, view_of
from troupe.placement import Placement, labels_of, owned_placement

__all__ = ["Engine", "Identity", "configure_logging", "library_version", "protocol_version"]

_BATCH = 64
_SIGNALS = 200  # milliseconds that a wait may keep signals waiting
_EVENT_SIZE = ctypes.sizeof(_abi.CEvent)
_ALLOCATE = {None: 0, "ordinary": 1, "huge": 2}
_MODES = {None: 0, "write": 1, "read": 2}
_STANDINGS = ("serving", "draining", "drained")
_NO_OPERATION = Operation(0)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a node. `epoch`: of the newest membership that the node has, 0 before the first; `replica` and
    `rank` count from 0; `port`: the cluster port that was bound; `supervisor_incarnation`: of the supervisor that
    registered the node last, 0 before the first."""

    incarnation: int
    epoch: int
    replica: int
    rank: int
    ranks: int
    port: int
    pid: int
    supervisor_incarnation: int


def configure_logging(
    *, level: str = "info", node: str | None = None, file: str | os.PathLike[str] | None = None
) -> None:
    """Sets where Troupe logs in this process. Before the first call it logs level info to standard error.

    `level`: trace, debug, info, warn, error, off. `node` is printed in every line. `file` is rotated at 64 MiB; None:
    standard error. `TroupeError` INVALID_CONFIG: no such level, or the file cannot be written; nothing changes then.
    """
    lib = _abi.library()
    options = _abi.LogOptions(
        size=ctypes.sizeof(_abi.LogOptions),
        level=_abi.encoded("level", level),
        node=_abi.optional("node", node),
        file=None if file is None else os.fsencode(file),
    )
    lib.check(lib.log(ctypes.byref(options)))


def library_version() -> str:
    """The version of the loaded library, such as "0.1.0"."""
    return _abi.text_of(_abi.library().version())


def protocol_version() -> int:
    """The protocol version, which must be the same on all nodes of a cluster."""
    return int(_abi.library().protocol_version())


class Engine:
    """A node of the deployment: starts with the object, leaves the cluster with `stop` or the end of its `with`.

    Every method may be called from any thread. Calls that begin an operation return at once; calls that wait say so,
    and let other Python threads run. Each operation ends with one outcome, which is taken in one of two ways: `wait`
    for that operation, or `take` for all operations in order. `fileno` is readable while events wait.

    Times are in seconds, memory in bytes. Every failure raises `TroupeError`, whose `code` says why. In a forked
    process the parent's engine refuses every call with STALE_INCARNATION.
    """

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_fd",
        "_finalizer",
        "_handle",
        "_layers_ready",
        "_lib",
        "_memory",
        "_name",
        "_stopped",
        "_take",
        "_values",
        "_values_lock",
        "_waiting",
    )

    def __init__(
        self,
        name: str | None = None,
        *,
        join: Announcement | None = None,
        file: str | os.PathLike[str] | None = None,
        text: str | None = None,
        supervisor: str | None = None,
        layout: Layout | None = None,
        regions: Sequence[object] | None = None,
        allocate: str | None = None,
        numa_node: int | None = None,
        cores: Iterable[int] = (),
        calls: bool = False,
        polling: bool = False,
        watch: bool = False,
    ) -> None:
        """Starts node `name`: binds its port, adopts or allocates the cache, registers in the background.

        Args:
            name: of a node of the deployment, such as "prefill-0". None with `join`.
            join: the node joins an open stage, as STAGE.REPLICA.RANK. An engine with a cache gives its `layout`, with
                the same rank; placements pair it with replicas of equal layouts. If the supervisor refuses the node,
                `wait_registered` says why.
            file: path of the deployment; or `text`: its YAML.
            supervisor: "host:port" in place of the deployment's.
            layout: of the engine's own cache, in place of one made from the deployment's `model` and `pool`. There is
                no pool then: the engine names the blocks in `send` and `receive`.
            regions: the memory of `layout`, in its order, each at least as large as `layout.region_sizes()` says: torch
                tensors or storages (CPU or CUDA), numpy arrays, buffers, `Memory`. Referenced until the engine is gone.
            allocate: "ordinary" or "huge": Troupe allocates the regions of `layout` instead, of such pages, zeroed; shm
                peers map them without the right to trace this process. `region` returns them.
            numa_node: the node that the allocated pages are on.
            cores: those that the node's threads run on; none: those of the calling thread (`os.sched_getaffinity(0)`).
            calls: calls of frontends come as `Call` events; else they are refused.
            polling: no progress thread: call `poll` often.
            watch: `MemberEvent` comes for each other node of the cluster that comes, changes or goes; the present ones
                come first. None comes after `stop`.

        Raises:
            TroupeError: INVALID_CONFIG (the deployment: every issue with its line; an announcement), NOT_FOUND (no such
                node, or no such stage that is open), LAYOUT_MISMATCH, OUT_OF_RANGE (a region too small), POOL_EXHAUSTED
                (not enough memory), NO_DEVICE (a region is memory of a GPU that the library cannot reach: it was built
                without code for GPUs, say), ALREADY_EXISTS (the port is taken), STALE_INCARNATION (forked from a
                process that has an engine).
            TypeError, ValueError: naming the argument.
        """
        lib = _abi.library()
        if (file is None) == (text is None):
            raise ValueError("name the deployment by file or by text, one of the two")
        called = name_of(name, join)
        if allocate not in _ALLOCATE:
            raise ValueError(f"allocate is {allocate!r}; give 'ordinary' or 'huge'")
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(f"layout is a troupe.Layout, not {type(layout).__name__}")
        if isinstance(regions, (str, bytes, bytearray, memoryview)):
            raise TypeError("regions is a sequence of memory: put a single region into a list")
        memory = [Memory.of(region) for region in regions] if regions is not None else []
        raw = (_abi.CMemory * len(memory))(*(_abi.CMemory(m.address, m.size) for m in memory))
        host, port = _host_and_port(supervisor)
        on = array.array("I", [_abi.number("cores", core) for core in cores])  # lives until the call has returned
        core_address, core_count = on.buffer_info()
        options = _abi.EngineOptions(
            size=ctypes.sizeof(_abi.EngineOptions),
            flags=(1 if polling else 0) | (2 if calls else 0) | (4 if watch else 0),
            deployment_file=None if file is None else os.fsencode(file),
            deployment_text=_abi.optional("text", text),
            node=None if join is not None else _abi.encoded("name", called),
            supervisor_host=_abi.optional("supervisor", host),
            supervisor_port=port,
            allocate=_ALLOCATE[allocate],
            layout=None if layout is None else layout._handle,
            regions=ctypes.addressof(raw) if memory else None,
            region_count=len(memory),
            numa_node_plus_1=0 if numa_node is None else _abi.number("numa_node", numa_node, 2**31) + 1,
            cores=core_address if core_count else None,
            core_count=core_count,
        )
        if join is not None:
            options.join = ctypes.pointer(announced(join))
        handle = ctypes.c_void_p()
        lib.check(lib.engine_start(ctypes.byref(options), ctypes.byref(handle)))
        self._lib = lib
        self._handle = handle
        self._name = called
        self._memory = memory
        self._values: dict[Operation, Memory] = {}  # of puts without an outcome yet
        self._values_lock = threading.Lock()  # an outcome may be taken before its put has returned
        self._waiting: dict[int, object] = {}  # by operation that a thread waits for: that thread's mark
        self._stopped = False
        self._buffers: list[Any] = []
        # The finalizer holds the memory, which so outlives the engine, even when the interpreter ends.
        self._finalizer = weakref.finalize(self, _end, lib, handle, memory, self._values)
        fd = ctypes.c_int()
        lib.check(lib.engine_event_fd(handle, ctypes.byref(fd)))
        self._fd = fd.value
        self._take = lib.engine_take
        self._layers_ready = lib.engine_layers_ready
        if any(region.on_gpu for region in memory) and self.report()["pool"]["memory"]:  # it reports host memory
            refusal = unreachable("the cache", self._why_no_gpu())
            self.stop()
            raise refusal

    # -- life

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Engine {self._name}>"

    @property
    def name(self) -> str:
        return self._name

    def wait_registered(self, timeout: float = 30.0) -> None:
        """Waits up to `timeout` seconds until the supervisor has registered the node.

        `TroupeError` DEADLINE with the last reason: the node goes on trying. STALE_INCARNATION: another process has
        this node's name; stop this one.
        """
        self._lib.check(
            self._lib.engine_wait_registered(self._handle, _abi.milliseconds("timeout", timeout, _abi.FOREVER))
        )

    def stop(self) -> None:
        """Leaves the cluster: live operations fail with ABORTED at both sides. Waits for that. A second call does
        nothing.

        Events that happened can still be taken, except those of members. The memory of the cache is no longer
        registered and may be reused.
        """
        self._stopped = True
        if self._handle.value is not None:  # else the interpreter has freed it
            self._lib.check(self._lib.engine_stop(self._handle))

    def identity(self) -> Identity:
        raw = _abi.CIdentity(size=ctypes.sizeof(_abi.CIdentity))
        self._lib.check(self._lib.engine_identity(self._handle, ctypes.byref(raw)))
        return Identity(**{one.name: getattr(raw, one.name) for one in fields(Identity)})

    # -- the cache

    def layout(self) -> Layout:
        """The cache's layout: the engine's own, or the one made from the deployment's `model` and `pool`."""
        out = ctypes.c_void_p()
        self._lib.check(self._lib.engine_layout(self._handle, ctypes.byref(out)))
        return Layout._of(self._lib, out)

    def region(self, index: int = 0) -> memoryview:
        """Writable bytes of a region of the cache in host memory: torch.frombuffer and numpy.frombuffer take it.

        Memory that Troupe allocated stays mapped while any view of it is referenced, even after `stop`. `TroupeError`
        OUT_OF_RANGE: no such region.
        """
        raw = _abi.CMemory()
        self._lib.check(self._lib.engine_region(self._handle, _abi.number("index", index), ctypes.byref(raw)))
        return view_of(raw.data, raw.size, self)

    def allocate_blocks(self, count: int) -> tuple[int, list[int]]:
        """Allocates blocks from the node's pool and returns (owner, blocks). `TroupeError` POOL_EXHAUSTED;
        INVALID_CONFIG (the engine brought its own layout)."""
        count = _abi.number("count", count)
        owner = ctypes.c_uint64()
        blocks = (ctypes.c_uint32 * count)()
        self._lib.check(self._lib.engine_allocate_blocks(self._handle, count, ctypes.byref(owner), blocks))
        return int(owner.value), list(blocks)

    def free_blocks(self, owner: int, blocks: Iterable[int]) -> None:
        """Frees blocks of one allocation. `TroupeError` NOT_FOUND: foreign or double free, nothing is freed."""
        ids = indices("blocks", blocks)  # named: it lives until the call has returned
        address, count = ids.buffer_info()
        self._lib.check(self._lib.engine_free_blocks(self._handle, _abi.number("owner", owner, 2**64), address, count))

    # -- transfers

    def send(
        self,
        request: str,
        blocks: Iterable[int] = (),
        *,
        groups: Sequence[GroupBlocks] = (),
        deadline: float | None = None,
        consumers: int = 0,
        held_for: Sequence[str] = (),
        grows: bool = False,
        tell_wanted: bool = False,
        state_slot: int = 0,
    ) -> Operation:
        """Prefill side: offers the cache of a request to the decode ranks that ask for it.

        Args:
            request: the id that both engines know, 1 to 256 bytes, unique while live.
            blocks: of tokens 0, 1, ...: `block_tokens` tokens each. The engine may reuse them after `wait` or
                `Unpinned`.
            groups: if the layout has groups: one entry for each, in their order, and no `blocks`. A decode rank is
                refused if it needs tokens of a group that are not held here.
            deadline: seconds; None: the deployment's default.
            consumers: decode ranks that take the cache before the send is done; 0: all of the replica of the first one.
            held_for: decode nodes that the cache is for: it does not expire while they live and queue.
            grows: `blocks` is only the beginning: `add_blocks` names the rest.
            tell_wanted: `Wanted` comes for each decode rank that asks.

        Raises:
            TroupeError: ALREADY_EXISTS (the request is live here), OUT_OF_RANGE (a block outside the cache), NOT_FOUND
                (a node of `held_for`), OVERLOADED (too many operations are open: take events).
        """
        ids = indices("blocks", blocks)
        address, count = ids.buffer_info()
        spec = _abi.SendSpec(
            size=_SEND_SIZE,
            state_slot=_abi.number("state_slot", state_slot),
            request=_abi.encoded("request", request),
            blocks=address if count else None,
            block_count=count,
            deadline_ms=_abi.milliseconds("deadline", deadline, 0),
            consumers=_abi.number("consumers", consumers),
            flags=(_GROWS if grows else 0) | (_TELL_WANTED if tell_wanted else 0),
        )
        tables = _tables(groups)  # named: it lives until the call has returned
        if tables is not None:
            spec.groups, spec.group_count = ctypes.addressof(tables[0]), len(tables[0])
        if held_for:
            names = _names("held_for", held_for)
            spec.held_for, spec.held_for_count = names, len(held_for)
        out = ctypes.c_uint64()
        status = self._lib.engine_send(self._handle, ctypes.addressof(spec), ctypes.addressof(out))
        if status:
            self._lib.fail(status)
        return Operation(out.value)

    def add_blocks(self, send: Operation, blocks: Iterable[int], *, group: int = 0) -> None:
        """Adds the blocks of the next tokens to a send with `grows`, for one group of layers if the layout has groups.

        Layers can be ready, and the request sealed, only as far as its blocks reach. `TroupeError` NOT_FOUND (the send
        has ended), ALREADY_EXISTS (it is sealed), INVALID_CONFIG (it does not grow), OUT_OF_RANGE (a block outside the
        cache, or no such group; none is added).
        """
        ids = indices("blocks", blocks)
        address, count = ids.buffer_info()
        self._lib.check(
            self._lib.engine_add_group_blocks(
                self._handle,
                _abi.number("send", send, 2**64),
                _abi.number("group", group),
                address if count else None,
                count,
            )
        )

    def layers_ready(
        self,
        send: Operation,
        layer_begin: int,
        layer_end: int,
        token_end: int,
        *,
        event: int = 0,
        gpu: int = 0,
        shared_event: bytes | None = None,
    ) -> None:
        """Layers [layer_begin, layer_end) are computed up to token `token_end` and will not be written again.

        Call it once per chunk. `event` is a cudaEvent_t or hipEvent_t of GPU `gpu` (torch: `event.cuda_event`) recorded
        after the kernels; `shared_event` is the 64-byte IPC handle of another process's event. With one of them, the
        layers are ready once the GPU has reached the event. The call does not wait for it; the event may be recorded
        again when the call returns. `TroupeError` NOT_FOUND (the send has ended), OUT_OF_RANGE, NO_DEVICE,
        INVALID_CONFIG.
        """
        point = None
        if event or shared_event is not None:
            if shared_event is not None and len(shared_event) != 64:
                raise ValueError(f"shared_event has {len(shared_event)} bytes; an IPC handle has 64")
            raw = _abi.ComputePoint(
                size=ctypes.sizeof(_abi.ComputePoint), gpu=_abi.number("gpu", gpu), event=event or None
            )
            held = None if shared_event is None else ctypes.create_string_buffer(shared_event, 64)
            raw.shared = None if held is None else ctypes.addressof(held)
            point = ctypes.addressof(raw)
        if (layer_begin | layer_end | token_end) >> 32 or send >> 64:  # negative numbers too
            _abi.number("send", send, 2**64)
            for what, value in (("layer_begin", layer_begin), ("layer_end", layer_end), ("token_end", token_end)):
                _abi.number(what, value)
        status = self._layers_ready(self._handle, send, layer_begin, layer_end, token_end, point)
        if status:
            self._lib.fail(status)

    def seal(self, send: Operation, tokens: int, aux: bytes = b"") -> None:
        """Completes a send: the request has `tokens` tokens, and every layer is ready up to there. `aux`: at most 64
        KiB for the decode engine. `TroupeError` as in `layers_ready`."""
        aux = bytes(aux)
        status = self._lib.engine_seal(
            self._handle, _abi.number("send", send, 2**64), _abi.number("tokens", tokens), aux or None, len(aux)
        )
        if status:
            self._lib.fail(status)

    def receive(
        self,
        request: str | None = None,
        *,
        tokens: int,
        placement: Placement | None = None,
        sources: Sequence[str] = (),
        blocks: Iterable[int] = (),
        groups: Sequence[GroupBlocks] = (),
        prefix_tokens: int = 0,
        mode: str | None = None,
        deadline: float | None = None,
        fail_when_full: bool = False,
        placed_by: int = 0,
        placed_at: int = 0,
        lives: Sequence[int] = (),
        park: float | None = None,
        expect: bytes = b"",
        again: bool = False,
        state_slot: int = 0,
    ) -> Operation:
        """Decode side: takes the cache of a request from the ranks of one prefill replica.

        Args:
            request: the id that the prefill engine sends it by; None: that of `placement`.
            tokens: of the prompt; at most what `blocks` hold.
            placement: gives sources, mode, `placed_by` and `placed_at`.
            sources: without `placement`: node names of every rank of the prefill replica, each once, in rank order; all
                parts of a pipeline, including those that hold none of this node's layers.
            blocks: destination of tokens 0, 1, ...; none: the node's pool allocates them (`Allocated`,
                `Outcome.blocks`).
            groups: if the layout has groups: one entry for each, in their order, and no `blocks`. Tokens before the
                first token of a group are not wanted. The entry may be empty if this part of a model has no layer of
                the group.
            prefix_tokens: how many leading tokens are already in `blocks`. If they end inside an opaque block, the
                whole block is written again.
            mode: "write" (the default) or "read"; must be that of the deployment's edge.
            deadline: seconds; None: the deployment's default.
            fail_when_full: POOL_EXHAUSTED at once instead of waiting in line.
            lives: incarnation of each source as the caller knows it, 0: any. A source in another life has lost the
                cache: STALE_INCARNATION.
            park: seconds that a source that does not know the request yet keeps the receive, before it answers
                NOT_FOUND. 0: not at all; None: until the deadline.
            expect: what the sealed `aux` of each source must begin with, at most 64 bytes (a hash of the prompt, say);
                else LAYOUT_MISMATCH, in read mode before a byte moves.
            again: the request was received before and is sent again: its earlier delivery does not answer this receive.

        Raises:
            TroupeError: OVERLOADED, POOL_EXHAUSTED, OUT_OF_RANGE, NOT_FOUND (a source is not a node), INVALID_CONFIG
                (the sources are not the ranks of one replica, each once; not a life for each; a block is named twice).
        """
        if placement is not None:
            if sources:
                raise ValueError("a receive follows a placement or names its sources, not both")
            if request is None:
                request = placement.request
            sources = [node.name for node in placement.prefill]
            mode = mode or placement.mode
            placed_by, placed_at = placement.supervisor_incarnation, placement.epoch
        if mode not in _MODES:
            raise ValueError(f"mode is {mode!r}; give 'write' or 'read'")
        ids = indices("blocks", blocks)
        address, count = ids.buffer_info()
        spec = _abi.ReceiveSpec(
            size=_RECEIVE_SIZE,
            state_slot=_abi.number("state_slot", state_slot),
            request=_abi.encoded("request", request),
            source_count=len(sources),
            mode=_MODES[mode],
            tokens=_abi.number("tokens", tokens),
            prefix_tokens=_abi.number("prefix_tokens", prefix_tokens),
            blocks=address if count else None,
            block_count=count,
            deadline_ms=_abi.milliseconds("deadline", deadline, 0),
            placed_by=_abi.number("placed_by", placed_by, 2**64),
            placed_at=_abi.number("placed_at", placed_at, 2**64),
            fail_when_full=1 if fail_when_full else 0,
            flags=(0 if park is None else _PARK) | (_AGAIN if again else 0),
        )
        if sources:
            spec.sources = _names("sources", sources)
        known = _lives(lives, sources)  # named: it lives until the call has returned
        if known is not None:
            spec.lives = ctypes.addressof(known)
        tables = _tables(groups)  # likewise
        if tables is not None:
            spec.groups, spec.group_count = ctypes.addressof(tables[0]), len(tables[0])
        if park is not None:
            spec.park_ms = _abi.milliseconds("park", park, _abi.FOREVER)
        first = bytes(expect)
        if first:
            spec.expect, spec.expect_size = first, len(first)
        out = ctypes.c_uint64()
        status = self._lib.engine_receive(self._handle, ctypes.addressof(spec), ctypes.addressof(out))
        if status:
            self._lib.fail(status)
        return Operation(out.value)

    def release(self, request: str, sources: Sequence[str], *, lives: Sequence[int] = ()) -> Operation:
        """Decode side: gives up a request before it is received, and frees its sources.

        Costs no block, may come before the request is sent, and may be repeated. `sources`, `lives` as in `receive`.
        Outcome: done once each source has ended (its engine gets ABORTED) or had ended before. If the request was never
        sent, its next send ends in this way, and so do receives until then. ALREADY_EXISTS: the source goes on, since
        another node takes the request, waits for it, or is named in its `held_for`. STALE_INCARNATION: a source is in
        another life. `TroupeError` NOT_FOUND, INVALID_CONFIG.
        """
        return self._words(self._lib.engine_release, request, sources, lives)

    def hold(self, request: str, sources: Sequence[str], *, lives: Sequence[int] = ()) -> Operation:
        """Decode side: keeps the leases of a request's sources alive while the request waits in the engine's own queue.

        `sources`, `lives` as in `receive`. Outcome: done once a receive of the request has asked all of them, or if the
        request was delivered meanwhile; else that of the first source that failed, or of `abort`. NOT_FOUND: a source
        does not offer the request. Ends with the life of either node. `TroupeError` ALREADY_EXISTS (this node holds it
        already), NOT_FOUND, INVALID_CONFIG.
        """
        return self._words(self._lib.engine_hold, request, sources, lives)

    def _words(self, function: Any, request: str, sources: Sequence[str], lives: Sequence[int]) -> Operation:
        of = _abi.CSources(
            size=ctypes.sizeof(_abi.CSources), source_count=len(sources), request=_abi.encoded("request", request)
        )
        if sources:
            of.sources = _names("sources", sources)
        known = _lives(lives, sources)
        if known is not None:
            of.lives = ctypes.addressof(known)
        return self._begin(function, ctypes.byref(of))

    def await_layers(
        self, receive: Operation, layer_begin: int, layer_end: int, token_end: int, *, stream: int = 0, gpu: int = 0
    ) -> None:
        """Decode side: work given to `stream` from here on waits, on the GPU, until these layers have arrived or the
        receive has ended. `stream` is a cudaStream_t or hipStream_t of GPU `gpu` (torch: `stream.cuda_stream`; 0: the
        default stream). For a receive that is done nothing waits.

        `TroupeError`: that of a failed receive; NOT_FOUND (no receive, or it ended long ago), OUT_OF_RANGE, NO_DEVICE,
        INVALID_CONFIG, BACKEND_UNAVAILABLE, OVERLOADED.
        """
        raw = _abi.ComputeStream(
            size=ctypes.sizeof(_abi.ComputeStream), gpu=_abi.number("gpu", gpu), stream=stream or None
        )
        self._lib.check(
            self._lib.engine_await_layers(
                self._handle,
                _abi.number("receive", receive, 2**64),
                _abi.number("layer_begin", layer_begin),
                _abi.number("layer_end", layer_end),
                _abi.number("token_end", token_end),
                ctypes.byref(raw),
            )
        )

    def abort(self, operation: Operation, reason: str = "") -> None:
        """Aborts an operation; its one outcome still comes. `TroupeError` NOT_FOUND: it has ended."""
        self._lib.check(
            self._lib.engine_abort(
                self._handle, _abi.number("operation", operation, 2**64), _abi.encoded("reason", reason)
            )
        )

    # -- keyed values

    def put(self, peer: str, key: str, value: object, *, ttl: float | None = None) -> Operation:
        """Stores a copy of `value` (bytes, or any memory as `Memory.of` takes it) under `key` at node `peer`.

        The value must not change until the outcome; the engine references it until then and does not read it
        afterwards. A value in GPU memory must be computed before the call, which copies it before it returns. Blocks of
        the node's pool may be freed at once. `ttl`: seconds; None: until removed. `TroupeError` INVALID_CONFIG: the
        deployment has no edge that joins the two nodes; NO_DEVICE: memory of a GPU that the library cannot reach.
        Outcome: done, ALREADY_EXISTS, POOL_EXHAUSTED.
        """
        memory = None if _is_empty(value) else Memory.of(value, writable=False)
        if memory is not None and memory.on_gpu and (why := self._why_no_gpu()).startswith("not built"):
            raise unreachable("the value", why)
        with self._values_lock:
            operation = self._begin(
                self._lib.engine_put,
                _abi.encoded("peer", peer),
                _abi.encoded("key", key),
                None if memory is None else memory.address,
                0 if memory is None else memory.size,
                _abi.milliseconds("ttl", ttl, 0),
            )
            if memory is not None:
                self._values[operation] = memory
        return operation

    def get(self, peer: str, key: str) -> Operation:
        """Outcome: `Value` (`Outcome.data`), or NOT_FOUND."""
        return self._keyed(self._lib.engine_get, peer, key)

    def query(self, peer: str, key: str) -> Operation:
        """Whether the key has a value. Outcome: `Info` (`Outcome.size`, `Outcome.ttl`), or NOT_FOUND."""
        return self._keyed(self._lib.engine_query, peer, key)

    def remove(self, peer: str, key: str) -> Operation:
        """Outcome: done, or NOT_FOUND."""
        return self._keyed(self._lib.engine_remove, peer, key)

    def _why_no_gpu(self) -> str:
        """Why caches do not move between GPUs here."""
        return next((str(one["reason"]) for one in self.report()["backends"] if one["name"] == "xgmi"), "")

    def _keyed(self, function: Any, peer: str, key: str) -> Operation:
        return self._begin(function, _abi.encoded("peer", peer), _abi.encoded("key", key))

    def _begin(self, function: Any, *arguments: Any) -> Operation:
        out = ctypes.c_uint64()
        self._lib.check(function(self._handle, *arguments, ctypes.byref(out)))
        return Operation(out.value)

    # -- the cluster

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
    ) -> Operation:
        """Asks the supervisor where a request goes, waiting `timeout` seconds while no replica is up. Outcome: `Placed`
        (`Outcome.placement`). Stages: None if the deployment has one edge. `affinity`: requests with the same affinity
        go to the same replicas. `failed`, `keep_source`: as in `Cluster.place`. Call `placed_request_ended` when the
        request has ended."""
        raw = placement_request(
            request, from_stage, to_stage, affinity, timeout, failed=failed, keep_source=keep_source
        )
        return self._begin(self._lib.engine_place, ctypes.byref(raw))

    def placed_request_ended(self, request: str) -> None:
        """Reports that a placed request ended, with or without success: its place in the queue is free."""
        self._lib.check(self._lib.engine_placed_request_ended(self._handle, _abi.encoded("request", request)))

    def set_queue_length(self, requests: int) -> None:
        """Sets the number that each heartbeat reports: requests that wait or run in the engine."""
        self._lib.check(self._lib.engine_set_queue_length(self._handle, _abi.number("requests", requests)))

    def draining(self) -> str:
        """Whether the cluster drains the node: "serving", "draining" (no new requests come) or "drained" (stop and end
        the process). Call it at least once a second."""
        standing = ctypes.c_uint32()
        self._lib.check(self._lib.engine_draining(self._handle, ctypes.byref(standing)))
        return _STANDINGS[standing.value]

    def report_failure(self, why: str) -> None:
        """Reports that the engine can serve no request (its GPU is lost, say): the cluster treats the node as down
        until `recover`."""
        self._lib.check(self._lib.engine_report_failure(self._handle, _abi.encoded("why", why)))

    def recover(self) -> None:
        """Reports that the failure is over: the node registers again."""
        self._lib.check(self._lib.engine_recover(self._handle))

    def report(self) -> dict[str, Any]:
        """What the node owns and does, as a node of `troupe status --json`."""
        report: dict[str, Any] = json.loads(self._lib.text(self._lib.engine_report, self._handle))
        return report

    # -- events

    def fileno(self) -> int:
        """Readable while events wait (level-triggered): for select, poll, epoll, asyncio. Never read or close it."""
        return self._fd

    def take(self, max_events: int = _BATCH, *, timeout: float | None = 0.0) -> list[Event]:
        """Takes up to `max_events` (64 at most) events of all operations, oldest first, events of members before the
        others, waiting up to `timeout` seconds for the first one (0: not at all; None: no limit). Empty: none came.
        Events of an operation that a thread waits for go to that thread."""
        if max_events < 1:
            raise ValueError(f"max_events is {max_events}; give 1 or more")
        left = 0 if timeout == 0 else _abi.milliseconds("timeout", timeout, _abi.FOREVER)
        most = max_events if max_events < _BATCH else _BATCH
        try:
            buffer, count, address, count_address = self._buffers.pop()
        except IndexError:
            buffer, count = (_abi.CEvent * _BATCH)(), ctypes.c_size_t()
            address, count_address = ctypes.addressof(buffer), ctypes.addressof(count)
        while True:
            wait = left if left < _SIGNALS else _SIGNALS
            status = self._take(self._handle, address, _EVENT_SIZE, most, wait, count_address)
            if status:
                self._lib.fail(status)
            left -= wait
            if count.value or left == 0 or self._stopped:
                break
        events = [self._event(buffer[i]) for i in range(count.value)] if count.value else []
        self._buffers.append((buffer, count, address, count_address))
        return events

    def wait(self, operation: Operation, timeout: float | None = None) -> Outcome:
        """Waits until the operation has ended and, for a send or a receive, the network can no longer touch its blocks.

        Takes all of its events. Any number of threads may wait, each for another operation. A failed receive frees the
        blocks that the pool gave it, unless their `Allocated` event was taken before.

        Raises:
            WaitTimeout: `timeout` seconds passed; the operation goes on, and none of its events was taken.
            TroupeError: that of the operation; NOT_FOUND (never begun, or `take` had its outcome), ALREADY_EXISTS
                (another thread waits for it), ABORTED or INTERNAL (the node was stopped and the outcome will not come).
        """
        raw = _abi.COutcome(size=_OUTCOME_SIZE)
        status = _abi.TIMED_OUT
        awaited = _abi.number("operation", operation, 2**64)
        left = _abi.milliseconds("timeout", timeout, _abi.FOREVER)
        # The main thread handles signals between two waits. Any other thread keeps its claim on the operation's events.
        longest = _SIGNALS if threading.current_thread() is threading.main_thread() else left
        mine = object()
        if self._waiting.setdefault(awaited, mine) is not mine:  # checked here: an outcome may have the same code
            raise TroupeError(ErrorCode.ALREADY_EXISTS, f"another thread waits for operation {awaited}")
        try:
            while True:
                wait = left if left < longest else longest
                status = self._lib.engine_wait(self._handle, awaited, wait, ctypes.addressof(raw))
                left -= wait
                if status != _abi.TIMED_OUT or left == 0:
                    break
        finally:
            del self._waiting[awaited]
            if status not in _GOES_ON:
                self._values.pop(operation, None)
        if status:
            self._lib.fail(status)
        return self._outcome(raw)

    def poll(self) -> bool:
        """Makes progress on the calling thread; returns whether it did something. For `polling` engines."""
        worked = ctypes.c_uint32()
        self._lib.check(self._lib.engine_poll(self._handle, ctypes.byref(worked)))
        return bool(worked.value)

    # -- from C

    def _forget_value(self, operation: Operation) -> None:
        with self._values_lock:
            self._values.pop(operation, None)

    def _event(self, raw: Any) -> Event:
        kind, operation, detail = raw.kind, Operation(raw.operation), raw.detail
        if kind == 5:
            return Unpinned(operation)
        if kind == 2:
            layers = raw.u.layers
            return Layers(operation, layers.layer_begin, layers.layer_end, layers.token_begin, layers.token_end)
        if kind in (3, 4):
            self._forget_value(operation)
        if kind == 3:
            done = raw.u.done
            return Done(
                operation,
                done.bytes,
                _Detail(self._lib, detail).bytes() if detail else b"",
                waited=done.waited_us / 1e6,
                moving=done.moving_us / 1e6,
                segments=done.segments,
                backend=done.backend.decode("ascii"),
            )
        keeper = _Detail(self._lib, detail)
        lib = self._lib
        if kind == 4:
            return Failed(operation, TroupeError(raw.code, _abi.text_of(lib.detail_reason(detail))))
        if kind == 1:
            return Allocated(operation, *keeper.blocks())
        if kind == 6:
            return Value(operation, keeper.view())
        if kind == 7:
            return Info(operation, raw.u.pair.first, raw.u.pair.second / 1000 if raw.u.pair.second else None)
        if kind == 8:
            return Placed(operation, keeper.placement())
        if kind == 10:
            asked = raw.u.wanted
            return Wanted(
                operation,
                _abi.text_of(lib.detail_node(detail)),
                asked.rank,
                asked.ranks,
                asked.expected,
                asked.token_begin,
                asked.token_end,
            )
        if kind == 11:
            seen = raw.u.member
            return MemberEvent(
                _NO_OPERATION,
                node=_abi.text_of(lib.detail_node(detail)),
                stage=_abi.text_of(lib.detail_stage(detail)),
                replica=seen.replica,
                rank=seen.rank,
                incarnation=seen.incarnation,
                state=state_of(seen.state),
                labels=keeper.labels(),
                reason=_abi.text_of(lib.detail_reason(detail)),
            )
        if kind == 9:
            return Call(
                _NO_OPERATION, _abi.text_of(lib.detail_method(detail)), keeper.bytes(), self._replier(raw.u.pair.first)
            )
        return Failed(
            operation,
            TroupeError(ErrorCode.INTERNAL, f"the library is newer than this package: it has events of kind {kind}"),
        )

    def _replier(self, call: int) -> Any:
        def reply(code: int, sentence: str, payload: bytes) -> None:
            raw = bytes(payload)
            self._lib.check(
                self._lib.engine_reply(
                    self._handle, call, code, _abi.encoded("sentence", sentence), raw or None, len(raw)
                )
            )

        return reply

    def _outcome(self, raw: Any) -> Outcome:
        outcome = Outcome(
            bytes_moved=raw.bytes,
            waited=raw.waited_us / 1e6,
            moving=raw.moving_us / 1e6,
            segments=raw.segments,
            backend=raw.backend.decode("ascii"),
            size=raw.value_size,
            ttl=raw.ttl_ms / 1000 if raw.ttl_ms else None,
        )
        if not raw.detail:
            return outcome
        keeper = _Detail(self._lib, raw.detail)
        if raw.aux_size:
            outcome.aux = keeper.bytes()
        if raw.block_count:
            outcome.owner, outcome.blocks = keeper.blocks()
        if raw.kind == 6:
            outcome.data = keeper.view()
        elif raw.kind == 8:
            outcome.placement = keeper.placement()
        return outcome


_GROWS, _TELL_WANTED = 1, 2
_PARK, _AGAIN = 1, 2
_SEND_SIZE = ctypes.sizeof(_abi.SendSpec)
_RECEIVE_SIZE = ctypes.sizeof(_abi.ReceiveSpec)
_OUTCOME_SIZE = ctypes.sizeof(_abi.COutcome)
# After these the operation may still use its memory.
_GOES_ON = frozenset((_abi.TIMED_OUT, int(ErrorCode.INTERNAL)))


class _Detail:
    """Owns a detail of C."""

    __slots__ = ("_handle", "_lib")

    def __init__(self, lib: _abi.Library, handle: int) -> None:
        self._lib = lib
        self._handle = handle

    def __del__(self) -> None:
        self._lib.detail_free(self._handle)

    def _range(self) -> tuple[int | None, int]:
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._lib.check(self._lib.detail_bytes(self._handle, ctypes.byref(address), ctypes.byref(size)))
        return address.value, size.value

    def bytes(self) -> bytes:
        return _abi.bytes_at(*self._range())

    def view(self) -> memoryview:
        address, size = self._range()
        return view_of(address, size, self).toreadonly()

    def blocks(self) -> tuple[int, list[int]]:
        owner, blocks, count = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
        self._lib.check(
            self._lib.detail_blocks(self._handle, ctypes.byref(owner), ctypes.byref(blocks), ctypes.byref(count))
        )
        ids = array.array("I")
        ids.frombytes(_abi.bytes_at(blocks.value, 4 * count.value))
        return int(owner.value), ids.tolist()

    def labels(self) -> dict[str, str]:
        labels, count = ctypes.POINTER(_abi.CLabel)(), ctypes.c_size_t()
        self._lib.check(self._lib.detail_labels(self._handle, ctypes.byref(labels), ctypes.byref(count)))
        return labels_of(labels, count.value)

    def placement(self) -> Placement:
        out = ctypes.c_void_p()
        self._lib.check(self._lib.detail_placement(self._handle, ctypes.byref(out)))
        return owned_placement(self._lib, out)


def _end(lib: _abi.Library, handle: ctypes.c_void_p, memory: object, values: dict[Operation, Memory]) -> None:
    _abi.free(lib.engine_free, handle)
    values.clear()


def _is_empty(value: object) -> bool:
    return isinstance(value, (bytes, bytearray, memoryview)) and len(value) == 0


def _tables(groups: Sequence[GroupBlocks]) -> tuple[Any, list[Any]] | None:
    """The tables as C reads them, with the arrays of blocks that they point into."""
    if not groups:
        return None
    held = [indices("blocks", group.blocks) for group in groups]
    tables = (_abi.CGroupBlocks * len(held))()
    for table, group, ids in zip(tables, groups, held, strict=True):
        table.first_token = _abi.number("first_token", group.first_token)
        address, count = ids.buffer_info()
        table.blocks, table.block_count = (address if count else None), count
    return tables, held


def _lives(lives: Sequence[int], sources: Sequence[str]) -> Any:
    if not lives:
        return None
    if len(lives) != len(sources):
        raise ValueError(f"lives has {len(lives)} incarnations for {len(sources)} sources; give one for each")
    return (ctypes.c_uint64 * len(lives))(*(_abi.number("lives", life, 2**64) for life in lives))


def _names(what: str, names: Sequence[str]) -> Any:
    if isinstance(names, str):
        raise TypeError(f"{what} is a sequence of str, not one str")
    return (ctypes.c_char_p * len(names))(*(_abi.encoded(what, name) for name in names))


def _host_and_port(address: str | None) -> tuple[str | None, int]:
    if address is None:
        return None, 0
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"supervisor is {address!r}; give HOST:PORT, such as 127.0.0.1:7400")
    return host.strip("[]") or None, int(port)


def placement_request(
    request: str,
    from_stage: str | None,
    to_stage: str | None,
    affinity: str | None,
    timeout: float,
    *,
    failed: Sequence[str],
    keep_source: bool,
) -> _abi.PlacementRequest:
    raw = _abi.PlacementRequest(
        size=ctypes.sizeof(_abi.PlacementRequest),
        timeout_ms=min(_abi.milliseconds("timeout", timeout, 2**32), 2**32 - 1),
        request=_abi.encoded("request", request),
        from_=_abi.optional("from_stage", from_stage),
        to=_abi.optional("to_stage", to_stage),
        affinity=_abi.optional("affinity", affinity),
        keep_source=1 if keep_source else 0,
    )
    if failed:
        raw.failed, raw.failed_count = _names("failed", failed), len(failed)
    return raw
