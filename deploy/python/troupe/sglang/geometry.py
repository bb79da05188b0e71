"""How a scheduler's server is divided, and the model's properties that its memory does not show: from what SGLang
publishes."""

from __future__ import annotations

from typing import Any

from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.runtime_context import get_device, process_model_config

from troupe.sglang.layouts import Geometry

__all__ = ["geometry_of"]


def geometry_of(args: Any, *, tp: tuple[int, int], pp: tuple[int, int], is_mla: bool) -> Geometry:
    """`args`: a `KVArgs`. `tp`, `pp`: the rank and the size of each. The model is read if `args` lacks something."""
    states = {str(getattr(kind, "value", kind)) for kind in args.state_types}
    heads = int(getattr(args, "total_kv_head_num", 0))
    more: dict[str, int] = {}
    if pp[1] > 1 or states & {"mamba", "swa"} or not (is_mla or heads):
        model = process_model_config()
        if not is_mla:
            heads = heads or int(model.get_total_num_kv_heads())
        if "swa" in states:
            more["swa_heads"] = int(model.get_swa_num_kv_heads(1))
        more.update(_layers_of(args, model, *pp))
    return Geometry(
        page_size=int(args.page_size),
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
        is_mla=is_mla,
        kv_heads=heads or 1,
        on_gpu=get_device().device == "cuda",
        **more,
    )


def _layers_of(args: Any, model: Any, pp_rank: int, pp_size: int) -> dict[str, int]:
    """The model's layers that are here. SGLang counts the layers with keys and values separately."""
    total = int(model.num_hidden_layers)
    begin, end = get_pp_indices(total, pp_rank, pp_size)
    with_kv = getattr(model.hf_text_config, "full_attention_layer_ids", None) if args.kv_layer_ids else None
    first = getattr(args, "prefill_start_layer", None)  # decode servers do not say it
    if first is None:
        first = begin if with_kv is None else sum(1 for layer in with_kv if layer < begin)
    return {
        "first_layer": int(first),
        "kv_layers": total if with_kv is None else len(with_kv),
        "hidden_layers": total,
        "first_hidden_layer": begin,
        "end_hidden_layer": end,
    }
