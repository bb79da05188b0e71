"""The engines of a cluster of Troupe's: who is in it, and where its supervisor would have a request."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from troupe.cluster import Cluster
from troupe.errors import TroupeError
from troupe.open_cluster import deployment_of
from troupe.router.instances import Fleet, Instance
from troupe.router.settings import Settings

__all__ = ["Members"]

logger = logging.getLogger("troupe.router")

_TIMEOUT = 2.0  # seconds, of a call to the supervisor
_PATIENCE = 0.5  # of a request for its placement: the router can choose by itself
_LOOK = 1.0  # between two looks at the membership
_THREADS = 8
_MOST_PENDING = 256  # calls; behind it the router chooses by itself

_ADDRESS = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])?:(\d{1,5})")

# Of ranks of one engine the worst state counts.
_STATES = ("down", "joining", "leaving", "suspect", "up")

_Result = TypeVar("_Result")


class Members:
    """Keeps the fleet as the membership is. While the supervisor is away the last one counts."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        """Needs libtroupe (`OSError`). `TroupeError`, `ValueError`: the deployment is none."""
        self._fleet = fleet
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="troupe-router")
        self._pending = 0
        self._reachable = False
        self._said = ""
        if settings.deployment is not None:
            self._cluster = Cluster(file=settings.deployment, timeout=_TIMEOUT, lazy=True)
        else:
            text = deployment_of(settings.supervisor)
            self._cluster = Cluster(text=text, timeout=_TIMEOUT, lazy=True)

    @property
    def reachable(self) -> bool:
        """The supervisor answered when it was asked last."""
        return self._reachable

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                document = await self._call(self._cluster.members)
                if not self._reachable:
                    logger.info("the supervisor of cluster %s answers", document.get("cluster"))
                self._reachable, self._said = True, ""
                self._adopt(engines_of(document))
            except TroupeError as why:
                self._lost_sight(str(why))
            except Exception:
                logger.exception("the membership cannot be read")
            await asyncio.sleep(_LOOK)

    def may_place(self, model: str | None) -> bool:
        """Whether the supervisor can know a good place: every engine that may be chosen is a member that it may choose,
        too, and the other way round."""
        if not self._reachable or self._pending >= _MOST_PENDING:
            return False
        serving = self._fleet.serving(model)
        others = {one for one in self._fleet if one.nodes and one.usable} - set(serving)
        return not others and all(one.nodes and (one.given or one.role == "both") for one in serving)

    async def place(self, request: str, affinity: str | None) -> tuple[Instance, Instance] | None:
        """Where the supervisor would have a request: (prefill, decode). None: it does not say. It counts the request
        there until it is told that that one has `finished`."""
        try:
            placed = await asyncio.wait_for(
                self._call(lambda: self._cluster.place(request, affinity=affinity)), _PATIENCE
            )
        except asyncio.TimeoutError:
            return None
        except TroupeError as why:
            logger.debug("%s: the supervisor places it nowhere: %s", request, why)
            return None
        prefill, decode = (self._fleet.by_node(nodes[0].name) for nodes in (placed.prefill, placed.decode))
        return None if prefill is None or decode is None else (prefill, decode)

    def finished(self, request: str) -> None:
        """Does not wait. What the supervisor does not hear it forgets by itself, in time."""

        def tell() -> None:
            try:
                self._cluster.finished(request)
            except TroupeError as why:
                logger.debug("%s: the supervisor does not hear that it ended: %s", request, why)

        if self._pending < _MOST_PENDING:
            self._count(self._threads.submit(tell))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- parts

    async def _call(self, work: Callable[[], _Result]) -> _Result:
        future = self._threads.submit(work)
        self._count(future)
        return await asyncio.wrap_future(future)

    def _count(self, future: Any) -> None:
        loop = asyncio.get_running_loop()
        self._pending += 1

        def ended(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._ended)

        future.add_done_callback(ended)

    def _ended(self) -> None:
        self._pending -= 1

    def _lost_sight(self, why: str) -> None:
        if self._reachable or why != self._said:
            logger.warning("the supervisor does not answer, the last membership counts: %s", why)
        self._reachable, self._said = False, why

    def _adopt(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """`found`: by URL."""
        changed = False
        by_node = {node: one for one in found.values() for node in one["nodes"]}
        for instance in self._fleet:
            entry = found.get(instance.url)
            if entry is None:
                entry = next((by_node[node] for node in instance.nodes if node in by_node), None)
            if entry is not None:
                changed |= _update(instance, entry)
            elif not instance.given:
                logger.info("%s has left the cluster", instance.name)
                self._fleet.remove(instance)
            elif instance.nodes and instance.member:
                changed |= _update(instance, {"state": "down", "nodes": instance.nodes, "fingerprint": ""})
        for url, entry in found.items():
            if url.startswith("http") and self._fleet.at(url) is None and entry["state"] != "down":
                role = entry["role"]
                instance = Instance(url, prefills=role != "decode", decodes=role != "prefill")
                _update(instance, entry)
                self._fleet.add(instance)
                logger.info("%s has joined the cluster (%s)", instance.name, instance.role)
        if changed:
            self._fleet.on_change()


def engines_of(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The engines of a membership by the URL of their servers; those whose nodes have no label of it by "node:NAME".
    An engine that was started again may stand in it twice: the life that is up counts."""
    lives: dict[tuple[str, str], dict[str, Any]] = {}
    for node in document.get("nodes", ()):
        labels = node.get("labels", {})
        url = _url_of(str(labels.get("http", "")), str(node.get("host", ""))) or f"node:{node['name']}"
        state = node.get("state") if node.get("state") in _STATES else "down"
        life = lives.setdefault(
            (url, str(node.get("replica_name") or node["name"])),
            {"state": "up", "nodes": frozenset(), "fingerprint": "", "role": labels.get("role", "both")},
        )
        life["state"] = min(life["state"], state, key=_STATES.index)
        life["nodes"] |= {node["name"]}
        life["fingerprint"] = str(node.get("fingerprint", ""))
    found: dict[str, dict[str, Any]] = {}
    for (url, _), life in lives.items():
        known = found.get(url)
        if known is None or _STATES.index(life["state"]) > _STATES.index(known["state"]):
            found[url] = life
    return found


def _url_of(address: str, host: str) -> str:
    """`address`: host:port, or :port at the node's own host. "": it is none."""
    split = _ADDRESS.fullmatch(address)
    if split is None or not 0 < int(split[2]) < 65536:
        return ""
    at = split[1] or (f"[{host}]" if ":" in host else host)
    return f"http://{at}:{int(split[2])}" if at else ""


def _update(instance: Instance, entry: Mapping[str, Any]) -> bool:
    """Whether it may have become usable."""
    before = instance.member
    instance.member = entry["state"]
    instance.nodes = entry["nodes"]
    instance.fingerprint = entry["fingerprint"]
    if before == instance.member:
        return False
    if instance.member == "down" and before:
        logger.warning("%s is down", instance.name)
        instance.lost("its node is down")
    return instance.usable
