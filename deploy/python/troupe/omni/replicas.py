"""The replicas of vLLM-Omni's stages, as they report themselves. This module has no socket, thread or clock."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

__all__ = ["MAX_MESSAGE", "BadEventError", "Replicas", "Status"]

#: Bound on the bytes of one event.
MAX_MESSAGE = 64 << 10

MOST = 4096  # bound on known replicas
FORGOTTEN = 600.0  # seconds until a replica that is down or lost is forgotten
_LONGEST = 1024  # characters of an address


class BadEventError(ValueError):
    """Bytes that are not an event of a stage."""


class Status(enum.Enum):
    """The status of a replica, in vLLM-Omni's words, and `LOST`, which vLLM-Omni also calls an error."""

    UP = "up"
    DOWN = "down"  #: it has left
    ERROR = "error"  #: it has reported an error, and will report the end of it
    LOST = "lost"  #: it has been silent for too long, and is up again with its next event


@dataclass
class _Replica:
    input_addr: str
    output_addr: str
    stage_id: int
    status: Status
    queue_length: int
    heard: float  # by the monotonic clock
    last_heartbeat: float  # by the wall clock, for hubs
    registered_at: float  # likewise


@dataclass(frozen=True)
class _Event:
    input_addr: str
    output_addr: str
    stage_id: int
    is_heartbeat: bool
    status: Status
    queue_length: int | None


class Replicas:
    """A registry of replicas, by the address at which each takes requests.

    | state      | event                        | next                                 |
    | ---------- | ---------------------------- | ------------------------------------ |
    | none       | update or heartbeat          | what it says: up, down or error      |
    | any        | update                       | what it says                         |
    | up         | heartbeat                    | up, with its queue                   |
    | up         | nothing for the time-out     | lost                                 |
    | lost       | heartbeat                    | up                                   |
    | error      | heartbeat, or nothing        | error                                |
    | down       | heartbeat                    | down                                 |
    | down, lost, error | nothing for ten minutes | none                              |

    A heartbeat carries all that an update does, so a heartbeat of an unknown replica, as after a restart of the
    coordinator, registers it.

    Times: `now` in seconds of a monotonic clock, `wall` in seconds since 1970.
    """

    def __init__(self, heartbeat_timeout: float, most: int = MOST) -> None:
        self._timeout = heartbeat_timeout
        self._most = most
        self._replicas: dict[str, _Replica] = {}

    def hear(self, raw: bytes, *, now: float, wall: float) -> bool:
        """Handles an event; returns whether to publish. `BadEventError` says what is wrong; nothing has changed then.
        """
        event = _event_of(raw)
        replica = self._replicas.get(event.input_addr)
        if replica is None:
            return self._add(event, now, wall)
        before = _shown(replica)
        replica.heard, replica.last_heartbeat = now, wall
        if event.queue_length is not None:
            replica.queue_length = event.queue_length
        if not event.is_heartbeat:
            if replica.status in (Status.DOWN, Status.LOST) and event.status == Status.UP:
                replica.registered_at = wall
            replica.output_addr, replica.stage_id = event.output_addr, event.stage_id
            replica.status = event.status
        elif replica.status == Status.LOST:
            replica.status = Status.UP
        return before != _shown(replica)

    def tick(self, now: float) -> bool:
        """Handles the passing of time; returns whether to publish."""
        lost = [
            one for one in self._replicas.values() if one.status == Status.UP and now - one.heard > self._timeout
        ]
        for replica in lost:
            replica.status = Status.LOST
        for address, replica in list(self._replicas.items()):
            if replica.status != Status.UP and now - replica.heard > FORGOTTEN:
                del self._replicas[address]
        return bool(lost)

    def active(self) -> list[dict[str, Any]]:
        """The replicas that are up, in the form for hubs, in the order in which they came."""
        return [
            {
                "input_addr": one.input_addr,
                "output_addr": one.output_addr,
                "stage_id": one.stage_id,
                "status": Status.UP.value,
                "queue_length": one.queue_length,
                "last_heartbeat": one.last_heartbeat,
                "registered_at": one.registered_at,
            }
            for one in self._replicas.values()
            if one.status == Status.UP
        ]

    def __len__(self) -> int:
        return len(self._replicas)

    def _add(self, event: _Event, now: float, wall: float) -> bool:
        if len(self._replicas) >= self._most:
            gone = next((key for key, one in self._replicas.items() if one.status in (Status.DOWN, Status.LOST)), None)
            if gone is None:
                raise BadEventError(f"an event of {event.input_addr}, beyond the limit of {self._most} live replicas")
            del self._replicas[gone]
        self._replicas[event.input_addr] = _Replica(
            event.input_addr, event.output_addr, event.stage_id, event.status, event.queue_length or 0, now, wall, wall
        )
        return event.status == Status.UP


def _shown(replica: _Replica) -> tuple[object, ...]:
    """The fields that hubs see, without the times."""
    if replica.status != Status.UP:
        return ()
    return replica.output_addr, replica.stage_id, replica.queue_length


def _event_of(raw: bytes) -> _Event:
    if len(raw) > MAX_MESSAGE:
        raise BadEventError(f"an event of {len(raw)} bytes; {MAX_MESSAGE} are the most")
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as why:
        raise BadEventError(f"an event that is not JSON: {why}") from None
    if not isinstance(said, dict):
        raise BadEventError(f"an event that is not an object but {type(said).__name__}")
    addresses = [said.get(key) for key in ("input_addr", "output_addr")]
    if not all(isinstance(one, str) and 0 < len(one) <= _LONGEST for one in addresses):
        raise BadEventError("an event whose input_addr or output_addr is not an address")
    stage, queue = said.get("stage_id"), said.get("queue_length")
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < 2**31:
        raise BadEventError(f"an event of stage {str(stage)[:40]!r}")
    if queue is not None and (isinstance(queue, bool) or not isinstance(queue, int) or not 0 <= queue < 2**31):
        raise BadEventError(f"an event with a queue of {str(queue)[:40]!r}")
    if said.get("event_type") not in ("update", "heartbeat"):
        raise BadEventError(f"an event of type {str(said.get('event_type'))[:40]!r}; it is update or heartbeat")
    status = said.get("status")
    if status not in ("up", "down", "error"):
        raise BadEventError(f"an event of status {str(status)[:40]!r}; it is up, down or error")
    return _Event(
        str(addresses[0]), str(addresses[1]), stage, said["event_type"] == "heartbeat", Status(status), queue
    )
