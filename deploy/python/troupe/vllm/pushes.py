"""The scheduler's side of prompts whose caches move while they are computed: tracks their blocks.

The blocks have a reference of their own: vLLM may preempt a request and give its blocks away in the same step, while a
transfer still reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from troupe.vllm.metadata import Chunk, Drop, Push, TroupeMetadata

__all__ = ["Pushes"]

logger = init_logger(f"vllm.{__name__}")


@dataclass
class _Push:
    """`request_id`: None once its request has been preempted, after which it computes its prompt only for itself."""

    transfer: str
    request_id: str | None
    tokens: int
    blocks: list[int] = field(default_factory=list)
    end: int = 0  # up to which token it was ordered


class Pushes:
    """By transfer: offered -> sealed or dropped -> unpinned. The worker reports the last state by the request, if it
    has ended, or by the transfer's name, if the request goes on without these blocks."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a block; 0: caches move after their prompts are computed."""
        self._block_size = block_size
        self._pool: Any = None
        self._pushes: dict[str, _Push] = {}
        self._of: dict[str, _Push] = {}  # by vLLM's id of a running request
        self._ended: dict[str, _Push] = {}  # by that of a request that has ended
        self._lost: set[str] = set()  # requests that were preempted

    def bind(self, pool: Any) -> None:
        self._pool = pool

    def begin(self, request: Any, transfer: str, blocks: Sequence[int]) -> Push | None:
        """None if it is not offered before it is computed."""
        if not self._block_size or self._pool is None or request.num_preemptions or transfer in self._pushes:
            return None
        push = _Push(transfer, request.request_id, int(request.num_prompt_tokens))
        order = Push(transfer, self._take(push, blocks), push.tokens)
        self._pushes[transfer] = self._of[request.request_id] = push
        return order

    def step(self, output: Any, orders: TroupeMetadata) -> None:
        """Handles vLLM's next step: what it computes, and which requests it has preempted."""
        for request_id in output.preempted_req_ids or ():
            self._lose(request_id, orders)
        if self._of:
            self._go_on(output, orders)

    def frees_soon(self) -> bool:
        """Whether blocks are held of prompts that were preempted, in this step or before."""
        last = [push.blocks[-1] for push in self._of.values() if push.blocks]
        return self.waits() or any(self._pool.blocks[block].ref_cnt == 1 for block in last)

    def waits(self) -> bool:
        """Whether blocks are held for which vLLM may have no request."""
        return any(push.request_id is None for push in self._pushes.values())

    def named(self, transfer: str) -> bool:
        """Whether any request is offered by this name."""
        return transfer in self._pushes

    def lost(self, request_id: str) -> bool:
        """Whether the cache of a request is no longer wanted. Asked when the request ends."""
        found = request_id in self._lost
        self._lost.discard(request_id)
        return found

    def transfer_of(self, request_id: str) -> str | None:
        """The transfer by which a request is offered."""
        push = self._of.get(request_id)
        return None if push is None else push.transfer

    def end(self, request_id: str) -> None:
        """Records the end of a request: its transfer will be sealed or dropped."""
        self._ended[request_id] = self._of.pop(request_id)

    def give_up(self, request_id: str, orders: TroupeMetadata) -> None:
        """Drops the transfer of a request that has ended without an order for it."""
        self._lose(request_id, orders)
        self._lost.discard(request_id)

    def lose_all(self, orders: TroupeMetadata) -> None:
        """Drops all pushes, since it is unknown what the step computes. A push that no worker knows has ended."""
        unheard = {push.transfer for push in orders.pushes}
        orders.pushes, orders.chunks = [], []
        for request_id, push in list(self._of.items()):
            self._lose(request_id, orders)
            if push.transfer in unheard:
                del self._pushes[push.transfer]
                self._free(push)

    def settle(self, told: set[str]) -> set[str]:
        """Of the sends that the workers reported, the requests that have ended."""
        preempted = set()
        for name in told:
            push = self._ended.pop(name, None)
            if push is None and name in self._pushes and self._pushes[name].request_id is None:
                push = self._pushes[name]
                preempted.add(name)
            if push is not None:
                del self._pushes[push.transfer]
                self._free(push)
        return told - preempted

    # -- parts

    def _free(self, push: _Push) -> None:
        try:
            self._pool.free_blocks(self._pool.blocks[block] for block in reversed(push.blocks))
        except Exception:  # pylint: disable=broad-exception-caught
            logger.exception("blocks of %s cannot be given back", push.transfer)  # the other ends still count

    def _take(self, push: _Push, blocks: Sequence[int]) -> list[int]:
        """Takes the new blocks of the prompt, each with a reference."""
        wanted = -(-push.tokens // self._block_size)
        new = list(blocks)[: max(wanted - len(push.blocks), 0)]
        self._pool.touch([self._pool.blocks[block] for block in new])
        push.blocks += new
        return new

    def _lose(self, request_id: str, orders: TroupeMetadata) -> None:
        push = self._of.pop(request_id, None)
        if push is not None:
            push.request_id = None
            self._lost.add(request_id)
            orders.drops.append(Drop("", push.transfer))

    def _go_on(self, output: Any, orders: TroupeMetadata) -> None:
        """Continues pushes. A request that got other blocks, or recomputes tokens that were already ordered, is lost:
        another connector tried in vain to load some of it."""
        cached = output.scheduled_cached_reqs
        scheduled = [(new.req_id, new.block_ids[0], True, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        scheduled += [
            (request_id, blocks[0] if blocks else [], False, begin)
            for request_id, blocks, begin in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        for request_id, blocks, is_table, begin in scheduled:
            push = self._of.get(request_id)
            if push is None or begin >= push.tokens:
                continue
            known = len(push.blocks)
            if begin < push.end or (is_table and list(blocks[:known]) != push.blocks):
                self._lose(request_id, orders)
                continue
            push.end = min(begin + output.num_scheduled_tokens[request_id], push.tokens)
            more = self._take(push, blocks[known:] if is_table else blocks)
            orders.chunks.append(Chunk(push.transfer, more, push.end, push.end - begin))
