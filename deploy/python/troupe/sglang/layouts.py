"""SGLang's description of its memory (`KVArgs`) as layouts of Troupe.

A scheduler process has one cache of keys and values, and another one for each state component of the model, since each
has its own numbering of blocks. The index keys of sparse attention lie in the pages of keys and values, and are layers
of that cache.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from troupe.layout import LayerKind, LayerShape, Layout, OpaqueUnit, Plane
from troupe.memory import Memory
from troupe.sglang.pages import blocks_of
from troupe.sglang.states import slots_of

__all__ = ["Cache", "Geometry", "caches_of"]

_NAME = 32  # bytes of a dtype, or of a packing
_RECURRENT = LayerShape(kind=LayerKind.RECURRENT)

# Components whose lists of indices must be of equal length at both sides.
_EXACT = frozenset(("c128_state", "minimax_dense_kv", "qsa_compressed", "qsa_pending", "swa_ring"))
_LISTS = _EXACT | {"block_scale", "block_scale_swa", "minimax_index_k", "request_row", "swa"}


@dataclass(frozen=True)
class Geometry:
    """How the scheduler's server is divided, and the model's properties that its memory does not show.

    Attributes:
        kv_heads, swa_heads: of the whole model, in layers with full attention and with windows.
        first_layer: the number of the first layer here, among those with keys and values.
        kv_layers: how many layers of the model have keys and values; `hidden_layers`: the number of all its layers.
        on_gpu: where the caches are.
    """

    page_size: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    is_mla: bool = False
    kv_heads: int = 1
    swa_heads: int = 1
    first_layer: int = 0
    kv_layers: int = 0
    hidden_layers: int = 0
    first_hidden_layer: int = 0
    end_hidden_layer: int = 0
    on_gpu: bool = False

    @property
    def rank(self) -> int:
        """The rank within the replica, in Troupe's order."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        return self.pp_size * self.tp_size


@dataclass(frozen=True)
class Cache:
    """The cache of one node of Troupe.

    A block is a token, so that the page sizes of two servers may differ; or an item whose contents only SGLang knows.
    Runs of blocks move as one.

    Attributes:
        name: "kv", or that of the state component; `layers`: how many it has.
        component: its number among SGLang's state components; -1: keys and values.
        item_blocks: blocks of a page, or of another item that an index of SGLang names.
        is_slot: a request has one slot of it, and no list of indices.
        is_exact: lists of unequal length are refused, not cut.
    """

    name: str
    component: int
    layers: int
    layout: Layout
    regions: tuple[Memory, ...]
    item_blocks: int
    is_slot: bool = False
    is_exact: bool = False

    def blocks(self, states: Sequence[Any] | None) -> array.array[int]:
        """The blocks of a request, from SGLang's lists of indices, one per component. `ValueError`: it does not have
        exactly one slot."""
        indices = states[self.component] if states is not None and self.component < len(states) else None
        blocks = blocks_of([] if indices is None else indices, self.item_blocks)
        if self.is_slot and len(blocks) != 1:
            raise ValueError(f"the state {self.name!r} of a request is one slot, and {len(blocks)} were named")
        return blocks


class _Regions:
    """Buffers of SGLang, each once, in the order of the layout."""

    def __init__(self, what: str, on_gpu: bool) -> None:
        self._what = what
        self._on_gpu = on_gpu
        self._known: set[tuple[int, int]] = set()
        self.memory: list[Memory] = []

    def add(self, address: int, size: int) -> int:
        if (address, size) in self._known:
            raise ValueError(
                f"{self._what} are named twice at one address: Troupe does not move SGLang's unified memory; leave "
                "--enable-unified-memory out"
            )
        self._known.add((address, size))
        self.memory.append(Memory(address, size, on_gpu=self._on_gpu))
        return len(self.memory) - 1


