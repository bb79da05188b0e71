"""The scheduler's side: tables of requests, and nothing else. No engine, no thread, no socket."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from troupe.vllm.kept import Kept
from troupe.vllm.layouts import NULL_BLOCK
from troupe.vllm.metadata import Drop, RankIdentity, Receive, Seal, Send, TroupeMetadata
from troupe.vllm.params import (
    BadParamsError,
    HandOff,
    is_asked_in_turn,
    named_transfer,
    new_transfer,
    prompt_digest,
    wants_decode_elsewhere,
    wants_prefill_elsewhere,
)
from troupe.vllm.place import ALONE, Ranks
from troupe.vllm.pushes import Pushes
from troupe.vllm.sources import Sources

__all__ = ["Scheduler", "Window"]

logger = init_logger(f"vllm.{__name__}")

TOLD = 4096  # number of ends that are remembered

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_CHILD = re.compile(r"[0-9]+_(.+)", re.DOTALL)  # vLLM's name for a child of a request for several texts


@dataclass(frozen=True)
class Window:
    """The window of a group of layers: the number of tokens that each token sees, itself included, and of tokens in a
    block."""

    tokens: int
    block_size: int


class Scheduler:
    """Tracks which requests send and which load, by vLLM's request ids.

    A prefill: asked for -> computed -> `_sending` until its blocks are unpinned; or one of `_pushes` from its first
    blocks on, if a router that asks both engines at once has named its transfer. A decode: new -> `_loading` until the
    load ended -> ordinary. A decode request's source is used once (`_used`): after a failed load vLLM asks again, and
    must be told that there is nothing to load.

    Each event has a second handler, for the case that the first one raised: it knows less, and loses no request.
    """

    def __init__(
        self,
        *,
        nodes: tuple[str, ...],
        engine_id: str,
        ranks: Ranks = ALONE,
        windows: Sequence[Window | None] = (),
        push_block_size: int = 0,
        longest: int | None = None,
        loads: bool = True,
    ) -> None:
        """`nodes`: of the engine's ranks. `windows`: of each group of layers that keeps only the last tokens of a
        request. `push_block_size`: tokens of a block of a cache that may move while it is computed; 0: none does.
        `longest`: blocks of the longest request of an engine that writes texts, too. `loads`: it takes caches from
        others. vLLM hands the blocks of a request that ended to the next one while a step may still write there, unless
        the engine is a consumer: what is loaded into them would be overwritten."""
        self._loads = loads
        self._nodes = nodes
        self._engine_id = engine_id
        self._ranks = ranks
        self._lives: tuple[int, ...] = ()  # of the nodes, once the workers have reported them
        self._address = ("", 0)  # of the first node, likewise
        self._windows = windows if any(windows) else ()
        self._sending: set[str] = set()
        self._loading: set[str] = set()
        self._used: set[str] = set()
        self._told: dict[tuple[str, str], None] = {}  # the latest ends of our requests
        self._pushes = Pushes(push_block_size)
        self._sources = Sources()
        self._kept = Kept(longest)
        # By parent, prompt and transfer: the child whose blocks are kept for all children, and the answer to each.
        self._shared: dict[tuple[str, str, str | None], tuple[str, dict[str, Any]]] = {}
        self._next = TroupeMetadata()

    def know(self, ranks: Sequence[object]) -> None:
        """Sets the workers' identities, in the order of their ranks. Under MultiConnector they may be another
        connector's."""
        own = [rank for rank in ranks if isinstance(rank, RankIdentity)]
        if tuple(rank.node for rank in own) == self._nodes:
            self._lives = tuple(rank.incarnation for rank in own)
            self._address = (own[0].host, own[0].port)

    def bind_pool(self, pool: Any) -> None:
        """Sets vLLM's block pool."""
        self._pushes.bind(pool)
        self._kept.bind(pool)

    def frees_soon(self) -> bool:
        """Whether blocks of a preempted prompt become free, without another preemption, once they are no longer read.
        """
        return self._pushes.frees_soon()

    def waits_for_pushes(self) -> bool:
        """Whether vLLM must go on stepping, even without requests, because blocks of a preempted prompt are held."""
        return self._pushes.waits()

    # -- before a step

    def arrived(self, request: Any) -> None:
        """Holds the source of a new request, which may wait here for longer than an unclaimed cache is kept."""
        if not self._is_new_decode(request):
            return
        with contextlib.suppress(BadParamsError):  # reported when it would load
            source = _hand_off_of(request)
            self._sources.waits(source.transfer, request.request_id)
            self._next.holds.append(source)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond those that are here, and whether the load happens between steps. None: wait for another
        request that loads them. Called for requests without blocks; what another connector loads does not concern this
        one.

        The last token is computed again in any case, so a load of one token alone saves nothing.
        """
        self._told.pop(("finished_recving", request.request_id), None)
        missing = self._tokens_of(request) - computed
        least = 0 if self._windows else 1
        if not self._is_new_decode(request) or request.num_preemptions > 0 or missing <= least:
            return 0, False
        with contextlib.suppress(BadParamsError):
            source = _hand_off_of(request)
            if self._sources.is_taken(source.transfer):
                same = source.tokens in (None, request.num_prompt_tokens)  # otherwise another prompt of a list
                return (None if same and self._sources.is_loading(source.transfer) else 0), False
        return missing, True

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], external: int) -> None:
        """Records that the request has these blocks of each group, of which `external` tokens are to be loaded."""
        if not self._is_new_decode(request):
            self._offer_early(request, blocks)
            return
        self._used.add(request.request_id)
        if external == 0:
            self._take_nothing(request)
            return
        digest = _digest_of(request)
        source, refused = self._source_of(request, digest)
        tokens = self._tokens_of(request)
        self._loading.add(request.request_id)
        self._next.receives.append(
            Receive(request.request_id, source, _lists(blocks), tokens, tokens - external, digest or "", refused)
        )
        if source is not None:
            self._sources.take(source.transfer, request.request_id, loads=True)
        else:
            self._leave(request)

    def not_allocated(self, request: Any, external: int, why: Exception) -> None:
        """After `allocated` has raised: vLLM still waits for a load, and is told that it has failed."""
        name = request.request_id
        if external == 0 or any(receive.request_id == name for receive in self._next.receives):
            return
        self._used.add(name)
        self._loading.add(name)
        refused = f"its load could not be prepared: {why!r}"
        self._next.receives.append(Receive(name, None, [], 0, 0, "", refused))
        with contextlib.suppress(Exception):
            self._leave(request)

    def take_metadata(self, output: Any) -> TroupeMetadata:
        """`output`: vLLM's, of the step that takes the metadata."""
        self._pushes.step(output, self._next)
        taken, self._next = self._next, TroupeMetadata()
        taken.idle = output.total_num_scheduled_tokens == 0
        return taken

    def take_orders(self) -> TroupeMetadata:
        """Orders without the step's computation: pushes are not continued, since some of their tokens would be left
        out."""
        self._pushes.lose_all(self._next)
        taken, self._next = self._next, TroupeMetadata()
        return taken

    def take_offers(self) -> TroupeMetadata:
        """Offers of computed prompts that no step has taken."""
        own = self._next
        taken = TroupeMetadata(sends=own.sends, seals=own.seals, drops=own.drops)
        own.sends, own.seals, own.drops = [], [], []
        return taken

    # -- after a step

    def settle(self, output: Any) -> None:
        """Drops ends that are reported twice, which vLLM would not survive. Unknown ends belong to other connectors."""
        output.finished_sending = self._pushes.settle(set(output.finished_sending or ()))
        self._sources.ended(set(output.finished_recving or ()))
        for name, own in (("finished_sending", self._sending), ("finished_recving", self._loading)):
            told = set(getattr(output, name) or ())
            again = {one for one in told - own if (name, one) in self._told}
            if again:
                logger.error("%s names requests a second time: %s", name, sorted(again))
            self._told.update(((name, one), None) for one in told & own)
            while len(self._told) > TOLD:
                del self._told[next(iter(self._told))]
            own.difference_update(told)
            setattr(output, name, told - again)
        self._shared = {family: one for family, one in self._shared.items() if one[0] in self._sending}
        for request_id in output.finished_sending:
            self._kept.remove(request_id)

    def finished(self, request: Any, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Handles the end of a request: returns whether its blocks stay allocated until they are sent, and the answer
        to the client."""
        new_decode = self._is_new_decode(request)
        self._used.discard(request.request_id)
        if request.request_id in self._loading:  # vLLM frees its blocks when the load has ended
            self._next.aborts.append(request.request_id)
            return False, None
        if new_decode:  # its load never began
            self._leave(request, releases=True)
            return False, None
        if not wants_decode_elsewhere(request.kv_transfer_params) or self._pushes.lost(request.request_id):
            return False, None
        return self._hand_off(request, blocks)

    def not_finished(self, request: Any) -> tuple[bool, None]:
        """After `finished` has raised: keeps what was promised; a cache that was not offered yet is not handed off."""
        name = request.request_id
        self._used.discard(name)
        if name in self._loading:
            if name not in self._next.aborts:
                self._next.aborts.append(name)
            return False, None
        if name in self._sending:
            return True, None
        self._pushes.give_up(name, self._next)
        self._kept.remove(name)
        return False, None

    # -- parts

    def _offer_early(self, request: Any, blocks: Sequence[Sequence[int]]) -> None:
        params = request.kv_transfer_params
        transfer = named_transfer(params)
        if transfer is None or not wants_decode_elsewhere(params) or wants_prefill_elsewhere(params):
            return
        if len(blocks) != 1 or request.prompt_token_ids is None:
            return
        if is_asked_in_turn(params):
            return
        push = self._pushes.begin(request, transfer, blocks[0])
        if push is not None:
            self._next.pushes.append(push)

    def _hand_off(self, request: Any, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Hands off a prefill that has ended, or reports that its transfer will not come."""
        name, tokens, digest = request.request_id, int(request.num_prompt_tokens), _digest_of(request)
        pushed, named = self._pushes.transfer_of(name), named_transfer(request.kv_transfer_params)
        complete = request.status in _COMPLETE and request.num_computed_tokens >= tokens
        if complete and digest is None:
            logger.warning("%s has no token ids to compare prompts by: it is not handed off", name)
        if not complete or digest is None or not self._are_held(blocks, tokens):
            return self._hand_nothing_off(name, pushed, named)
        child = _CHILD.fullmatch(name)
        family = (child[1], digest, named) if child is not None else None
        if pushed is None:
            shared = self._shared.get(family) if family is not None else None
            if shared is not None:
                return False, dict(shared[1])
            if named is not None and self._pushes.named(named):
                return False, None  # another request's
            if not self._kept.add(name, blocks):
                logger.info("%s is not handed off: this engine keeps as many blocks as it can spare", name)
                return self._hand_nothing_off(name, None, named)
        transfer = pushed or named or new_transfer(self._nodes[0])
        hand_off = HandOff(transfer, self._nodes, tokens, digest, lives=self._lives)
        tables = _lists(blocks)
        params = hand_off.to_params(
            engine_id=self._engine_id, ranks=self._ranks, blocks=tables, address=self._address
        )
        # Only now, since queued orders are promises: an exception above leaves nothing behind.
        if pushed is not None:
            self._pushes.end(name)
            self._next.seals.append(Seal(name, transfer, tokens, digest))
        else:
            self._next.sends.append(Send(name, transfer, tables, tokens, digest))
        self._sending.add(name)
        if family is not None:
            self._shared[family] = (name, dict(params))
        return True, params

    def _hand_nothing_off(self, name: str, pushed: str | None, named: str | None) -> tuple[bool, None]:
        if pushed is not None:
            self._pushes.end(name)
            self._sending.add(name)
            self._next.drops.append(Drop(name, pushed))
            return True, None
        if named is not None and not self._pushes.named(named):
            self._next.drops.append(Drop("", named))
        return False, None

    def _are_held(self, blocks: Sequence[Sequence[int]], tokens: int) -> bool:
        """Whether the windows of the last token of a prompt are here. That token is computed again after the others are
        loaded; if a block ends with it, vLLM has freed what only its window needs."""
        for window, table in zip(self._windows, blocks, strict=False):
            if window is not None and tokens >= window.tokens:
                first = (tokens - window.tokens) // window.block_size
                if first < len(table) and table[first] == NULL_BLOCK:
                    return False
        return True

    def _tokens_of(self, request: Any) -> int:
        """How many tokens of a prompt are loaded. With windows not the last one, which is computed again: vLLM
        allocates what the token after the loaded ones needs, and a step back by one would need a token outside of all
        windows."""
        return int(request.num_prompt_tokens) - (1 if self._windows else 0)

    def _is_new_decode(self, request: Any) -> bool:
        return wants_prefill_elsewhere(request.kv_transfer_params) and request.request_id not in self._used

    def _source_of(self, request: Any, digest: str | None) -> tuple[HandOff | None, str]:
        try:
            source = _hand_off_of(request)
        except BadParamsError as why:
            return None, str(why)
        if not self._loads:
            return None, "this engine has kv_role kv_producer and loads no caches: ask one with kv_both or kv_consumer"
        if source.digest is not None and (source.tokens != request.num_prompt_tokens or source.digest != digest):
            return None, f"the prompt of {source.tokens} tokens that was prefilled is not the one to decode"
        return source, ""

    def _take_nothing(self, request: Any) -> None:
        """Loads nothing: all of the prompt is here, or another request has loaded it."""
        try:
            source = _hand_off_of(request)
        except BadParamsError as why:
            logger.warning("%s: %s", request.request_id, why)
            return
        taken = self._sources.is_taken(source.transfer)
        self._sources.take(source.transfer, request.request_id, loads=False)
        if not taken:
            self._next.releases.append(source)
        elif not self._sources.is_awaited(source.transfer):
            self._next.unholds.append(source.transfer)  # it may have been held again for this request

    def _leave(self, request: Any, *, releases: bool = False) -> None:
        """Drops the source of a request. `releases`: if no request here will load it, tell its prefill engine, which
        need not wait for the lease."""
        try:
            source = _hand_off_of(request)
        except BadParamsError as why:
            if releases:  # else its load is refused with these words
                logger.warning("%s: %s", request.request_id, why)
            return
        if not self._sources.leaves(source.transfer, request.request_id):
            if not self._sources.is_awaited(source.transfer):
                self._next.unholds.append(source.transfer)
            return
        if releases:
            self._next.releases.append(source)
        else:  # of another prompt, whose own request may still come
            self._next.unholds.append(source.transfer)


def _hand_off_of(request: Any) -> HandOff:
    return HandOff.from_params(request.kv_transfer_params, request.request_id)


def _lists(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(group) for group in blocks]


def _digest_of(request: Any) -> str | None:
    """None if the prompt has embeddings in place of token ids."""
    if request.prompt_token_ids is None:
        return None
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    return prompt_digest(request.prompt_token_ids, adapter=adapter, salt=request.cache_salt or "")
