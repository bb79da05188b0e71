"""The worker's side, which has the memory and so the engine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from vllm.logger import init_logger

from troupe.engine import Engine
from troupe.errors import ErrorCode, TroupeError
from troupe.events import Call, Done, Event, Failed, Operation, Unpinned
from troupe.hand_off import RELEASE
from troupe.vllm.holds import Holds
from troupe.vllm.layouts import WHOLE, CacheView, Group, Share, describe_cache
from troupe.vllm.metadata import Chunk, Drop, Push, RankIdentity, Receive, Seal, Send, TroupeMetadata
from troupe.vllm.params import HandOff, is_name
from troupe.vllm.place import Place
from troupe.vllm.releases import Releases
from troupe.vllm.stats import TransferStats

__all__ = ["Results", "Worker"]

logger = init_logger(f"vllm.{__name__}")

_Order = TypeVar("_Order")

IDLE_WAIT = 0.001  # seconds to wait in a step that computes nothing
PARK = 30.0  # seconds; the answer that sent a decode here comes a step before the send
# Seconds that an offer lasts, and a load of a prompt that may still be queued at the other engine. Leases and the
# supervisor end them sooner if a peer is gone.
KEPT = 600.0
EARLY_PARK = 120.0  # seconds that it waits for the other engine to begin the prompt
# Bytes of layers that are reported to the peer together. On a GPU each report costs the computing thread 0.3 ms (call,
# event, what the engine launches meanwhile), the time that 15 MB take at 50 GB/s.
TOGETHER = 32 << 20
RELEASED = 1024  # bound on names of released transfers that have not begun
REFUSED = 1024  # bound on names of transfers that will not come and whose takers have not been told


@dataclass
class Results:
    """vLLM's request ids, as in `KVConnectorTransferResults`. A failed load is in both of the last fields."""

    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass
class _Transfer:
    """One operation of the engine. `request_id`: the request to report its end by; empty: none. `name`: of a send, its
    public name. `source`: of a load. `unwanted`: its request has ended, so its own end is not a failure.
    """

    request_id: str
    sends: bool
    tokens: int
    began: float
    name: str = ""
    source: HandOff | None = None
    why: str = ""
    unwanted: bool = False
    bytes_moved: int = 0


