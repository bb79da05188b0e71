"""Times of an engine's transfers, for vLLM's log line and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

__all__ = ["PrometheusMetrics", "TransferStats"]

_MILLI = 1e3
_MEGA = 2**20


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Loads of an interval, with one entry per list for each load of one rank, and the number of failures.

    `data` goes from the worker's process to that of the log in this form. All loggers get the same object, so sums are
    made in a copy.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.reset()
        for key, value in (data or {}).items():
            self.data[key] = list(value) if isinstance(value, list) else value

    def reset(self) -> None:
        self.data: dict[str, Any] = {
            "seconds": [],  # from the first byte to the last
            "waited": [],  # seconds before
            "bytes": [],
            "segments": [],
            "failed": 0,
            "expired": 0,  # prompts that were not loaded in time
        }

    def add_load(self, *, seconds: float, waited: float, size: int, segments: int) -> None:
        for key, value in (("seconds", seconds), ("waited", waited), ("bytes", size), ("segments", segments)):
            self.data[key].append(value)

    def add_failed_load(self) -> None:
        self.data["failed"] += 1

    def add_expired_send(self) -> None:
        self.data["expired"] += 1

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        for key, value in other.data.items():
            self.data[key] += value
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        seconds, loads = sum(self.data["seconds"]), len(self.data["seconds"])
        size = sum(self.data["bytes"]) / _MEGA
        return {
            "Num successful transfers": loads,
            "Avg xfer time (ms)": round(_mean(self.data["seconds"]) * _MILLI, 3),
            "P90 xfer time (ms)": round(_ninetieth(self.data["seconds"]) * _MILLI, 3),
            "Avg wait (ms)": round(_mean(self.data["waited"]) * _MILLI, 3),
            "Avg MB per transfer": round(size / loads, 3) if loads else 0.0,
            "Throughput (MB/s)": round(size / seconds, 3) if seconds else 0.0,
            "Avg number of segments": round(_mean(self.data["segments"]), 1),
            "Num failed transfers": self.data["failed"],
            "Num KV expired reqs": self.data["expired"],
        }


class PrometheusMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics of NIXL's connector with NIXL's suffixes, so that a dashboard changes one word."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def histogram(name: str, what: str, buckets: list[float]) -> Any:
            return self._of_engines(self._histogram_cls, f"vllm:troupe_{name}", what, buckets=buckets)

        times = [0.001 * 2**i for i in range(15)]
        self._histograms = {
            "seconds": histogram("xfer_time_seconds", "Time in which the bytes of a load of KV cache moved.", times),
            "waited": histogram("recv_wait_seconds", "Time from the beginning of a load to its first byte.", times),
            "bytes": histogram("bytes_transferred", "Bytes of a load.", [2.0 ** (10 + i) for i in range(1, 25, 2)]),
            "segments": histogram(
                "num_descriptors", "Pieces that a load moved in.", [float(4**i) for i in range(1, 10)]
            ),
        }
        self._counters = {
            "failed": self._of_engines(
                self._counter_cls, "vllm:troupe_num_failed_transfers", "Loads of KV cache that failed, each rank's own."
            ),
            "expired": self._of_engines(
                self._counter_cls,
                "vllm:troupe_num_kv_expired_reqs",
                "Prompts that no engine loaded in time, each rank's own.",
            ),
        }

    def _of_engines(self, kind: Any, name: str, what: str, **more: Any) -> Any:
        metric = kind(name=name, documentation=what, labelnames=self._labelnames, **more)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        for key, histogram in self._histograms.items():
            for value in transfer_stats_data.get(key, ()):
                histogram[engine_idx].observe(value)
        for key, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data.get(key, 0))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ninetieth(values: list[float]) -> float:
    """The smallest that nine of ten values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * 9 // 10) - 1)] if values else 0.0
