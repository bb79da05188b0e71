"""Lists of places in memory as C reads them: rows of 64-bit numbers, from any container. Private."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable
from typing import Any

_WORDS = frozenset("lLqQ")


def table(what: str, given: Any, short: int, full: int) -> array.array[int]:
    """Rows of `full` numbers each, one after the other. `given` has rows of `full` numbers, or of `short` ones, with 0
    for the rest: a list of tuples, or a two-dimensional array. An array of 64-bit numbers is taken without a loop.

    `ValueError`, `TypeError` naming `what`.
    """
    words, width = _rows_of_buffer(given)
    if words is None:
        words, width = _rows_of_list(what, given, short, full)
    if width == full or not words:
        return words
    if width != short:
        raise ValueError(f"a row of {what} has {width} numbers; give {short} or {full}")
    wide = array.array("Q", bytes(8 * full * (len(words) // short)))
    for column in range(short):
        wide[column::full] = words[column::short]
    return wide


def _rows_of_buffer(given: Any) -> tuple[array.array[int] | None, int]:
    try:
        view = memoryview(given)
    except TypeError:
        return None, 0
    if view.ndim != 2 or view.format not in _WORDS or view.itemsize != 8:
        return None, 0
    words = array.array("Q")
    words.frombytes(view.tobytes())
    return words, view.shape[1] if view.shape else 0


def _rows_of_list(what: str, given: Any, short: int, full: int) -> tuple[array.array[int], int]:
    tolist = getattr(given, "tolist", None)
    rows = tolist() if callable(tolist) else given
    if isinstance(rows, (str, bytes, bytearray)) or not isinstance(rows, Iterable):
        raise TypeError(f"{what} are rows of {short} or {full} numbers, not {type(given).__name__}")
    try:
        rows = [tuple(row) for row in rows]
    except TypeError:
        raise TypeError(f"{what} are rows of {short} or {full} numbers each: a list of tuples, say") from None
    widths = {len(row) for row in rows}
    if not widths <= {short, full}:
        raise ValueError(f"a row of {what} has {max(widths - {short, full})} numbers; give {short} or {full}")
    if len(widths) > 1:
        rows = [row + (0,) * (full - len(row)) for row in rows]
    try:
        words = array.array("Q", itertools.chain.from_iterable(rows))
    except OverflowError:
        raise ValueError(f"a number in {what} is negative, or has more than 64 bits") from None
    except TypeError:
        raise TypeError(f"{what} are rows of int") from None
    return words, len(rows[0]) if rows else full


def indices(what: str, given: Any) -> array.array[int]:
    """32-bit numbers, such as ids of blocks, from any iterable: an array of numpy or torch, a list. An `array('I')` is
    taken as it is. `ValueError`, `TypeError` naming `what`."""
    if isinstance(given, array.array) and given.typecode == "I":
        return given
    if isinstance(given, (str, bytes, bytearray)):
        raise TypeError(f"{what} are numbers from 0 to {2**32 - 1}, not {type(given).__name__}")
    tolist = getattr(given, "tolist", None)  # a loop over the array itself takes many times as long
    try:
        return array.array("I", tolist() if callable(tolist) else given)
    except OverflowError:
        raise ValueError(f"{what} are numbers from 0 to {2**32 - 1}; one is negative, or greater") from None
    except TypeError:
        raise TypeError(f"{what} are an iterable of int, not {type(given).__name__}") from None
