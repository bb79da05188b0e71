"""The operator's settings of the backend: the environment variable TROUPE_SGLANG, a mapping in JSON. SGLang has no flag
for it."""

from __future__ import annotations

import difflib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from troupe.open_cluster import NUMBERS, check_texts, supervisor_section, transport_section

__all__ = ["STAGE", "VARIABLE", "Settings", "read_settings", "settings_of"]

VARIABLE = "TROUPE_SGLANG"

#: The stage of the deployment that every scheduler process joins.
STAGE = "sglang"

_TEXTS = ("cluster", "deployment", "supervisor")
_BACKENDS = ("auto", "rdma", "shm", "tcp", "xgmi")
_KEYS = frozenset((*_TEXTS, *NUMBERS, "backend"))
# Keys that a deployment's file contains itself.
_OF_THE_FILE = frozenset(("backend", "cluster", "supervisor", *NUMBERS))

# The first process begins the supervisor, and the others find it. The times are long: a scheduler that loads a model
# does not answer for seconds. A killed peer is noticed at once.
_DEPLOYMENT = """\
cluster: {cluster}
supervisor: {{{supervisor}, heartbeat_timeout: 10s}}
stages:
  - {{name: {stage}, role: both, open: {{max_nodes: 1023}}, transport: {transport}}}
edges:
  - {{from: {stage}, to: {stage}, mode: write}}
"""


@dataclass(frozen=True)
class Settings:
    """The settings of one process.

    Attributes:
        file: path of the deployment; or `text`: its YAML.
        cluster: compared by both sides before they transfer: the cluster's name, and where its supervisor is. Empty:
            the deployment is a file.
    """

    file: str | None
    text: str | None
    cluster: str


def read_settings() -> Settings:
    """From the environment. `ValueError` names the key that is wrong and what to write instead."""
    said = os.environ.get(VARIABLE, "").strip()
    if not said:
        return settings_of({})
    try:
        found = json.loads(said)
    except ValueError as why:
        raise ValueError(f'{VARIABLE} is not JSON: {why}; write {{"supervisor": "HOST:PORT"}}, for example') from None
    return settings_of(found)


def settings_of(said: Mapping[str, Any]) -> Settings:
    """`ValueError` names the key that is wrong and what to write instead."""
    if not isinstance(said, Mapping):
        raise ValueError(f'{VARIABLE} is {said!r}; give a mapping, such as {{"supervisor": "HOST:PORT"}}')
    for key in sorted(set(said) - _KEYS):
        meant = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"did you mean {meant[0]!r}? It" if meant else "it"
        raise ValueError(f"{VARIABLE} knows no {key!r}; {hint} has {', '.join(sorted(_KEYS))}")
    check_texts(said, _TEXTS, VARIABLE)
    if "deployment" in said:
        doubled = sorted(_OF_THE_FILE & set(said))
        if doubled:
            raise ValueError(
                f"{', '.join(map(repr, doubled))} of {VARIABLE} cannot be given with 'deployment'; set it "
                f"in that file, in `cluster`, `supervisor`, and `transport` of its stage `{STAGE}`"
            )
        return Settings(str(said["deployment"]), None, "")
    cluster, supervisor = str(said.get("cluster", STAGE)), said.get("supervisor")
    text = _DEPLOYMENT.format(
        cluster=json.dumps(cluster),
        supervisor=supervisor_section(supervisor, f"'supervisor' of {VARIABLE}"),
        stage=STAGE,
        transport=json.dumps({"peer_silence": "10s", **transport_section(said, _BACKENDS, VARIABLE)}),
    )
    where = supervisor or f"begun on {socket.gethostname()} by user {os.getuid()}"
    return Settings(None, text, f"{cluster}, supervisor {where}")
