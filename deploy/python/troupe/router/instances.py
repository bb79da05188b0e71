"""The engines behind the router: address, models, load and usability of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from troupe.router.settings import GivenEngine

__all__ = ["Fleet", "Instance"]

# Rests of an engine that failed requests: the first one, which doubles, and the longest.
_SHORTEST_REST = 0.5
_LONGEST_REST = 30.0
_NOT_ASKED = "it was not asked yet"


@dataclass(eq=False)
class Instance:
    """One engine, by the address of its HTTP server.

    Attributes:
        prefills, decodes: its roles. Neither: a plain engine, for whole requests.
        says_tokens: it supports `return_token_ids`.
        given: the settings name it; else Troupe's supervisor does.
        nodes: Troupe's names of its ranks. `fingerprint`: of its cache's layout, "" if unknown.
        ranks: the same in rank order; empty while the cluster does not have all of them. `engine_id`: vLLM's own.
        mode: how its caches move: "write", while the prompt is computed, or "read", afterwards.
        member: its state in Troupe's membership; "" if it has none.
        ready: its server answers. `cards`: its list of models. `why`: why it is not ready.
        outstanding: the router's requests there. `chosen`: when it was chosen last, as a counter.
    """

    url: str
    prefills: bool
    decodes: bool
    says_tokens: bool = True
    given: bool = False
    nodes: frozenset[str] = frozenset()
    fingerprint: str = ""
    ranks: tuple[str, ...] = ()
    engine_id: str = ""
    mode: str = "read"
    member: str = ""
    ready: bool = False
    why: str = _NOT_ASKED
    cards: list[dict[str, Any]] = field(default_factory=list)
    outstanding: int = 0
    chosen: int = 0
    _failures: int = 0
    _rests_until: float = 0.0
    _lost: set[Callable[[str], None]] = field(default_factory=set)

    @classmethod
    def of(cls, given: GivenEngine) -> Instance:
        return cls(
            given.url,
            prefills=given.role in ("prefill", "both"),
            decodes=given.role in ("decode", "both"),
            says_tokens=given.says_tokens,
            given=True,
            nodes=frozenset({given.node} if given.node else ()),
        )

    @property
    def name(self) -> str:
        """For logs and metrics."""
        return urlsplit(self.url).netloc

    @property
    def plain(self) -> bool:
        return not (self.prefills or self.decodes)

    @property
    def role(self) -> str:
        if self.plain:
            return "plain"
        return "both" if self.prefills and self.decodes else "prefill" if self.prefills else "decode"

    @property
    def has_been_asked(self) -> bool:
        """Whether its server has been probed, with any result."""
        return self.ready or self.why != _NOT_ASKED

    @property
    def usable(self) -> bool:
        """Whether new requests may go there."""
        return self.ready and self.member in ("", "up")

    def rests(self) -> bool:
        """Whether it failed a moment ago, so that others are preferred."""
        return time.monotonic() < self._rests_until

    def failed(self) -> None:
        if self.rests():  # asked before the failure was known
            return
        self._rests_until = time.monotonic() + min(_LONGEST_REST, _SHORTEST_REST * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)

    def served(self) -> None:
        self._failures, self._rests_until = 0, 0.0

    def serves(self, model: str) -> bool:
        return any(card.get("id") == model for card in self.cards)

    def longest(self, model: str | None) -> int | None:
        """The limit on tokens of a prompt and its text together; None if it does not say."""
        for card in self.cards:
            if model is None or card.get("id") == model:
                length = card.get("max_model_len")
                return length if isinstance(length, int) else None
        return None

    def fits(self, other: Instance) -> bool:
        """Whether a cache can move from this engine to the other."""
        unknown = not self.fingerprint or not other.fingerprint
        alike = unknown or (self.fingerprint, self.mode) == (other.fingerprint, other.mode)
        return self is not other and alike

    def pushes_to(self, other: Instance) -> bool:
        """Whether a cache moves from this engine to the other while it is computed, so that both are asked at once.

        This takes blocks of both. Engines that do both could wait for each other's blocks, each with its own taken by
        texts whose prompts wait in the other one's queue.
        """
        divided = not self.decodes and not other.prefills
        return divided and self.mode == other.mode == "write" and bool(self.ranks)

    # -- loss

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Called with the reason, once, unless `forget` comes first."""
        self._lost.add(tell)

    def forget(self, tell: Callable[[str], None]) -> None:
        self._lost.discard(tell)

    def lost(self, why: str) -> None:
        """Reports the loss to all requests that wait for its answers."""
        told, self._lost = self._lost, set()
        for tell in told:
            tell(why)


class Fleet:
    """All engines. `on_change` is called when one may have become usable."""

    def __init__(self, given: Iterable[GivenEngine] = ()) -> None:
        self._all = {one.url: Instance.of(one) for one in given}
        self.on_change: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def at(self, url: str) -> Instance | None:
        return self._all.get(url)

    def add(self, instance: Instance) -> None:
        self._all[instance.url] = instance

    def remove(self, instance: Instance) -> None:
        self._all.pop(instance.url, None)
        instance.ready = False
        instance.lost("it has left the cluster")

    def by_node(self, node: str) -> Instance | None:
        return next((one for one in self._all.values() if node in one.nodes), None)

    def serving(self, model: str | None) -> list[Instance]:
        """The usable engines that serve a model. A model that no engine lists may still be served: the engine that is
        asked answers in its own words."""
        listed = [one for one in self._all.values() if model is not None and one.serves(model)]
        return [one for one in (listed or self._all.values()) if one.usable]

    def doubts(self, model: str | None, but: Collection[Instance]) -> bool:
        """Whether an engine that serves the model answers, although its node has been silent for a moment."""
        listed = [one for one in self._all.values() if model is not None and one.serves(model)]
        return any(one.ready and one.member == "suspect" and one not in but for one in listed or self._all.values())

    def models(self) -> list[dict[str, Any]]:
        """The models of all usable engines, each once."""
        cards: dict[str, dict[str, Any]] = {}
        for one in self._all.values():
            if one.usable:
                for card in one.cards:
                    cards.setdefault(str(card.get("id")), card)
        return list(cards.values())
