"""A cluster of Troupe: its engines, its supervisor's placements, and the release of caches that will not be taken.

The library's calls block, so threads make them, different ones for each kind of call. A supervisor that does not place
a request in time is not asked again until it has answered, and the membership is still polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from troupe.cluster import Cluster
from troupe.errors import ErrorCode, TroupeError
from troupe.hand_off import RELEASE
from troupe.open_cluster import deployment_of
from troupe.placement import NodeInfo, Placement
from troupe.router.errors import one_line
from troupe.router.instances import Fleet, Instance
from troupe.router.roster import Roster, engines_of
from troupe.router.settings import Settings

__all__ = ["Members"]

logger = logging.getLogger("troupe.router")

_TIMEOUT = 2.0  # seconds, of a call to the supervisor
_PATIENCE = 0.5  # of a request for its placement: the router can choose by itself
_HEARD = 5.0  # of a message that needs no answer: an engine reads messages between its steps, and drops expired ones
_LOOK = 1.0  # between two polls of the membership
_THREADS = 8  # threads that ask for placements
_MOST_PLACING = 256  # requests; beyond that the router chooses by itself
_MOST_RELEASES = 512  # waiting releases; beyond that leases end the transfers
_MOST_ENDED = 65536  # ends not reported to the supervisor yet: it remembers no more requests either

# After these errors the call may be repeated later.
_AWAY = (ErrorCode.PEER_UNREACHABLE, ErrorCode.PEER_LOST, ErrorCode.DEADLINE, ErrorCode.OVERLOADED)


class Members:
    """Keeps the fleet in step with the membership. While the supervisor is away, the last membership counts."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        """Needs libtroupe (`OSError`). `TroupeError`, `ValueError`: the deployment is invalid."""
        self._fleet = fleet
        self._roster = Roster(fleet)
        self._looking, self._placing, self._telling, self._releasing = (
            ThreadPoolExecutor(threads, thread_name_prefix=f"troupe-{name}")
            for name, threads in (("members", 1), ("place", _THREADS), ("finished", 1), ("release", _THREADS))
        )
        self._releases = 0
        self._calls: dict[str, list[Future[Placement]]] = {}  # by request, until it has ended; the last may still run
        self._running = 0  # number of running calls
        self._late = 0  # number of those that no request waits for any longer
        self._ended: deque[str] = deque(maxlen=_MOST_ENDED)  # requests whose end the supervisor does not know yet
        self._tells = False
        self._reachable = False
        self._has_looked = False
        self._said = ""
        if settings.deployment is not None:
            self._cluster = Cluster(file=settings.deployment, timeout=_TIMEOUT, lazy=True)
        else:
            text = deployment_of(settings.supervisor)
            self._cluster = Cluster(text=text, timeout=_TIMEOUT, lazy=True)

    @property
    def reachable(self) -> bool:
        """Whether the supervisor answered the last call."""
        return self._reachable

    @property
    def has_looked(self) -> bool:
        """Whether the supervisor has been asked, even in vain."""
        return self._has_looked

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                document = await asyncio.wrap_future(self._looking.submit(self._cluster.members))
                if not self._reachable:
                    logger.info("the supervisor of cluster %s answers", document.get("cluster"))
                self._reachable, self._said = True, ""
                self._roster.adopt(engines_of(document), time.monotonic())
                self._tell()
            except TroupeError as why:
                self._lost_sight(one_line(str(why)))
            except Exception:
                logger.exception("the membership cannot be read")
            self._has_looked = True
            await asyncio.sleep(_LOOK)

    def may_place(self, model: str | None) -> bool:
        """Whether the supervisor can place well and in time: the engines that the router may choose are exactly the
        members that the supervisor may choose."""
        if not self._reachable or self._late or self._running >= _MOST_PLACING:
            return False
        serving = self._fleet.serving(model)
        others = {one for one in self._fleet if one.nodes and one.usable} - set(serving)
        return not others and all(one.nodes and (one.given or one.role == "both") for one in serving)

    async def place(
        self, request: str, affinity: str | None, failed: Sequence[str] = ()
    ) -> tuple[Instance, Instance] | None:
        """The supervisor's choice for a request: (prefill, decode). None if it does not say. It counts the request
        there until it is told that the request has `finished`. `failed`: nodes that lost the request before, whose
        affinity is dropped."""
        call = self._placing.submit(lambda: self._cluster.place(request, affinity=affinity, failed=failed))
        self._calls.setdefault(request, []).append(call)
        self._running += 1
        answered = asyncio.wrap_future(call)
        answered.add_done_callback(self._place_ended)
        try:
            await asyncio.wait({answered}, timeout=_PATIENCE)
        finally:
            call.cancel()  # unless it is running
        if not answered.done():
            self._late += 1
            answered.add_done_callback(self._late_ended)
        if not answered.done() or answered.cancelled():
            return None
        try:
            placed = answered.result()
        except TroupeError as why:
            logger.debug("%s: the supervisor does not place it: %s", request, why)
            return None
        prefill, decode = (self._of(nodes) for nodes in (placed.prefill, placed.decode))
        return None if prefill is None or decode is None else (prefill, decode)

    def finished(self, request: str) -> None:
        """Does not wait. The supervisor is told once it has placed the request, and once it is reachable again."""
        calls = self._calls.pop(request, None)
        if calls is None:
            return
        if calls[-1].done():
            self._has_ended(request, calls)
            return
        loop = asyncio.get_running_loop()
        calls[-1].add_done_callback(lambda _: _call_soon(loop, lambda: self._has_ended(request, calls)))

    def release(self, nodes: Sequence[str], transfer: str) -> None:
        """Tells an engine's nodes, without waiting, that a transfer will not be taken. Nodes that are not reached rely
        on the lease."""
        loop = asyncio.get_running_loop()
        for node in nodes:
            if self._releases >= _MOST_RELEASES:
                return
            try:
                told = self._releasing.submit(self._release, node, transfer)
            except RuntimeError:  # the router stops
                return
            self._releases += 1
            told.add_done_callback(lambda _: _call_soon(loop, self._has_released))

    def close(self) -> None:
        """Ends are still reported, by a thread that the process waits for."""
        for threads in (self._looking, self._placing, self._releasing):
            threads.shutdown(wait=False, cancel_futures=True)
        self._telling.shutdown(wait=False)

    # -- parts

    def _of(self, nodes: Sequence[NodeInfo]) -> Instance | None:
        return self._fleet.by_node(nodes[0].name) if nodes else None

    def _place_ended(self, answered: asyncio.Future[Placement]) -> None:
        self._running -= 1
        if not answered.cancelled():
            answered.exception()  # retrieved, since no request may wait for it any longer

    def _late_ended(self, _: object) -> None:
        self._late -= 1

    def _has_ended(self, request: str, calls: Sequence[Future[Placement]]) -> None:
        if not all(call.cancelled() for call in calls):
            self._ended.append(request)
            self._tell()

    def _tell(self) -> None:
        """Reports all pending ends, from one thread at a time."""
        if self._tells or not self._ended or not self._reachable:
            return
        loop = asyncio.get_running_loop()
        try:
            told = self._telling.submit(self._tell_all)
        except RuntimeError:  # the router stops
            return
        self._tells = True
        told.add_done_callback(lambda _: _call_soon(loop, self._has_told))

    def _tell_all(self) -> None:
        while self._ended:
            request = self._ended.popleft()
            try:
                self._cluster.finished(request)
            except TroupeError as why:
                logger.debug("%s: the supervisor cannot be told that it ended: %s", request, why)
                if why.code in _AWAY:
                    self._ended.appendleft(request)
                    return

    def _has_told(self) -> None:
        self._tells = False

    def _release(self, node: str, transfer: str) -> None:
        try:
            self._cluster.call(node, RELEASE, transfer.encode(), timeout=_HEARD)
        except TroupeError as why:
            logger.debug("%s cannot be told that nobody takes %s: %s", node, transfer, why)

    def _has_released(self) -> None:
        self._releases -= 1

    def _lost_sight(self, why: str) -> None:
        if self._reachable or why != self._said:
            logger.warning("the supervisor does not answer; the last membership stays in use: %s", why)
        self._reachable, self._said = False, why


def _call_soon(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    """Thread-safe. The loop may be closed by now."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)
