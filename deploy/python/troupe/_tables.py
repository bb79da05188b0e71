"""Lists of places in memory as C reads them: rows of 64-bit numbers, whatever they come in. Private."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable
from typing import Any

_WORDS = frozenset("lLqQ")
_HALF_WORDS = frozenset("iI")


def table(what: str, given: Any, short: int, full: int) -> array.array[int]:
    """Rows of `full` numbers each, one after the other. `given` has rows of `short` numbers, of which the rest is 0, or
    of `full`: a list of tuples, or an array of two dimensions. An array of 64-bit numbers is taken without a loop.

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
        raise ValueError(f"a number in {what} is negative, or of more than 64 bits") from None
    except TypeError:
        raise TypeError(f"{what} are rows of int") from None
    return words, len(rows[0]) if rows else full


def indices(what: str, given: Any) -> array.array[int]:
    """Indices as 32-bit numbers, from a list or an array. `ValueError`, `TypeError` naming `what`."""
    try:
        view = memoryview(given)
    except TypeError:
        view = None
    if view is not None and view.ndim == 1 and view.format in _WORDS | _HALF_WORDS:
        numbers = array.array(view.format)
        numbers.frombytes(view.tobytes())
        given = numbers
    elif callable(getattr(given, "tolist", None)):
        given = given.tolist()
    elif isinstance(given, (str, bytes, bytearray)):
        raise TypeError(f"{what} are numbers, not {type(given).__name__}")
    try:
        return array.array("I", given)
    except OverflowError:
        raise ValueError(f"an index in {what} is negative, or of more than 32 bits") from None
    except TypeError:
        raise TypeError(f"{what} are an iterable of int, not {type(given).__name__}") from None
