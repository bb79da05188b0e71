"""The nodes of one scheduler process, one for each of its caches, and the thread that takes their events."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.engine import Engine
from troupe.errors import ErrorCode, TroupeError
from troupe.events import Done, Event, Failed, MemberEvent, Operation, Unpinned
from troupe.members import Announcement
from troupe.sglang.layouts import Cache
from troupe.sglang.settings import STAGE, Settings

__all__ = ["PAGE_SIZE", "Handler", "Identity", "Nodes"]

logger = logging.getLogger(__name__)

#: The label of a node with its server's page size in tokens.
PAGE_SIZE = "page_size"

REGISTERED = 15.0  # seconds that a scheduler waits for its supervisor before it continues without
TICK = 1.0  # seconds between two calls of `on_tick`

Handler = Callable[[Event], None]


@dataclass(frozen=True)
class Identity:
    """The names of the nodes of one process. `replica`: shared by all ranks of the server, without the cache."""

    replica: str
    rank: int
    ranks: int
    labels: Mapping[str, str]


class Nodes:
    """Thread-safe. Events are handled on a thread of this object's own, under `lock`."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        caches: Sequence[Cache],
        *,
        lock: threading.RLock,
        on_member: Callable[[MemberEvent], None],
        on_tick: Callable[[], None],
    ) -> None:
        """Starts the nodes, and waits for their supervisor. A supervisor that does not answer is no error: the nodes go
        on trying. `TroupeError` as in `Engine`."""
        self.lock = lock
        self.caches = tuple(caches)
        self._on_member = on_member
        self._on_tick = on_tick
        self._engines: list[Engine] = []
        self._handlers: list[dict[Operation, Handler]] = [{} for _ in caches]
        self._words: set[tuple[int, Operation]] = set()  # releases, which pin nothing
        self._labels: dict[str, Mapping[str, str]] = {}
        self._ending = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread: threading.Thread | None = None
        try:
            for number, cache in enumerate(caches):
                self._engines.append(self._start(settings, identity, cache, watch=number == 0))
            limit = time.monotonic() + REGISTERED
            for engine in self._engines:
                self._wait_registered(engine, max(0.1, limit - time.monotonic()))
        except BaseException:
            self.stop()
            raise
        self._thread = threading.Thread(target=self._serve, name="troupe-sglang", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # the thread must not be in an engine when the interpreter ends the engine

    @property
    def names(self) -> list[str]:
        """The names of the nodes, one per cache."""
        return [engine.name for engine in self._engines]

    @property
    def lives(self) -> list[int]:
        return [engine.identity().incarnation for engine in self._engines]

    @property
    def port(self) -> int:
        """The port of the first node."""
        return self._engines[0].identity().port

    @property
    def stopped(self) -> bool:
        return self._ending.is_set()

    def is_member(self, node: str) -> bool:
        """Whether the node is a member, so that its server's labels are known."""
        return node in self._labels

    def page_size_of(self, node: str) -> int | None:
        """The page size of the node's server; None if unknown."""
        said = self._labels.get(node, {}).get(PAGE_SIZE, "")
        return int(said) if said.isdecimal() else None

    def stop(self) -> None:
        """Leaves the cluster: live operations end at both sides, and no event is handled any more. A second call does
        nothing."""
        if self._ending.is_set():
            return
        self._ending.set()
        atexit.unregister(self.stop)
        os.write(self._wake_write, b"x")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for engine in self._engines:
            with contextlib.suppress(TroupeError):
                engine.stop()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # -- operations: the handler gets all events of its operation, from the first one on

    def send(self, cache: int, handler: Handler, request: str, blocks: Any = (), **more: Any) -> Operation:
        with self.lock:
            return self._begun(cache, handler, self._engines[cache].send(request, blocks, **more))

    def receive(self, cache: int, handler: Handler, request: str, **more: Any) -> Operation:
        with self.lock:
            return self._begun(cache, handler, self._engines[cache].receive(request, **more))

    def release(self, request: str, sources: Sequence[str], lives: Sequence[int]) -> None:
        """Releases the request at the sources of the first cache. Their answers are ignored."""
        with self.lock, contextlib.suppress(TroupeError):
            operation = self._engines[0].release(request, sources, lives=lives)
            self._words.add((0, operation))
            self._begun(0, lambda _: None, operation)

    def abort(self, cache: int, operation: Operation, reason: str) -> None:
        with contextlib.suppress(TroupeError):  # it has ended
            self._engines[cache].abort(operation, reason)

    def engine(self, cache: int) -> Engine:
        """The engine of a cache, for calls on a live send."""
        return self._engines[cache]

    # -- parts

    def _start(self, settings: Settings, identity: Identity, cache: Cache, *, watch: bool) -> Engine:
        return Engine(
            join=Announcement(
                STAGE, f"{identity.replica}-{cache.name}", identity.rank, identity.ranks, labels=identity.labels
            ),
            file=settings.file,
            text=settings.text,
            layout=cache.layout,
            regions=cache.regions,
            watch=watch,
        )

    @staticmethod
    def _wait_registered(engine: Engine, seconds: float) -> None:
        try:
            engine.wait_registered(seconds)
        except TroupeError as error:
            if error.code != ErrorCode.DEADLINE:
                raise
            logger.warning("%s is not registered after %.0f s, and keeps asking: %s", engine.name, seconds, error)

    def _begun(self, cache: int, handler: Handler, operation: Operation) -> Operation:
        self._handlers[cache][operation] = handler
        return operation

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        numbers = {engine.fileno(): number for number, engine in enumerate(self._engines)}
        for descriptor in numbers:
            poller.register(descriptor, select.POLLIN)
        ticked = time.monotonic()
        while not self._ending.is_set():
            ready = poller.poll(TICK * 1000)
            try:
                for descriptor, _ in ready:
                    if descriptor in numbers:
                        self._take(numbers[descriptor])
                if time.monotonic() - ticked >= TICK:
                    ticked = time.monotonic()
                    with self.lock:
                        self._on_tick()
            except Exception:  # pylint: disable=broad-exception-caught
                if not self._ending.is_set():
                    logger.exception("an event of a node was not handled; the nodes go on")

    def _take(self, cache: int) -> None:
        for event in self._engines[cache].take():
            with self.lock:
                try:
                    self._handle(cache, event)
                except Exception:  # pylint: disable=broad-exception-caught
                    logger.exception("%s did not handle %r, and goes on", self._engines[cache].name, event)

    def _handle(self, cache: int, event: Event) -> None:
        if isinstance(event, MemberEvent):
            if event.state == "gone":
                self._labels.pop(event.node, None)
            else:
                self._labels[event.node] = event.labels
            self._on_member(event)
            return
        operation = event.operation
        handler = self._handlers[cache].get(operation)
        word = (cache, operation) in self._words
        if isinstance(event, Unpinned) or (word and isinstance(event, (Done, Failed))):
            self._handlers[cache].pop(operation, None)
            self._words.discard((cache, operation))
        if handler is not None:
            handler(event)
