"""Troupe between the prefill and decode servers of SGLang: the transfer backend `troupe`.

SGLang finds it by the entry point of `sglang.srt.plugins`. Importing this package starts nothing, and loads neither
torch nor SGLang nor the library.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

__all__ = ["BACKEND", "register"]

#: The word for `--disaggregation-transfer-backend`.
BACKEND = "troupe"

#: The release of SGLang whose classes the backend derives from.
RELEASE = "0.5.23"

_UTILS = "sglang.srt.disaggregation.utils"

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes the backend known by its name. SGLang calls this in each of its processes, before it reads its arguments.

    Raises nothing: SGLang swallows what its plugins raise. The log says why the backend is missing.
    """
    try:
        release = importlib.metadata.version("sglang")
        if release != RELEASE:
            logger.warning(
                "the transfer backend %r is for SGLang %s, and this is %s; classes of SGLang that it derives from may "
                "have changed",
                BACKEND,
                RELEASE,
                release,
            )
        from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
        from sglang.srt.disaggregation.utils import TransferBackend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if BACKEND in (member.value for member in TransferBackend):
            return
        members = {member.name: member.value for member in TransferBackend}
        names = [*members.items(), (BACKEND.upper(), BACKEND)]
        extended = Enum("TransferBackend", names, module=_UTILS)  # type: ignore[misc]
        HookRegistry.register(f"{_UTILS}.TransferBackend", extended, HookType.REPLACE)
        HookRegistry.register(f"{_UTILS}.get_kv_class", _class_of, HookType.AROUND)
        add_disagg_transfer_backend_choices([BACKEND])
    except Exception as why:  # pylint: disable=broad-exception-caught
        logger.error(
            "the transfer backend %r is not available: it needs SGLang %s, and registering it failed: %r",
            BACKEND,
            RELEASE,
            why,
        )


def _class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Wraps SGLang's own function: returns the classes of this backend, and SGLang's for any other."""
    if transfer_backend.value != BACKEND or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    modules = {
        "manager": ("manager", "TroupeKVManager"),
        "sender": ("sender", "TroupeKVSender"),
        "receiver": ("receiver", "TroupeKVReceiver"),
        "bootstrap_server": ("bootstrap", "TroupeKVBootstrapServer"),
    }
    if class_type.value not in modules:
        raise ValueError(f"the transfer backend {BACKEND!r} has no class of the kind {class_type.value!r}")
    module, name = modules[class_type.value]
    return getattr(importlib.import_module(f"troupe.sglang.{module}"), name)
