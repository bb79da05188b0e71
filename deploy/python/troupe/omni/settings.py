"""The settings of a connector, from `extra` of vLLM-Omni's YAML."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from troupe.open_cluster import NUMBERS, check_texts, supervisor_section, transport_section

__all__ = ["STAGE", "Settings", "settings_of"]

#: The stage of the deployment that every process joins. It is a store: its nodes keep values in their own memory.
STAGE = "omni"

_TEXTS = ("cluster", "deployment", "supervisor")
_BACKENDS = ("auto", "rdma", "shm", "tcp")
_OWN = frozenset((*_TEXTS, *NUMBERS, "backend", "memory", "timeout", "ttl"))
# Keys that a deployment's file contains itself.
_OF_THE_FILE = frozenset(("cluster", "supervisor", "memory", "backend", *NUMBERS))
# Keys that vLLM-Omni itself adds to `extra`.
_OF_OMNI = frozenset(("stage_id", "role", "from_stage", "to_stage"))

_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"([0-9]{1,15}) ?([KMGT]i?B|B)")
_LEAST_MEMORY = 1 << 20
_DEFAULT_MEMORY = 1 << 30
_DEFAULT_TTL = 300.0  # seconds
_DEFAULT_TIMEOUT = 30.0  # seconds

# The first process begins the supervisor, the others find it. The times are long: computing processes stall for seconds
# on a busy machine. A killed peer is noticed at once.
_DEPLOYMENT = """\
cluster: {cluster}
supervisor: {{{supervisor}, heartbeat_timeout: 10s}}
stages:
  - name: {stage}
    role: store
    open: {{max_nodes: 256}}
    pool: {{size: {memory}B}}
    transport: {transport}
limits: {{transfer_deadline: {deadline}ms}}
"""


@dataclass(frozen=True)
class Settings:
    """The settings of one connector. Connectors of a process with equal `stage`, `file` and `text` share a node.

    Attributes:
        stage: vLLM-Omni's id of the process's stage; None: it was not given.
        file: path of the deployment; or `text`: its YAML.
        ttl: seconds that an untaken payload is kept.
        timeout: seconds that moving one payload, or waiting for room, may take at most.
        unread: keys of `extra` that are not the connector's, for the stage's own code.
    """

    stage: str | None
    file: str | None
    text: str | None
    ttl: float
    timeout: float
    unread: tuple[str, ...] = ()


def settings_of(extra: Mapping[str, Any]) -> Settings:
    """`ValueError` names the key that is wrong and what to write instead."""
    if not isinstance(extra, Mapping):
        raise ValueError(f"`extra` of TroupeOmniConnector is {extra!r}; give a mapping")
    unread = _unread(extra)
    check_texts(extra, _TEXTS, "TroupeOmniConnector")
    stage = extra.get("stage_id")
    name = None if stage is None or stage in (-1, "-1", "") else str(stage)
    ttl = _seconds("ttl", extra, _DEFAULT_TTL)
    timeout = _seconds("timeout", extra, _DEFAULT_TIMEOUT)
    if "deployment" in extra:
        said = sorted(_OF_THE_FILE & set(extra))
        if said:
            raise ValueError(
                f"{', '.join(map(repr, said))} of TroupeOmniConnector cannot be given with 'deployment'; set it "
                f"in that file, in `cluster`, `supervisor`, and `pool` and `transport` of its stage `{STAGE}`"
            )
        return Settings(name, str(extra["deployment"]), None, ttl, timeout, unread)
    text = _DEPLOYMENT.format(
        cluster=json.dumps(extra.get("cluster", STAGE)),
        supervisor=supervisor_section(extra.get("supervisor"), "'supervisor' of TroupeOmniConnector"),
        stage=STAGE,
        memory=_memory(extra.get("memory", _DEFAULT_MEMORY)),
        transport=json.dumps({"peer_silence": "5s", **transport_section(extra, _BACKENDS, "TroupeOmniConnector")}),
        deadline=math.ceil(timeout * 1000),
    )
    return Settings(name, None, text, ttl, timeout, unread)


def _unread(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that are not the connector's. Stages read keys of their own there (`codec_chunk_frames`, say), so only
    likely typing errors are refused."""
    unread = []
    for key in extra:
        if key in _OWN or key in _OF_OMNI:
            continue
        meant = difflib.get_close_matches(str(key), _OWN, n=1, cutoff=0.8)
        if meant:
            raise ValueError(
                f"TroupeOmniConnector knows no {key!r}; did you mean {meant[0]!r}? It has {', '.join(sorted(_OWN))}"
            )
        unread.append(str(key))
    return tuple(sorted(unread))


def _memory(said: object) -> int:
    size = -1
    if isinstance(said, int) and not isinstance(said, bool):
        size = said
    elif isinstance(said, str) and (found := _SIZE.fullmatch(said.strip())):
        size = int(found[1]) * _UNITS[found[2]]
    if not _LEAST_MEMORY <= size < 1 << 50:
        raise ValueError(
            f"'memory' of TroupeOmniConnector is {said!r}; give bytes, or a size such as 1GiB, of 1MiB or more"
        )
    return size


def _seconds(key: str, extra: Mapping[str, Any], otherwise: float) -> float:
    said = extra.get(key, otherwise)
    try:
        seconds = math.nan if isinstance(said, bool) else float(said)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0.1 <= seconds <= 24 * 3600:
        raise ValueError(f"{key!r} of TroupeOmniConnector is {said!r}; give seconds, 0.1 to 86400")
    return seconds
