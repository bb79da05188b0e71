"""What engines and routers both say of a prompt that one engine computes for another: `kv_transfer_params`.

The keys are those that NIXL's connector uses, so that any router serves, with one key of our own that says the rest.
Nothing here needs vLLM or the library.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

__all__ = ["KEY", "RELEASE", "VERSION", "new_transfer", "source_params"]

KEY = "troupe"
VERSION = 1
#: What a frontend calls a prefill engine's node with: the name of a transfer that nobody takes.
RELEASE = "release"


def new_transfer(node: str) -> str:
    """A name for the transfer of one request that nobody can guess and that never comes again."""
    return f"{node}-{secrets.token_hex(16)}"


def source_params(transfer: str, nodes: Sequence[str], *, engine_id: str) -> dict[str, Any]:
    """For the engine that decodes: where the cache of its prompt is, or is being made.

    `nodes`: of the prefill engine in rank order. `engine_id`: vLLM's id of that engine; "": it is not known.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": transfer,
        # Routers hand these on unread. An engine that has computed the prompt fills them in.
        "remote_block_ids": [],
        "remote_host": "",
        "remote_port": 0,
        "tp_size": len(nodes),
        KEY: {"v": VERSION, "request": transfer, "nodes": list(nodes)},
    }
