"""SGLang's pages as blocks of Troupe."""

from __future__ import annotations

import array
from typing import Any

import numpy as np

__all__ = ["blocks_of", "placeholders"]


def blocks_of(pages: Any, per_page: int) -> array.array[int]:
    """The blocks of these pages, `per_page` of each. `ValueError`: one of them is not a page."""
    ids = np.asarray(pages, dtype=np.int64).reshape(-1)
    if ids.size and int(ids.min()) < 0:
        raise ValueError(f"there is no page {int(ids.min())}; pages count from 0")
    if per_page != 1:
        ids = (ids[:, None] * per_page + np.arange(per_page)).reshape(-1)
    return _array(ids)


def placeholders(count: int, used: array.array[int], blocks: int) -> array.array[int]:
    """`count` distinct blocks of a cache with `blocks` blocks, none of them in `used`: for a prefix that does not move,
    since a receive must not name a block twice. `ValueError`: there are too few."""
    if count + len(used) > blocks:
        raise ValueError(f"a prefix of {count} blocks and {len(used)} more do not fit a cache of {blocks} blocks")
    free = np.ones(count + len(used), dtype=bool)
    taken = np.asarray(used, dtype=np.int64)
    free[taken[taken < free.size]] = False
    return _array(np.flatnonzero(free)[:count])


def _array(ids: Any) -> array.array[int]:
    out = array.array("I")
    out.frombytes(ids.astype(np.uint32).tobytes())
    return out
