"""The default cluster, by which engines and frontends of one user on one machine find each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["NUMBERS", "STAGE", "check_texts", "deployment_of", "supervisor_section", "transport_section"]

#: Keys of a stage's section `transport` that an operator gives as numbers.
NUMBERS = ("num_workers", "post_batch_size", "qp_per_transfer")

#: The stage that every engine joins.
STAGE = "engines"

# The first process that needs a supervisor begins it, the others find it. The times are long, since an engine that
# computes on every core of a shared machine was seen to stall for seconds; a killed one is noticed at once.
_DEPLOYMENT = """\
cluster: vllm
supervisor: {{{supervisor}, heartbeat_timeout: 10s}}
stages:
  - {{name: {stage}, role: both, open: {{max_nodes: 256}}{transport}}}
edges:
  - {{from: {stage}, to: {stage}, mode: {mode}}}
limits: {{source_lease: {lease_ms}ms}}
"""


def deployment_of(
    supervisor: str | None,
    *,
    called: str = "supervisor",
    mode: str = "read",
    transport: Mapping[str, object] | None = None,
    source_lease: float = 30.0,
) -> str:
    """The text of the deployment. `supervisor`: HOST:PORT of a running one, called `called` in a `ValueError`. `mode`:
    read or write, the same at both ends of a transfer. `transport`: keys of a stage's section of that name, for the
    links of processes that start with this text. `source_lease`: seconds that a cache is kept without being asked
    for."""
    section = f", transport: {json.dumps(dict(transport))}" if transport else ""
    return _DEPLOYMENT.format(
        stage=STAGE,
        mode=mode,
        supervisor=supervisor_section(supervisor, called),
        transport=section,
        lease_ms=round(source_lease * 1000),
    )


def supervisor_section(address: str | None, called: str) -> str:
    """The section `supervisor` of a deployment: `address` as HOST:PORT, called `called` in a `ValueError`. None: a
    process that needs a supervisor begins it on its machine."""
    if address is None:
        return "port: 0, begin: true"
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{called} is {address!r}; give host:port")
    return f'host: "{host}", port: {int(port)}'


def transport_section(said: Mapping[str, Any], backends: Iterable[str], called: str) -> dict[str, object]:
    """The section `transport` of a deployment, from the keys of `said`, which is called `called` in a `ValueError`. The
    deployment's own check knows the bounds of numbers."""
    section: dict[str, object] = {}
    if "backend" in said:
        if said["backend"] not in backends:
            raise ValueError(f"'backend' of {called} is {said['backend']!r}; give one of {', '.join(backends)}")
        section["backend"] = said["backend"]
    for key in NUMBERS:
        if key in said:
            if isinstance(said[key], bool) or not isinstance(said[key], int):
                raise ValueError(f"{key!r} of {called} is {said[key]!r}; give a whole number")
            section[key] = said[key]
    return section


def check_texts(said: Mapping[str, Any], keys: Iterable[str], called: str) -> None:
    """`ValueError` if one of `keys` is in `said`, which is called `called`, and is not a text."""
    for key in keys:
        if key in said and (not isinstance(said[key], str) or not said[key]):
            raise ValueError(f"{key!r} of {called} is {said[key]!r}; give a string")
