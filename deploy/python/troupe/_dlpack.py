"""The memory of a tensor that exports DLPack 1.0 or earlier (dlpack.h; the array API's `__dlpack__`)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

_HOST = (1, 3, 11)  # kDLCPU, and host memory pinned by CUDA or ROCm
_GPU = (2, 10, 13)  # kDLCUDA, kDLROCM, kDLCUDAManaged
_READ_ONLY = 1  # a flag of DLManagedTensorVersioned
_NO_ORDER = -1  # the producer's streams are not waited for: the move concerns memory, not what was computed before


class _DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    ]


@dataclass(frozen=True, slots=True)
class Exported:
    """`strides` are counted in elements; empty: packed. `keeper` holds the memory as long as it is referenced."""

    address: int
    on_gpu: bool
    element_bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool
    keeper: object

    @property
    def size(self) -> int:
        """In bytes, rounded up."""
        elements = 1
        for extent in self.shape:
            elements *= extent
        return (elements * self.element_bits + 7) // 8

    @property
    def packed(self) -> bool:
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True


def exported(what: Any) -> Exported:
    """`TypeError`: its device is unknown to Troupe, or it exported no tensor."""
    device = int(what.__dlpack_device__()[0])
    if device not in _HOST and device not in _GPU:
        name = type(what).__name__
        raise TypeError(f"{name} is on a device of DLPack's type {device}; Troupe moves memory of hosts and GPUs")
    order = {"stream": _NO_ORDER} if device in _GPU else {}
    try:
        capsule = what.__dlpack__(max_version=(1, 0), **order)
    except TypeError:  # older than DLPack 1.0
        capsule = what.__dlpack__(**order)
    # The capsule is not consumed: once it is no longer referenced, it releases the tensor itself.
    read_only = False
    address = _pointer(capsule, b"dltensor_versioned")
    if address:
        versioned = _Versioned.from_address(address)
        if versioned.major > 1:
            raise TypeError(f"{type(what).__name__} is exported by DLPack {versioned.major}; Troupe understands 1")
        read_only = bool(versioned.flags & _READ_ONLY)
        tensor = versioned.tensor
    else:
        address = _pointer(capsule, b"dltensor")
        if not address:
            raise TypeError(f"__dlpack__ of {type(what).__name__} returned no tensor")
        tensor = _DLTensor.from_address(address)
    return Exported(
        address=int(tensor.data or 0) + int(tensor.byte_offset),
        on_gpu=device in _GPU,
        element_bits=int(tensor.bits) * int(tensor.lanes),
        shape=tuple(tensor.shape[i] for i in range(tensor.ndim)),
        strides=tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else (),
        read_only=read_only,
        keeper=(capsule, what),
    )


# Our own function objects: those of ctypes.pythonapi, with their argument types, are shared by the whole process.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _pointer(capsule: object, name: bytes) -> int:
    """0 if it is not a capsule of that name."""
    return int(_pointer_of(capsule, name) or 0) if _is_valid(capsule, name) else 0
