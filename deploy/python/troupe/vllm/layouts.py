"""How vLLM's KV cache lies in memory, said as a Troupe layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from troupe.layout import LayerKind, LayerShape, Layout, OpaqueUnit, Plane

__all__ = ["CacheView", "cpu_planes", "describe_cpu_cache"]

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


@dataclass(frozen=True)
class CacheView:
    """The layout of a cache, and the memory that it lies in (torch storages, in the layout's order).

    vLLM's block b is the blocks b * `ratio` ... of the layout: its kernels may use smaller ones.
    """

    layout: Layout
    regions: list[Any]
    block_tokens: int
    ratio: int
    layers: int

    def blocks_of(self, blocks: Sequence[int], tokens: int) -> list[int]:
        """The layout's blocks for the first tokens of vLLM's block table."""
        wide = [block * self.ratio + part for block in blocks for part in range(self.ratio)]
        return wide[: -(-tokens // self.block_tokens)]


def cpu_planes(shape: Sequence[int], strides: Sequence[int], element_size: int, base: int) -> tuple[Plane, Plane]:
    """K and V of a layer of the CPU backend: a view [block][head][token][2 * head_dim], strides in elements, `base` in
    bytes. Its kernels keep, of each (block, head), all of K and then all of V, packed in an order of their own: a token
    has no place in it."""
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


def describe_cpu_cache(caches: Sequence[Any], *, block_size: int, packing: str, model: bytes = b"") -> CacheView:
    """The cache of the CPU backend, one tensor [block][head][token][2 * head_dim] a layer, all in one storage.

    `packing`: the order of the kernels inside a block, which both sides must have in common, and so `model`, a hash of
    32 bytes or none. `ValueError` says what does not fit.
    """
    first = caches[0]
    storage = first.untyped_storage()
    layers = []
    shape = LayerShape(
        LayerKind.OPAQUE, kv_heads=first.shape[1], packing=f"vllm cpu {packing}", unit=OpaqueUnit.BLOCK_HEAD
    )
    for cache in caches:
        if cache.shape != first.shape or cache.dtype != first.dtype:
            raise ValueError("layers of different shape or type are not supported yet")
        if cache.untyped_storage().data_ptr() != storage.data_ptr():
            raise ValueError("layers in different allocations are not supported yet")
        planes = cpu_planes(cache.shape, cache.stride(), cache.element_size(), cache.data_ptr() - storage.data_ptr())
        layers.append((shape, planes))
    name = _DTYPES.get(str(first.dtype))
    if name is None:
        raise ValueError(f"a cache of {first.dtype} is not supported; start vLLM with --kv-cache-dtype auto")
    block_tokens = first.shape[2]
    if block_size % block_tokens:
        raise ValueError(f"a block of {block_size} tokens is no multiple of the kernels' blocks of {block_tokens}")
    layout = Layout(
        layers,
        dtype=name,
        element_size=first.element_size(),
        block_tokens=block_tokens,
        blocks=first.shape[0],
        model=model,
    )
    return CacheView(
        layout=layout,
        regions=[storage],
        block_tokens=block_tokens,
        ratio=block_size // block_tokens,
        layers=len(layers),
    )
