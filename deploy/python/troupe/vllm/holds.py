"""Prompts that wait in this engine's own queue: keeps their caches at the engines that computed them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from vllm.logger import init_logger

from troupe.engine import Engine
from troupe.errors import ErrorCode, TroupeError
from troupe.events import Event, Failed, Operation
from troupe.vllm.params import HandOff

__all__ = ["Holds"]

logger = init_logger(f"vllm.{__name__}")

# The request may arrive before its source exists: the answer that sent it here comes a step before the send.
AGAIN = 1.0  # seconds


@dataclass
class _Hold:
    source: HandOff
    operation: Operation | None  # None: to be asked for again
    again: float = 0.0


class Holds:
    """One operation for each prompt that is not loading yet. It ends with the load, with `end`, or with its source."""

    def __init__(self) -> None:
        self._holds: dict[str, _Hold] = {}  # by transfer

    def begin(self, engine: Engine, source: HandOff) -> None:
        try:
            operation = engine.hold(source.transfer, source.nodes, lives=source.lives)
        except TroupeError as error:
            if error.code != ErrorCode.ALREADY_EXISTS:  # another request holds the same
                logger.warning("%s is not held, its lease may end: %s", source.transfer, error)
            return
        self._holds[source.transfer] = _Hold(source, operation)

    def loads(self, transfer: str) -> None:
        """Records that a load of it begins, with which the operation ends by itself."""
        self._holds.pop(transfer, None)

    def end(self, engine: Engine, transfer: str) -> None:
        hold = self._holds.pop(transfer, None)
        if hold is None or hold.operation is None:
            return
        try:
            engine.abort(hold.operation, "nobody loads it")
        except TroupeError as error:
            if error.code != ErrorCode.NOT_FOUND:  # it has ended by itself
                logger.warning("%s is held longer than necessary: %s", transfer, error)

    def hear(self, event: Event) -> None:
        """Handles an event, which may be of another's operation."""
        for transfer, hold in self._holds.items():
            if hold.operation != event.operation:
                continue
            if not isinstance(event, Failed):  # another request has loaded it
                del self._holds[transfer]
            elif event.error.code == ErrorCode.NOT_FOUND and (hold.source.is_early or hold.again == 0.0):
                hold.operation, hold.again = None, time.monotonic() + AGAIN
            else:
                logger.warning("%s is not held, its lease may end: %s", transfer, event.error)
                del self._holds[transfer]
            return

    def ask_again(self, engine: Engine) -> None:
        """Repeats holds whose source did not exist yet: once, or until the prompt is scheduled."""
        now = time.monotonic()
        for hold in [hold for hold in self._holds.values() if hold.operation is None and hold.again <= now]:
            del self._holds[hold.source.transfer]
            self.begin(engine, hold.source)
            if hold.source.transfer in self._holds:
                self._holds[hold.source.transfer].again = hold.again
