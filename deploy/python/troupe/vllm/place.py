"""Who an engine is in its cluster, and which cluster that is: from `kv_connector_extra_config`, or from nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.engine import Engine
from troupe.layout import Layout
from troupe.members import Announcement

__all__ = ["Place", "place_of", "replica_of"]

STAGE = "engines"
_REPLICA = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

# Engines of one machine that say nothing: the first of them begins the supervisor, the others find it.
_CLUSTER = """\
cluster: vllm
supervisor: {{{supervisor}}}
stages:
  - {{name: {stage}, role: both, open: {{max_nodes: 256}}}}
edges:
  - {{from: {stage}, to: {stage}, mode: read}}
"""


@dataclass(frozen=True)
class Place:
    """A node that a deployment's file names, or one that joins an open stage of the deployment in `text`."""

    node: str
    file: str | None = None
    text: str | None = None
    join: Announcement | None = None

    def start(self, layout: Layout, regions: Sequence[object]) -> Engine:
        """The engine. It registers with the supervisor by itself, in whatever order they start."""
        name = None if self.join is not None else self.node
        return Engine(name, join=self.join, file=self.file, text=self.text, layout=layout, regions=regions)


def replica_of(engine_id: str) -> str:
    """vLLM's id of an engine as the name of a replica: itself, where it may be one."""
    if _REPLICA.fullmatch(engine_id):
        return engine_id
    return hashlib.blake2b(engine_id.encode(), digest_size=16).hexdigest()


def place_of(extra: Mapping[str, Any], engine_id: str) -> Place:
    """`ValueError` for keys that are unknown, or do not go together."""
    unknown = sorted(set(extra) - {"deployment", "node", "supervisor"})
    if unknown:
        raise ValueError(
            f"kv_connector_extra_config knows no {', '.join(map(repr, unknown))}; it has 'supervisor' (host:port of "
            "one that runs), or 'deployment' (a file) and the 'node' of it that this engine is, or nothing"
        )
    for key, value in extra.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key!r} of kv_connector_extra_config is {value!r}; give a text")
    deployment, node, supervisor = (extra.get(key) for key in ("deployment", "node", "supervisor"))
    if (deployment is None) != (node is None) or (deployment is not None and supervisor is not None):
        raise ValueError(
            "kv_connector_extra_config names a 'deployment' file together with the 'node' of it that this engine is, "
            "and no 'supervisor' beside them"
        )
    if deployment is not None and node is not None:
        return Place(node, file=deployment)
    join = Announcement(stage=STAGE, replica=replica_of(engine_id), labels={"engine_id": _cut(engine_id)})
    return Place(join.name, text=_CLUSTER.format(stage=STAGE, supervisor=_supervisor(supervisor)), join=join)


def _cut(text: str) -> str:
    """To what a label may hold."""
    return text.encode()[:256].decode(errors="ignore")


def _supervisor(address: str | None) -> str:
    if address is None:
        return "port: 0, begin: true"
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"'supervisor' of kv_connector_extra_config is {address!r}; give host:port")
    return f'host: "{host}", port: {int(port)}'
