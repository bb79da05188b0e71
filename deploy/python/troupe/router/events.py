"""Server-sent events: cuts a stream of bytes into events."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["Cutter", "TooLongError", "data_of", "event_of", "is_comment"]

#: Of one event, in bytes.
LONGEST = 16 * 2**20

_END = re.compile(rb"\r?\n\r?\n")


class TooLongError(ValueError):
    """A stream whose event does not end."""


class Cutter:
    """Bytes in, whole events out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete by now, without their blank lines."""
        begin = max(0, len(self._rest) - 3)  # all but one byte of the longest separator may have arrived
        self._rest += data
        events, at = [], 0
        for end in _END.finditer(self._rest, begin):
            events.append(bytes(self._rest[at : end.start()]))
            at = end.end()
        if at:
            del self._rest[:at]
        if not events and len(self._rest) > LONGEST:
            raise TooLongError(f"an event of the stream has more than {LONGEST} bytes")
        return events


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None for a comment or an event without data."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines).strip() or None


def is_comment(event: bytes) -> bool:
    """Whether the event is a comment, which only keeps a connection alive."""
    return all(line.startswith(b":") for line in event.splitlines())


def event_of(document: dict[str, Any]) -> bytes:
    """An event in vLLM's form."""
    return (
        b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"
    )
