"""An engine's cluster and its identity there: from `kv_connector_extra_config`, or by default."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.engine import Engine
from troupe.layout import Layout
from troupe.members import Announcement
from troupe.open_cluster import STAGE, deployment_of
from troupe.vllm.proxy import Proxy

__all__ = [
    "ALONE",
    "MAX_RANKS",
    "Place",
    "Ranks",
    "http_address",
    "nodes_behind",
    "nodes_of",
    "place_of",
    "pushes_of",
    "replica_of",
]

MAX_RANKS = 256  # of an engine, as many as the nodes of an open cluster

_REPLICA = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_EXTRA = "kv_connector_extra_config"
_TEXTS = frozenset(("deployment", "host_ip", "http", "node", "proxy_ip", "supervisor"))
# Keys of MoRIIO that are also keys of a deployment's `transport`, with the same times.
_TRANSPORT = frozenset(("backend", "num_workers", "post_batch_size", "qp_per_transfer"))
_TIMES = frozenset(("defer_timeout", "transfer_timeout"))
# MoRIIO's keys for its proxy, and those by which its engines find each other, which nodes of a cluster do not need.
_PORTS = frozenset(("handshake_port", "http_port", "notify_port", "proxy_ping_port"))
_PROXY = _PORTS | {"host_ip", "proxy_ip"}
_UNUSED = frozenset(("handshake_port", "notify_port", "recv_abort_timeout"))
_BACKENDS = ("auto", "rdma", "shm", "tcp", "xgmi")
# A load usually loses an unresponsive engine when the supervisor takes it for dead. What the engine may still touch, an
# RDMA device revokes sooner.
_PATIENCE = {"peer_silence": "10s", "rdma": {"fence_patience": "1s"}}
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
_MINTED = re.compile(r"(.+)-[0-9a-f]{32}")  # by `new_transfer` for a node
_REPLICATED = re.compile(r"_dp[0-9]+\Z")  # the end of the id that vLLM gives each data-parallel replica


@dataclass(frozen=True)
class Ranks:
    """How an engine is divided: `parts` of a pipeline, with `size` tensor-parallel ranks each. Rank r is
    tensor-parallel rank r % size of part r // size."""

    size: int = 1
    parts: int = 1

    @property
    def count(self) -> int:
        return self.size * self.parts


ALONE = Ranks()


@dataclass(frozen=True)
class Place:
    """The nodes of an engine, one for each of its ranks: named by a deployment's file, or joining an open stage
    (`joins`) of that file, or of the deployment in `text`."""

    nodes: tuple[str, ...]
    file: str | None = None
    text: str | None = None
    joins: tuple[Announcement, ...] = ()
    load_seconds: float | None = None  #: time for a load; none: the deployment's default
    pushes: bool = False  #: the prefill engine writes, while it computes if a router asks both engines at once
    proxy: Proxy | None = None  #: to which the engine is announced
    unused: tuple[str, ...] = ()  #: given keys of MoRIIO that have no meaning here

    def start(self, rank: int, layout: Layout, regions: Sequence[object]) -> Engine:
        """Starts a rank's engine. It registers with the supervisor in the background; the order of starts does not
        matter."""
        if self.joins:
            return Engine(
                join=self.joins[rank], file=self.file, text=self.text, layout=layout, regions=regions, calls=True
            )
        return Engine(self.nodes[rank], file=self.file, layout=layout, regions=regions, calls=True)


def replica_of(engine_id: str) -> str:
    """vLLM's id of an engine as the name of a replica: the id itself if it is a valid name."""
    if _REPLICA.fullmatch(engine_id):
        return engine_id
    return hashlib.blake2b(engine_id.encode(), digest_size=16).hexdigest()


def nodes_of(engine_id: str, ranks: int) -> tuple[str, ...]:
    """The nodes of an engine that has joined an open cluster."""
    replica = replica_of(engine_id)
    return tuple(Announcement(stage=STAGE, replica=replica, rank=rank, ranks=ranks).name for rank in range(ranks))


