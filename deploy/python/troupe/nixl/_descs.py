"""Lists of descriptors: ranges of memory by address, all of one kind of memory."""
# ruff: noqa: N801, N802 - the names are NIXL's

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from troupe.memory import Memory
from troupe.nixl._errors import nixlInvalidParamError, nixlMismatchError, nixlNotFoundError

logger = logging.getLogger("troupe.nixl")

#: The kinds of memory by name; those that Troupe moves are DRAM and VRAM. The lower-case ones are NIXL's old names.
MEMORY_KINDS = {"DRAM": 0, "VRAM": 1, "BLOCK": 2, "OBJ": 3, "FILE": 4, "cpu": 0, "cuda": 1}
_NAMES = {0: "DRAM", 1: "VRAM", 2: "BLOCK", 3: "OBJ", 4: "FILE"}
_MAGIC = b"TROUPE-DESCS\x01"
_HEAD = struct.Struct("<BBQ")
_MOST = 2**28
_List = TypeVar("_List", bound="_DList")


class _DList:
    """Rows of (address, length, device), followed by the fields of the list's class."""

    _kind = 0
    _extra: type | None = None  # type of the last field of a row

    def __init__(self, mem_type: int | str, descs: Any = ()) -> None:
        self._type = MEMORY_KINDS[mem_type] if isinstance(mem_type, str) else int(mem_type)
        if self._type not in _NAMES:
            raise nixlInvalidParamError(f"{mem_type!r} is not a kind of memory")
        self._rows: list[tuple[Any, ...]] = []
        self.owners: list[object] = []  # owners that keep the memory alive, if known
        for row in _rows_of(descs):
            self.addDesc(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self._rows[index]

    def __setitem__(self, index: int, row: tuple[Any, ...]) -> None:
        self._rows[index] = self._checked(row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _DList):
            return NotImplemented
        return (self._kind, self._type, self._rows) == (other._kind, other._type, other._rows)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {_NAMES[self._type]}: {len(self._rows)} descriptors>"

    def getType(self) -> int:
        """The number of its kind of memory."""
        return self._type

    def descCount(self) -> int:
        return len(self._rows)

    def isEmpty(self) -> bool:
        return not self._rows

    def addDesc(self, row: tuple[Any, ...]) -> None:
        self._rows.append(self._checked(row))

    append = addDesc

    def index(self, row: tuple[Any, ...]) -> int:
        """The index of the row; `nixlNotFoundError`: it is not in the list."""
        checked = self._checked(row)
        if checked not in self._rows:
            raise nixlNotFoundError(f"there is no descriptor {checked} in the list")
        return self._rows.index(checked)

    def remDesc(self, index: int) -> None:
        del self._rows[index]

    def trim(self) -> _DList:
        """The rows of a registration as rows to transfer, without the additional fields."""
        return nixlXferDList(self._type, [row[:3] for row in self._rows])

    def clear(self) -> None:
        self._rows.clear()

    def print(self) -> None:
        print(f"{self!r}: {self._rows}")

    def _checked(self, row: Iterable[Any]) -> tuple[Any, ...]:
        fields = tuple(row)
        if self._extra is not None and len(fields) == 3:
            fields = (*fields, b"" if self._extra is bytes else "")
        if len(fields) != (3 if self._extra is None else 4):
            raise nixlInvalidParamError(f"a descriptor of {type(self).__name__} cannot be a {len(fields)}-tuple")
        numbers = tuple(int(one) for one in fields[:3])
        if any(not 0 <= one < 2**64 for one in numbers):
            raise nixlInvalidParamError(f"a descriptor has a number that is negative, or too large: {fields}")
        if self._extra is bytes and isinstance(fields[3], str):
            fields = (*numbers, fields[3].encode())
        return numbers + fields[3:]

    # -- bytes

    def encoded(self) -> bytes:
        parts = [_MAGIC, _HEAD.pack(self._kind, self._type, len(self._rows))]
        for row in self._rows:
            parts.append(struct.pack("<QQQ", *row[:3]))
            if self._extra is not None:
                extra = row[3] if isinstance(row[3], bytes) else str(row[3]).encode()
                parts.append(struct.pack("<I", len(extra)) + extra)
        return b"".join(parts)


class nixlXferDList(_DList):
    """A list for transfers: (address, length, device)."""

    _kind = 1


class nixlRegDList(_DList):
    """A list for registrations: (address, length, device, meta), the last as bytes, which are ignored here."""

    _kind = 2
    _extra = bytes


class nixlRemoteDList(_DList):
    """(address, length, device, name of the remote agent)."""

    _kind = 3
    _extra = str


def decoded(given: bytes) -> _DList:
    """Decodes an encoded list. The bytes may come from an untrusted source."""
    if given[:1] == b"\x80":
        raise nixlMismatchError("these bytes are a pickle, as NIXL makes them; Troupe reads no pickles: they run code")
    if not given.startswith(_MAGIC):
        raise nixlMismatchError("these bytes are not a list of descriptors of Troupe")
    try:
        kind, mem_type, count = _HEAD.unpack_from(given, len(_MAGIC))
        at = len(_MAGIC) + _HEAD.size
        made = {one._kind: one for one in (nixlXferDList, nixlRegDList, nixlRemoteDList)}[kind](mem_type)
        if count > _MOST:
            raise ValueError(count)
        for _ in range(count):
            row: tuple[Any, ...] = struct.unpack_from("<QQQ", given, at)
            at += 24
            if made._extra is not None:
                (length,) = struct.unpack_from("<I", given, at)
                at += 4
                if at + length > len(given):
                    raise ValueError(length)
                extra = given[at : at + length]
                row += (extra if made._extra is bytes else extra.decode(),)
                at += length
            made.addDesc(row)
        if at != len(given):
            raise ValueError(at)
    except (struct.error, KeyError, ValueError) as why:
        raise nixlMismatchError("this list of descriptors is cut or damaged") from why
    return made


def xfer_descs(descs: Any, mem_type: str | None) -> nixlXferDList | None:
    """The result of `get_xfer_descs`: None, and a line in the log, for an invalid argument."""
    return _list_of(nixlXferDList, descs, mem_type, 3, "a %s was given for a transfer; give a nixlXferDList (trim())")


def reg_descs(descs: Any, mem_type: str | None) -> nixlRegDList | None:
    """The result of `get_reg_descs`."""
    return _list_of(nixlRegDList, descs, mem_type, 4, "a %s was given for a registration; give a nixlRegDList")


def remote_descs(descs: Any, mem_type: str | None) -> nixlRemoteDList | None:
    """The result of `get_remote_descs`."""
    return _list_of(nixlRemoteDList, descs, mem_type, 4)


def _list_of(kind: type[_List], descs: Any, mem_type: str | None, width: int, unlike: str = "") -> _List | None:
    """`unlike`: the error for a list of another class; empty: its rows are taken."""
    if isinstance(descs, kind):
        return descs
    if unlike and isinstance(descs, _DList):
        logger.error(unlike, type(descs).__name__)
        return None
    return _made_of(kind, descs, mem_type, width)


def _made_of(kind: type[_List], descs: Any, mem_type: str | None, width: int) -> _List | None:
    tensors = _tensors_of(descs)
    if tensors is not None:
        return _of_tensors(kind, tensors)
    if mem_type is None:
        logger.error("name the memory type of descriptors that are not tensors")
        return None
    numbered = MEMORY_KINDS[mem_type]  # KeyError, as in NIXL
    rows = _rows_of(descs)
    widths = {len(row) for row in rows}
    array_of_three = not isinstance(descs, (list, tuple)) and widths == {3}
    if widths - {width} and not array_of_three:
        logger.error("give a list of %d-tuples, or an N x 3 array, for a %s", width, kind.__name__)
        return None
    return kind(numbered, rows)


def _tensors_of(descs: Any) -> list[Any] | None:
    if callable(getattr(descs, "data_ptr", None)):
        return [descs]
    if isinstance(descs, (list, tuple)) and descs and callable(getattr(descs[0], "data_ptr", None)):
        return list(descs)
    return None


def _of_tensors(kind: type[_List], tensors: list[Any]) -> _List | None:
    memory = []
    for tensor in tensors:
        try:
            memory.append(Memory.of(tensor))
        except ValueError as why:
            logger.error("%s", why)
            return None
    if len({one.on_gpu for one in memory}) > 1:
        logger.error("tensors of one list are all of the host or all of GPUs")
        return None
    made = kind(MEMORY_KINDS["VRAM" if memory[0].on_gpu else "DRAM"])
    for one, tensor in zip(memory, tensors, strict=True):
        device = int(tensor.get_device()) if callable(getattr(tensor, "get_device", None)) else 0
        made.addDesc((one.address, one.size, max(device, 0)))
    made.owners = tensors
    return made


def _rows_of(descs: Any) -> list[tuple[Any, ...]]:
    """Rows of a list of tuples, or of a two-dimensional array."""
    tolist = getattr(descs, "tolist", None)
    return [tuple(row) for row in (tolist() if callable(tolist) else descs)]


def strided_rows(descs: Any) -> list[tuple[int, int, int, int, int]] | None:
    """Rows of an N x 5 array: (address, length, device, stride, count). None if it is not one."""
    if isinstance(descs, (list, tuple, _DList)) or _tensors_of(descs) is not None:
        return None
    rows = _rows_of(descs)
    return rows if rows and len(rows[0]) == 5 else None


def entries(of: _DList) -> list[tuple[Any, ...]]:
    """(address, length) of each row, for a plan."""
    return [row[:2] for row in of]