def caches_of(args: Any, geometry: Geometry) -> list[Cache]:
    """Keys and values first, then the state components in SGLang's order. `args`: a `KVArgs`. `ValueError` names what
    Troupe does not move."""
    if getattr(args, "mla_compression_ratios", None):
        raise ValueError("Troupe does not move the compressed caches of DeepSeek-V4; use another transfer backend")
    kinds = [str(getattr(kind, "value", kind)) for kind in getattr(args, "state_types", None) or []]
    for kind in kinds:
        if kind not in _LISTS and kind not in ("mamba", "dsa"):
            raise ValueError(
                f"Troupe does not move the state component {kind!r} of this model; use another transfer backend"
            )
        if geometry.pp_size > 1 and kind in _LISTS:
            raise ValueError(
                f"Troupe does not move the state component {kind!r} between pipelines: SGLang does not say which "
                "layers its buffers are of; leave --pp-size out, or use another transfer backend"
            )
        if kinds.count(kind) > 1:
            raise ValueError(f"Troupe does not move two state components {kind!r} of one model")
    caches = [_keys_and_values(args, geometry, kinds)]
    for number, kind in enumerate(kinds):
        if kind == "mamba":
            caches.append(_slots(args, geometry, number))
        elif kind != "dsa":
            caches.append(_lists(args, geometry, number, kind))
    return caches


# -- keys and values


def _keys_and_values(args: Any, geometry: Geometry, kinds: Sequence[str]) -> Cache:
    page = geometry.page_size
    buffers = _Buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, page, "the KV buffers")
    drafts = int(getattr(args, "num_draft_entries", 0))
    if drafts and geometry.pp_size > 1:
        raise ValueError(
            "Troupe does not move the KV cache of a draft model between pipelines: only the last part has it; leave "
            "--pp-size out, or use another transfer backend"
        )
    regions = _Regions("the KV buffers", geometry.on_gpu)
    layers: list[tuple[LayerShape, list[Plane]]] = []
    target = len(buffers) - drafts
    for begin, count in ((0, target), (target, drafts)):
        if geometry.is_mla:
            layers += [_latent(buffers.at(begin + i), regions) for i in range(count)]
        else:
            layers += _attention(buffers, begin, count, regions, geometry)
    first, total = geometry.first_layer, geometry.kv_layers
    if "dsa" in kinds:
        layers = _with_index_keys(args, geometry, kinds.index("dsa"), layers, regions)
        first, total = 2 * first, 2 * total
    layout = Layout(
        layers,
        dtype=_cut(f"sglang {args.kv_cache_dtype_str}"),
        element_size=1,
        block_tokens=1,
        blocks=buffers.pages * page,
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
        first_layer=first if geometry.pp_size > 1 else 0,
        total_layers=total if geometry.pp_size > 1 else 0,
    )
    return Cache("kv", -1, len(layers), layout, tuple(regions.memory), page)


