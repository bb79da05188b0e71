"""vLLM's connector: the KV cache of a prompt moves from the engine that prefilled it to the one that decodes it.

    python3 -m vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config '{
      "kv_connector": "TroupeConnector", "kv_connector_module_path": "troupe.vllm", "kv_role": "kv_both"}'

for every engine of one machine: the first one begins a supervisor, the others find it. `kv_connector_extra_config` may
name one that runs ({"supervisor": "HOST:PORT"}), or a deployment's file and which of its nodes this engine is
({"deployment": "FILE", "node": "prefill-0"}; stages of `engine: external` with an edge of mode read between them).
Frontends find the engine's HTTP server by a label of its node: as the server's command line has it, or by {"http":
"HOST:PORT"} where that is not the address to reach it by.

So far: the CPU backend, one rank an engine, one KV cache group. vLLM calls every method; one that raised would end the
whole server, so each has an answer for the case that something goes wrong in it.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from troupe.vllm.metadata import TroupeMetadata
from troupe.vllm.place import http_address, place_of
from troupe.vllm.scheduler import Scheduler
from troupe.vllm.worker import Worker

__all__ = ["TroupeConnector", "register"]

logger = init_logger(f"vllm.{__name__}")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def register() -> None:
    """Makes the connector known by its name; the entry point of `vllm.general_plugins`. May be called again."""
    if "TroupeConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("TroupeConnector", "troupe.vllm", "TroupeConnector")


def _answers(otherwise: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """A hook that raises is logged and answered with this."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            except Exception:  # pylint: disable=broad-exception-caught
                logger.exception("%s failed", method.__name__)
                return otherwise()

        return guarded  # type: ignore[return-value]

    return decorate


class TroupeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One object in the scheduler's process and one in the worker's, each with its own side only."""

    _cache_hit_source = CacheHitSource.P2P
    _scheduler: Scheduler  # of the role SCHEDULER
    _worker: Worker  # of the role WORKER

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine_id = self._kv_transfer_config.engine_id
        place = place_of(
            self._kv_transfer_config.kv_connector_extra_config,
            engine_id,
            role=self._kv_transfer_config.kv_role,
            http=http_address(sys.argv),  # of the server, also in the processes that it starts
        )
        _check_supported(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(node=place.node, engine_id=engine_id)
        else:
            self._worker = Worker(place)

    # -- the scheduler's side

    @_answers(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @_answers(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @_answers(TroupeMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> TroupeMetadata:
        return self._scheduler.take_metadata(idle=scheduler_output.total_num_scheduled_tokens == 0)

    @_answers(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.settle(connector_output)

    @_answers(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids[0])

    @_answers(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A load writes every block of its groups: vLLM need not, and must not, zero them meanwhile."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    # -- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """May raise: the server then does not start, and says why."""
        layers = self._kv_cache_config.kv_cache_groups[0].layer_names
        context = self._vllm_config.compilation_config.static_forward_context
        packing = {getattr(context[name], "isa", "") for name in layers}
        if len(packing) != 1 or "" in packing:
            raise ValueError(f"Troupe moves the cache of vLLM's CPU backend; the layers here are packed as {packing}")
        self._worker.register(
            kv_caches,
            layers=layers,
            block_size=self._vllm_config.cache_config.block_size,
            packing=packing.pop(),
            model=_hash_of(self._vllm_config.model_config),
        )

    def bind_connector_metadata(self, connector_metadata: TroupeMetadata) -> None:
        """Here and not in `start_load_kv`: on the CPU that is called only when the whole step has been computed."""
        super().bind_connector_metadata(connector_metadata)
        self._carry_out(connector_metadata)

    @_answers(lambda: None)
    def _carry_out(self, step: TroupeMetadata) -> None:
        self._worker.carry_out(step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    @_answers(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker.results(idle=self._get_connector_metadata().idle)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.loaded, failed_recving=results.failed
        )

    @_answers(lambda: None)
    def shutdown(self) -> None:
        if self._role == KVConnectorRole.WORKER:
            self._worker.stop()


def _hash_of(model: Any) -> bytes:
    """Of what makes equal bytes of two caches mean the same. A path is another one on another machine, so that the
    model's own configuration stands for it, which names what a file of weights was made by."""
    said = (model.hf_config.to_json_string(use_diff=False), model.revision, model.quantization, str(model.dtype))
    return hashlib.blake2b(repr(said).encode(), digest_size=32).digest()


def _check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1:
        raise ValueError(f"Troupe's connector serves engines of one rank so far; this one has {parallel.world_size}")
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ValueError(
            f"Troupe's connector serves models with one KV cache group so far; this one has {groups}. With sliding "
            "windows --disable-hybrid-kv-cache-manager makes one group of them"
        )
