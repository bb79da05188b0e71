"""What a prefill engine tells a decode engine about a request, by way of the router: `kv_transfer_params`.

Routers copy what the prefill engine answers into the decode request. The keys are those that NIXL's connector uses,
so that any router serves, with one key of our own that says the rest. Nothing here needs vLLM.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from troupe.hand_off import KEY, VERSION, new_transfer, source_params

__all__ = [
    "BadParamsError",
    "HandOff",
    "named_transfer",
    "new_transfer",
    "prompt_digest",
    "wants_decode_elsewhere",
    "wants_prefill_elsewhere",
]

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}")
_TRANSFER = re.compile(r"[a-z0-9_.-]{1,200}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


class BadParamsError(ValueError):
    """The decode request does not say where its cache is; says why."""


def wants_decode_elsewhere(params: object) -> bool:
    """Whether a request is a prefill whose decode happens at another engine."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def wants_prefill_elsewhere(params: object) -> bool:
    """Whether a request is a decode whose prompt was computed by another engine."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


def named_transfer(params: object) -> str | None:
    """The name of a prefill request's transfer by a router that asks both engines at once; None: it is named here."""
    own = params.get(KEY) if isinstance(params, Mapping) else None
    if not isinstance(own, Mapping) or own.get("v") != VERSION or not _is_like(_TRANSFER, own.get("request")):
        return None
    return str(own["request"])


def prompt_digest(tokens: Iterable[int], *, adapter: str = "", salt: str = "") -> str:
    """Of all that a cache depends on beside the model: equal where the caches are interchangeable."""
    digest = hashlib.blake2b(digest_size=16)
    for text in (adapter, salt):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.hexdigest()


@dataclass(frozen=True)
class HandOff:
    """A prompt whose cache waits at a prefill engine, or that is asked of one at the same time.

    `transfer`: the id of the send. `nodes`: of the prefill replica in rank order. `digest`: of the prompt. A router
    that asks both engines at once knows neither that nor its `tokens`.
    """

    transfer: str
    nodes: tuple[str, ...]
    tokens: int | None = None
    digest: str | None = None

    @property
    def is_early(self) -> bool:
        """The prompt may still be computed, or wait for it."""
        return self.digest is None

    def to_params(self, *, engine_id: str) -> dict[str, Any]:
        params = source_params(self.transfer, self.nodes, engine_id=engine_id)
        params[KEY].update(tokens=self.tokens, prompt=self.digest)
        return params

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> HandOff:
        """Parses what a client sent; `BadParamsError` for anything that no prefill engine has said."""
        own = params.get(KEY)
        if not isinstance(own, Mapping):
            raise BadParamsError(
                f"kv_transfer_params have no {KEY!r}: the prefill engine is none with Troupe's connector"
            )
        if own.get("v") != VERSION:
            raise BadParamsError(f"kv_transfer_params are of version {own.get('v')!r}, and this engine reads {VERSION}")
        nodes = own.get("nodes")
        if not isinstance(nodes, (list, tuple)) or not nodes or not all(_is_like(_NAME, node) for node in nodes):
            raise BadParamsError("'nodes' of kv_transfer_params is no list of names of nodes")
        if not _is_like(_TRANSFER, own.get("request")):
            raise BadParamsError("'request' of kv_transfer_params is no id of a transfer")
        if "tokens" not in own and "prompt" not in own:
            return cls(transfer=own["request"], nodes=tuple(nodes))
        tokens = own.get("tokens")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens < 2**32:
            raise BadParamsError("'tokens' of kv_transfer_params is no number of tokens")
        if not _is_like(_DIGEST, own.get("prompt")):
            raise BadParamsError("'prompt' of kv_transfer_params is no digest of a prompt")
        return cls(transfer=own["request"], nodes=tuple(nodes), tokens=tokens, digest=own["prompt"])


def _is_like(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
