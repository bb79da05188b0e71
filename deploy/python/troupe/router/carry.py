"""How another engine is asked to continue a text that an engine left unfinished.

Its prompt and the text so far become the token ids of a new prompt, at /v1/completions even for a chat, so that neither
a template nor a tokenizer intervenes. The continuation is what the lost engine would have written, as far as the text
depends only on tokens. If it depends on what was *generated* (a grammar, counts of generated tokens, the state of a
random generator, the words that a stop string may be part of), the continuation would differ: such a text is not
continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from troupe.router.said import Said

__all__ = ["as_chat", "continued", "why_fixed"]

# Keys of both endpoints: how tokens are drawn and reported. They hold for the rest of a text as for its beginning.
_SAMPLING = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "length_penalty",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "logit_bias",
        "allowed_token_ids",
        "priority",
        "session_id",
        "cache_salt",
        "user",
        "stream",
        "stream_options",
        "stream_interval",
        "detokenize",
    }
)

# Keys that form the prompt, or do not affect the text.
_OF_THE_PROMPT = frozenset(
    {
        "prompt",
        "messages",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "include_reasoning",
        "parallel_tool_calls",
    }
)
_OF_NO_ACCOUNT = frozenset(
    {"max_tokens", "max_completion_tokens", "return_token_ids", "request_id", "metadata", "store"}
)
_KNOWN = _SAMPLING | _OF_THE_PROMPT | _OF_NO_ACCOUNT

# Values with which a key outside of those sets has no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "stop": ([], ""),
    "bad_words": ([],),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "return_tokens_as_token_ids": (False,),
    "watermarking": (False,),
}

# The default of /v1/completions.
_DEFAULT_MAX_TOKENS = 16


def why_fixed(body: Mapping[str, Any]) -> str:
    """Why another engine cannot continue a text of this request; "" if it can."""
    for key, value in body.items():
        if key not in _KNOWN and value is not None and not _is_neutral(value, _NEUTRAL.get(key, ())):
            return f"it has {key}"
    if body.get("seed") is not None and body.get("temperature") != 0:
        return "it has a seed, and an engine draws with it from the first token on"
    messages = body.get("messages")
    if isinstance(messages, list) and not all(_is_text(message) for message in messages):
        return "its messages contain more than text"
    if "messages" not in body and not _is_one_prompt(body.get("prompt")):
        return "it has more than one prompt, or one that is not text"
    return ""


def continued(body: Mapping[str, Any], said: Said, longest: int | None) -> dict[str, Any] | str:
    """The body for /v1/completions that asks for the rest, or a sentence that says why there is none. `longest`: the
    model's limit."""
    if said.prompt is None:
        return "no engine has reported the tokens of its prompt"
    left = _tokens_left(body, said, longest)
    if left is None:
        return "it has no max_tokens, and no engine says how long a text of its model can be"
    made = {key: value for key, value in body.items() if key in _SAMPLING}
    made["prompt"] = said.prompt + said.tokens
    made["max_tokens"] = left
    least = body.get("min_tokens")
    if isinstance(least, int):
        made["min_tokens"] = max(0, least - len(said.tokens))
    return made


def as_chat(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk of /v1/completions as one of a chat."""
    for choice in chunk.get("choices") or ():
        text = choice.pop("text", None)
        choice["delta"] = {"content": text} if text else {}
    return chunk


def _tokens_left(body: Mapping[str, Any], said: Said, longest: int | None) -> int | None:
    chat = "messages" in body
    most = body.get("max_completion_tokens") if chat else None
    if most is None:
        most = body.get("max_tokens")
    if most is None and not chat:
        most = _DEFAULT_MAX_TOKENS
    room = None if longest is None else longest - len(said.prompt or ())
    if isinstance(most, int) and not isinstance(most, bool):
        room = most if room is None else min(most, room)
    return None if room is None else max(0, room - len(said.tokens))


def _is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _is_text(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list) or not prompt:
        return False
    return len(prompt) == 1 or all(isinstance(token, int) for token in prompt)
