"""Polls the engines' servers: whether they answer, and what they serve."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging

from troupe.router.instances import Fleet, Instance
from troupe.router.settings import Times
from troupe.router.upstream import RefusedError, Upstream

__all__ = ["Watch"]

logger = logging.getLogger("troupe.router")

_TIMEOUT = 5.0  # seconds for one probe
_SOON = 0.5  # until the next probe of an engine that does not answer yet
_TURNS_OF_MODELS = 8  # probes until the models are asked for again: adapters come and go
_MOST_MISSED = 2  # consecutive probes without an answer: then its streams will not go on either


class Watch:
    """One task for each engine, as long as it is in the fleet."""

    def __init__(self, fleet: Fleet, upstream: Upstream, times: Times) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._every = times.probe
        self._tasks: dict[Instance, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                there = set(self._fleet)
                for gone in set(self._tasks) - there:
                    self._tasks.pop(gone).cancel()
                for new in there - set(self._tasks):
                    self._tasks[new] = asyncio.create_task(self._follow(new))
                self._fleet.on_change()  # a failed engine may have finished its rest
                await asyncio.sleep(_SOON)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, instance: Instance) -> None:
        missed = 0
        for turn in itertools.count():
            try:
                await self._ask_health(instance)
                if not instance.ready or turn % _TURNS_OF_MODELS == 0:
                    await self._ask_models(instance)
            except Exception as why:  # an engine may answer anything
                missed += 1
                self._unready(instance, str(why), missed)
            else:
                missed = 0
                self._ready(instance)
            await asyncio.sleep(self._every if instance.ready else min(_SOON, self._every))

    async def _ask_health(self, instance: Instance) -> None:
        try:
            await self._upstream.get(instance, "/health", _TIMEOUT)
        except RefusedError as why:
            if why.status != 404:  # some servers lack this route
                raise

    async def _ask_models(self, instance: Instance) -> None:
        try:
            document = json.loads(await self._upstream.get(instance, "/v1/models", _TIMEOUT))
        except RefusedError as why:
            if why.status not in (401, 403):
                raise
            instance.cards = []  # it requires authorization, which the router does not have
            return
        cards = document.get("data") if isinstance(document, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
            raise ValueError(f"{instance.name}: its answer to /v1/models is not a list of models")
        instance.cards = cards

    def _ready(self, instance: Instance) -> None:
        if not instance.ready:
            instance.ready, instance.why = True, ""
            instance.served()
            models = ", ".join(str(card.get("id")) for card in instance.cards) or "models that it does not name here"
            logger.info("%s answers (%s), and serves %s", instance.name, instance.role, models)
            self._fleet.on_change()

    def _unready(self, instance: Instance, why: str, missed: int) -> None:
        if instance.ready:
            logger.warning("%s does not answer: %s", instance.name, why)
        instance.ready, instance.why = False, why
        if missed == _MOST_MISSED:
            instance.lost(f"its server does not answer: {why}")
