"""The receives that a room's receiver has begun, one per cache, as one transfer with one outcome."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any, Protocol

from troupe.errors import TroupeError
from troupe.events import Done, Event, Failed, Unpinned
from troupe.sglang.node import Nodes
from troupe.sglang.operations import RoomOperations
from troupe.sglang.pages import blocks_of, placeholders
from troupe.sglang.sends import request_of
from troupe.sglang.told import ServerNodes

__all__ = ["ReceiveListener", "Receives"]


class ReceiveListener(Protocol):
    """Called under the lock of the nodes."""

    def received(self, row: bytes) -> None:
        """Everything has arrived, and no peer writes to the pages any more."""

    def receive_failed(self, error: TroupeError, why: str) -> None:
        """The one outcome of a transfer that fails, unless this side has aborted it. Peers may still write to the
        pages: ask `Receives.is_quiet`."""


class Receives(RoomOperations):
    """Lives from when the destination is known until the outcome, and then until no peer can write to it."""

    def __init__(self, nodes: Nodes, room: int, sources: ServerNodes, listener: ReceiveListener) -> None:
        super().__init__(nodes)
        self._request = request_of(room)
        self._sources = sources
        self._listener = listener
        self._all_begun = False
        self._row = b""

    @property
    def is_quiet(self) -> bool:
        """Whether no peer can write to the pages, whatever it does."""
        return not self._live

    def begin(self, pages: Any, prefix: int, states: Sequence[Any] | None, deadline: float) -> None:
        """Asks the prefill server.

        Args:
            pages: destination of the tokens from `prefix` on.
            states: indices of each of SGLang's state components.
            deadline: seconds.

        Raises:
            ValueError, TroupeError: the transfer failed. `is_quiet` says when the pages may be reused.
        """
        with self._nodes.lock:
            try:
                for number, cache in enumerate(self._nodes.caches):
                    if number == 0:
                        blocks = blocks_of(pages, cache.item_blocks)
                        # A prefix does not move, but a receive names a block for each of its tokens.
                        blocks = placeholders(prefix, blocks, cache.layout.blocks) + blocks
                        self._receive(number, blocks, deadline, prefix_tokens=prefix)
                    else:
                        blocks = cache.blocks(states)
                        self._receive(number, blocks, deadline, state_slot=blocks[0] if cache.is_slot else 0)
            except BaseException:
                self._end("the transfer was not begun")
                raise
            self._all_begun = True

    # -- parts, under the lock

    def _receive(self, number: int, blocks: array.array[int], deadline: float, **more: Any) -> None:
        operation = self._nodes.receive(
            number,
            self._handler(number),
            self._request,
            tokens=len(blocks),
            sources=self._sources.nodes[number],
            lives=self._sources.lives[number],
            blocks=blocks,
            mode="write",
            deadline=deadline,
            again=True,
            **more,
        )
        self._begun(number, operation)

    def _handler(self, number: int) -> Any:
        return lambda event: self._on(number, event)

    def _on(self, number: int, event: Event) -> None:
        if isinstance(event, Done):
            self._running.discard(number)
            if number == 0:
                self._row = event.aux
        elif isinstance(event, Failed):
            self._running.discard(number)
            if self._over and number == 0:
                # A source that had not been asked yet does not know that this side has given up.
                self._nodes.release(self._request, self._sources.nodes[0], self._sources.lives[0])
            elif not self._over:
                why = f"{self._nodes.caches[number].name}: {event.error}"
                self._end(why)
                self._listener.receive_failed(event.error, why)
        elif isinstance(event, Unpinned):
            self._live.pop(number, None)
        if self._all_begun and not self._over and not self._live:
            self._over = True
            self._listener.received(self._row)
