"""What a room's sender has begun: the sends of its caches, as one transfer with one outcome."""

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

DAY = 24 * 3600.0  # SGLang's own time-outs, or the death of a peer, end a send before
INTRODUCED = 5.0  # seconds until a request goes on though its node is not known: a supervisor that is gone tells nobody


def request_of(room: int) -> str:
    """What Troupe calls a room."""
    return f"sgl/{room}"


class SendListener(Protocol):
    """Called under the lock of the nodes."""

    def wanted(self, prefix: int) -> None:
        """Every decode rank has asked. The tokens before `prefix` are there already."""

    def sent(self, size: int, seconds: float) -> None:
        """All bytes and rows are there, and nobody reads the pages any more. `seconds`: since the first `send`."""

    def send_failed(self, why: str) -> None:
        """The one outcome of a transfer that fails, unless this side has aborted it."""


class Sends(RoomOperations):
    """From the sender's birth to its outcome. Calls of the scheduler come from one thread; events from another, under
    the lock of the nodes."""

    def __init__(self, nodes: Nodes, room: int, page_size: int, listener: SendListener, former: Sends | None) -> None:
        """`former`: of the same room. Where that has not ended yet, this one begins when it has."""
        super().__init__(nodes)
        self._request = request_of(room)
        self._page_size = page_size
        self._listener = listener
        self._wanted: dict[str, Wanted] = {}
        self._wanted_at = 0.0  # by the last of them
        self._asked = False
        self._waits = former is not None and former.is_ending
        self._next: Sends | None = None  # of the same room, which waits for this one
        self._prefix = 0
        self._pages = 0
        self._named_prefix = False
        self._sealed = False
        self._started: float | None = None
        self._size = 0
        self._lists: dict[int, int] = {}  # indices that were sent of a cache whose lists have to be equal
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
        """Whether Troupe knows the request by this one still, or not yet. The next one of the room waits for that."""
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
        """Pages of the tokens behind those that were sent before.

        Args:
            event: of CUDA, recorded behind the kernels that compute them.
            is_last: the request has no more pages. There may be none here.
            row: of metadata, with the last pages. None: another part of the pipeline sends it.
            states: with the last pages, the indices of each of SGLang's state components.

        Raises:
            ValueError, TroupeError: the transfer cannot go on; give it up by `abort`.
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
        """Lets the next one of the room begin."""
        if not self.is_ending and self._next is not None:
            following, self._next = self._next, None
            following._open()

    def _begin(self, number: int, handler: Any, blocks: Any = (), **more: Any) -> None:
        self._begun(number, self._nodes.send(number, handler, self._request, blocks, deadline=DAY, **more))

    def _say(self, what: Any, *arguments: Any) -> None:
        """To the send of keys and values, if it lives: one that has nothing to move may be done before all is said."""
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
                engine.add_blocks(send, _zeros(self._prefix))  # nobody asks for them
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
        """A decode server with larger pages asks for all of its last one. It gets bytes of page 0 there, which SGLang
        gives to no request."""
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
        """Under the lock; also when a node has become a member and said how many tokens its pages have, which a request
        may be faster than."""
        if self._asked or not self._wanted or len(self._wanted) < max(one.expected for one in self._wanted.values()):
            return
        if time.monotonic() < self._wanted_at + INTRODUCED and not all(map(self._nodes.is_member, self._wanted)):
            return
        self._asked = True
        # A rank that needs nothing from here does not tell its prefix. All tokens are sent then, to nobody.
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
