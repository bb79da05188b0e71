"""Counters of the router, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from troupe.router.instances import Fleet
    from troupe.router.line import Line

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Each router has its own registry: nothing here is global."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests: Any = Counter(
            "troupe_router_requests",
            "Requests that ended, by endpoint and status",
            ("path", "status"),
            registry=registry,
        )
        self.disconnects: Any = Counter(
            "troupe_router_disconnects", "Requests whose client went away", registry=registry
        )
        self.broken: Any = Counter(
            "troupe_router_broken_streams",
            "Streams that ended with an error event, after a status of 200",
            registry=registry,
        )
        self.attempts: Any = Counter(
            "troupe_router_attempts",
            "Texts that were asked of an engine: pair, with the cache of another one; alone, without",
            ("how",),
            registry=registry,
        )
        self.pushed: Any = Counter(
            "troupe_router_pushed",
            "Of the attempts with a pair, those whose engines were asked at once: the cache moves while the prompt is "
            "computed",
            registry=registry,
        )
        self.placements: Any = Counter(
            "troupe_router_placements",
            "Pairs of engines chosen for requests, by who chose them",
            ("by",),
            registry=registry,
        )
        self.carried_on: Any = Counter(
            "troupe_router_carried_on",
            "Requests that went on elsewhere: pinned, from the cache that was kept; continued, with a new prefill of "
            "the prompt and the text so far; restarted, from the beginning",
            ("how",),
            registry=registry,
        )
        self.first_token: Any = Histogram(
            "troupe_router_first_token_seconds",
            "From a request to the first event of its stream",
            buckets=_SECONDS,
            registry=registry,
        )
        self.seconds: Any = Histogram(
            "troupe_router_request_seconds", "From a request to its end", buckets=_SECONDS, registry=registry
        )
        self._running: Any = Gauge("troupe_router_running", "Requests at engines", registry=registry)
        self._waiting: Any = Gauge("troupe_router_waiting", "Requests in the line", registry=registry)
        self._usable: Any = Gauge(
            "troupe_router_engine_usable", "1: new requests may go there", ("engine", "role"), registry=registry
        )
        self._outstanding: Any = Gauge(
            "troupe_router_engine_requests",
            "Requests of the router at an engine",
            ("engine", "role"),
            registry=registry,
        )

    def text(self, fleet: Fleet, line: Line) -> bytes:
        """The text for scraping, without engines that are gone."""
        self._running.set(line.running)
        self._waiting.set(line.waiting)
        self._usable.clear()
        self._outstanding.clear()
        for one in fleet:
            self._usable.labels(one.name, one.role).set(one.usable)
            self._outstanding.labels(one.name, one.role).set(one.outstanding)
        text: bytes = generate_latest(self._registry)
        return text
