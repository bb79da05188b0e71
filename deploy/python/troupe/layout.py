"""How a rank's KV cache lies in its regions of memory."""

from __future__ import annotations

import ctypes
import enum
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from troupe import _abi
from troupe._tables import indices

__all__ = [
    "Arrangement",
    "GroupBlocks",
    "LayerGroup",
    "LayerKind",
    "LayerShape",
    "Layout",
    "OpaqueUnit",
    "Plane",
    "StatePart",
    "StateTensor",
]

_MODEL_BYTES = 32


class LayerKind(enum.IntEnum):
    ATTENTION = 1  #: keys and values: two planes, K and V
    MLA = 2  #: one latent without heads, the same on every rank: one plane
    RECURRENT = 3  #: no data per token (only a state tensor): no plane
    OPAQUE = 4  #: bytes of a block that only the engine understands, moved by whole blocks: one or two planes


class OpaqueUnit(enum.IntEnum):
    """The piece of an opaque layer."""

    NONE = 0  #: the layer is not opaque
    BLOCK_HEAD = 1  #: a head of a block: heads are sharded as in attention
    BLOCK = 2  #: a block: both sides have equal parallel sizes


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer as the model has it, before any sharding.

    `kv_heads`: of the whole model, 0 unless attention, or opaque by heads. `head_dim`: elements of one head of K (and
    of V), or of the latent; 0 for recurrent and opaque layers. `value_dim`: elements of one head of V if not as K's; 0:
    `head_dim`. `dtype`: of this layer only, 1 to 32 bytes; "": the layout's. `element_size`: bytes of one element of
    `dtype`; 0: its known size.

    `packing`, 1 to 32 bytes, is the engine's name for the format of an opaque layer: layers with equal packings are
    equal byte for byte. `unit` is its piece. A block moves whole, once it is complete or the send is sealed. If a
    prefix ends inside a block, the whole block is written again.
    """

    kind: LayerKind = LayerKind.ATTENTION
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    dtype: str = ""
    element_size: int = 0
    packing: str = ""
    unit: OpaqueUnit = OpaqueUnit.NONE


@dataclass(frozen=True, slots=True)
class Plane:
    """Where K, V or the latent of one layer lies on this rank.

    The bytes of head h (of this rank) of token t (0 <= t < block_tokens) of block b begin at `base + b * block_stride +
    t * token_stride + h * head_stride` of region `region`. All strides are in bytes, not in elements (torch counts
    elements: multiply by `element_size()`). `head_bytes` is head_dim (V: value_dim) * element size. In an opaque layer
    they are the bytes of head h of all tokens of the block: `token_stride` is 0, `heads` is 1 if a block is one piece,
    and the engine chooses `head_bytes`.
    """

    region: int
    heads: int
    base: int
    block_stride: int
    token_stride: int
    head_stride: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class StatePart:
    """Consecutive bytes of a state's slot, `size` of them on this rank, that are `sliced` or held by every rank."""

    size: int
    sliced: bool = False


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor with one slot per request, whatever the request's length (Mamba, sliding window). Moved whole, last.

    `sliced`: rank r of T holds bytes [r * n, (r + 1) * n) of T * n; else every rank holds all of it. `parts`: the
    slot's parts, in order, if it is sliced part by part ([x, B, C] of a convolution), `slot_bytes` in all; `sliced` is
    ignored then. `name`: the two sides match tensors by position and name; if a side holds only part of the model's
    layers, by name alone, and a name then means one state of the whole model.
    """

    name: str
    region: int
    slots: int
    base: int
    slot_stride: int
    slot_bytes: int
    sliced: bool = False
    parts: tuple[StatePart, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that have a block table of their own in each request.

    They keep other tokens of a request than the other layers (sliding windows), or have another number of tokens in a
    block (`block_tokens`; 0: the layout's). `layers`: their numbers, ascending. If a layout has groups, each layer with
    planes is in exactly one. Planes of different groups may overlap, if an engine gives the blocks of one pool to any
    group: within a request a block then belongs to one group. Groups are those of the whole model: if the layout is a
    part of it, a group may have no layers here.
    """

    layers: tuple[int, ...]
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of a request for one group of layers.

    `first_token`: the first token of the first block, a multiple of the group's `block_tokens`. Earlier tokens are not
    held (a window has moved on), and nothing of them moves for these layers.
    """

    first_token: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A named arrangement; the default is [layer][block][kv][token][head][dim] in one region.

    `order`: `layers_first`, `blocks_first` or `block_interleaved`. `kv_separate`: K and V of a layer's block lie in two
    blocks. `head_major`: [head][token] inside a block. `region_per_layer`: a region for each layer (layers first).
    """

    order: str = "layers_first"
    kv_separate: bool = False
    head_major: bool = False
    region_per_layer: bool = False


