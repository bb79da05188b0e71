"""SGLang's auxiliary data: one row of each metadata buffer, sent with the end of a transfer."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

__all__ = ["MAX_ROW", "Rows"]

#: Bound on the bytes in the seal of a send.
MAX_ROW = 64 << 10

_COUNT = struct.Struct("<I")


class Rows:
    """The metadata buffers of one scheduler: address, size and row size of each, in bytes."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int], row_sizes: Sequence[int]) -> None:
        """`ValueError`: the buffers contradict each other, or a row exceeds the bound."""
        if not len(addresses) == len(sizes) == len(row_sizes):
            raise ValueError(
                f"there are {len(addresses)} metadata buffers, {len(sizes)} sizes and {len(row_sizes)} row sizes"
            )
        self._buffers = list(zip(map(int, addresses), map(int, sizes), map(int, row_sizes), strict=True))
        self._header = _COUNT.pack(len(self._buffers)) + b"".join(_COUNT.pack(row) for _, _, row in self._buffers)
        size = len(self._header) + sum(row for _, _, row in self._buffers)
        if size > MAX_ROW:
            raise ValueError(
                f"a row of the metadata buffers has {size} bytes, and Troupe carries {MAX_ROW}: speculative decoding "
                "with this hidden size needs another backend"
            )

    def pack(self, index: int) -> bytes:
        """A copy of row `index`. `IndexError`: there is no such row."""
        parts = [self._header]
        parts += [ctypes.string_at(self._address(at, size, row, index), row) for at, size, row in self._buffers]
        return b"".join(parts)

    def unpack(self, packed: bytes, index: int) -> None:
        """Writes a peer's packed row into row `index`. `ValueError`: the peer's rows have other sizes, and nothing is
        written. `IndexError`: there is no such row."""
        places = [self._address(at, size, row, index) for at, size, row in self._buffers]
        if packed[: len(self._header)] != self._header:
            raise ValueError(
                f"the metadata of the prefill server has rows of {_said(packed)} bytes, that of this server rows of "
                f"{_said(self._header)}; start both with the same options and the same SGLANG_* variables"
            )
        offset = len(self._header)
        for place, (_, _, row) in zip(places, self._buffers, strict=True):
            ctypes.memmove(place, packed[offset : offset + row], row)
            offset += row

    @staticmethod
    def _address(at: int, size: int, row: int, index: int) -> int:
        if index < 0 or (index + 1) * row > size:
            raise IndexError(f"row {index} of a metadata buffer of {size // row if row else 0} rows")
        return at + index * row


def _said(packed: bytes) -> str:
    """The row sizes at the beginning of a packed row, as text."""
    if len(packed) < _COUNT.size:
        return f"{len(packed)}"
    [count] = _COUNT.unpack_from(packed)
    if len(packed) < _COUNT.size * (count + 1):
        return f"{len(packed)}"
    return "+".join(str(row) for row in struct.unpack_from(f"<{count}I", packed, _COUNT.size)) or "0"
