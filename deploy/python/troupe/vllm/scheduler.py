"""The scheduler's side: tables of requests, and nothing else. No engine, no thread, no socket."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from troupe.vllm.metadata import Receive, Send, TroupeMetadata
from troupe.vllm.params import (
    BadParamsError,
    HandOff,
    new_transfer,
    prompt_digest,
    wants_decode_elsewhere,
    wants_prefill_elsewhere,
)

__all__ = ["Scheduler"]

logger = init_logger(f"vllm.{__name__}")

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Scheduler:
    """Which requests send and which load, by vLLM's request ids.

    A prefill: asked for -> computed -> `_sending` until its blocks are unpinned. A decode: new -> `_loading` until the
    load ended -> ordinary. What a decode request says of its source is used once (`_used`): after a failed load vLLM
    asks again, and must hear that there is nothing.
    """

    def __init__(self, *, nodes: tuple[str, ...], engine_id: str, windows: bool = False) -> None:
        """`nodes`: of the engine's ranks. `windows`: some layers keep only the last tokens of a request."""
        self._nodes = nodes
        self._engine_id = engine_id
        self._windows = windows
        self._sending: set[str] = set()
        self._loading: set[str] = set()
        self._used: set[str] = set()
        self._next = TroupeMetadata()

    # -- before a step

    def arrived(self, request: Any) -> None:
        """It may wait here for longer than a cache is kept for somebody who has not asked."""
        if not self._is_new_decode(request):
            return
        with contextlib.suppress(BadParamsError):  # told when it would load
            self._next.holds.append(HandOff.from_params(request.kv_transfer_params))

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens to load beyond those that are here, and whether that happens between steps. Changes nothing.

        The last token is computed again in any case, so a load of one token alone saves nothing.
        """
        missing = self._tokens_of(request) - computed
        least = 0 if self._windows else 1
        if not self._is_new_decode(request) or request.num_preemptions > 0 or missing <= least:
            return 0, False
        return missing, True

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], external: int) -> None:
        """The request has these blocks of each group, and `external` tokens of them are to be loaded."""
        if not self._is_new_decode(request):
            return
        self._used.add(request.request_id)
        if external == 0:
            self._release(request)
            return
        digest = _digest_of(request)
        source, refused = self._source_of(request, digest)
        tokens = self._tokens_of(request)
        self._loading.add(request.request_id)
        self._next.receives.append(
            Receive(request.request_id, source, _lists(blocks), tokens, tokens - external, digest or "", refused)
        )

    def take_metadata(self, *, idle: bool) -> TroupeMetadata:
        taken, self._next = self._next, TroupeMetadata()
        taken.idle = idle
        return taken

    def take_sends(self) -> list[Send]:
        """Those that no step has taken."""
        taken, self._next.sends = self._next.sends, []
        return taken

    # -- after a step

    def settle(self, output: Any) -> None:
        """Drops ids that vLLM would not survive: it asserts that each is known and was told once."""
        for name, own in (("finished_sending", self._sending), ("finished_recving", self._loading)):
            told = set(getattr(output, name) or ())
            unknown = told - own
            if unknown:
                logger.error("%s names requests that are not: %s", name, sorted(unknown))
            own.difference_update(told)
            setattr(output, name, told - unknown)

    def finished(self, request: Any, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks stay taken until they are sent, and what the client is told."""
        new_decode = self._is_new_decode(request)
        self._used.discard(request.request_id)
        if request.request_id in self._loading:  # vLLM frees its blocks when the load has ended
            self._next.aborts.append(request.request_id)
            return False, None
        if new_decode:  # it never came to its load
            self._release(request)
            return False, None
        tokens = int(request.num_prompt_tokens)
        complete = request.status in _COMPLETE and request.num_computed_tokens >= tokens
        if not wants_decode_elsewhere(request.kv_transfer_params) or not complete:
            return False, None
        digest = _digest_of(request)
        if digest is None:
            logger.warning("%s has no token ids to compare prompts by: it is not handed off", request.request_id)
            return False, None
        transfer = new_transfer(self._nodes[0])
        self._sending.add(request.request_id)
        self._next.sends.append(Send(request.request_id, transfer, _lists(blocks), tokens, digest))
        hand_off = HandOff(transfer=transfer, nodes=self._nodes, tokens=tokens, digest=digest)
        return True, hand_off.to_params(engine_id=self._engine_id)

    # -- parts

    def _tokens_of(self, request: Any) -> int:
        """So many of a prompt are loaded. With windows not the last one, which is computed again: vLLM allocates what
        the token behind the loaded ones needs, and a step back by one would want a token that no window holds."""
        return int(request.num_prompt_tokens) - (1 if self._windows else 0)

    def _is_new_decode(self, request: Any) -> bool:
        return wants_prefill_elsewhere(request.kv_transfer_params) and request.request_id not in self._used

    def _source_of(self, request: Any, digest: str | None) -> tuple[HandOff | None, str]:
        try:
            source = HandOff.from_params(request.kv_transfer_params)
        except BadParamsError as why:
            return None, str(why)
        if source.tokens != request.num_prompt_tokens or source.digest != digest:
            return None, f"the prompt of {source.tokens} tokens that was prefilled is not the one to decode"
        return source, ""

    def _release(self, request: Any) -> None:
        """Nobody will load what waits for the request: its prefill engine need not wait for the lease."""
        try:
            self._next.releases.append(HandOff.from_params(request.kv_transfer_params))
        except BadParamsError as why:
            logger.warning("%s: %s", request.request_id, why)


def _lists(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(group) for group in blocks]


def _digest_of(request: Any) -> str | None:
    """None: the prompt has embeddings in place of token ids."""
    if request.prompt_token_ids is None:
        return None
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    return prompt_digest(request.prompt_token_ids, adapter=adapter, salt=request.cache_salt or "")