_ORDERS = {"layers_first": 0, "blocks_first": 1, "block_interleaved": 2}


class Layout:
    """A checked layout. Immutable; may be used from any thread, and by any number of engines.

    Both sides of a transfer agree on layers, kind, heads, dims, dtype and packing of each, dtype and its size, block
    tokens, groups and state tensors, and the model if both give it; strides, regions, blocks and, unless a layer has
    `OpaqueUnit.BLOCK`, parallel sizes may differ. For two parts of a model (`total_layers`), only the layers that both
    hold are compared and moved.
    """

    __slots__ = ("__weakref__", "_handle", "_library")

    def __init__(
        self,
        layers: Iterable[tuple[LayerShape, Sequence[Plane]]],
        *,
        dtype: str,
        block_tokens: int,
        blocks: int,
        element_size: int = 0,
        tp_rank: int = 0,
        tp_size: int = 1,
        states: Iterable[StateTensor] = (),
        groups: Iterable[LayerGroup] = (),
        model: bytes = b"",
        first_layer: int = 0,
        total_layers: int = 0,
    ) -> None:
        """A layout plane by plane, for memory that exists already.

        Args:
            layers: for every layer, its shape and its planes on this rank: K and V, the latent, one or two opaque ones,
                or none.
            dtype: "fp8", "int8", "fp16", "bf16", "fp32", or a name of your own of 1 to 32 bytes. Compared by name.
            block_tokens: tokens of a block, 1 to 1024.
            blocks: of this rank.
            element_size: bytes; 0: the known size of `dtype`.
            groups: none: one block table serves every layer.
            model: a hash, 32 bytes, of everything that gives bytes their meaning (model, revision, quantisation).
                Compared if both sides give it; empty or all zero: not given.
            first_layer, total_layers: for a rank of a pipeline: `layers` are [first_layer, first_layer + len(layers))
                of the model's `total_layers`. Layer numbers count from the first layer here; `groups` and `states`
                cover these layers only. Both 0: all layers of the model are here. A rank with all layers whose peers
                are parts of a pipeline gives 0 and the layer count, so that its `fingerprint` equals theirs.

        Raises:
            TroupeError: INVALID_CONFIG naming the field.
            TypeError, ValueError: of an argument.
        """
        lib = _abi.library()
        geometry = _geometry(dtype, block_tokens, blocks, element_size, tp_rank, tp_size, model)
        out = ctypes.c_void_p()
        lib.check(lib.layout_new(ctypes.byref(geometry), ctypes.byref(out)))
        self._adopt(lib, out)
        for shape, planes in layers:
            raw = (_abi.CPlane * len(planes))(*(_plane(plane) for plane in planes))
            known, details = _shape(shape), _details(shape)
            lib.check(lib.layout_add_layer_with(out, ctypes.byref(known), ctypes.byref(details), raw, len(planes)))
        for state in states:
            parts = (_abi.CStatePart * len(state.parts))(*(_part(part) for part in state.parts))
            tensor = _abi.CStateTensor(
                size=ctypes.sizeof(_abi.CStateTensor),
                sharding=2 if state.sliced else 1,
                name=_abi.encoded("name", state.name),
                region=_abi.number("region", state.region),
                slots=_abi.number("slots", state.slots),
                base=_abi.number("base", state.base, 2**64),
                slot_stride=_abi.number("slot_stride", state.slot_stride, 2**64),
                slot_bytes=_abi.number("slot_bytes", state.slot_bytes, 2**64),
                parts=ctypes.addressof(parts),
                part_count=len(parts),
            )
            lib.check(lib.layout_add_state(out, ctypes.byref(tensor)))
        for group in groups:
            numbers = [_abi.number("a layer", layer) for layer in group.layers]
            known_layers = (ctypes.c_uint32 * len(numbers))(*numbers)
            lib.check(
                lib.layout_add_group(
                    out, known_layers, len(numbers), _abi.number("block_tokens", group.block_tokens)
                )
            )
        self._be_part(first_layer, total_layers)
        lib.check(lib.layout_check(out))

    @classmethod
    def packed(
        cls,
        layers: Iterable[LayerShape],
        *,
        dtype: str,
        block_tokens: int,
        blocks: int,
        element_size: int = 0,
        tp_rank: int = 0,
        tp_size: int = 1,
        arrangement: Arrangement = Arrangement(),
        model: bytes = b"",
        first_layer: int = 0,
        total_layers: int = 0,
    ) -> Layout:
        """The layout of a named arrangement, packed without padding. Arguments and errors as in the constructor;
        INVALID_CONFIG for an opaque layer, whose planes only the engine knows."""
        lib = _abi.library()
        geometry = _geometry(dtype, block_tokens, blocks, element_size, tp_rank, tp_size, model)
        shapes = list(layers)
        raw = (_abi.CLayerShape * len(shapes))(*(_shape(shape) for shape in shapes))
        details = [_details(shape) for shape in shapes]
        pointers = (ctypes.c_void_p * len(shapes))(*(ctypes.addressof(one) for one in details))
        if arrangement.order not in _ORDERS:
            raise ValueError(f"order is {arrangement.order!r}; give one of {', '.join(_ORDERS)}")
        how = _abi.CArrangement(
            _ORDERS[arrangement.order],
            int(arrangement.kv_separate),
            int(arrangement.head_major),
            int(arrangement.region_per_layer),
        )
        out = ctypes.c_void_p()
        lib.check(
            lib.layout_make_with(
                ctypes.byref(geometry), raw, pointers, len(shapes), ctypes.byref(how), ctypes.byref(out)
            )
        )
        made = cls._of(lib, out)
        made._be_part(first_layer, total_layers)
        lib.check(lib.layout_check(out))
        return made

    @classmethod
    def decode(cls, encoded: bytes) -> Layout:
        """Decodes an encoded layout. The bytes may come from an untrusted source."""
        lib = _abi.library()
        out = ctypes.c_void_p()
        lib.check(lib.layout_decode(bytes(encoded), len(encoded), ctypes.byref(out)))
        return cls._of(lib, out)

    def encode(self) -> bytes:
        """Encodes the layout as versioned bytes, equal on every machine; they include the physical strides."""
        lib = self._library
        out, size = ctypes.c_void_p(), ctypes.c_size_t()
        lib.check(lib.layout_encode(self._handle, ctypes.byref(out), ctypes.byref(size)))
        encoded = _abi.bytes_at(out.value, size.value)
        lib.free(out)
        return encoded

    def fingerprint(self) -> bytes:
        """A 16-byte digest of what `check_compatible` compares, equal on every machine. Layouts with equal fingerprints
        are compatible; strides, regions and blocks may differ, and one of them may not give its model. With
        `total_layers`, the fingerprint covers what all parts of the model have in common, since no rank knows the
        layers of the others: give `model`, too."""
        out = (ctypes.c_uint8 * 16)()
        self._library.check(self._library.layout_fingerprint(self._handle, out))
        return bytes(out)

    def region_sizes(self) -> list[int]:
        """The smallest size in bytes of each region that the layout fits into."""
        lib = self._library
        count = ctypes.c_size_t()
        lib.check(lib.layout_region_sizes(self._handle, None, 0, ctypes.byref(count)))
        sizes = (ctypes.c_uint64 * count.value)()
        lib.check(lib.layout_region_sizes(self._handle, sizes, count.value, ctypes.byref(count)))
        return list(sizes)

    def validate(self, region_sizes: Sequence[int]) -> None:
        """Raises `TroupeError` unless every byte lies in its region (sizes in bytes), and no two planes share one."""
        sizes = (ctypes.c_uint64 * len(region_sizes))(*(_abi.number("a size", s, 2**64) for s in region_sizes))
        self._library.check(self._library.layout_validate(self._handle, sizes, len(region_sizes)))

    def check_compatible(self, remote: Layout) -> None:
        """Raises `TroupeError` LAYOUT_MISMATCH, naming the field and both values, unless the layouts map onto each
        other; for two parts of a model, the layers that both hold."""
        self._library.check(self._library.layout_compatible(self._handle, remote._handle))

    def locate(
        self, blocks: Iterable[int], *, layer: int, plane: int, token: int, head: int = 0
    ) -> tuple[int, int, int]:
        """(region, offset, length) in bytes of one head of K (plane 0), V (plane 1) or the latent (plane 0) at a token
        of a request whose token t is token t % block_tokens of blocks[t // block_tokens]; in an opaque layer, of the
        head's part of the whole block. With groups, `blocks` is the table of the layer's group; if that table begins at
        a later token, count `token` from there."""
        ids = indices("blocks", blocks)
        place = _abi.CachePlace(
            _abi.number("layer", layer),
            _abi.number("plane", plane),
            _abi.number("token", token),
            _abi.number("head", head),
        )
        out = _abi.RegionBytes()
        address, count = ids.buffer_info()
        self._library.check(
            self._library.layout_locate(self._handle, address, count, ctypes.byref(place), ctypes.byref(out)),
        )
        return int(out.region), int(out.offset), int(out.length)

    @property
    def block_tokens(self) -> int:
        return int(self._geometry().block_tokens)

    @property
    def blocks(self) -> int:
        return int(self._geometry().blocks)

    @property
    def dtype(self) -> str:
        return _abi.text_of(self._geometry().dtype)

    @property
    def element_size(self) -> int:
        return int(self._geometry().element_size)

    @property
    def model(self) -> bytes:
        """The hash of the model, 32 bytes; empty if not given."""
        model = self._geometry().model
        return bytes(model[:_MODEL_BYTES]) if model else b""

    @property
    def tp_rank(self) -> int:
        return int(self._geometry().tp_rank)

    @property
    def tp_size(self) -> int:
        return int(self._geometry().tp_size)

    @property
    def first_layer(self) -> int:
        """The number, in the model, of the first layer here."""
        return self._part()[0]

    @property
    def total_layers(self) -> int:
        """How many layers the model has; 0: all of them are here."""
        return self._part()[1]

    def groups(self) -> list[LayerGroup]:
        """The groups of layers that have block tables of their own, with the tokens per block of each."""
        lib = self._library
        count = ctypes.c_uint32()
        lib.check(lib.layout_group_count(self._handle, ctypes.byref(count)))
        out = []
        for index in range(count.value):
            held, tokens = ctypes.c_size_t(), ctypes.c_uint32()
            lib.check(lib.layout_group(self._handle, index, None, 0, ctypes.byref(held), ctypes.byref(tokens)))
            layers = (ctypes.c_uint32 * held.value)()
            lib.check(
                lib.layout_group(self._handle, index, layers, held.value, ctypes.byref(held), ctypes.byref(tokens))
            )
            out.append(LayerGroup(tuple(layers), tokens.value))
        return out

    def layers(self) -> list[tuple[LayerShape, list[Plane]]]:
        """Shape and planes of every layer."""
        lib = self._library
        count = ctypes.c_uint32()
        lib.check(lib.layout_layer_count(self._handle, ctypes.byref(count)))
        out = []
        for index in range(count.value):
            shape, planes, held = _abi.CLayerShape(), (_abi.CPlane * 2)(), ctypes.c_size_t()
            lib.check(
                lib.layout_layer(self._handle, index, ctypes.byref(shape), planes, len(planes), ctypes.byref(held))
            )
            details = _abi.CLayerDetails(size=ctypes.sizeof(_abi.CLayerDetails))
            lib.check(lib.layout_layer_details(self._handle, index, ctypes.byref(details)))
            out.append(
                (
                    _shape_of(shape, details),
                    [
                        Plane(*(int(getattr(planes[i], name)) for name, *_ in _abi.CPlane._fields_))
                        for i in range(held.value)
                    ],
                )
            )
        return out

    def _part(self) -> tuple[int, int]:
        first, total = ctypes.c_uint32(), ctypes.c_uint32()
        self._library.check(self._library.layout_part(self._handle, ctypes.byref(first), ctypes.byref(total)))
        return first.value, total.value

    def _be_part(self, first_layer: int, total_layers: int) -> None:
        first, total = _abi.number("first_layer", first_layer), _abi.number("total_layers", total_layers)
        self._library.check(self._library.layout_set_part(self._handle, first, total))

    def _geometry(self) -> Any:
        geometry = _abi.CacheGeometry(size=ctypes.sizeof(_abi.CacheGeometry))
        self._library.check(self._library.layout_geometry(self._handle, ctypes.byref(geometry)))
        return geometry

    def _adopt(self, lib: _abi.Library, handle: ctypes.c_void_p) -> None:
        self._library = lib
        self._handle = handle
        weakref.finalize(self, lib.layout_free, handle)

    @classmethod
    def _of(cls, lib: _abi.Library, handle: ctypes.c_void_p) -> Layout:
        self = cls.__new__(cls)
        self._adopt(lib, handle)
        return self


