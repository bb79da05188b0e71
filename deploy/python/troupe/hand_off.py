"""`kv_transfer_params`: what engines and routers exchange about a prompt that one engine computes for another.

The keys are those that NIXL's connector uses, so that any router works, with one key of our own for the rest. Nothing
here needs vLLM or the library.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

__all__ = ["KEY", "RELEASE", "VERSION", "new_transfer", "source_params"]

KEY = "troupe"
VERSION = 1
#: The method by which a frontend tells a prefill engine's node the name of a transfer that will not be taken.
RELEASE = "release"


def new_transfer(node: str) -> str:
    """An unguessable, unique name for the transfer of one request."""
    return f"{node}-{secrets.token_hex(16)}"


def source_params(transfer: str, nodes: Sequence[str], *, engine_id: str) -> dict[str, Any]:
    """For the decoding engine: where the cache of its prompt is, or is being computed.

    `nodes`: of the prefill engine, in rank order. `engine_id`: vLLM's id of that engine; "" if unknown.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": transfer,
        # Routers pass these on unread. An engine that has computed the prompt fills them in.
        "remote_block_ids": [],
        "remote_host": "",
        "remote_port": 0,
        "tp_size": len(nodes),
        KEY: {"v": VERSION, "request": transfer, "nodes": list(nodes)},
    }
