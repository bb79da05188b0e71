"""Troupe between the stages of vLLM-Omni: `TroupeOmniConnector` hands payloads from stage to stage.

vLLM-Omni finds it by the entry point of `vllm_omni.general_plugins`. Importing this package starts nothing, and loads
neither torch nor vLLM-Omni nor the library.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troupe.omni.connector import TroupeOmniConnector

__all__ = ["TroupeOmniConnector", "register"]

NAME = "TroupeOmniConnector"

logger = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """Makes the connector known by its name. May be called again, in every process of vLLM-Omni.

    Raises nothing: vLLM-Omni does not catch exceptions of its plugins. The log says why the connector is missing.
    """
    try:
        from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

        if NAME in OmniConnectorFactory.list_registered_connectors():
            return
        more: dict[str, Any] = {}
        # Releases after 0.30 ask whether one object may serve both directions.
        if "supports_dual" in inspect.signature(OmniConnectorFactory.register_connector).parameters:
            more["supports_dual"] = True
        OmniConnectorFactory.register_connector(NAME, _construct, **more)
        if os.environ.get("TROUPE_OMNI_COORDINATOR") == "1":
            _take_coordinator()
    except Exception as why:  # pylint: disable=broad-exception-caught
        logger.error("%s is not available: it needs vLLM-Omni 0.30, and registering it failed: %r", NAME, why)


def _take_coordinator() -> None:
    """Replaces vLLM-Omni's coordinator: its head imports the class from there when it starts one, and no flag names
    another."""
    from vllm_omni.distributed import omni_coordinator

    from troupe.omni.coordinator import CoordinatorRuntime

    omni_coordinator.OmniCoordinatorRuntime = CoordinatorRuntime


def _construct(config: dict[str, Any]) -> Any:
    from troupe.omni.connector import TroupeOmniConnector as Connector

    return Connector(config)


def __getattr__(name: str) -> Any:
    if name == NAME:
        from troupe.omni.connector import TroupeOmniConnector as Connector

        return Connector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
