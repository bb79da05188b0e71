"""Memory of the engine in any container: torch and numpy objects are understood, but never imported."""

from __future__ import annotations

import ctypes
from typing import Any

from troupe._dlpack import exported
from troupe.errors import ErrorCode, TroupeError

__all__ = ["Memory"]


class Memory:
    """A range of memory of this process: `address`, `size` in bytes, and the owner that keeps it alive.

    `owner` is referenced as long as this object is; an engine references its regions until it is closed. The address
    may be in host or GPU memory; `on_gpu` if the container says that it is a GPU's. Raises `ValueError` for a null
    address or an empty range.
    """

    __slots__ = ("address", "on_gpu", "owner", "size")

    address: int
    size: int
    owner: object
    on_gpu: bool

    def __init__(self, address: int, size: int, owner: object = None, *, on_gpu: bool = False) -> None:
        if address <= 0 or size <= 0:
            raise ValueError(f"no memory: {size} bytes at address {address}; allocate it before the engine starts")
        self.address = address
        self.size = size
        self.owner = owner
        self.on_gpu = on_gpu

    def __repr__(self) -> str:
        return f"Memory(0x{self.address:x}, {self.size})"

    @classmethod
    def of(cls, what: object, *, writable: bool = True) -> Memory:
        """The memory of `what`, in this order: a `Memory`; a torch storage (`data_ptr()` and `nbytes()`: all of it); a
        torch tensor, of the host or CUDA (`data_ptr()`, contiguous); an array with `__cuda_array_interface__`; one with
        the buffer protocol (`bytearray`, `mmap`, `array`, numpy); one with `__array_interface__`; one with
        `__dlpack__`, of the host, CUDA or ROCm (pending work of its streams is not waited for).

        The bytes must be contiguous and, unless `writable` is False, not read-only: `ValueError` else. `TypeError` for
        anything that is none of these.
        """
        if isinstance(what, Memory):
            return what
        if callable(getattr(what, "data_ptr", None)):
            return cls._of_tensor(what)
        interface = getattr(what, "__cuda_array_interface__", None)
        if interface is not None:
            return cls._of_interface(interface, what, writable, on_gpu=True)
        try:
            view = memoryview(what)  # type: ignore[arg-type]
        except TypeError:
            interface = getattr(what, "__array_interface__", None)
            if interface is not None:
                return cls._of_interface(interface, what, writable)
            if callable(getattr(what, "__dlpack__", None)) and callable(getattr(what, "__dlpack_device__", None)):
                return cls._of_dlpack(what, writable)
            raise TypeError(
                f"{type(what).__name__} is no memory: give a torch tensor or storage, a numpy array, an object with "
                "the buffer protocol or __dlpack__, or troupe.Memory(address, size, owner)"
            ) from None
        return cls._of_view(view, what, writable)

    @classmethod
    def _of_tensor(cls, tensor: Any) -> Memory:
        on_gpu = bool(getattr(tensor, "is_cuda", False))  # also for AMD
        if callable(getattr(tensor, "nbytes", None)):  # a storage
            return cls(int(tensor.data_ptr()), int(tensor.nbytes()), tensor, on_gpu=on_gpu)
        if not tensor.is_contiguous():
            raise ValueError(
                f"the tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} is not contiguous; "
                "register its storage: tensor.untyped_storage()"
            )
        size = int(tensor.numel()) * int(tensor.element_size())
        return cls(int(tensor.data_ptr()), size, tensor, on_gpu=on_gpu)

    @classmethod
    def _of_view(cls, view: memoryview, what: object, writable: bool) -> Memory:
        if not view.c_contiguous:
            raise ValueError(f"the {type(what).__name__} of strides {view.strides} is not contiguous")
        if writable and view.readonly:
            raise ValueError(f"the {type(what).__name__} is read-only; a cache is written to")
        if view.nbytes == 0:
            raise ValueError(f"the {type(what).__name__} is empty")
        # The view is kept, so that a bytearray cannot be resized, nor a mapping closed, under the engine.
        if view.readonly:
            return cls(_address_of_readonly(view), view.nbytes, view)
        return cls(
            ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B") if view.ndim else view)), view.nbytes, view
        )

    @classmethod
    def _of_interface(cls, interface: Any, what: object, writable: bool, *, on_gpu: bool = False) -> Memory:
        try:
            shape, text = interface["shape"], interface["typestr"]
            address, readonly = interface["data"]
            item = int(text[2:])
        except (KeyError, TypeError, ValueError, IndexError):
            raise TypeError(f"the array interface of {type(what).__name__} lacks shape, typestr or data") from None
        size = item
        for extent in shape:
            size *= int(extent)
        strides = interface.get("strides")
        if strides is not None and tuple(strides) != _packed_strides(tuple(shape), item):
            name = type(what).__name__
            raise ValueError(f"the {name} of shape {tuple(shape)} and strides {strides} is not contiguous")
        if writable and readonly:
            raise ValueError(f"the {type(what).__name__} is read-only; a cache is written to")
        return cls(int(address), size, what, on_gpu=on_gpu)

    @classmethod
    def _of_dlpack(cls, what: object, writable: bool) -> Memory:
        told = exported(what)
        if told.strides and not told.packed:
            name = type(what).__name__
            raise ValueError(f"the {name} of shape {told.shape} and strides {told.strides} is not contiguous")
        if writable and told.read_only:
            raise ValueError(f"the {type(what).__name__} is read-only; a cache is written to")
        return cls(told.address, told.size, told.keeper, on_gpu=told.on_gpu)


def _packed_strides(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(item)
        item *= extent
    return tuple(reversed(strides))


class _Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


# Our own function objects: those of ctypes.pythonapi, with their argument types, are shared by the whole process.
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_Buffer))(("PyBuffer_Release", ctypes.pythonapi))


def _address_of_readonly(view: memoryview) -> int:
    # A read-only buffer gives its address only to C.
    raw = _Buffer()
    _get_buffer(view, ctypes.byref(raw), 0)
    address = int(raw.buf or 0)
    _release_buffer(ctypes.byref(raw))
    return address


def view_of(address: int | None, size: int, keeper: object) -> memoryview:
    """Bytes at an address, which reference `keeper` as long as any view of them lives."""
    if not address or not size:
        return memoryview(b"")
    held: Any = (ctypes.c_ubyte * size).from_address(address)
    held.keeper = keeper
    return memoryview(held).cast("B")


def unreachable(what: str, why: str) -> TroupeError:
    return TroupeError(
        ErrorCode.NO_DEVICE,
        f"{what} is in memory of a GPU, which this libtroupe cannot reach ({why}); build the package for GPUs: "
        "pip wheel --no-deps -C cmake.define.TROUPE_GPU=cuda deploy/python, with nvcc on the PATH (or hip, with hipcc)",
    )
