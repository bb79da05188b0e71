"""The scheduler's bound on blocks of prompts that are computed here and not loaded yet.

Engines that compute prompts for each other must not wait for each other's blocks, each with all of its own kept for
prompts whose texts find no room at the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from troupe.vllm.layouts import NULL_BLOCK

__all__ = ["Kept"]


class Kept:
    """By vLLM's ids of requests. Requests with equal beginnings may share blocks."""

    def __init__(self, longest: int | None) -> None:
        """`longest`: blocks of the longest request; None: the engine writes no texts, and may keep all of its blocks.
        """
        self._longest = longest
        self._most: int | None = None  # blocks; none: all
        self._of: dict[str, set[int]] = {}
        self._count: Counter[int] = Counter()

    def bind(self, pool: Any) -> None:
        """Sets the bound: half of the pool, or what the longest request leaves, if that is more. A request that needs
        no more than half then always has room."""
        if self._longest is not None:
            usable = int(pool.num_gpu_blocks) - 1  # excluding the null block
            self._most = max(usable // 2, usable - self._longest)

    def add(self, request_id: str, blocks: Sequence[Sequence[int]]) -> bool:
        """Returns false if they are too many."""
        if self._most is None:
            return True
        own = {block for group in blocks for block in group} - {NULL_BLOCK}
        if len(self._count) + sum(block not in self._count for block in own) > self._most:
            return False
        self._of[request_id] = own
        self._count.update(own)
        return True

    def remove(self, request_id: str) -> None:
        """Forgets them: they are free again, or were never kept."""
        own = self._of.pop(request_id, set())
        self._count.subtract(own)
        for block in own:
            if not self._count[block]:
                del self._count[block]
