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
from troupe.open_cluster import STAGE, deployment_of

__all__ = ["Place", "http_address", "place_of", "replica_of"]

_REPLICA = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_EXTRA = "kv_connector_extra_config"
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


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


def place_of(extra: Mapping[str, Any], engine_id: str, *, role: str = "kv_both", http: str | None = None) -> Place:
    """`role`: vLLM's `kv_role`. `http`: where the engine's HTTP server listens, unless `extra` says it. Frontends find
    both among the labels of a node that joins. `ValueError` for keys that are unknown, or do not go together."""
    unknown = sorted(set(extra) - {"deployment", "http", "node", "supervisor"})
    if unknown:
        raise ValueError(
            f"{_EXTRA} knows no {', '.join(map(repr, unknown))}; it has 'supervisor' (host:port of one that runs), or "
            "'deployment' (a file) and the 'node' of it that this engine is, or nothing, and 'http' (host:port of this "
            "engine's HTTP server)"
        )
    for key, value in extra.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key!r} of {_EXTRA} is {value!r}; give a text")
    deployment, node, supervisor = (extra.get(key) for key in ("deployment", "node", "supervisor"))
    if (deployment is None) != (node is None) or (deployment is not None and supervisor is not None):
        raise ValueError(
            f"{_EXTRA} names a 'deployment' file together with the 'node' of it that this engine is, and no "
            "'supervisor' beside them"
        )
    if "http" in extra:
        http = _checked_address(extra["http"])
    if deployment is not None and node is not None:
        return Place(node, file=deployment)
    labels = {"engine_id": _cut(engine_id), "role": _ROLES.get(role, "both")}
    if http is not None:
        labels["http"] = http
    join = Announcement(stage=STAGE, replica=replica_of(engine_id), labels=labels)
    return Place(join.name, text=deployment_of(supervisor, called=f"'supervisor' of {_EXTRA}"), join=join)


def http_address(command_line: Sequence[str]) -> str | None:
    """Where the HTTP server of this command line listens, which vLLM's configuration does not say: host:port, or :port
    where it listens at every address. None: it is no server of vLLM's, or does not listen where its words say."""
    if not _is_server(command_line):
        return None
    options: dict[str, str] = {}
    words = iter(command_line)
    for word in words:
        key, equals, value = word.partition("=")
        key = key.replace("_", "-")
        if key in ("--host", "--port"):
            options[key] = value if equals else next(words, "")
        elif key in ("--uds", "--headless", "--ssl-keyfile", "--ssl-certfile"):
            return None
        elif key == "--config":  # a file that may say the port
            options.setdefault("--port", "")
    host, port = options.get("--host", ""), options.get("--port", "8000")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    if host in ("", "0.0.0.0", "::"):
        host = ""
    elif ":" in host:
        host = f"[{host.strip('[]')}]"
    return f"{host}:{int(port)}"


def _is_server(command_line: Sequence[str]) -> bool:
    program = command_line[0] if command_line else ""
    if "/vllm/entrypoints/" in program:
        return True
    return program.rpartition("/")[2] == "vllm" and "serve" in command_line[1:2]


def _checked_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"'http' of {_EXTRA} is {address!r}; give host:port, or :port of the node's own host")
    return _cut(address)


def _cut(text: str) -> str:
    """To what a label may hold."""
    return text.encode()[:256].decode(errors="ignore")