def _geometry(  # noqa: PLR0917
    dtype: str, block_tokens: int, blocks: int, element_size: int, tp_rank: int, tp_size: int, model: bytes
) -> _abi.CacheGeometry:
    if not isinstance(model, bytes):
        raise TypeError(f"model is bytes, not {type(model).__name__}")
    if model and len(model) != _MODEL_BYTES:
        raise ValueError(f"model has {len(model)} bytes; give {_MODEL_BYTES} or none")
    return _abi.CacheGeometry(
        size=ctypes.sizeof(_abi.CacheGeometry),
        element_size=_abi.number("element_size", element_size),
        dtype=_abi.encoded("dtype", dtype),
        block_tokens=_abi.number("block_tokens", block_tokens),
        blocks=_abi.number("blocks", blocks),
        tp_rank=_abi.number("tp_rank", tp_rank),
        tp_size=_abi.number("tp_size", tp_size),
        model=(ctypes.c_uint8 * _MODEL_BYTES).from_buffer_copy(model) if model else None,
    )


def _shape(shape: LayerShape) -> _abi.CLayerShape:
    return _abi.CLayerShape(
        _abi.number("kind", shape.kind),
        _abi.number("kv_heads", shape.kv_heads),
        _abi.number("head_dim", shape.head_dim),
    )


