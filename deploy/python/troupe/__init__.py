"""Troupe: a distributed KV-cache service for disaggregated LLM serving, from Python.

An `Engine` is one node of a deployment inside the process of an inference engine; `AsyncEngine` is the same for
asyncio; a `Cluster` is a frontend's view. `troupe.io` has one-sided agents, without a deployment; `AsyncAgent` wraps
them for asyncio, `troupe.nixl` in NIXL's API. Importing this package starts nothing and loads no library.
"""

from troupe import io
from troupe.aio import AsyncEngine
from troupe.async_agent import AsyncAgent
from troupe.cluster import Attempt, CallDraft, Carried, Cluster, Stop
from troupe.engine import Engine, Identity, configure_logging, library_version, protocol_version
from troupe.errors import ErrorCode, TroupeError, WaitTimeout
from troupe.events import (
    Allocated,
    Call,
    Done,
    Event,
    Failed,
    Info,
    Layers,
    MemberEvent,
    Operation,
    Outcome,
    Placed,
    Unpinned,
    Value,
    Wanted,
)
from troupe.layout import (
    Arrangement,
    GroupBlocks,
    LayerGroup,
    LayerKind,
    LayerShape,
    Layout,
    OpaqueUnit,
    Plane,
    StatePart,
    StateTensor,
)
from troupe.members import Announcement, Member
from troupe.memory import Memory
from troupe.placement import NodeInfo, Placement

__all__ = [
    "Allocated",
    "Announcement",
    "Arrangement",
    "AsyncAgent",
    "AsyncEngine",
    "Attempt",
    "Call",
    "CallDraft",
    "Carried",
    "Cluster",
    "Done",
    "Engine",
    "ErrorCode",
    "Event",
    "Failed",
    "GroupBlocks",
    "Identity",
    "Info",
    "LayerGroup",
    "LayerKind",
    "LayerShape",
    "Layers",
    "Layout",
    "Member",
    "MemberEvent",
    "Memory",
    "NodeInfo",
    "OpaqueUnit",
    "Operation",
    "Outcome",
    "Placed",
    "Placement",
    "Plane",
    "StatePart",
    "StateTensor",
    "Stop",
    "TroupeError",
    "Unpinned",
    "Value",
    "WaitTimeout",
    "Wanted",
    "configure_logging",
    "io",
    "library_version",
    "protocol_version",
]
