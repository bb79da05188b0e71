"""The state of recurrent layers (Mamba and its kin), as state tensors of Troupe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.layout import StatePart, StateTensor

__all__ = ["slots_of"]


def slots_of(args: Any, component: int, tp_size: int, add: Callable[[int, int], int]) -> list[StateTensor]:
    """The tensors of a component, each with its region, which `add` returns for an address and a size. `ValueError`: a
    tensor contradicts itself."""
    sizes, items = args.state_data_lens[component], args.state_item_lens[component]
    dims = _of(args, "state_dim_per_tensor", component)
    groups = _of(args, "state_conv_shard_groups", component)
    outer = _of(args, "state_slice_outer_counts", component)
    layers = _of(args, "state_layer_ids", component)
    seen: dict[int, int] = {}
    states = []
    for number, (address, size, item) in enumerate(zip(args.state_data_ptrs[component], sizes, items, strict=True)):
        if size == 0:
            continue
        if item <= 0 or size < item:
            raise ValueError(f"state buffer {number} has {size} bytes and slots of {item}")
        name = f"state.{number}"
        if layers:
            layer = int(layers[number])
            seen[layer] = seen.get(layer, -1) + 1
            name = f"layers.{layer}.{seen[layer]}"
        more: dict[str, Any] = {}
        if not dims:
            # How it is sliced is unknown: it moves only between equal sizes.
            name, more = f"{name}/tp{tp_size}", {"sliced": True}
        elif dims[number]:
            rows = _Rows(
                item, int(dims[number]), int(outer[number]) if outer else 1, groups[number] if groups else None
            )
            try:
                parts = rows.pieces(tp_size)
            except ValueError as why:
                raise ValueError(f"state buffer {number}: {why}") from None
            more = {"sliced": True} if len(parts) == 1 else {"parts": tuple(StatePart(part, True) for part in parts)}
        states.append(StateTensor(name, add(address, size), size // item, 0, item, item, **more))
    if not states:
        raise ValueError("the state component 'mamba' has no memory")
    return states


@dataclass(frozen=True)
class _Rows:
    """A slot of `item` bytes: `outer` rows of `dim` elements, where each row is made of `groups` (queries, keys and
    values, in elements of the whole model)."""

    item: int
    dim: int
    outer: int
    groups: Sequence[int] | None

    def pieces(self, tp_size: int) -> list[int]:
        """Bytes of each piece that is sliced by itself."""
        if self.item % (self.dim * self.outer):
            raise ValueError(f"slots of {self.item} bytes are not {self.outer} rows of {self.dim} elements")
        element = self.item // (self.dim * self.outer)
        row = [self.dim]
        if self.groups and sum(self.groups) == self.dim * tp_size:
            if any(group % tp_size for group in self.groups):
                raise ValueError(f"groups of {list(self.groups)} elements do not divide into {tp_size} ranks")
            row = [group // tp_size for group in self.groups]
        return [part * element for part in row] * self.outer


def _of(args: Any, name: str, component: int) -> Sequence[Any]:
    every = getattr(args, name, None) or []
    return every[component] if component < len(every) and every[component] else []