class _Buffers:
    """Buffers of pages: the address and size of each, and the bytes of a token in it."""

    def __init__(
        self, addresses: Sequence[int], sizes: Sequence[int], items: Sequence[int], page: int, what: str
    ) -> None:
        if not len(addresses) == len(sizes) == len(items):
            raise ValueError(f"{what}: {len(addresses)} addresses, {len(sizes)} sizes, {len(items)} sizes of pages")
        for number, (size, item) in enumerate(zip(sizes, items, strict=True)):
            if item <= 0 or item % page or size < item:
                raise ValueError(
                    f"{what}: number {number} has {size} bytes and pages of {item} bytes, which do not fit {page} "
                    "tokens per page"
                )
        self._all = list(zip(addresses, sizes, (item // page for item in items), strict=True))
        self.pages = min((size // item for size, item in zip(sizes, items, strict=True)), default=0)
        if not self._all:
            raise ValueError(f"{what}: there are none")

    def __len__(self) -> int:
        return len(self._all)

    def at(self, number: int) -> tuple[int, int, int]:
        return self._all[number]


def _attention(  # noqa: PLR0917
    buffers: _Buffers, begin: int, count: int, regions: _Regions, geometry: Geometry, heads: int = 0
) -> list[tuple[LayerShape, list[Plane]]]:
    """Keys of every layer, then values of every layer."""
    if count % 2:
        raise ValueError(f"there are {count} buffers of keys and values; each layer must have two")
    total = heads or geometry.kv_heads
    here = max(1, total // geometry.tp_size)
    layers = []
    for number in range(begin, begin + count // 2):
        pair = [buffers.at(number), buffers.at(number + count // 2)]
        sizes = [token // here for _, _, token in pair]
        planes = [
            Plane(regions.add(address, size), here, 0, token, token, head, head)
            for (address, size, token), head in zip(pair, sizes, strict=True)
        ]
        if any(token % here for _, _, token in pair):
            raise ValueError(
                f"KV buffer {number} has {pair[0][2]} and {pair[1][2]} bytes per token, which do not divide into "
                f"{here} heads (the model has {total}, tensor parallelism is {geometry.tp_size})"
            )
        value = sizes[1] if sizes[1] != sizes[0] else 0
        layers.append((LayerShape(kv_heads=total, head_dim=sizes[0], value_dim=value), planes))
    return layers


def _latent(buffer: tuple[int, int, int], regions: _Regions) -> tuple[LayerShape, list[Plane]]:
    address, size, token = buffer
    plane = Plane(regions.add(address, size), 1, 0, token, token, token, token)
    return LayerShape(kind=LayerKind.MLA, head_dim=token), [plane]


def _with_index_keys(
    args: Any,
    geometry: Geometry,
    component: int,
    layers: list[tuple[LayerShape, list[Plane]]],
    regions: _Regions,
) -> list[tuple[LayerShape, list[Plane]]]:
    """Adds the index keys, which every rank has, after each layer. They are packed by pages, so both sides must have
    equal pages: the name of the dtype contains the page size. A layer that uses the index keys of another has an empty
    buffer."""
    addresses, sizes = args.state_data_ptrs[component], args.state_data_lens[component]
    items = args.state_item_lens[component]
    if len(addresses) != len(layers):
        raise ValueError(f"there are index keys of {len(addresses)} layers, and keys and values of {len(layers)}")
    page = geometry.page_size
    out = []
    for layer, address, size, item in zip(layers, addresses, sizes, items, strict=True):
        out.append(layer)
        if size == 0:
            out.append((_RECURRENT, []))
            continue
        if item % page:
            raise ValueError(f"a page of index keys has {item} bytes, which do not divide into {page} tokens")
        shape, planes = _latent((address, size, item // page), regions)
        out.append((_named(shape, f"index of {page}"), planes))
    return out


def _named(shape: LayerShape, dtype: str) -> LayerShape:
    return LayerShape(kind=shape.kind, head_dim=shape.head_dim, dtype=dtype, element_size=1)


# -- states


def _slots(args: Any, geometry: Geometry, component: int) -> Cache:
    """The cache of a component with one slot per tensor. It has no keys and values; its layers stand for those of the
    model."""
    regions = _Regions("the state buffers", geometry.on_gpu)
    states = slots_of(args, component, geometry.tp_size, regions.add)
    here = max(1, geometry.end_hidden_layer - geometry.first_hidden_layer)
    layout = Layout(
        [(_RECURRENT, [])] * here,
        dtype="sglang state",
        element_size=1,
        block_tokens=1,
        blocks=min(state.slots for state in states),
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
        states=states,
        first_layer=geometry.first_hidden_layer,
        total_layers=geometry.hidden_layers if geometry.pp_size > 1 else 0,
    )
    return Cache("mamba", component, here, layout, tuple(regions.memory), 1, is_slot=True)


def _lists(args: Any, geometry: Geometry, component: int, kind: str) -> Cache:
    """The cache of a component made of pages, or rows, of buffers with an order of their own."""
    addresses, sizes = args.state_data_ptrs[component], args.state_data_lens[component]
    items = args.state_item_lens[component]
    regions = _Regions("the state buffers", geometry.on_gpu)
    page = geometry.page_size
    dtype = f"sglang {args.kv_cache_dtype_str}"
    if kind == "swa" and getattr(args, "swa_kv_cache_layout", None) == "nhd":
        buffers = _Buffers(addresses, sizes, items, page, "the state buffers of windows")
        layers = _attention(buffers, 0, len(buffers), regions, geometry, geometry.swa_heads)
        blocks, item_blocks = buffers.pages * page, page
        dtype = f"{page}-token pages {args.kv_cache_dtype_str}"  # windows begin with a page
    else:
        there = [(at, size, item) for at, size, item in zip(addresses, sizes, items, strict=True) if size]
        if not there:
            raise ValueError(f"the state component {kind!r} has no memory")
        layers = []
        for address, size, item in there:
            plane = Plane(regions.add(address, size), 1, 0, item, 0, item, item)
            shape = LayerShape(kind=LayerKind.OPAQUE, packing=_cut(f"{kind} {item}"), unit=OpaqueUnit.BLOCK)
            layers.append((shape, [plane]))
        blocks, item_blocks = min(size // item for _, size, item in there), 1
    layout = Layout(
        layers,
        dtype=_cut(dtype),
        element_size=1,
        block_tokens=1,
        blocks=blocks,
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
    )
    return Cache(kind, component, len(layers), layout, tuple(regions.memory), item_blocks, is_exact=kind in _EXACT)


def _cut(name: str) -> str:
    return name.encode()[:_NAME].decode(errors="ignore")
