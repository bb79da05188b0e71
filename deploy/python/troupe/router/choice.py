"""Chooses the engines for a request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from troupe.router.instances import Fleet, Instance

__all__ = ["Chooser", "Seat", "Wanted"]

# The supervisor's choice is passed over if the router has this many more requests there than at the least busy engine.
# The supervisor knows of other routers' requests, but not how long ours last.
_SLACK = 4


@dataclass(eq=False)
class Seat:
    """Room at the engines that serve one attempt. `prefill` is None if `decode` gets the whole request, or the prompt
    is already cached. `as_placed`: as the supervisor chose."""

    decode: Instance
    prefill: Instance | None = None
    as_placed: bool = False


@dataclass
class Wanted:
    """What a request needs.

    Attributes:
        whole: one engine serves all of it.
        source: the engine that holds the cache of its prompt; only a decode is wanted.
        failed: engines that lost it before: others are preferred.
        placed: the supervisor's choice, (prefill, decode).
    """

    model: str | None = None
    whole: bool = False
    source: Instance | None = None
    failed: set[Instance] = field(default_factory=set)
    placed: tuple[Instance, Instance] | None = None

    @property
    def kind(self) -> Hashable:
        """If there is no room for one request of a kind, there is none for another."""
        return self.model, self.whole, self.source, frozenset(self.failed)


class Chooser:
    """By least outstanding requests, in turn among equals; the supervisor's choice comes first."""

    def __init__(self, fleet: Fleet, per_engine: int) -> None:
        self._fleet = fleet
        self._per_engine = per_engine
        self._turn = itertools.count(1)

    def can(self, wanted: Wanted) -> bool:
        """Whether any engine is there, with or without room. For an existing cache, only engines that have not failed.
        """
        pool = self._fleet.serving(wanted.model)
        if wanted.source is not None:
            pool = [one for one in pool if one not in wanted.failed]
        return self._seat(pool, wanted, lambda _: True) is not None

    def choose(self, wanted: Wanted) -> Seat | None:
        """None if no engine has room now, or the engine that lost this request must rest before it is asked again. It
        is not asked while another engine is only in doubt, which is settled in a few seconds."""
        serving = self._fleet.serving(wanted.model)
        fresh = [one for one in serving if one not in wanted.failed]
        rested = [one for one in serving if one not in wanted.failed or not one.rests()]
        if self._fleet.doubts(wanted.model, wanted.failed):
            rested = []
        for pool in ([one for one in fresh if not one.rests()], fresh, rested):
            if self._seat(pool, wanted, lambda _: True) is not None:
                seat = self._seat(pool, wanted, self._has_room)
                if seat is not None:
                    self._count(seat)
                return seat
        return None

    # -- parts

    def _has_room(self, instance: Instance) -> bool:
        return instance.outstanding < self._per_engine

    def _count(self, seat: Seat) -> None:
        """Counts the decode side last: engines that do both then take turns."""
        for one in (seat.prefill, seat.decode):
            if one is not None:
                one.chosen = next(self._turn)

    def _seat(self, pool: Sequence[Instance], wanted: Wanted, room: Callable[[Instance], bool]) -> Seat | None:
        decodes = sorted((one for one in pool if one.decodes and room(one)), key=_busy)
        if wanted.source is not None:
            return next((Seat(one) for one in decodes if wanted.source.fits(one)), None)
        plain = sorted((one for one in pool if one.plain and room(one)), key=_busy)
        if not wanted.whole:
            prefills = sorted((one for one in pool if one.prefills), key=_busy)
            pair = self._pair([one for one in prefills if room(one)], decodes, wanted)
            if pair is not None:
                return pair
            if not plain and any(one.fits(other) for one in prefills for other in pool if other.decodes):
                return None  # they are full, which is no reason to serve it by one of them
        # Plain engines serve whole requests, and decode engines can compute a prompt as well.
        alone = plain or decodes
        return Seat(alone[0]) if alone else None

    def _pair(self, prefills: Sequence[Instance], decodes: Sequence[Instance], wanted: Wanted) -> Seat | None:
        """A pair, both by load, least first."""
        if wanted.placed is not None:
            prefill, decode = wanted.placed
            if prefill in prefills and decode in decodes and prefill.fits(decode):
                least = prefills[0].outstanding + decodes[0].outstanding
                if prefill.outstanding + decode.outstanding <= least + _SLACK:
                    return Seat(decode, prefill, as_placed=True)
        for decode in decodes:
            for prefill in prefills:
                if prefill.fits(decode):
                    return Seat(decode, prefill)
        return None


def _busy(instance: Instance) -> tuple[int, int]:
    return instance.outstanding, instance.chosen
