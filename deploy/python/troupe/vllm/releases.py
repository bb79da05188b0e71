"""Prompts that are no longer wanted here: tells the engines that computed them, again if they do not answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from vllm.logger import init_logger

from troupe.engine import Engine
from troupe.errors import ErrorCode, TroupeError
from troupe.events import Event, Failed, Operation
from troupe.vllm.params import HandOff

__all__ = ["Releases"]

logger = init_logger(f"vllm.{__name__}")

AGAIN = 1.0  # seconds
SAID_FOR = 60.0  # seconds, longer than an unclaimed cache is kept
MOST = 4096
_NOT_HEARD = (ErrorCode.PEER_UNREACHABLE, ErrorCode.PEER_LOST, ErrorCode.DEADLINE, ErrorCode.OVERLOADED)


@dataclass
class _Release:
    source: HandOff
    until: float
    again: float = 0.0


class Releases:
    """One operation for each prompt. Without it a cache would be kept until its lease ends."""

    def __init__(self) -> None:
        self._said: dict[Operation, _Release] = {}
        self._due: list[_Release] = []

    def begin(self, engine: Engine, source: HandOff) -> None:
        self._say(engine, _Release(source, time.monotonic() + SAID_FOR))

    def hear(self, event: Event) -> None:
        """Handles an event, which may be of another's operation."""
        release = self._said.pop(event.operation, None)
        if release is None or not isinstance(event, Failed) or event.error.code not in _NOT_HEARD:
            return
        release.again = time.monotonic() + AGAIN
        if release.again < release.until and len(self._due) < MOST:
            self._due.append(release)
        else:
            logger.warning("%s was not released, its lease will end: %s", release.source.transfer, event.error)

    def ask_again(self, engine: Engine) -> None:
        now = time.monotonic()
        due = [release for release in self._due if release.again <= now]
        self._due = [release for release in self._due if release.again > now]
        for release in due:
            self._say(engine, release)

    def _say(self, engine: Engine, release: _Release) -> None:
        source = release.source
        try:
            self._said[engine.release(source.transfer, source.nodes, lives=source.lives)] = release
        except TroupeError as error:
            logger.warning("%s cannot be released, its lease will end: %s", source.transfer, error)
