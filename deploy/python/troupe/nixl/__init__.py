"""Troupe's one-sided agents in the shape of NIXL's Python API: a program written for it runs by changing its import.

    from troupe.nixl import nixl_agent, nixl_agent_config  # from nixl._api import nixl_agent, nixl_agent_config

Calls, arguments, words and names of exceptions are those of NIXL 1.5. Calls without a meaning here raise
`nixlNotSupportedError`, which says so; docs/agents.md lists the differences. New programs should use `troupe.io`.
"""

from troupe.nixl._agent import nixl_agent
from troupe.nixl._descs import nixlRegDList, nixlRemoteDList, nixlXferDList
from troupe.nixl._errors import (
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)
from troupe.nixl._handles import (
    DEFAULT_COMM_PORT,
    nixl_agent_config,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
    nixlXferTelemetry,
)

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
