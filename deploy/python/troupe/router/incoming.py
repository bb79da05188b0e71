"""A client's request, as far as the router needs it. The engines judge the rest."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from troupe.router.carry import why_fixed
from troupe.router.errors import ApiError

__all__ = ["Incoming", "forwarded", "id_of", "read"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_ID = re.compile(r"[!-~]{1,128}")
# Headers passed on to the engines: the client's identity, and what the request belongs to.
_FORWARDED = ("authorization", "traceparent", "tracestate", "x-session-id")
# Keys that only the router sends to engines. vLLM takes them in `vllm_xargs`, too.
_OWN = ("kv_transfer_params", "ec_transfer_params")


@dataclass
class Incoming:
    """A request of a client.

    Attributes:
        path: of the endpoint. `body`: as the client sent it.
        id: for logs of the router and of the engines. `headers`: for the engines.
        whole: why one engine must serve all of it; "" if prompt and text may be split.
        fixed: why its text cannot be continued elsewhere; "" if it can.
        affinity: requests with the same affinity go to the same engines; None: wherever there is room.
    """

    id: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    whole: str = ""
    fixed: str = ""
    affinity: str | None = None
    model: str | None = field(init=False)
    stream: bool = field(init=False)
    wants_tokens: bool = field(init=False)

    def __post_init__(self) -> None:
        model = self.body.get("model")
        self.model = model if isinstance(model, str) else None
        self.stream = self.body.get("stream") is True
        self.wants_tokens = self.body.get("return_token_ids") is True

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    @property
    def wants_usage(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True


def id_of(headers: Mapping[str, str]) -> str:
    """The client's own id, if it is fit for logs."""
    given = headers.get("X-Request-Id", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(12)


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers that are passed on to the engines. `ApiError` 400: one is invalid as a header."""
    found = {key: headers[key] for key in _FORWARDED if key in headers}
    for key, value in found.items():
        if not (value.isascii() and value.isprintable()):
            raise ApiError(400, f"the header {key} has characters other than printable ASCII")
    return found


def read(path: str, data: bytes, headers: Mapping[str, str], request_id: str) -> Incoming:
    """`ApiError` 400: it is not a JSON object, or has keys that only the router may send to engines, or headers that
    cannot be passed on."""
    try:
        return _read(path, json.loads(data), headers, request_id)
    except ValueError as why:
        raise ApiError(400, f"the body is not valid JSON: {why}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def _read(path: str, body: object, headers: Mapping[str, str], request_id: str) -> Incoming:
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}, not a JSON object")
    extra = body.get("vllm_xargs")
    for key in _OWN:
        if body.get(key) is not None or (isinstance(extra, dict) and key in extra):
            raise ApiError(400, f"only the router sends {key} to engines; leave it out")
    if not isinstance(body.get("stream", False), (bool, type(None))):
        raise ApiError(400, "stream must be true or false")
    fixed = why_fixed(body)
    return Incoming(
        request_id,
        path,
        body,
        {**forwarded(headers), "X-Request-Id": request_id},
        whole=_why_whole(body),
        fixed=fixed,
        affinity=_affinity_of(body, headers),
    )


def _why_whole(body: Mapping[str, Any]) -> str:
    """Why the request must be whole: one transfer brings the cache of one prompt to one text."""
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1) or body.get("use_beam_search"):
        return "it has several texts"
    if body.get("prompt_embeds") is not None:
        return "it has embeddings for a prompt"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return "it wants what only an engine that computes the prompt knows"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        return "it has several prompts"
    for key in ("max_completion_tokens", "max_tokens"):
        most = body.get(key)
        if isinstance(most, int) and most <= 1:
            return "it has one token, which the engine of its prompt says"
    return ""


def _affinity_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """A session that the client names, or a conversation with at least one answer. A conversation is identified by its
    beginning: its earlier turns are cached where its last one was served."""
    session = body.get("session_id") or headers.get("X-Session-Id")
    if isinstance(session, str) and session:
        return _hash("session", session)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if "assistant" not in roles:
        return None
    return _hash("conversation", json.dumps([body.get("model"), messages[: roles.index("assistant")]]))


def _hash(kind: str, text: str) -> str:
    return f"{kind}-{hashlib.blake2b(text.encode(errors='replace'), digest_size=16).hexdigest()}"