def nodes_behind(transfer: str, engine_id: str, ranks: Ranks) -> tuple[str, ...]:
    """The nodes of the engine that has named a transfer by its first node: from a deployment's file, whose names are
    independent of vLLM's id of the engine, or from an open cluster."""
    minted = _MINTED.fullmatch(transfer)
    if minted is not None and not minted[1].startswith(f"{STAGE}."):
        first = _named("", ranks)[0]
        replica = minted[1].removesuffix(first)
        if replica + first == minted[1]:
            return _named(replica, ranks)
    return nodes_of(engine_id, ranks.count)


def place_of(
    extra: Mapping[str, Any], engine_id: str, *, ranks: Ranks = ALONE, role: str = "kv_both", http: str | None = None
) -> Place:
    """`role`: vLLM's `kv_role`. `http`: where the engine's HTTP server listens, unless `extra` says it. Frontends find
    both among the labels of joining nodes. `ValueError` for keys that are unknown or contradict each other."""
    extra = {key: value for key, value in extra.items() if key not in ("host_ip", "proxy_ip") or value != ""}
    unknown = sorted(set(extra) - _TEXTS - _TRANSPORT - _TIMES - _PROXY - _UNUSED - {"read_mode"})
    if unknown:
        raise ValueError(
            f"{_EXTRA} knows no {', '.join(map(repr, unknown))}; it has 'supervisor' (host:port of one that runs), or "
            "'deployment' (a file whose stage `engines` the engine joins) and 'node' (where the file names it), "
            "or nothing, and 'http' (host:port of this engine's HTTP server); of MoRIIO's words "
            f"{', '.join(sorted(_PROXY | _UNUSED | {'read_mode'}))}, and without a file also "
            f"{', '.join(sorted(_TRANSPORT | _TIMES))}"
        )
    for key in sorted(_TEXTS & set(extra)):
        if not isinstance(extra[key], str) or not extra[key]:
            raise ValueError(f"{key!r} of {_EXTRA} is {extra[key]!r}; give a string")
    pushes = pushes_of(extra)
    tuning = sorted(set(extra) & (_TRANSPORT | _TIMES))
    if tuning and "deployment" in extra:
        said = ", ".join(map(repr, tuning))
        raise ValueError(
            f"{said} of {_EXTRA} cannot be given with 'deployment'; set it in that file, in `transport` and `limits`"
        )
    deployment, node, supervisor = (extra.get(key) for key in ("deployment", "node", "supervisor"))
    if deployment is None and node is not None:
        raise ValueError(f"'node' of {_EXTRA} is {node!r}; give the 'deployment' file that names it")
    if deployment is not None and supervisor is not None:
        raise ValueError(
            f"{_EXTRA} has both 'deployment' and 'supervisor'; leave 'supervisor' out, since the file says where it is"
        )
    http = _http_of(extra, http)
    proxy, unused = _proxy_of(extra, engine_id, ranks, role, http), _unused_of(extra)
    if deployment is not None and node is not None:
        return Place(_named(node, ranks), file=deployment, pushes=pushes, proxy=proxy, unused=unused)
    labels = {"engine_id": _cut(engine_id), "role": _ROLES.get(role, "both")}
    if pushes:
        labels["mode"] = "write"
    if http is not None:
        labels["http"] = http
    joins = tuple(
        Announcement(stage=STAGE, replica=replica_of(engine_id), rank=rank, ranks=ranks.count, labels=labels)
        for rank in range(ranks.count)
    )
    if deployment is not None:
        return Place(
            nodes_of(engine_id, ranks.count), file=deployment, joins=joins, pushes=pushes, proxy=proxy, unused=unused
        )
    text = deployment_of(
        supervisor,
        called=f"'supervisor' of {_EXTRA}",
        mode="write" if pushes else "read",
        transport={
            **_PATIENCE,
            **{key: _number_or_word(key, extra[key]) for key in sorted(_TRANSPORT & set(extra))},
        },
        source_lease=_seconds("defer_timeout", extra) or 30.0,
    )
    return Place(
        nodes_of(engine_id, ranks.count),
        text=text,
        joins=joins,
        load_seconds=_seconds("transfer_timeout", extra),
        pushes=pushes,
        proxy=proxy,
        unused=unused,
    )


def pushes_of(extra: Mapping[str, Any]) -> bool:
    """Whether `read_mode` is false."""
    said = str(extra.get("read_mode", True)).lower()
    if said not in ("true", "1", "false", "0"):
        raise ValueError(
            f"'read_mode' of {_EXTRA} is {extra['read_mode']!r}; give true (a decode engine reads what the prefill "
            "engine keeps) or false (the prefill engine writes it there, layer by layer)"
        )
    return said in ("false", "0")


