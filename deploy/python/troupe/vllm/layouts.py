"""vLLM's KV cache as a Troupe layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from troupe.layout import GroupBlocks, LayerGroup, LayerKind, LayerShape, Layout, OpaqueUnit, Plane

__all__ = [
    "NULL_BLOCK",
    "WHOLE",
    "CacheView",
    "Group",
    "Share",
    "describe_cache",
    "numbers_of",
    "packed_planes",
    "strided_planes",
]

NULL_BLOCK = 0  #: the first block of vLLM's pool, reserved by the pool

_DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.uint8": "uint8",  # the hash of the model says which 8-bit format it is
}


@dataclass(frozen=True)
class Group:
    """A KV cache group of vLLM: layers that share a block table, with `block_size` tokens in a block; none on a rank
    whose part of a pipeline has no layer of it. `window`: they keep only the last tokens of a request. `key_dim`:
    elements of a head of K, which are followed by those of V; all elements if the layers keep one latent (`latent`)."""

    layers: Sequence[str]
    block_size: int
    window: bool = False
    key_dim: int = 0
    latent: bool = False


@dataclass(frozen=True)
class Share:
    """A rank's share of a model, and which model that is.

    `tp_rank` of `tp_size` has its share of the heads; `kv_heads`: of the whole model, which matters if several ranks
    have the same head. `numbers`: the number of each layer within the model, which has `total_layers` (0: they are not
    numbered, and the rank has all of them). A rank that has all layers numbers them, too, if it can: they are then in
    the order of a pipeline's layers, and its fingerprint equals a pipeline's. `model`: a hash of 32 bytes, equal on
    both sides, or none.
    """

    tp_rank: int = 0
    tp_size: int = 1
    kv_heads: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)
    total_layers: int = 0
    model: bytes = b""

    def heads_of_model(self, own: int) -> int:
        """The model's heads of a layer of which this rank has `own` heads; if there are fewer heads than ranks, several
        ranks have the same one."""
        return self.kv_heads if own == 1 and 0 < self.kv_heads < self.tp_size else own * self.tp_size


WHOLE = Share()


def numbers_of(layers: Iterable[str]) -> dict[str, int]:
    """The numbers of layers in the model, from vLLM's names: "model.layers.3.self_attn.attn" is 3. Layers whose names
    do not have exactly one number are left out."""
    said = {name: [int(word) for word in name.split(".") if word.isdecimal()] for name in layers}
    return {name: numbers[0] for name, numbers in said.items() if len(numbers) == 1}


@dataclass(frozen=True)
class CacheView:
    """The layout of a cache, and its memory (torch storages, in the layout's order).

    vLLM's block b of a group is made of the layout's blocks from b * ratio on, with `ratios[group]`: its kernels may
    use smaller blocks, of `block_tokens[group]` tokens.
    """

    layout: Layout
    regions: list[Any]
    block_tokens: list[int]
    ratios: list[int]
    windows: list[bool]
    layers: int
    order: Mapping[str, int]  #: position of vLLM's layers, by their names

    def blocks_of(self, blocks: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        """The arguments of a send or receive of the first `tokens` tokens of vLLM's block tables, one per group."""
        tables = [self._table(group, blocks[group], tokens) for group in range(len(self.ratios))]
        return {"groups": tables} if self.layout.groups() else {"blocks": tables[0].blocks}

    def no_blocks(self) -> dict[str, Any]:
        """The same for a request without tokens."""
        return self.blocks_of([[] for _ in self.ratios], 0)

    def layers_in(self, size: int, tokens: int) -> int:
        """The number of layers, at least one, in which `tokens` take `size` bytes."""
        layout = self.layout
        of_a_token = self.regions[0].nbytes() / (self.layers * layout.blocks * layout.block_tokens)
        return max(int(size / max(tokens * of_a_token, 1)), 1)

    def wide(self, group: int, blocks: Sequence[int]) -> list[int]:
        """The layout's blocks for some of vLLM's."""
        ratio = self.ratios[group]
        return [block * ratio + part for block in blocks for part in range(ratio)]

    def _table(self, group: int, blocks: Sequence[int], tokens: int) -> GroupBlocks:
        """The table of a group: vLLM puts its null block in the place of blocks that a window has left behind."""
        ratio, block_tokens = self.ratios[group], self.block_tokens[group]
        count = -(-tokens // block_tokens)
        needed = -(-count // ratio)
        left_behind = [i for i, block in enumerate(blocks[:needed]) if self.windows[group] and block == NULL_BLOCK]
        kept = left_behind[-1] + 1 if left_behind else 0
        first = kept * ratio
        return GroupBlocks(first * block_tokens, self.wide(group, blocks[kept:])[: max(count - first, 0)])


def strided_planes(
    shape: Sequence[int], strides: Sequence[int], element_size: int, base: int, group: Group
) -> tuple[LayerShape, tuple[Plane, ...]]:
    """The planes of a layer in which each token has its place: a view [block][head][token][K, then V], strides in
    elements, `base` in bytes. `kv_heads` of the shape counts only this rank's."""
    _, heads, _, content = shape
    block_stride, head_stride, token_stride, content_stride = strides
    fits = (heads, group.key_dim) == (1, content) if group.latent else 0 < group.key_dim < content
    if content_stride != 1 or not fits:
        raise ValueError(
            f"the cache of shape {tuple(shape)} and strides {tuple(strides)} does not have heads of {group.key_dim} "
            "elements of K followed by those of V"
        )

    def plane(first: int, count: int) -> Plane:
        return Plane(
            region=0,
            heads=heads,
            base=base + first * element_size,
            block_stride=block_stride * element_size,
            token_stride=token_stride * element_size,
            head_stride=head_stride * element_size,
            head_bytes=count * element_size,
        )

    if group.latent:
        return LayerShape(LayerKind.MLA, head_dim=content), (plane(0, content),)
    value_dim = content - group.key_dim
    shape_of_layer = LayerShape(
        LayerKind.ATTENTION,
        kv_heads=heads,
        head_dim=group.key_dim,
        value_dim=0 if value_dim == group.key_dim else value_dim,
    )
    return shape_of_layer, (plane(0, group.key_dim), plane(group.key_dim, value_dim))


def packed_planes(shape: Sequence[int], strides: Sequence[int], element_size: int, base: int) -> tuple[Plane, Plane]:
    """K and V of a layer of the CPU backend: a view [block][head][token][2 * head_dim], strides in elements, `base` in
    bytes. Its kernels keep, of each (block, head), all of K and then all of V, packed in an order of their own, in
    which a token has no place."""
    _, heads, tokens, content = shape
    block_stride, head_stride, token_stride, content_stride = strides
    if content % 2 or content_stride != 1 or token_stride != content or head_stride != tokens * content:
        raise ValueError(
            f"the cache of shape {tuple(shape)} and strides {tuple(strides)} is not that of vLLM's CPU backend, "
            "in which a head of a block is contiguous"
        )
    half = content // 2 * element_size * tokens
    k, v = (
        Plane(
            region=0,
            heads=heads,
            base=base + part * half,
            block_stride=block_stride * element_size,
            token_stride=0,
            head_stride=head_stride * element_size,
            head_bytes=half,
        )
        for part in range(2)
    )
    return k, v


def describe_cache(
    caches: Mapping[str, Any], groups: Sequence[Group], *, packing: str = "", share: Share = WHOLE
) -> CacheView:
    """Describes a cache of one tensor [block][head][token][K, then V] per layer, with strides in any order, all in one
    storage. Layers of different groups may have the same memory.

    `packing`: the order of the CPU backend's kernels inside a block, the same on both sides; none: each token has its
    place. `ValueError` says what does not fit.
    """
    names, first_layer = _in_order([name for group in groups for name in group.layers], share)
    group_of = {name: group for group in groups for name in group.layers}
    first = caches[names[0]]
    storage = first.untyped_storage()
    layers = []
    for name in names:
        cache = caches[name]
        if cache.shape[0] != first.shape[0] or cache.dtype != first.dtype:
            raise ValueError("layers of different numbers of blocks or types are not supported yet")
        if cache.untyped_storage().data_ptr() != storage.data_ptr():
            raise ValueError("layers in different allocations are not supported yet")
        base = cache.data_ptr() - storage.data_ptr()
        if packing:
            shape = LayerShape(
                LayerKind.OPAQUE,
                kv_heads=share.heads_of_model(cache.shape[1]),
                packing=f"vllm cpu {packing}",
                unit=OpaqueUnit.BLOCK_HEAD,
            )
            planes: Sequence[Plane] = packed_planes(cache.shape, cache.stride(), cache.element_size(), base)
        else:
            shape, planes = strided_planes(cache.shape, cache.stride(), cache.element_size(), base, group_of[name])
            if shape.kind == LayerKind.ATTENTION:
                shape = replace(shape, kv_heads=share.heads_of_model(shape.kv_heads))
        layers.append((shape, planes))
    dtype = _DTYPES.get(str(first.dtype))
    if dtype is None:
        raise ValueError(f"a cache of {first.dtype} is not supported; start vLLM with --kv-cache-dtype auto")
    block_tokens = _tokens_of_blocks(caches, groups)
    tables = [
        LayerGroup(tuple(sorted(names.index(name) for name in group.layers)), tokens)
        for group, tokens in zip(groups, block_tokens, strict=True)
    ]
    layout = Layout(
        layers,
        dtype=dtype,
        element_size=first.element_size(),
        block_tokens=block_tokens[0],
        blocks=first.shape[0],
        tp_rank=share.tp_rank,
        tp_size=share.tp_size,
        groups=tables if len(tables) > 1 or groups[0].window else (),
        model=share.model,
        first_layer=first_layer,
        total_layers=share.total_layers,
    )
    return CacheView(
        layout=layout,
        regions=[storage],
        block_tokens=block_tokens,
        ratios=[group.block_size // tokens for group, tokens in zip(groups, block_tokens, strict=True)],
        windows=[group.window for group in groups],
        layers=len(layers),
        order={name: place for place, name in enumerate(names)},
    )


def _tokens_of_blocks(caches: Mapping[str, Any], groups: Sequence[Group]) -> list[int]:
    """Tokens of the kernels' blocks of each group. All groups have the same number of vLLM's blocks, and of the
    kernels': the blocks of a group without layers on this rank are divided like the others'."""
    found = []
    for group in groups:
        sizes = {int(caches[name].shape[2]) for name in group.layers}
        if len(sizes) > 1 or any(group.block_size % tokens for tokens in sizes):
            raise ValueError(f"blocks of {group.block_size} tokens are not multiples of the kernels' blocks of {sizes}")
        found.append(sizes.pop() if sizes else 0)
    ratio = min(group.block_size // tokens for group, tokens in zip(groups, found, strict=True) if tokens)
    return [tokens or group.block_size // ratio for group, tokens in zip(groups, found, strict=True)]


def _in_order(names: Sequence[str], share: Share) -> tuple[list[str], int]:
    """The layers in the model's order, and the number of the first."""
    if not names:
        raise ValueError("this rank has no layer with a cache; each part of a pipeline needs one")
    if share.total_layers == 0:
        return list(names), 0
    unnumbered = [name for name in names if name not in share.numbers]
    if unnumbered:
        raise ValueError(f"the names of a pipeline's layers must have the layer's number; {unnumbered[0]!r} has none")
    ordered = sorted(names, key=lambda name: share.numbers[name])
    numbers = [share.numbers[name] for name in ordered]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise ValueError(f"a part of a pipeline must have consecutive layers of the model; this one has {numbers}")
    return ordered, numbers[0]
