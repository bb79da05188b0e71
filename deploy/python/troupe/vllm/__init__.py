"""vLLM's connector: the KV cache of a prompt moves from the engine that prefilled it to the one that decodes it.

    python3 -m vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config '{
      "kv_connector": "TroupeConnector", "kv_connector_module_path": "troupe.vllm", "kv_role": "kv_both"}'

for every engine of one machine: the first one begins a supervisor, the others find it. `kv_connector_extra_config` may
name a running supervisor ({"supervisor": "HOST:PORT"}), or a deployment's file and this engine's node in it
({"deployment": "FILE", "node": "prefill-0"}; stages of `engine: external` with an edge of mode read between them).
Frontends find the engine's HTTP server by a label of its node: the address of the server's command line, or {"http":
"HOST:PORT"} if the server is reached by another one.

A decode engine reads a cache when the prompt is computed ({"read_mode": true}, the default), or the prefill engine
writes it there ({"read_mode": false}): layer by layer while it computes, if a router asks both engines at once.

With {"proxy_ip": "HOST", "proxy_ping_port": PORT, "http_port": PORT} it registers with a proxy for MoRIIO's connector.

So far: attention with or without windows and latents (MLA), on the CPU, and on GPUs in any of vLLM's orders.
Tensor-parallel and pipeline-parallel sizes may differ between prefill and decode. vLLM calls every method, and an
exception would end the whole server, so each method has an answer for the case that it fails. That answer ends the
affected requests, too: a load fails by name, a cache is not handed off.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import is_quantized_kv_cache
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from troupe.vllm.layouts import Group, Share, numbers_of
from troupe.vllm.metadata import RankIdentity, TroupeMetadata
from troupe.vllm.place import Ranks, http_address, place_of, pushes_of
from troupe.vllm.proxy import Heartbeat
from troupe.vllm.scheduler import Scheduler, Window
from troupe.vllm.stats import PrometheusMetrics, TransferStats
from troupe.vllm.worker import Worker

__all__ = ["TroupeConnector", "register"]

logger = init_logger(f"vllm.{__name__}")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def register() -> None:
    """Makes the connector known by its name; the entry point of `vllm.general_plugins`. May be called again."""
    if "TroupeConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("TroupeConnector", "troupe.vllm", "TroupeConnector")


def _answers(otherwise: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Logs a hook that raises, and answers with the result of `otherwise` for the hook's arguments."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            except Exception:  # pylint: disable=broad-exception-caught
                logger.exception("%s failed", method.__name__)
                return otherwise(*arguments, **named)

        return guarded  # type: ignore[return-value]

    return decorate


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


# The only workers of engines whose scheduler is in this process, too, by vLLM's id of the engine.
_WORKERS: weakref.WeakValueDictionary[str, Worker] = weakref.WeakValueDictionary()


class TroupeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One object in the scheduler's process and one in the worker's, each with its own side only."""

    _cache_hit_source = CacheHitSource.P2P
    _scheduler: Scheduler  # of the role SCHEDULER
    _heartbeat: Heartbeat | None = None  # of that role, too
    _worker: Worker  # of the role WORKER

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine_id, kv_role = self._kv_transfer_config.engine_id, self._kv_transfer_config.kv_role
        parallel = vllm_config.parallel_config
        ranks = Ranks(size=parallel.tensor_parallel_size, parts=parallel.pipeline_parallel_size)
        place = place_of(
            self._kv_transfer_config.kv_connector_extra_config,
            engine_id,
            ranks=ranks,
            role=kv_role,
            http=http_address(sys.argv),  # the server's command line, also in the processes that it starts
        )
        _check_supported(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                nodes=place.nodes,
                engine_id=engine_id,
                ranks=ranks,
                windows=[_window_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups],
                push_block_size=_push_block_size(parallel, kv_cache_config) if place.pushes else 0,
                longest=None if kv_role == "kv_producer" else _longest(vllm_config, kv_cache_config),
                loads=kv_role != "kv_producer",
            )
            if place.unused:
                unused = ", ".join(place.unused)
                logger.info("%s: ignored, since nodes find each other through their cluster", unused)
            if place.proxy is not None and parallel.data_parallel_rank == 0:
                self._heartbeat = Heartbeat(place.proxy, parallel.data_parallel_size)
        else:
            self._worker = Worker(place, parallel.rank % ranks.count)  # ranks count across a server's replicas
            if ranks.count == 1:
                _WORKERS[engine_id] = self._worker

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True if caches are pushed: a full graph would not call `save_kv_layer`."""
        return pushes_of(extra_config)

    # -- the scheduler's side

    @_answers(_always(None))
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_pool(gpu_block_pool)

    @_answers(_always(None))
    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    @_answers(_always((0, False)))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        try:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
        except Exception as error:  # pylint: disable=broad-exception-caught
            logger.exception("update_state_after_alloc failed")
            self._scheduler.not_allocated(request, num_external_tokens, error)

    @_answers(lambda self, *_, **__: self._scheduler.take_orders())
    def build_connector_meta(self, scheduler_output: Any) -> TroupeMetadata:
        return self._scheduler.take_metadata(scheduler_output)

    @_answers(_always(None))
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.settle(connector_output)

    @_answers(lambda self, request, *_, **__: self._scheduler.not_finished(request))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = self._scheduler.finished(request, block_ids)
        self._offer_at_once()
        return answer

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_answers(_always(None))  # promises of `request_finished` stay
    def _offer_at_once(self) -> None:
        """Gives the worker at once what it would get with the next step. An engine that steps only while it is asked,
        such as `LLM` without a core of its own, makes no step after its last request."""
        worker = _WORKERS.get(self._kv_transfer_config.engine_id)
        if worker is not None:
            worker.offer(self._scheduler.take_offers())

    @_answers(_always(None))
    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self._scheduler.know([metadata[rank] for rank in sorted(metadata)])

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): said for rank, said in metadata.items()})

    @_answers(_always(False))
    def has_pending_block_frees(self) -> bool:
        return self._scheduler.frees_soon()

    @_answers(_always(False))
    def has_pending_push_work(self) -> bool:
        return self._scheduler.waits_for_pushes()

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups that are loaded: a load writes every block of its groups, so vLLM need not, and must not, zero
        them meanwhile."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    # -- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """May raise: the server then reports the error and does not start."""
        groups = [_group_of(group) for group in self._kv_cache_config.kv_cache_groups]
        context = self._vllm_config.compilation_config.static_forward_context
        # An attribute of the CPU backend's layers: the instruction set for which its kernels order a block.
        packing = {getattr(context[name], "isa", "") for group in groups for name in group.layers}
        if len(packing) > 1:
            raise ValueError(f"Troupe moves caches whose layers are all packed in one way; here they are as {packing}")
        packed = packing.pop() if packing else ""
        self._worker.register(
            {name: kv_caches[name] for group in groups for name in group.layers},
            groups=groups,
            packing=packed,
            share=_share_of(self._vllm_config, groups, packed),
        )

    @_answers(_always(None))
    def get_handshake_metadata(self) -> RankIdentity | None:
        """Lets the scheduler's side say which life of its nodes has computed a prompt."""
        return self._worker.identity() if self._role == KVConnectorRole.WORKER else None

    def bind_connector_metadata(self, connector_metadata: TroupeMetadata) -> None:
        """Starts the step's work here and not in `start_load_kv`, which on the CPU is called only after the whole step.
        """
        super().bind_connector_metadata(connector_metadata)
        self._carry_out(connector_metadata)

    @_answers(_always(None))
    def _carry_out(self, step: TroupeMetadata) -> None:
        self._worker.carry_out(step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    @_answers(_always(None))
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.layer_computed(layer_name, kv_layer)

    def wait_for_save(self) -> None:
        pass

    @_answers(lambda *_, **__: KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker.results(idle=self._get_connector_metadata().idle)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.loaded, failed_recving=results.failed
        )

    @_answers(_always(None))
    def get_kv_connector_stats(self) -> TransferStats | None:
        return self._worker.take_stats() if self._role == KVConnectorRole.WORKER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrometheusMetrics:
        register()  # MultiConnector finds the class of its statistics by this name, and must not fail there
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_answers(_always(None))
    def shutdown(self) -> None:
        if self._role == KVConnectorRole.WORKER:
            self._worker.stop()
        elif self._heartbeat is not None:
            self._heartbeat.stop()


_WHOLE, _WINDOW, _LATENT = "FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"


def _kinds_of(kv_cache_config: Any) -> list[str]:
    return [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]


def _window_of(spec: Any) -> Window | None:
    return Window(spec.sliding_window, spec.block_size) if type(spec).__name__ == _WINDOW else None


def _push_block_size(parallel: Any, kv_cache_config: Any) -> int:
    """Tokens of a block of a cache that may move while it is computed: it has one block table, from which no blocks are
    dropped, and its layers are computed once a step, not batch by batch. 0: it moves after it is computed."""
    groups = kv_cache_config.kv_cache_groups
    if parallel.use_ubatching or len(groups) != 1 or _kinds_of(kv_cache_config) == [_WINDOW]:
        return 0
    return int(groups[0].kv_cache_spec.block_size)


def _longest(vllm_config: Any, kv_cache_config: Any) -> int:
    """Blocks of the longest request that the engine takes."""
    tokens = int(vllm_config.model_config.max_model_len)
    return sum(-(-tokens // int(group.kv_cache_spec.block_size)) for group in kv_cache_config.kv_cache_groups)


def _group_of(group: Any) -> Group:
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    return Group(
        tuple(group.layer_names),
        spec.block_size,
        window=kind == _WINDOW,
        key_dim=spec.head_size,
        latent=kind == _LATENT,
    )


def _hash_of(model: Any, cache_dtype: str, packing: str) -> bytes:
    """A hash of everything that gives a cache's bytes their meaning. Paths differ between machines, so the model's own
    configuration is used, which names the origin of a file of weights."""
    said = (
        model.hf_config.to_json_string(use_diff=False),
        model.revision,
        model.quantization,
        str(model.dtype),
        # Unquantised types are in the layout, whether they were asked for by name or not.
        cache_dtype if is_quantized_kv_cache(cache_dtype) else "auto",
        # Fingerprints of numbered layers lack it, and engines with other packings must not be placed together.
        packing,
    )
    return hashlib.blake2b(repr(said).encode(), digest_size=32).digest()


def _share_of(vllm_config: Any, groups: Sequence[Group], packing: str) -> Share:
    """This rank's share of the model. Layers of a model without a pipeline have numbers, unless some are not among the
    layers that the model counts (drafts), or have no cache."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = [name for group in groups for name in group.layers]
    numbers, total_layers = numbers_of(layers), model.get_total_num_hidden_layers()
    as_counted = len(layers) == total_layers and sorted(numbers.values()) == list(range(total_layers))
    if parallel.pipeline_parallel_size == 1 and not as_counted:
        numbers, total_layers = {}, 0
    return Share(
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        kv_heads=model.get_total_num_kv_heads(),
        numbers=numbers,
        total_layers=total_layers,
        model=_hash_of(model, vllm_config.cache_config.cache_dtype, packing),
    )


def _check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel = vllm_config.parallel_config
    context = parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size
    if context != 1:
        raise ValueError(
            "Troupe's connector serves engines whose ranks have every token of their heads; this one has them divided "
            f"over {context} context-parallel ranks"
        )
    backend = parallel.distributed_executor_backend
    divided = parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
    if backend == "external_launcher" and divided:
        raise ValueError(
            "Troupe's connector needs one scheduler for all ranks of an engine; with the executor 'external_launcher' "
            "each has its own"
        )
    if backend == "ray" and parallel.pipeline_parallel_size > 1 and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        raise ValueError(
            "Ray's former executor hears only from the last part of a pipeline, so no transfer would end; "
            "start vLLM with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"
        )
    others = sorted({kind for kind in _kinds_of(kv_cache_config) if kind not in {_WHOLE, _WINDOW, _LATENT}})
    if others:
        raise ValueError(
            "Troupe's connector serves models whose layers keep every token or a window of them, with caches of one "
            f"shape; this one has {', '.join(others)}"
        )
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if spec.state_content_bytes is not None or spec.num_head_slots is not None or spec.tokens_per_state != 1:
            raise ValueError(
                f"the cache of {', '.join(group.layer_names[:1]) or 'a layer'} ({spec.kv_quant_mode.name}) does "
                "not hold K followed by V for each head and token, and Troupe's connector serves no other cache yet; "
                "start vLLM with another --kv-cache-dtype or --attention-backend"
            )