def _http_of(extra: Mapping[str, Any], listens: str | None) -> str | None:
    """`listens`: from the command line."""
    if "http" in extra:
        return _checked_address(extra["http"])
    host, _, port = (listens or "").rpartition(":")
    host = extra.get("host_ip", host)
    port = str(_port("http_port", extra)) if "http_port" in extra else port
    return _cut(f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}") if port else None


def _proxy_of(extra: Mapping[str, Any], engine_id: str, ranks: Ranks, role: str, http: str | None) -> Proxy | None:
    ports = {key: _port(key, extra) for key in sorted(_PORTS & set(extra))}
    if "proxy_ip" not in extra:
        return None
    if "proxy_ping_port" not in ports:
        raise ValueError(f"'proxy_ip' of {_EXTRA} needs 'proxy_ping_port' as well: the port where engines register")
    if role not in _ROLES:
        raise ValueError(
            f"'proxy_ip' of {_EXTRA}: such a proxy knows engines that compute prompts and engines that write texts; "
            f"give kv_producer or kv_consumer as kv_role, which is {role!r}"
        )
    pushes = pushes_of(extra)
    if pushes and ("node" in extra or _REPLICATED.search(engine_id)):
        raise ValueError(
            f"'proxy_ip' of {_EXTRA} with 'read_mode' false: such a proxy asks both engines at once, and does not tell "
            "the decode engine which node of a deployment's file, or which data-parallel replica, computes the prompt; "
            "give read_mode true, or use `troupe router`"
        )
    return Proxy(
        extra["proxy_ip"].strip("[]"),
        ports.pop("proxy_ping_port"),
        role="P" if _ROLES[role] == "prefill" else "D",
        http=http,
        replica=replica_of(engine_id),
        ranks=ranks.count,
        pushes=pushes,
        **{key: port for key, port in ports.items() if key in _UNUSED},
    )


def _unused_of(extra: Mapping[str, Any]) -> tuple[str, ...]:
    _seconds("recv_abort_timeout", extra)
    return tuple(sorted(set(extra) & (_UNUSED if "proxy_ip" in extra else _UNUSED | {"proxy_ping_port"})))


def _number_or_word(key: str, value: object) -> int | str:
    """As in MoRIIO, where a number may be a text."""
    text = str(value).strip().lower()
    if key == "backend":
        if text not in _BACKENDS:
            raise ValueError(f"'backend' of {_EXTRA} is {value!r}; give one of {', '.join(_BACKENDS)}")
        return text
    if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise ValueError(f"{key!r} of {_EXTRA} is {value!r}; give a whole number")
    return int(text)


def _port(key: str, extra: Mapping[str, Any]) -> int:
    text = str(extra[key])
    if isinstance(extra[key], bool) or not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ValueError(f"{key!r} of {_EXTRA} is {extra[key]!r}; give a port, 1 to 65535")
    return int(text)


def _seconds(key: str, extra: Mapping[str, Any]) -> float | None:
    if key not in extra:
        return None
    try:
        seconds = float(extra[key])
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(extra[key], bool) or not 1 <= seconds <= 24 * 3600:
        raise ValueError(f"{key!r} of {_EXTRA} is {extra[key]!r}; give seconds, 1 to 86400")
    return seconds


def _named(replica: str, ranks: Ranks) -> tuple[str, ...]:
    """A deployment's names for the nodes of a replica."""
    parts = [f"-pp{part}" for part in range(ranks.parts)] if ranks.parts > 1 else [""]
    sliced = [f"-tp{rank}" for rank in range(ranks.size)] if ranks.size > 1 else [""]
    return tuple(f"{replica}{part}{rank}" for part in parts for rank in sliced)


def http_address(command_line: Sequence[str]) -> str | None:
    """Where the HTTP server of this command line listens, which vLLM's configuration does not say: host:port, or :port
    if it listens at every address. None: it is not a server of vLLM, or the command line does not say where it
    listens."""
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
        elif key == "--config":  # a file, which may contain the port
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
    """Truncates a text to the length of a label."""
    return text.encode()[:256].decode(errors="ignore")
