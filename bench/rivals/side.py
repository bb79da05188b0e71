"""One process of a pair, the initiator or the target: a loop that is the same for every implementation.

    side.py MODULE '{"name": "initiator", "own_memory": false, "polling": false, "transport": "tcp", "threads": 1}'

Orders come as lines of JSON on standard input, an answer to each as a line on what was standard output:

    allocate {bytes, seed}       memory filled with a pattern and registered; seconds of the registration, how to reach it
    meet {peer}                  initiator: connects to the side that answered `peer` to `allocate`
    plan {write, count, size, seed, batches}   initiator: batches of blocks at scattered offsets, for each thread
    once {}                      initiator: moves the first batch of the first thread
    run {seconds}                initiator: moves batch after batch; latencies, bytes, seconds
    endless {}                   initiator: moves until that fails; what was said and when (the clock is the host's)
    spoil, digest {count, size, seed, local}   writes over the blocks of the first batch; their checksum
    processor {}                 seconds of processor time that this process took so far
    register {bytes}             registers touched memory and gives it back; seconds
    mapped {}                    files in /dev/shm that this process maps

An answer has the key `refused`, the words of the implementation, where it did not do it.
"""
import importlib
import json
import mmap
import os
import random
import resource
import select
import sys
import threading
import time
import zlib

import numpy as np

LINE = 512  # of the pattern before it changes
MOST_LATENCIES = 20_000  # in an answer
FEWEST_MOVES = 3


class Blocks:
    """Blocks of `size` bytes in a memory of `total` bytes, at places drawn from a seed that both sides share."""

    def __init__(self, total, count, size, seed):
        slots = total // size
        if count > slots:
            raise ValueError(f"{count} blocks of {size} bytes do not fit into {total}")
        self.size = size
        chance = random.Random(f"{seed}/{count}/{size}")
        self.local = np.array(chance.sample(range(slots), count), np.uint64) * np.uint64(size)
        self.remote = np.array(chance.sample(range(slots), count), np.uint64) * np.uint64(size)

    @property
    def bytes(self):
        return self.size * len(self.local)

    def rows(self, base, places, columns=2):
        """(address, size, 0...) of each block of a memory that begins at `base`."""
        rows = np.zeros((len(places), columns), np.uint64)
        rows[:, 0] = places + np.uint64(base)
        rows[:, 1] = self.size
        return rows


def ordinary_memory(size):
    """Memory as an engine has it: anonymous and private."""
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(held, np.uint8)


