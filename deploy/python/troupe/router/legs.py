"""The questions to each engine for one request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from troupe.hand_off import KEY, VERSION
from troupe.router.errors import ApiError

__all__ = ["decode_leg", "encoded", "prefill_leg"]

# The form of NIXL's connector, which every router uses.
_TO_BE_DECODED_ELSEWHERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# Keys that concern the text, of which an engine that only computes the prompt writes one token.
_OF_THE_TEXT = frozenset(
    {
        "stream",
        "stream_options",
        "min_tokens",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "return_tokens_as_token_ids",
        "echo",
        "return_token_ids",
    }
)


def prefill_leg(
    body: Mapping[str, Any], *, chat: bool, transfer: str | None = None, in_turn: bool = False
) -> dict[str, Any]:
    """For the engine that computes the prompt. It answers where the cache is, or moves it as `transfer` meanwhile;
    `in_turn`: the name only identifies the transfer."""
    made = {key: value for key, value in body.items() if key not in _OF_THE_TEXT}
    made["max_tokens"] = 1
    if chat:
        made["max_completion_tokens"] = 1
    made["stream"] = False
    made["kv_transfer_params"] = _TO_BE_DECODED_ELSEWHERE
    if transfer is not None:
        named = {"v": VERSION, "request": transfer, **({"in_turn": True} if in_turn else {})}
        made["kv_transfer_params"] = {**_TO_BE_DECODED_ELSEWHERE, KEY: named}
    return made


def decode_leg(body: Mapping[str, Any], source: Mapping[str, Any] | None, *, tokens: bool) -> dict[str, Any]:
    """For the engine that writes the text. `source`: where the cache of the prompt is; None: the engine computes the
    prompt itself. `tokens`: it must report token ids."""
    made = dict(body)
    if source is not None:
        made["kv_transfer_params"] = source
    if tokens:
        made["return_token_ids"] = True
    return made


def encoded(body: Mapping[str, Any]) -> bytes:
    """`ApiError` 400: it is nested too deeply to be written, although it could be read."""
    try:
        return json.dumps(body, separators=(",", ":")).encode()
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
