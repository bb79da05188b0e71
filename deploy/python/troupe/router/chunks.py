"""Engines' answers, streamed or not: read, and checked as far as the router uses them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from troupe.router.carry import as_chat
from troupe.router.instances import Instance
from troupe.router.upstream import LostError, RefusedError

__all__ = ["check_answer", "chunk_of", "has_given_up", "message_of", "params_of"]

# The last chunk of an engine that is told to stop and does not finish a text. Inside a text the quotes would be
# escaped.
_GIVEN_UP = re.compile(rb'"finish_reason":\s*"abort"')


def has_given_up(data: bytes) -> bool:
    return _GIVEN_UP.search(data) is not None


def chunk_of(decode: Instance, data: bytes, *, chat: bool) -> dict[str, Any]:
    """One event of a stream. `chat`: a chunk of a text that is to become one of a chat. `LostError`, `RefusedError`."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        raise LostError(decode, "an event of its stream is not JSON", asked=True) from None
    if not isinstance(chunk, dict):
        raise LostError(decode, "an event of its stream is not a JSON object", asked=True)
    if chunk.get("error") is not None:
        raise _refused(decode, chunk, data)
    wrong = _wrong_of(chunk)
    if wrong:
        raise LostError(decode, f"{wrong} of an event of its stream has a type that the API does not allow", asked=True)
    return as_chat(chunk) if chat else chunk


def check_answer(decode: Instance, body: bytes) -> None:
    """Checks that the answer has a text, without parsing it. `LostError`, `RefusedError`."""
    if has_given_up(body):
        raise LostError(decode, "it gave the request up", asked=True)
    if b'"choices"' in body:
        return
    document = _object_of(body)
    if document.get("error") is not None:
        raise _refused(decode, document, body)
    raise LostError(decode, "its answer has no choices", asked=True)


def params_of(prefill: Instance, body: bytes) -> Mapping[str, Any] | None:
    """Where the cache of a prompt is; None if the engine keeps none. `LostError`, `RefusedError`."""
    document = _object_of(body)
    if document.get("error") is not None:
        raise _refused(prefill, document, body)
    if "choices" not in document:
        raise LostError(prefill, "its answer has no choices", asked=True)
    params = document.get("kv_transfer_params")
    return params if isinstance(params, Mapping) and params.get("do_remote_prefill") else None


def message_of(body: bytes) -> str:
    """The message of an engine's error; "" if it is not an error of the API."""
    error = _object_of(body).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


def _refused(instance: Instance, document: dict[str, Any], data: bytes) -> RefusedError:
    error = document["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return RefusedError(instance, code if isinstance(code, int) and 400 <= code < 600 else 500, data)


def _object_of(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; empty if it is not one."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _wrong_of(chunk: dict[str, Any]) -> str:
    choices = chunk.get("choices")
    if choices is None:
        choices = []
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        return "choices"
    if not isinstance(chunk.get("usage"), (dict, type(None))):
        return "usage"
    for holder in (chunk, *choices):
        for key in ("token_ids", "prompt_token_ids"):
            if not _are_tokens(holder.get(key)):
                return key
    for choice in choices:
        delta = choice.get("delta")
        if not isinstance(delta, (dict, type(None))):
            return "delta"
        for text in (choice.get("text"), (delta or {}).get("content")):
            if not isinstance(text, (str, type(None))):
                return "text"
    return ""


def _are_tokens(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(token, int) for token in value))
