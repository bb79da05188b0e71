"""A stage of vLLM-Omni as a process of its own: a connector, and functions of this file that a test runs in it."""
import hashlib
import os
import time
import traceback

import numpy
import torch

from nursery import Failure, Process, obey
from troupe.engine import configure_logging
from troupe.omni.connector import TroupeOmniConnector
from troupe.omni.payload import RawPayload


class Stage(Process):
    def __init__(self, stage_id, **extra):
        super().__init__({"stage_id": stage_id, **extra})
        self.name = self.end()


def serve(pipe, config):
    configure_logging(level="error")
    try:
        connector = TroupeOmniConnector(config)
        pipe.send((True, connector.health()["node"]))
    except Exception:  # pylint: disable=broad-exception-caught
        pipe.send((False, traceback.format_exc()))
        return
    obey(pipe, connector)
    connector.close()


# -- payloads

KINDS = ("small object", "object", "few bytes", "bytes", "small tensor", "tensor", "text", "array")


def payload(kind, seed):
    """A payload that is the same each time, in every process."""
    numbers = torch.Generator().manual_seed(seed)

    def random(count):
        return torch.randint(0, 256, (count,), generator=numbers, dtype=torch.uint8)

    return {
        "small object": lambda: {"finished": bool(seed % 2), "ids": list(range(seed % 50)), "t": random(7).float()},
        "object": lambda: {"hidden": random(60_000).view(torch.bfloat16).reshape(100, 300), "n": [seed, None, "x"]},
        "few bytes": lambda: random(seed % 1000).numpy().tobytes(),
        "bytes": lambda: random(40_000 + seed % 1000).numpy().tobytes(),
        "small tensor": lambda: random(24).view(torch.float16).reshape(3, 4),
        "tensor": lambda: random(80_000).view(torch.int32).reshape(100, 200),
        "text": lambda: f"text {seed} \N{GREEK SMALL LETTER ALPHA}",
        "array": lambda: random(600).numpy().reshape(20, 30),
    }[kind]()


def digest(data):
    """A digest that is equal for a payload as it was put and as it was got."""
    found = hashlib.sha256()
    _add(found, data)
    return found.hexdigest()


def _add(found, data):
    if isinstance(data, RawPayload):
        data = data.tensor
    if isinstance(data, (bytes, bytearray)):
        data = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    if isinstance(data, torch.Tensor):
        found.update(f"{data.dtype}{tuple(data.shape)}".encode())
        found.update(data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    elif isinstance(data, numpy.ndarray):
        found.update(f"{data.dtype}{data.shape}".encode() + data.tobytes())
    elif isinstance(data, dict):
        for key in sorted(data):
            found.update(key.encode())
            _add(found, data[key])
    elif isinstance(data, (list, tuple)):
        for one in data:
            _add(found, one)
    else:
        found.update(repr(data).encode())


# -- what stages do

def put(connector, to_stage, key, data):
    return connector.put(str(connector.stage_id), str(to_stage), key, data)


def get(connector, from_stage, key, seconds=0.0):
    """Returns the digest of a payload, or None, and the seconds that it took."""
    began = time.monotonic()
    if seconds:
        got = connector.get_with_deadline(str(from_stage), str(connector.stage_id), key, deadline=began + seconds)
    else:
        got = connector.get(str(from_stage), str(connector.stage_id), key)
    return (None if got is None else digest(got[0])), time.monotonic() - began


def produce(connector, to_stage, prefix, numbers):
    """Payloads of every kind, one after the other."""
    for number in numbers:
        kept, _, _ = put(connector, to_stage, f"{prefix}_{connector.stage_id}_{number}",
                         payload(KINDS[number % len(KINDS)], number))
        if not kept:
            raise Failure(f"{prefix} {number} was not kept")


def as_they_come(connector, prefix, numbers, seconds):
    """Gets the numbered payloads of the previous stage until all have come or the time is over."""
    before, limit = connector.stage_id - 1, time.monotonic() + seconds
    waiting = dict.fromkeys(numbers)
    while waiting and time.monotonic() < limit:
        for number in list(waiting):
            got = connector.get(str(before), str(before + 1), f"{prefix}_{before}_{number}")
            if got is not None:
                yield number, got[0]
                del waiting[number]


def pass_on(connector, prefix, numbers, seconds):
    """Gets payloads of the previous stage as they come, and puts each for the next stage. Returns those that came."""
    came = []
    for number, data in as_they_come(connector, prefix, numbers, seconds):
        data = data.tensor if isinstance(data, RawPayload) else data
        put(connector, connector.stage_id + 1, f"{prefix}_{connector.stage_id}_{number}", data)
        came.append(number)
    return came


def consume(connector, prefix, numbers, seconds):
    """Which payloads of the previous stage never came, and which of those that came differ from what was put."""
    waiting, wrong = set(numbers), []
    for number, data in as_they_come(connector, prefix, numbers, seconds):
        if digest(data) != digest(payload(KINDS[number % len(KINDS)], number)):
            wrong.append(number)
        waiting.remove(number)
    return sorted(waiting), wrong


def race(connector, from_stage, keys, taken):
    """The keys that this reader got. `taken`: a file of all keys that any reader got. The race ends when it is
    complete, or after a minute."""
    got, limit = [], time.monotonic() + 60
    waiting = set(keys)
    with open(taken, "a+", encoding="utf-8", buffering=1) as of_all:
        while waiting and time.monotonic() < limit:
            for key in sorted(waiting):
                if connector.get(str(from_stage), str(connector.stage_id), key) is not None:
                    got.append(key)
                    of_all.write(f"{key}\n")
            of_all.seek(0)
            waiting -= {*of_all.read().split()}
    return got


def health(connector):
    return connector.health()


def named_memory(connector):  # pylint: disable=unused-argument
    """Files of /dev/shm that the process has open or mapped, which would stay if it were killed."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "/dev/shm/" in line}
    opened = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            opened.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the entry of the listing itself
            continue
    return sorted(mapped | {name for name in opened if name.startswith("/dev/shm/")})


def memory_used(connector):
    connector.reap_consumed()
    return connector.health()["memory_used"]


def cleanup(connector, request):
    return connector.cleanup(request)
