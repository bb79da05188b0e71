"""The sends that a room's sender has begun, one per cache, as one transfer with one outcome."""

from __future__ import annotations

import array
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from troupe.errors import ErrorCode, TroupeError
from troupe.events import Done, Event, Failed, Operation, Unpinned, Wanted
from troupe.sglang.layouts import Cache
from troupe.sglang.node import Nodes
from troupe.sglang.operations import RoomOperations
from troupe.sglang.pages import blocks_of

__all__ = ["SendListener", "Sends", "request_of"]

DAY = 24 * 3600.0  # SGLang's own time-outs, or the death of a peer, end a send earlier
INTRODUCED = 5.0  # seconds until a request from an unknown node proceeds: without a supervisor no node becomes known


def request_of(room: int) -> str:
    """Troupe's name of a room."""
    return f"sgl/{room}"


class SendListener(Protocol):
    """Called under the lock of the nodes."""

    def wanted(self, prefix: int) -> None:
        """Every decode rank has asked. The decode side already has the tokens before `prefix`."""

    def sent(self, size: int, seconds: float) -> None:
        """All bytes and rows have arrived, and no peer reads the pages any more. `seconds`: since the first `send`."""

    def send_failed(self, why: str) -> None:
        """The one outcome of a transfer that fails, unless this side has aborted it."""


