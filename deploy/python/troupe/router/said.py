"""The text that a client has received, from the streams of one engine after the other.

Each chunk of a stream is read before it goes to the client. So token ids that only the router asked for do not reach
the client, and the router knows where the text can be continued.

A text can be continued only after a chunk with text, when no character is incomplete. Chunks of tokens without text
(the first bytes of a multi-byte character) are held until text follows, and are dropped if their stream breaks: the
next engine writes them again.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Said"]

# A character has at most this many bytes, and a token at least one. A client that reads only token ids need not wait
# for more tokens.
_MOST_TOKENS_OF_A_CHARACTER = 4

_BEYOND_TEXT = ("reasoning", "reasoning_content", "tool_calls", "function_call", "refusal", "audio")


class Said:
    """One choice of one request.

    Attributes:
        prompt: token ids of the prompt; None: no engine has reported them.
        tokens: token ids that the client has received: the text is continued after them.
        fixed: why it cannot be continued elsewhere; "" if it can.
        finish: why the text has ended; None: it has not.
        heard: the present engine has sent something. `started`: the client has received something, even if not text.
        counted: the client has received the usage.
    """

    def __init__(self, *, chat: bool, wants_tokens: bool, fixed: str = "") -> None:
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.fixed = fixed
        self.finish: str | None = None
        self.heard = False
        self.started = False
        self.counted = False
        self._chat = chat
        self._wants_tokens = wants_tokens
        self._held: list[dict[str, Any]] = []
        self._held_tokens: list[int] = []
        self._has_text = False
        self._has_no_text = False  # its engines have no tokenizer
        self._before = 0  # number of tokens from earlier engines
        self._same: dict[str, Any] = {}  # fields that all chunks share

    def begin(self) -> None:
        """Begins a stream that continues from `tokens`, or is the first one."""
        self.heard = False
        self._held, self._held_tokens = [], []
        self._before = len(self.tokens)

    def take(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks to send to the client for this one of an engine."""
        self.heard = True
        self._keep_prompt(chunk)
        self._mend(chunk)
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices:  # the usage, last of all
            self.counted = True
            return self._let_go([chunk])
        choice = choices[0]
        if not isinstance(choice, dict) or len(choices) > 1 or choice.get("index") not in (0, None):
            self.fixed = self.fixed or "it has several choices"
            return self._let_go([chunk])
        tokens = choice.get("token_ids") or []
        text = self._text_of(choice)
        if not self._wants_tokens:
            choice.pop("token_ids", None)
        if choice.get("finish_reason") is not None:
            self.finish = str(choice["finish_reason"])
            self._held_tokens += tokens
            return self._let_go([chunk])
        if not tokens and not text:
            return self._opening(chunk, choice)
        if text and not tokens:
            self.fixed = self.fixed or "its engine does not report its tokens"
        self._held_tokens += tokens
        if text:
            self._has_text, self._has_no_text = True, False
        elif self._must_wait():
            self._held.append(chunk)
            return []
        return self._let_go([chunk])

    def pass_on(self) -> None:
        """Records that a chunk goes to the client as it is."""
        self.heard = self.started = True

    def usage(self) -> dict[str, int]:
        """The usage as far as it is known here."""
        prompt = len(self.prompt or ())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": len(self.tokens),
            "total_tokens": prompt + len(self.tokens),
        }

    def like(self, **more: Any) -> dict[str, Any]:
        """A chunk of the router's own, with the fields of those before it."""
        return {**self._same, **more}

    # -- parts

    def _let_go(self, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.tokens += self._held_tokens
        chunks = self._held + chunks
        self._held, self._held_tokens = [], []
        self.started = True
        return chunks

    def _must_wait(self) -> bool:
        """Whether a chunk without text may be part of a character."""
        if self.fixed:
            return False
        if not self._wants_tokens:
            return True
        if len(self._held_tokens) >= _MOST_TOKENS_OF_A_CHARACTER and not self._has_text:
            self._has_no_text = True
        return not self._has_no_text and len(self._held_tokens) < _MOST_TOKENS_OF_A_CHARACTER

    def _opening(self, chunk: dict[str, Any], choice: dict[str, Any]) -> list[dict[str, Any]]:
        """A chunk without text or tokens. The first one of a chat names the speaker, and an engine that starts over
        repeats it."""
        if self.started and "role" in (choice.get("delta") or {}):
            return []
        if self._held:
            self._held.append(chunk)
            return []
        self.started = True
        return [chunk]

    def _text_of(self, choice: dict[str, Any]) -> str:
        if not self._chat:
            return str(choice.get("text") or "")
        delta = choice.get("delta") or {}
        beyond = next((key for key in _BEYOND_TEXT if delta.get(key)), None)
        if beyond is not None:
            self.fixed = self.fixed or f"it has {beyond}"
        return str(delta.get("content") or "")

    def _keep_prompt(self, chunk: dict[str, Any]) -> None:
        """Keeps the prompt of the first stream: the prompt of a continued text contains the earlier part of the text.
        """
        holders = [chunk, *(one for one in chunk.get("choices") or () if isinstance(one, dict))]
        for holder in holders:
            ids = holder.get("prompt_token_ids")
            if isinstance(ids, list) and self.prompt is None and self._before == 0:
                self.prompt = ids
            if ids is not None and (not self._wants_tokens or self._before > 0 or self.started):
                del holder["prompt_token_ids"]

    def _mend(self, chunk: dict[str, Any]) -> None:
        """Gives all chunks of a stream one id, and counts the earlier part of the text as completion."""
        if not self._same:
            self._same = {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}
        chunk.update(self._same)
        usage = chunk.get("usage")
        if isinstance(usage, dict) and self._before:
            for key, more in (("prompt_tokens", -self._before), ("completion_tokens", self._before)):
                if isinstance(usage.get(key), int):
                    usage[key] += more