def fill(array, seed):
    """Fills an array so that no two lines are equal."""
    tile = np.frombuffer(random.Random(seed).randbytes(1 << 20), np.uint8)
    for begin in range(0, len(array), len(tile)):
        array[begin:begin + len(tile)] = tile[:len(array) - begin]
    words = array.view(np.uint64)[::LINE // 8]
    words[:] = np.arange(len(words), dtype=np.uint64) ^ words


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Orders:
    def __init__(self, implementation, options):
        self._side = implementation
        self._options = options
        self._array = None
        self._total = 0
        self._plans = []  # of each thread

    def allocate(self, bytes, seed):
        if self._options["own_memory"]:
            began = time.perf_counter()
            self._array = self._side.allocate(bytes)
            took = time.perf_counter() - began
            fill(self._array, seed)
        else:
            self._array = ordinary_memory(bytes)
            fill(self._array, seed)
            began = time.perf_counter()
            self._side.register(self._array)
            took = time.perf_counter() - began
        self._total = bytes
        return {"seconds": took, "peer": self._side.describe(), "version": self._side.version}

    def meet(self, peer):
        return {"over": self._side.meet(peer)}

    def plan(self, write, count, size, seed, batches):
        self._plans = []  # the last ones are released first
        began = time.perf_counter()
        for thread in range(self._options["threads"]):
            blocks = [Blocks(self._total, count, size, f"{seed}/{thread}/{batch}") for batch in range(batches)]
            self._plans.append([(self._side.plan(write, one), one.bytes) for one in blocks])
        return {"seconds": time.perf_counter() - began}

    def once(self):
        self._side.move(self._plans[0][0][0])
        return {}

    def run(self, seconds):
        ready = threading.Barrier(len(self._plans))
        done = [None] * len(self._plans)
        threads = [threading.Thread(target=self._run_one, args=(number, ready, seconds, done), daemon=True)
                   for number in range(1, len(self._plans))]
        for thread in threads:
            thread.start()
        if threads:
            ready.wait()
        before, began = processor_seconds(), time.perf_counter()
        self._run_one(0, None, seconds, done)
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        used = processor_seconds() - before
        for one in done:
            if isinstance(one, Exception):
                raise one
        latencies = sorted(latency for one in done for latency in one[0])
        step = max(1, len(latencies) // MOST_LATENCIES)
        return {"microseconds": [round(one / 1e3, 2) for one in latencies[step // 2::step]], "moves": len(latencies),
                "bytes": sum(one[1] for one in done), "seconds": took, "processor": used}

    def _run_one(self, number, ready, seconds, done):
        move, plans, clock = self._side.move, self._plans[number], time.perf_counter_ns
        latencies, moved = [], 0
        try:
            if ready:
                ready.wait()
            end, turn = clock() + int(seconds * 1e9), 0
            now = clock()
            while now < end or turn < FEWEST_MOVES:
                plan, size = plans[turn % len(plans)]
                begin = clock()
                move(plan)
                now = clock()
                latencies.append(now - begin)
                moved += size
                turn += 1
            done[number] = latencies, moved
        except Exception as error:  # any exception counts as the implementation's words
            done[number] = error

    def endless(self):
        plans, turn = self._plans[0], 0
        while True:
            try:
                self._side.move(plans[turn % len(plans)][0])
            except Exception as error:
                return {"at": time.monotonic(), "said": words_of(error), "moves": turn}
            turn += 1

    def _first(self, count, size, seed, local):
        blocks = Blocks(self._total, count, size, f"{seed}/0/0")
        return (blocks.local if local else blocks.remote), size

    def spoil(self, count, size, seed, local):
        places, size = self._first(count, size, seed, local)
        for place in places.tolist():
            self._array[place:place + size] = 0xEE
        return {}

    def digest(self, count, size, seed, local):
        places, size = self._first(count, size, seed, local)
        checksum = 0
        for place in places.tolist():
            checksum = zlib.crc32(self._array[place:place + size], checksum)
        return {"checksum": checksum}

    def processor(self):
        return {"seconds": processor_seconds()}

    def register(self, bytes):
        array = ordinary_memory(bytes)
        array[::mmap.PAGESIZE] = 1
        began = time.perf_counter()
        self._side.register(array)
        return {"seconds": time.perf_counter() - began}

    def mapped(self):
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/" in line}
        return {"paths": sorted(path for path in paths if not path.endswith("(deleted)"))}


def words_of(error):
    kind = type(error).__name__
    return " ".join((str(error) if kind in ("Refused", "RuntimeError") else f"{kind}: {error}").split())[:300]


def next_order(implementation, polling):
    if polling:  # a polling target must make the progress itself
        while not select.select([0], [], [], 0)[0]:
            implementation.poll()
    return sys.stdin.buffer.readline()


def main():
    # The implementations write their logs to standard output, too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    options = json.loads(sys.argv[2])

    def answer(said):
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    try:
        implementation = importlib.import_module(sys.argv[1]).Side(options)
    except Exception as error:
        answer({"refused": words_of(error)})
        return
    answer({})
    orders = Orders(implementation, options)
    while line := next_order(implementation, options["polling"]):
        order = json.loads(line)
        try:
            answer(getattr(orders, order.pop("do"))(**order))
        except Exception as error:
            answer({"refused": words_of(error)})
    answers.flush()
    os._exit(0)  # a clean end of an implementation is not measured


if __name__ == "__main__":
    main()
