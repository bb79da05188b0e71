"""A payload as bytes: its header, and the object that readers get."""

from __future__ import annotations

import ctypes
import enum
import math
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from troupe.memory import Memory

__all__ = ["Header", "Kind", "Payload", "PayloadError", "RawPayload", "payload_of", "restored"]

# magic, kind, whether the payload is a value of its own, dimensions, bytes of the dtype's name, bytes of the identity,
# bytes of the payload, number; then the dtype's name, the shape, the identity, and the payload unless it is apart.
_FIXED = struct.Struct("<4sBBBBIQQ")
_MAGIC = b"TrO1"
_MAX_DIMENSIONS = 64

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
# vLLM's encoders and decoders keep their state in fields of their own, and all threads of a process share them.
_SERIALIZER = threading.Lock()


class PayloadError(ValueError):
    """Bytes that were not written by a connector, or that contradict their header."""


class Kind(enum.IntEnum):
    """The kind of object that was put, and that readers get."""

    OBJECT = 1  #: by vLLM-Omni's own serializer
    BYTES = 2
    TENSOR = 3


@dataclass(frozen=True, slots=True)
class Header:
    """What a reader knows before it has the payload.

    `size`: of the payload, in bytes. `number`: the payload's number at its node, for `claim_of`. `apart`: the payload
    is a value of its own.
    """

    kind: Kind
    identity: bytes
    size: int
    number: int
    apart: bool
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def encode(self) -> bytes:
        name = self.dtype.encode("ascii")
        fixed = _FIXED.pack(
            _MAGIC, self.kind, self.apart, len(self.shape), len(name), len(self.identity), self.size, self.number
        )
        return b"".join((fixed, name, struct.pack(f"<{len(self.shape)}Q", *self.shape), self.identity))

    @classmethod
    def decode(cls, raw: memoryview) -> tuple[Header, memoryview]:
        """The header, and the payload that follows it (empty if it is apart). `PayloadError`."""
        if len(raw) < _FIXED.size:
            raise PayloadError(f"a header of {len(raw)} bytes; it has {_FIXED.size} at least")
        magic, kind, apart, dimensions, name, identity, size, number = _FIXED.unpack_from(raw)
        if magic != _MAGIC:
            raise PayloadError(f"a header that begins with {magic!r}, which no connector of this version has written")
        if kind not in list(Kind) or apart > 1 or dimensions > _MAX_DIMENSIONS:
            raise PayloadError(f"a header of kind {kind}, apart {apart}, {dimensions} dimensions")
        at = _FIXED.size
        end = at + name + 8 * dimensions + identity
        if end > len(raw) or (apart and end != len(raw)) or (not apart and len(raw) - end != size):
            raise PayloadError(f"a header of {len(raw)} bytes that says {end}, and {size} of its payload")
        dtype = bytes(raw[at : at + name]).decode("ascii", "replace")
        shape = struct.unpack_from(f"<{dimensions}Q", raw, at + name)
        own = bytes(raw[end - identity : end])
        header = cls(Kind(kind), own, size, number, bool(apart), dtype, shape)
        if header.kind == Kind.TENSOR:
            header._check_tensor()
        return header, raw[end:]

    def _check_tensor(self) -> None:
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise PayloadError(f"a tensor of dtype {self.dtype!r}, which this torch does not have")
        if math.prod(self.shape) * dtype.itemsize != self.size:
            raise PayloadError(f"a tensor of {self.dtype} and shape {self.shape} in {self.size} bytes")


@dataclass(frozen=True, slots=True)
class Payload:
    """The payload of a put: `memory`, which the engine reads (bytes, or a flat tensor of uint8), and the fields for its
    header."""

    kind: Kind
    memory: Any
    size: int
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def header(self, identity: bytes, number: int, *, apart: bool) -> Header:
        return Header(self.kind, identity, self.size, number, apart, self.dtype, self.shape)

    def bytes(self) -> bytes:
        """A copy of the bytes, in host memory."""
        if not isinstance(self.memory, torch.Tensor):
            return bytes(self.memory)
        host = self.memory.cpu()
        return ctypes.string_at(host.data_ptr(), host.numel()) if host.numel() else b""