class Worker:
    """Carries out the scheduler side's orders, and reports each request once, when its blocks are free again. Each rank
    of an engine has a worker, and all get the same orders: each sends and loads its own share of a request.

    A pushed prompt is reported only after its request has ended, too: every rank has to report it by the same name.
    Blocks are free again at `Unpinned`, not at the outcome: until then a peer may still read or write them.
    """

    def __init__(self, place: Place, rank: int = 0) -> None:
        self._place = place
        self._rank = rank
        self._engine: Engine | None = None
        self._view: CacheView | None = None
        self._transfers: dict[Operation, _Transfer] = {}
        # By transfer: sends whose prompts are being computed here. None: it has ended by itself.
        self._pushed: dict[str, Operation | None] = {}
        self._step: list[tuple[Operation, int]] = []  # of those: what this step computes, up to which token
        self._together = 1  # layers of this step that are reported together
        self._computed = 0, 0  # layers not reported yet, as a range
        self._released: dict[str, None] = {}  # released transfers that may not have begun yet
        self._refused: dict[str, str] = {}  # transfers that will not come, and why, until their takers are told
        self._event: Any = None  # of the GPU's computing stream
        self._holds = Holds()  # only used by the first rank
        self._releases = Releases()
        self._results = Results()
        self._stats = TransferStats()

    def register(
        self, caches: Mapping[str, Any], *, groups: Sequence[Group], packing: str = "", share: Share = WHOLE
    ) -> None:
        """Starts the node."""
        self._view = describe_cache(caches, groups, packing=packing, share=share)
        with _on_every_core():
            self._engine = self._place.start(self._rank, self._view.layout, self._view.regions)
        logger.info(
            "%s offers its cache of %d blocks of %d tokens",
            self._place.nodes[self._rank],
            self._view.layout.blocks,
            self._view.layout.block_tokens,
        )

    def identity(self) -> RankIdentity | None:
        """None if the cache was never registered."""
        if self._engine is None:
            return None
        own = self._engine.identity()
        return RankIdentity(self._engine.name, own.incarnation, str(self._engine.report()["host"]), own.port)

    def carry_out(self, step: TroupeMetadata) -> None:
        _each(self._abort, step.aborts)
        _each(self._hold, step.holds)
        _each(self._unhold, step.unholds)
        _each(self._release_once, step.releases)
        self.offer(step)
        self._step = []
        self._computed = 0, 0
        _each(self._push, step.pushes, self._not_pushed)
        _each(self._chunk, step.chunks, self._not_computed)
        _each(self._receive, step.receives, self._not_received)
        if self._step and self._view is not None:
            self._together = self._view.layers_in(TOGETHER, sum(chunk.tokens for chunk in step.chunks))

    def offer(self, ends: TroupeMetadata) -> None:
        """Offers the caches of computed prompts to peers that ask for them, and reports prompts that will not be
        computed."""
        _each(self._send, ends.sends, self._not_sent)
        _each(self._seal, ends.seals, self._not_ended)
        _each(self._drop, ends.drops, self._not_ended)

    def layer_computed(self, name: str, cache: Any) -> None:
        """Records that vLLM's layer is written as far as this step goes: on a GPU, once its stream reaches this point.
        """
        assert self._view is not None
        layer = self._view.order.get(name)
        if layer is None or not self._step:
            return
        first, behind = self._computed
        if layer != behind:
            self._say_computed(cache.device)
            first = layer
        self._computed = first, layer + 1
        if layer + 1 - first >= self._together or layer + 1 == self._view.layers:
            self._say_computed(cache.device)

    def results(self, *, idle: bool) -> Results:
        """Requests that ended since the last call. `idle`: nothing else is to be done, so wait a little for the first
        event."""
        wait = idle and not (self._results.sent or self._results.loaded)
        engine = self._started()
        _each(self._holds.ask_again, (engine,))
        _each(self._releases.ask_again, (engine,))
        while events := engine.take(timeout=IDLE_WAIT if wait else 0.0):
            wait = False
            _each(self._hear, events, self._not_heard)
        if self._refused:
            _each(self._tell_refused, [list(self._refused)])
        taken, self._results = self._results, Results()
        return taken

    def take_stats(self) -> TransferStats | None:
        """Statistics of the loads that ended since the last call; None, which saves a message to the scheduler, if
        there were none."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, TransferStats()
        return taken

    def stop(self) -> None:
        """Leaves the cluster. A second call does nothing."""
        if self._engine is not None:
            self._engine.stop()

    # -- parts

    def _hear(self, event: Event) -> None:
        if isinstance(event, Call):
            self._answer(event)
            return
        transfer = self._transfers.get(event.operation)
        if transfer is None:  # of a hold or a release
            self._holds.hear(event)
            self._releases.hear(event)
        elif isinstance(event, Failed):
            transfer.why = self._reason_of(event.error)
            if transfer.sends and event.error.code in (ErrorCode.DEADLINE, ErrorCode.LEASE_EXPIRED):
                self._stats.add_expired_send()
            if event.error.code == ErrorCode.LAYOUT_MISMATCH:
                transfer.source = None  # another prompt's source, which stays
        elif isinstance(event, Done):
            transfer.bytes_moved = event.bytes_moved
            if not transfer.sends:
                self._stats.add_load(
                    seconds=event.moving, waited=event.waited, size=event.bytes_moved, segments=event.segments
                )
        elif isinstance(event, Unpinned):
            self._unpinned(event.operation)

    def _reason_of(self, error: TroupeError) -> str:
        """The sentence of a failure. An engine without a supervisor knows no other engine, and its loads wait until
        their deadline: then the sentence says so."""
        if error.code == ErrorCode.DEADLINE and not self._started().report()["supervisor_reachable"]:
            return f"{error}; this engine's supervisor has not been reached: start it, or correct its address"
        return str(error)

    def _unpinned(self, operation: Operation) -> None:
        transfer = self._transfers.pop(operation)
        if self._pushed.get(transfer.name) == operation:
            self._pushed[transfer.name] = None
        self._end(transfer)

    def _hold(self, source: HandOff) -> None:
        if self._rank == 0 and not self._is_own(source):
            self._holds.begin(self._started(), source)

    def _unhold(self, transfer: str) -> None:
        self._holds.end(self._started(), transfer)

    def _release_once(self, source: HandOff) -> None:
        """Releases a source, once for all ranks."""
        if self._rank == 0 or self._is_own(source):
            self._release(source)

    def _started(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the KV cache was never registered")
        return self._engine

    def _send(self, send: Send) -> None:
        assert self._view is not None
        engine = self._started()
        transfer = _Transfer(send.request_id, True, send.tokens, time.monotonic(), send.transfer)
        try:
            operation = engine.send(send.transfer, deadline=KEPT, **self._view.blocks_of(send.blocks, send.tokens))
        except Exception as error:  # pylint: disable=broad-exception-caught
            transfer.why = str(error)
            self._end(transfer)
            self._refuse(send.transfer, f"it cannot be offered: {error}")
            return
        self._transfers[operation] = transfer
        if self._is_released(operation):
            return
        try:
            engine.layers_ready(operation, 0, self._view.layers, send.tokens)
            engine.seal(operation, send.tokens, send.digest.encode())
        except Exception as error:  # pylint: disable=broad-exception-caught
            self._give_up(operation, f"it cannot be offered: {error}")

    def _push(self, push: Push) -> None:
        assert self._view is not None
        transfer = _Transfer("", True, push.tokens, time.monotonic(), push.transfer)
        blocks = self._view.wide(0, push.blocks)
        try:
            operation = self._started().send(push.transfer, blocks, deadline=KEPT, grows=True)
        except Exception as error:  # pylint: disable=broad-exception-caught
            transfer.why = str(error)
            self._pushed[push.transfer] = None
            self._end(transfer)
            self._refuse(push.transfer, f"it cannot be offered: {error}")
            return
        self._transfers[operation], self._pushed[push.transfer] = transfer, operation
        self._is_released(operation)

    def _chunk(self, chunk: Chunk) -> None:
        """Tokens from vLLM's prefix cache are not reported here: another request may be computing them in this step, or
        in the one before, which a GPU may still execute. A layer of this step comes after all of that."""
        assert self._view is not None
        operation = self._pushed.get(chunk.transfer)
        if operation is None:
            return
        try:
            if chunk.blocks:
                self._started().add_blocks(operation, self._view.wide(0, chunk.blocks))
        except TroupeError as error:
            self._give_up_push(operation, error)
            return
        self._step.append((operation, chunk.end))

    def _say_computed(self, device: Any) -> None:
        first, behind = self._computed
        self._computed = behind, behind
        if first == behind:
            return
        event, gpu = (self._recorded(device), device.index) if device.type == "cuda" else (0, 0)
        for operation, end in list(self._step):
            try:
                self._started().layers_ready(operation, first, behind, end, event=event, gpu=gpu)
            except TroupeError as error:
                self._step.remove((operation, end))
                self._give_up_push(operation, error)

    def _seal(self, seal: Seal) -> None:
        operation = self._report_by(seal.request_id, seal.transfer)
        if operation is None:
            return
        try:
            self._started().seal(operation, seal.tokens, seal.digest.encode())
        except TroupeError as error:
            self._give_up_push(operation, error)

    def _drop(self, drop: Drop) -> None:
        """Drops a push and tells its takers."""
        why = "its prompt was not computed to the end"
        if drop.transfer not in self._pushed:
            self._refuse(drop.transfer, why)
            return
        operation = self._report_by(drop.request_id or drop.transfer, drop.transfer)
        if operation is not None:
            self._transfers[operation].unwanted = True
            self._give_up(operation, why)

    def _refuse(self, name: str, why: str) -> None:
        """Tells the takers of a transfer, present and later ones, why it does not come."""
        self._refused[name] = why
        if len(self._refused) > REFUSED:
            del self._refused[next(iter(self._refused))]
        self._tell_refused([name])

    def _tell_refused(self, names: Sequence[str]) -> None:
        """Tells takers by empty sends that are aborted. An overloaded node has room for them when other operations have
        ended."""
        assert self._view is not None
        for name in names:
            why = self._refused.pop(name)
            try:
                operation = self._started().send(name, grows=True, **self._view.no_blocks())
            except TroupeError as error:
                if error.code == ErrorCode.OVERLOADED:
                    self._refused[name] = why
                    return
                if error.code != ErrorCode.ALREADY_EXISTS:  # another request's send, which goes on
                    logger.warning("%s: receivers are not told that it does not come: %s", name, error)
                continue
            self._transfers[operation] = _Transfer("", True, 0, time.monotonic(), name, unwanted=True)
            self._give_up(operation, why)

    def _report_by(self, name: str, transfer: str) -> Operation | None:
        """Sets the name to report its end by. None: it has ended already, and is reported now."""
        operation = self._pushed.pop(transfer, None)
        if operation is None:
            self._results.sent.add(name)
        else:
            self._transfers[operation].request_id = name
        return operation

    def _answer(self, call: Call) -> None:
        """Answers a router that has lost its client. vLLM learns of that from the broken connection, but perhaps only
        when it has just computed the prompt; and the router's call may come before the step that offers the cache."""
        name = call.payload.decode(errors="replace")
        with contextlib.suppress(TroupeError):  # the router no longer waits
            if call.method != RELEASE:
                call.fail(TroupeError(ErrorCode.NOT_FOUND, f"a vLLM engine has no method {call.method!r}"))
                return
            call.reply()
        if not is_name(name):
            return
        offers = self._offers_of(name)
        for operation in offers:
            self._give_up_unwanted(operation)
        if offers:
            return
        self._released[name] = None
        if len(self._released) > RELEASED:
            del self._released[next(iter(self._released))]

    def _is_released(self, operation: Operation) -> bool:
        """Gives up a released offer; returns whether it was one."""
        transfer = self._transfers[operation]
        if transfer.name not in self._released:
            return False
        del self._released[transfer.name]
        self._give_up_unwanted(operation)
        return True

    def _offers_of(self, name: str) -> list[Operation]:
        """The sends of a transfer."""
        return [operation for operation, one in self._transfers.items() if one.sends and one.name == name]

    def _give_up_unwanted(self, operation: Operation) -> None:
        self._transfers[operation].unwanted = True
        self._give_up(operation, "nobody takes it")

    def _give_up_push(self, operation: Operation, why: TroupeError) -> None:
        if why.code != ErrorCode.NOT_FOUND:  # otherwise it has ended by itself, which is reported
            self._give_up(operation, f"it cannot be pushed: {why}")

    def _recorded(self, device: Any) -> int:
        """Records an event after the GPU's work so far. It may be reused once it was reported."""
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))
        return int(self._event.cuda_event)

    def _receive(self, receive: Receive) -> None:
        assert self._view is not None
        transfer = _Transfer(receive.request_id, False, 0, time.monotonic())
        source = receive.source
        if source is None:
            transfer.why = receive.refused
            self._end(transfer)
            return
        transfer.tokens, transfer.source = receive.tokens, source
        self._holds.loads(source.transfer)
        try:
            operation = self._started().receive(
                source.transfer,
                sources=source.nodes,
                mode="write" if self._place.pushes else "read",
                tokens=receive.tokens,
                prefix_tokens=receive.prefix_tokens,
                park=(self._place.load_seconds or EARLY_PARK) if source.is_early else PARK,
                deadline=self._place.load_seconds or (KEPT if source.is_early else None),
                expect=receive.digest.encode(),
                lives=source.lives,
                **self._view.blocks_of(receive.blocks, receive.tokens),
            )
        except Exception as error:  # pylint: disable=broad-exception-caught
            transfer.why = str(error)
            self._end(transfer)
        else:
            self._transfers[operation] = transfer

    def _release(self, source: HandOff) -> None:
        if self._is_own(source):
            for operation in self._offers_of(source.transfer):
                self._give_up(operation, "it was to be decoded where it was prefilled")
            return
        self._holds.end(self._started(), source.transfer)
        self._releases.begin(self._started(), source)

    def _is_own(self, source: HandOff) -> bool:
        """Whether a router sent both halves of a request here."""
        return self._place.nodes[self._rank] in source.nodes

    def _is_loading(self, source: HandOff) -> bool:
        """Whether another request here loads the same source."""
        return any(
            one.source is not None and one.source.transfer == source.transfer for one in self._transfers.values()
        )

    def _abort(self, request_id: str) -> None:
        for operation, transfer in self._transfers.items():
            if transfer.request_id == request_id and not transfer.sends:
                transfer.unwanted = True
                self._give_up(operation, "the request ended while its cache was loaded")

    def _give_up(self, operation: Operation, why: str) -> None:
        try:
            self._started().abort(operation, why)
        except TroupeError as error:
            if error.code != ErrorCode.NOT_FOUND:  # it has ended by itself
                logger.warning("%s cannot be aborted: %s", self._transfers[operation].request_id, error)

    def _end(self, transfer: _Transfer) -> None:
        """Ends a transfer: first what vLLM waits for, even if the rest fails."""
        if transfer.sends and transfer.request_id:
            self._results.sent.add(transfer.request_id)
        if not transfer.sends:
            self._results.loaded.add(transfer.request_id)
            if transfer.why:
                self._results.failed.add(transfer.request_id)
        what = "sent" if transfer.sends else "loaded"
        seconds = time.monotonic() - transfer.began
        if transfer.why:
            say = logger.debug if transfer.unwanted else logger.warning
            say(
                "%s: %d tokens were not %s after %.3f s: %s",
                transfer.request_id,
                transfer.tokens,
                what,
                seconds,
                transfer.why,
            )
        else:
            logger.debug(
                "%s: %d tokens, %d bytes, %s in %.4f s",
                transfer.request_id,
                transfer.tokens,
                transfer.bytes_moved,
                what,
                seconds,
            )
        if transfer.why and not transfer.sends:
            if not transfer.unwanted:
                self._stats.add_failed_load()
            if transfer.source is not None and not self._is_loading(transfer.source):
                self._release(transfer.source)  # no request here asks for it again

    # -- an order or an event that raised: its request ends, and no load counts as one that may have failed

    def _not_received(self, receive: Receive, error: Exception) -> None:
        if receive.request_id not in self._results.loaded:
            self._end(_Transfer(receive.request_id, False, receive.tokens, time.monotonic(), why=repr(error)))

    def _not_sent(self, send: Send, error: Exception) -> None:
        offers = self._offers_of(send.transfer)
        for operation in offers:
            self._give_up(operation, repr(error))
        if not offers:
            self._results.sent.add(send.request_id)

    def _not_pushed(self, push: Push, _: Exception) -> None:
        self._pushed.setdefault(push.transfer, None)

    def _not_computed(self, chunk: Chunk, error: Exception) -> None:
        operation = self._pushed.get(chunk.transfer)
        if operation is not None:
            self._give_up(operation, repr(error))

    def _not_ended(self, end: Seal | Drop, error: Exception) -> None:
        if end.transfer in self._pushed:
            self._report_by(end.request_id or end.transfer, end.transfer)
        elif isinstance(end, Seal) and all(one.request_id != end.request_id for one in self._transfers.values()):
            self._results.sent.add(end.request_id)
        for operation in self._offers_of(end.transfer):
            self._give_up(operation, repr(error))

    def _not_heard(self, event: Event, error: Exception) -> None:
        transfer = None if isinstance(event, Call) else self._transfers.get(event.operation)
        if transfer is None:
            return
        if isinstance(event, Failed):
            transfer.why = repr(error)
        elif isinstance(event, Unpinned):
            self._unpinned(event.operation)


def _nothing(_: object, __: Exception) -> None:
    """No request waits for it."""


def _each(
    carry_out: Callable[[_Order], None],
    orders: Sequence[_Order],
    otherwise: Callable[[_Order, Exception], None] = _nothing,
) -> None:
    """Carries out each order, even if others raise."""
    for order in orders:
        try:
            carry_out(order)
        except Exception as error:  # pylint: disable=broad-exception-caught
            logger.exception("%s cannot be carried out", order)
            with contextlib.suppress(Exception):
                otherwise(order, error)


@contextlib.contextmanager
def _on_every_core() -> Iterator[None]:
    """vLLM binds this thread to its computing cores, and new threads inherit that. The engine's threads should run on
    all cores of the parent process."""
    own = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
