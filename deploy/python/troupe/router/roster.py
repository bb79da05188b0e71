"""The fleet as a membership has it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from troupe.router.instances import Fleet, Instance

__all__ = ["Roster", "engines_of"]

logger = logging.getLogger("troupe.router")

# Of an engine whose server answers and which the membership does not have any more: a supervisor that was just begun in
# place of one that died knows nobody until they have come to it.
_GRACE = 30.0  # seconds

_ADDRESS = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])?:(\d{1,5})")

# Of ranks of one engine the worst state counts.
_STATES = ("down", "joining", "leaving", "suspect", "up")


class Roster:
    """Time is passed in: seconds of any clock that does not go back."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._missed: dict[Instance, float] = {}  # since when

    def adopt(self, found: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """`found`: by URL, as `engines_of` has it."""
        changed = False
        by_node = {node: one for one in found.values() for node in one["nodes"]}
        for instance in self._fleet:
            entry = found.get(instance.url)
            if entry is None:
                entry = next((by_node[node] for node in instance.nodes if node in by_node), None)
            if entry is not None:
                self._missed.pop(instance, None)
                changed |= _update(instance, entry)
            elif self._has_gone(instance, now):
                self._leave(instance)
        for url, entry in found.items():
            if url.startswith("http") and self._fleet.at(url) is None and entry["state"] != "down":
                instance = Instance(url, prefills=True, decodes=True)
                _update(instance, entry)
                self._fleet.add(instance)
                logger.info("%s has joined the cluster (%s)", instance.name, instance.role)
        if changed:
            self._fleet.on_change()

    # -- parts

    def _has_gone(self, instance: Instance, now: float) -> bool:
        if not instance.member:  # it never was there
            return False
        since = self._missed.setdefault(instance, now)
        return not instance.usable or now - since >= _GRACE

    def _leave(self, instance: Instance) -> None:
        self._missed.pop(instance, None)
        if instance.given:
            _update(instance, {"state": "down", "nodes": instance.nodes, "fingerprint": ""})
            return
        logger.info("%s has left the cluster", instance.name)
        self._fleet.remove(instance)


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
    if not instance.given:
        instance.prefills, instance.decodes = entry["role"] != "decode", entry["role"] != "prefill"
    if before == instance.member:
        return False
    if instance.member == "down" and before:
        logger.warning("%s is down", instance.name)
        instance.lost("its node is down")
    return instance.usable