def payload_of(data: Any, serialize: Callable[[Any], bytes]) -> Payload:
    """Contiguous tensors and bytes stay where they are; everything else is serialized.

    `TypeError`: the tensor is in memory that Troupe does not move; the message says what to pass instead.
    """
    if isinstance(data, torch.Tensor):
        flat = _flat(data)
        return Payload(
            Kind.TENSOR, flat, int(flat.numel()), str(data.dtype).removeprefix("torch."), tuple(data.shape)
        )
    if isinstance(data, (bytes, bytearray, memoryview)):
        if isinstance(data, memoryview) and not data.c_contiguous:
            data = data.tobytes()
        return Payload(Kind.BYTES, data, data.nbytes if isinstance(data, memoryview) else len(data))
    with _SERIALIZER:
        raw = serialize(data)
    return Payload(Kind.OBJECT, raw, len(raw))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"the tensor is of layout {tensor.layout}; hand over tensor.to_dense()")
    if tensor.is_quantized:
        raise TypeError(f"the tensor is quantized ({tensor.dtype}); hand over tensor.int_repr() and its scales")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"the tensor is on {tensor.device}; Troupe moves tensors of the host and of GPUs of NVIDIA and AMD: hand "
            "over tensor.cpu()"
        )
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        raise TypeError(f"the tensor is of dtype {tensor.dtype}, which has no name in torch; view it as uint8")
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if whole.numel() == 0:  # an empty tensor cannot be viewed as another dtype
        return torch.empty(0, dtype=torch.uint8)
    return whole.reshape(-1).view(torch.uint8)


def restored(header: Header, body: memoryview, deserialize: Callable[[bytes], Any]) -> Any:
    """The object that a reader gets, or a `RawPayload` over `body`, which it references. `PayloadError`."""
    if len(body) != header.size:
        raise PayloadError(f"a payload of {len(body)} bytes whose header says {header.size}")
    if header.kind == Kind.OBJECT:
        try:
            with _SERIALIZER:
                return deserialize(bytes(body))
        except Exception as why:
            raise PayloadError(f"{header.size} bytes that vLLM-Omni's serializer cannot read: {why}") from why
    dtype, shape = (
        (_DTYPES[header.dtype], header.shape) if header.kind == Kind.TENSOR else (torch.uint8, (header.size,))
    )
    if header.size == 0:
        return RawPayload(torch.empty(shape, dtype=dtype), 0)
    return RawPayload(_bytes_at(body, copied=not header.apart).view(dtype).reshape(shape), header.size)


def _bytes_at(body: memoryview, *, copied: bool) -> torch.Tensor:
    """A tensor over the bytes. It is writable, since only the reader that took the payload knows its memory."""
    if copied:
        return torch.frombuffer(bytearray(body), dtype=torch.uint8)
    held: Any = (ctypes.c_ubyte * len(body)).from_address(Memory.of(body, writable=False).address)
    held.keeper = body
    return torch.frombuffer(held, dtype=torch.uint8)


class RawPayload:
    """Bytes or a tensor that a stage has put, got without a copy: `tensor` lies in memory of this process's node.

    `tensor` has the dtype and the shape that it was put with; of bytes it is flat, of uint8. Its memory is reused once
    `release` was called, or this object is gone, and the tensor and its views are no longer referenced. It outlives the
    connector. Not thread-safe.
    """

    __slots__ = ("_size", "_tensor")

    def __init__(self, tensor: torch.Tensor, size: int) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._size = size

    def __repr__(self) -> str:
        return f"<RawPayload of {self._size} bytes{' that was released' if self._tensor is None else ''}>"

    def __enter__(self) -> RawPayload:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def size(self) -> int:
        """In bytes."""
        return self._size

    @property
    def tensor(self) -> torch.Tensor:
        """`RuntimeError`: it was released."""
        if self._tensor is None:
            raise RuntimeError("the payload was released; clone what you need of its tensor before releasing it")
        return self._tensor

    def as_tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The same bytes as another tensor, over the same memory."""
        if self._size == 0:
            return torch.empty(shape, dtype=dtype)
        return self.tensor.reshape(-1).view(torch.uint8).view(dtype).reshape(shape)

    def to_bytes(self) -> bytes:
        """A copy."""
        tensor = self.tensor
        return ctypes.string_at(tensor.data_ptr(), self._size) if self._size else b""

    def release(self) -> None:
        """Releases the payload. A second call does nothing."""
        self._tensor = None