class Sends(RoomOperations):
    """Lives from the sender's creation to its outcome. Calls of the scheduler come from one thread; events from
    another, under the lock of the nodes."""

    def __init__(self, nodes: Nodes, room: int, page_size: int, listener: SendListener, former: Sends | None) -> None:
        """`former`: the earlier sends of the same room. If they have not ended yet, these begin when they have."""
        super().__init__(nodes)
        self._request = request_of(room)
        self._page_size = page_size
        self._listener = listener
        self._wanted: dict[str, Wanted] = {}
        self._wanted_at = 0.0  # when the last rank asked
        self._asked = False
        self._waits = former is not None and former.is_ending
        self._next: Sends | None = None  # later sends of the same room, which wait for these
        self._prefix = 0
        self._pages = 0
        self._named_prefix = False
        self._sealed = False
        self._started: float | None = None
        self._size = 0
        self._lists: dict[int, int] = {}  # number of indices sent, for caches whose lists must be equal
        with nodes.lock:
            if former is not None and self._waits:
                former._next = self
            else:
                self._open()

    @property
    def is_over(self) -> bool:
        """Whether it has an outcome, or was aborted."""
        return self._over

    @property
    def is_ending(self) -> bool:
        """Whether this one still occupies, or will occupy, the request's name in Troupe. The next sends of the room
        wait for its end."""
        return bool(self._running) or self._waits

    @property
    def sent_any(self) -> bool:
        return self._started is not None

    def send(
        self,
        pages: Any,
        *,
        row: bytes | None = None,
        states: Sequence[Any] | None = None,
        is_last: bool = False,
        event: Any = None,
        gpu: int = 0,
    ) -> None:
        """Sends the pages of the tokens after those sent before.

        Args:
            event: a CUDA event recorded after the kernels that compute them.
            is_last: the request has no more pages. There may be none here.
            row: the row of metadata, with the last pages. None: another part of the pipeline sends it.
            states: with the last pages, the indices of each of SGLang's state components.

        Raises:
            ValueError, TroupeError: the transfer cannot go on; call `abort`.
        """
        with self._nodes.lock:
            if self._over:
                return
            if self._started is None:
                self._started = time.monotonic()
            cache = self._nodes.caches[0]
            blocks = blocks_of(pages, cache.item_blocks)
            self._say(self._name_blocks, blocks)
            self._pages += len(blocks)
            tokens = self._prefix + self._pages
            if event is not None and len(blocks):
                self._say(self._compute, tokens, event, gpu)
            if not is_last:
                if event is None and len(blocks):
                    self._say(self._compute, tokens, None, gpu)
                return
            tokens += self._say_padding(tokens)
            self._sealed = True
            self._say(lambda op: self._nodes.engine(0).seal(op, tokens, row or b""))
            for number, other in enumerate(self._nodes.caches[1:], 1):
                self._send_state(number, other, states)
            self._check()

    # -- parts, under the lock

    def _open(self) -> None:
        self._waits = False
        if not self._over and not self._nodes.stopped:
            try:
                self._begin(0, self._on_kv, grows=True, tell_wanted=True)
            except TroupeError as error:
                self._fail(str(error))
        self._hand_on()

    def _hand_on(self) -> None:
        """Lets the next sends of the room begin."""
        if not self.is_ending and self._next is not None:
            following, self._next = self._next, None
            following._open()

    def _begin(self, number: int, handler: Any, blocks: Any = (), **more: Any) -> None:
        self._begun(number, self._nodes.send(number, handler, self._request, blocks, deadline=DAY, **more))

    def _say(self, what: Any, *arguments: Any) -> None:
        """Calls the engine on the send of keys and values, if it lives: a send with nothing to move may be done early.
        """
        if 0 not in self._running:
            return
        try:
            what(self._live[0], *arguments)
        except TroupeError as error:
            if error.code != ErrorCode.NOT_FOUND:
                raise

    def _name_blocks(self, send: Operation, blocks: Any) -> None:
        engine = self._nodes.engine(0)
        if not self._named_prefix:
            self._named_prefix = True
            if self._prefix:
                engine.add_blocks(send, _zeros(self._prefix))  # never asked for
        if len(blocks):
            engine.add_blocks(send, blocks)

    def _compute(self, send: Operation, tokens: int, event: Any, gpu: int) -> None:
        engine, layers = self._nodes.engine(0), self._nodes.caches[0].layers
        if event is None:
            engine.layers_ready(send, 0, layers, tokens)
            return
        try:
            engine.layers_ready(send, 0, layers, tokens, event=int(event.cuda_event), gpu=gpu)
        except TroupeError as error:
            if error.code != ErrorCode.NO_DEVICE:
                raise
            event.synchronize()  # this libtroupe has no code for GPUs
            engine.layers_ready(send, 0, layers, tokens)

    def _say_padding(self, tokens: int) -> int:
        """A decode server with larger pages asks for the whole of its last page. The excess is sent from page 0, which
        SGLang gives to no request."""
        lack = max((event.token_end for event in self._wanted.values()), default=0) - tokens
        if lack <= 0:
            return 0
        sizes = {node: self._nodes.page_size_of(node) for node in self._wanted}
        known = [size for size in sizes.values() if size is not None]
        why = f"the decode server asks for {tokens + lack} tokens, and the prefill server has {tokens} of the request"
        if len(known) < len(sizes):
            silent = next(node for node, size in sizes.items() if size is None)
            raise ValueError(
                f"{why}; whether its pages are larger is not known, since nothing was heard of node {silent!r} within "
                f"{INTRODUCED:.0f} s: does the supervisor run?"
            )
        if lack >= max(known) or max(known) <= self._page_size:
            raise ValueError(why)
        self._say(lambda op: self._nodes.engine(0).add_blocks(op, _zeros(lack)))
        return lack

    def _send_state(self, number: int, cache: Cache, states: Sequence[Any] | None) -> None:
        blocks = cache.blocks(states)
        if cache.is_slot:
            self._begin(number, self._on_state(number), blocks, state_slot=blocks[0])
            self._nodes.engine(number).seal(self._live[number], 1)
            return
        self._begin(number, self._on_state(number), blocks, tell_wanted=cache.is_exact)
        if cache.is_exact:
            self._lists[number] = len(blocks)
        else:
            self._nodes.engine(number).seal(self._live[number], len(blocks))

    def _on_kv(self, event: Event) -> None:
        if isinstance(event, Wanted):
            self._wanted[event.node] = event
            self._wanted_at = time.monotonic()
            self.look_at_wanted()
            return
        self._on_end(0, event)

    def look_at_wanted(self) -> None:
        """Called under the lock, also when a node has become a member and so told its page size, since a request may
        arrive before its node is known."""
        if self._asked or not self._wanted or len(self._wanted) < max(one.expected for one in self._wanted.values()):
            return
        if time.monotonic() < self._wanted_at + INTRODUCED and not all(map(self._nodes.is_member, self._wanted)):
            return
        self._asked = True
        # A rank that needs nothing from here does not report its prefix. All tokens are then sent, to no rank.
        begins = [one.token_begin for one in self._wanted.values() if one.token_begin < one.token_end]
        prefix = min(begins, default=0)
        self._prefix = prefix - prefix % self._page_size
        if not self._over:
            self._listener.wanted(self._prefix)

    def _on_state(self, number: int) -> Any:
        def handle(event: Event) -> None:
            if not isinstance(event, Wanted):
                self._on_end(number, event)
            elif number in self._lists:
                count = self._lists[number]
                if event.token_end != count:
                    self._fail(
                        f"the decode server asks for {event.token_end} indices of the state "
                        f"{self._nodes.caches[number].name!r}, and the prefill server has {count}"
                    )
                elif number in self._running:
                    del self._lists[number]
                    with contextlib.suppress(TroupeError):
                        self._nodes.engine(number).seal(self._live[number], count)

        return handle

    def _on_end(self, number: int, event: Event) -> None:
        if isinstance(event, Done):
            self._running.discard(number)
            self._size += event.bytes_moved
        elif isinstance(event, Failed):
            self._running.discard(number)
            self._fail(f"{self._nodes.caches[number].name}: {event.error}")
        elif isinstance(event, Unpinned):
            self._live.pop(number, None)
        else:
            return
        self._hand_on()
        self._check()

    def _check(self) -> None:
        if self._over or not self._sealed or self._live:
            return
        self._over = True
        self._listener.sent(self._size, time.monotonic() - (self._started or time.monotonic()))

    def _fail(self, why: str) -> None:
        if not self._over:
            self._end(why)
            self._listener.send_failed(why)


def _zeros(count: int) -> array.array[int]:
    return array.array("I", bytes(4 * count))
