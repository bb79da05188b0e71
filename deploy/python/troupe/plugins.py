"""Entry points of vLLM, vLLM-Omni and SGLang: functions that load nothing before they are called.

vLLM-Omni loads vLLM's plugins as well as its own, and comes with another release of vLLM than the connector for vLLM
needs. A plugin that cannot be loaded logs one line.
"""

from __future__ import annotations

import logging

__all__ = ["sglang", "vllm", "vllm_omni"]

logger = logging.getLogger(f"vllm.{__name__}")


def vllm() -> None:
    """The entry point of `vllm.general_plugins`."""
    try:
        from troupe.vllm import register
    except ImportError as why:
        logger.warning("TroupeConnector is not available: it needs vLLM 0.32, and importing it failed: %s", why)
        return
    register()


def vllm_omni() -> None:
    """The entry point of `vllm_omni.general_plugins`."""
    from troupe.omni import register

    register()


def sglang() -> None:
    """The entry point of `sglang.srt.plugins`."""
    from troupe.sglang import register

    register()
