"""Keeps the fleet as a membership describes it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from troupe.router.instances import Fleet, Instance

__all__ = ["Roster", "engines_of"]

logger = logging.getLogger("troupe.router")

# For an engine that answers but is missing from the membership: a supervisor just begun in place of a dead one knows no
# engines until they register.
_GRACE = 30.0  # seconds

_ADDRESS = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])?:(\d{1,5})")

# The worst state of an engine's ranks counts.
_STATES = ("down", "joining", "leaving", "suspect", "up")


class Roster:
    """Time is passed in: seconds of any clock that does not go back."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._missed: dict[Instance, float] = {}  # since when each is missing

    def adopt(self, found: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """`found`: by URL, from `engines_of`."""
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
        if not instance.member:  # it was never a member
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
    """The engines of a membership by the URL of their servers, or by "node:NAME" if their nodes have no label for it.
    An engine that was restarted may be listed twice: the life that is up counts."""
    lives: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in document.get("nodes", ()):
        address = str(_labels_of(node).get("http", ""))
        url = _url_of(address, str(node.get("host", ""))) or f"node:{node['name']}"
        lives.setdefault((url, str(node.get("replica_name") or node["name"])), []).append(node)
    found: dict[str, dict[str, Any]] = {}
    for (url, _), nodes in lives.items():
        life, known = _life_of(nodes), found.get(url)
        if known is None:
            found[url] = life
            continue
        newer, older = sorted((known, life), key=lambda one: _STATES.index(one["state"]), reverse=True)
        found[url] = newer if older["state"] == "down" else {**newer, "ranks": ()}  # unknown which of them answers
    return found


def _life_of(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The combined entry of the nodes of one life of an engine."""
    labels = _labels_of(nodes[0])
    in_order = sorted(nodes, key=_rank_of)
    complete = [_rank_of(node) for node in in_order] == list(range(int(nodes[0].get("ranks", 1))))
    return {
        "state": min((_state_of(node) for node in nodes), key=_STATES.index),
        "nodes": frozenset(node["name"] for node in nodes),
        "ranks": tuple(node["name"] for node in in_order) if complete else (),
        "fingerprint": str(nodes[-1].get("fingerprint", "")),
        "role": labels.get("role", "both"),
        "mode": "write" if all(_labels_of(node).get("mode") == "write" for node in nodes) else "read",
        "engine_id": str(labels.get("engine_id", "")),
    }


def _labels_of(node: Mapping[str, Any]) -> Mapping[str, Any]:
    labels: Mapping[str, Any] = node.get("labels", {})
    return labels


def _rank_of(node: Mapping[str, Any]) -> int:
    return int(node.get("rank", 0))


def _state_of(node: Mapping[str, Any]) -> str:
    state = node.get("state")
    return state if state in _STATES else "down"


def _url_of(address: str, host: str) -> str:
    """`address`: host:port, or :port at the node's own host. "" if it is invalid."""
    split = _ADDRESS.fullmatch(address)
    if split is None or not 0 < int(split[2]) < 65536:
        return ""
    at = split[1] or (f"[{host}]" if ":" in host else host)
    return f"http://{at}:{int(split[2])}" if at else ""


def _update(instance: Instance, entry: Mapping[str, Any]) -> bool:
    """Updates an engine; returns whether it may have become usable."""
    before = instance.member
    instance.member = entry["state"]
    instance.nodes = entry["nodes"]
    instance.fingerprint = entry["fingerprint"]
    instance.ranks = entry.get("ranks", ())
    instance.engine_id = entry.get("engine_id", "")
    instance.mode = entry.get("mode", "read")
    if not instance.given:
        instance.prefills, instance.decodes = entry["role"] != "decode", entry["role"] != "prefill"
    if before == instance.member:
        return False
    if instance.member == "down" and before:
        logger.warning("%s is down", instance.name)
        instance.lost("its node is down")
    return instance.usable