def _details(shape: LayerShape) -> _abi.CLayerDetails:
    return _abi.CLayerDetails(
        size=ctypes.sizeof(_abi.CLayerDetails),
        value_dim=_abi.number("value_dim", shape.value_dim),
        element_size=_abi.number("element_size", shape.element_size),
        unit=_abi.number("unit", shape.unit),
        dtype=_abi.encoded("dtype", shape.dtype),
        packing=_abi.encoded("packing", shape.packing),
    )


def _shape_of(shape: _abi.CLayerShape, details: _abi.CLayerDetails) -> LayerShape:
    return LayerShape(
        kind=LayerKind(shape.kind),
        kv_heads=int(shape.kv_heads),
        head_dim=int(shape.head_dim),
        value_dim=int(details.value_dim),
        dtype=_abi.text_of(details.dtype),
        element_size=int(details.element_size),
        packing=_abi.text_of(details.packing),
        unit=OpaqueUnit(details.unit),
    )


def _part(part: StatePart) -> _abi.CStatePart:
    return _abi.CStatePart(_abi.number("size", part.size, 2**64), 2 if part.sliced else 1)


def _plane(plane: Plane) -> _abi.CPlane:
    return _abi.CPlane(
        _abi.number("region", plane.region),
        _abi.number("heads", plane.heads),
        *(
            _abi.number(name, getattr(plane, name), 2**64)
            for name in ("base", "block_stride", "token_stride", "head_stride", "head_bytes")
        ),
    )
