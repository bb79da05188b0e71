"""The cluster of engines that name none: engines and frontends of one user on one machine find each other by it."""

from __future__ import annotations

__all__ = ["STAGE", "deployment_of"]

#: The stage that every engine joins.
STAGE = "engines"

# The first of those that need a supervisor begins it, the others find it.
_DEPLOYMENT = """\
cluster: vllm
supervisor: {{{supervisor}}}
stages:
  - {{name: {stage}, role: both, open: {{max_nodes: 256}}}}
edges:
  - {{from: {stage}, to: {stage}, mode: read}}
limits: {{source_lease: 30s}}
"""


def deployment_of(supervisor: str | None, *, called: str = "supervisor") -> str:
    """The text of its deployment. `supervisor`: HOST:PORT of one that runs, which `called` names in a `ValueError`."""
    return _DEPLOYMENT.format(stage=STAGE, supervisor=_section(supervisor, called))


def _section(address: str | None, called: str) -> str:
    if address is None:
        return "port: 0, begin: true"
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{called} is {address!r}; give host:port")
    return f'host: "{host}", port: {int(port)}'
