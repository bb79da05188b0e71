#!/usr/bin/env python3
"""Moves the same blocks by Troupe, NIXL and Mooncake, in turns, and prints the rows of bench/run as a JSON array.

    compare.py --troupe PROGRAM --library LIBRARY [--quick] [--only PATTERN] [--rounds N] [--seconds N] [--results FOLDER]

Each contender is two processes (side.py) between which batches of blocks move from scattered places to scattered places,
written or read by the initiator. In each round a contender gets new processes, does every work of the round, and ends
before the next contender starts, since threads that never sleep would disturb the others; the order changes with each
round. The bytes of each work are compared once. A work is tried with one batch at a time, from four threads, and
between four pairs of processes. Then: the time of a transfer between two engines (`troupe bench`) against the same
blocks moved by a rival; the time of a registration; and what an initiator learns, and when, if its target is killed or
stopped.

Work that a rival refuses has its words instead of a figure. All figures, of each round, are in FOLDER/results.json,
from which plot.py draws. MoRI-IO is not among the rivals: it has no wheel that runs without GPUs of its own kind.
"""
import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/environments")]
# pylint: disable=wrong-import-position
import environment
from pairs import Pair, Process, Refused

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
median = statistics.median


# -- works and contenders --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contender:
    """`against`: our contender that it is compared with; none for ours."""
    name: str
    module: str
    transport: str
    against: str = ""
    own_memory: bool = False  # the implementation allocates the memory; else anonymous memory is registered
    polling: bool = False
    environment: dict = dataclasses.field(default_factory=dict, hash=False)

    @property
    def is_plain(self):
        """False for ours with another way to move."""
        return not self.polling and not self.own_memory

    @property
    def slug(self):
        return re.sub(r"\W+", "-", f"{self.name} {self.transport}".lower())


@dataclasses.dataclass(frozen=True)
class Work:
    """A batch of `count` blocks of `size` bytes."""
    write: bool
    count: int
    size: int
    threads: int = 1
    pairs: int = 1

    @property
    def bytes(self):
        return self.count * self.size

    @property
    def seed(self):
        return f"{self.write}/{self.count}/{self.size}"

    def __str__(self):
        many = (f", {self.threads} threads" if self.threads > 1 else "") + (f", {self.pairs} pairs" if self.pairs > 1 else "")
        return f"{'write' if self.write else 'read'} {self.count:,} x {text_of(self.size)}{many}"


def text_of(size):
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


TROUPE, POLLING, OWN, ENGINES = "troupe.io", "troupe.io, polling", "troupe.io, its own memory", "Troupe's engines"
CONTENDERS = (
    Contender(TROUPE, "by_troupe", "shm"),
    # The transport of its own choice, process_vm_writev here: its agent cannot be made with `UCX_TLS=shm,self`.
    Contender("NIXL", "by_nixl", "shm", TROUPE),
    Contender(POLLING, "by_troupe", "shm", polling=True),
    Contender(OWN, "by_troupe", "shm", own_memory=True),
    Contender(TROUPE, "by_troupe", "tcp"),
    Contender("NIXL", "by_nixl", "tcp", TROUPE, environment={"UCX_TLS": "tcp,self"}),
    Contender("Mooncake", "by_mooncake", "tcp", TROUPE),
    Contender(POLLING, "by_troupe", "tcp", polling=True),
)
# For one transfer between two engines: blocks, layers, KV heads and their size, with 16 tokens of two bytes an element.
CACHES = {(3584, 16 * KIB): (128, 28, 2, 128), (224, 16 * KIB): (8, 28, 2, 128), (56, 16 * KIB): (2, 28, 2, 128),
          (2, 4 * KIB): (1, 2, 1, 64)}


def works(quick):
    """The works, by how many pairs move at once."""
    if quick:
        shapes, crowded = [*list(CACHES)[1:], (64, 64 * KIB), (4, MIB)], [(224, 16 * KIB)]
    else:
        shapes = [(count, size) for size in (512, 4 * KIB, 16 * KIB, 64 * KIB, MIB, 16 * MIB)
                  for count in (1, 16, 256, 4096) if count * size <= 256 * MIB]
        shapes += [shape for shape in CACHES if shape not in shapes]
        crowded = [(2, 4 * KIB), (256, 4 * KIB), (256, 16 * KIB), (256, 64 * KIB), (16, MIB)]
    return {(threads, pairs): [Work(write, count, size, threads, pairs) for count, size in some for write in (True, False)]
            for threads, pairs, some in ((1, 1, shapes), (4, 1, crowded), (1, 4, crowded))}


# -- measuring ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Seen:
    """The results of one contender and one work: a figure for each round, or why there is none."""
    speed: list = dataclasses.field(default_factory=list)  # GB/s
    middle: list = dataclasses.field(default_factory=list)  # microseconds, p50
    high: list = dataclasses.field(default_factory=list)  # microseconds, p99
    processor: list = dataclasses.field(default_factory=list)  # seconds of both processes for each GB
    latencies: list = dataclasses.field(default_factory=list)
    moves: int = 0
    refused: str = ""
    checked: bool = False


@dataclasses.dataclass(frozen=True)
class Python:
    path: str
    variables: dict


class Bench:
    def __init__(self, asked, folder):
        packages = environment.environment("mooncake")
        self._asked = asked
        self._folder = folder
        self._python = Python(packages / "bin/python", {
            **environment.variables(packages), "TROUPE_LIBRARY": str(asked.library.resolve()),
            "PYTHONPATH": str(ROOT / "deploy/python")})
        self.seen = {}  # by (transport, contender, work)
        self.versions = {}
        self.registrations = {}  # by (transport, contender): [bytes, seconds or words...]
        self.faults = {}  # by (fault, transport, contender): [seconds...], [words...], bytes left

    def of(self, contender, work):
        return self.seen.setdefault((contender.transport, contender.name, work), Seen())

    def works_for(self, contender, some):
        """The works of a contender: those that poll do only works that measure latency."""
        if not contender.polling:
            return some
        return [work for work in some if work.bytes <= 256 * KIB and work.threads == work.pairs == 1]

    def _pair(self, contender, threads, pairs):
        size = (512 if pairs == 1 else 128) * MIB
        return Pair(contender, threads, self._python, self._folder, size)

    def round(self, contender, some):
        """Every work of these once, between new processes of the contender."""
        with contextlib.ExitStack() as stack:
            pairs = None
            for work in self.works_for(contender, some):
                seen = self.of(contender, work)
                if seen.refused:
                    continue
                try:
                    if pairs is None:
                        pairs = [self._begin(stack, contender, work) for _ in range(work.pairs)]
                    self._measure(pairs, work, seen)
                except Refused as why:
                    seen.refused = str(why)
                    note(f"{contender.transport} {contender.name}: {work}: {why}")
                    stack.close()  # its state is unknown
                    pairs = None

    def _begin(self, stack, contender, work):
        pair = self._pair(contender, work.threads, work.pairs)
        stack.callback(pair.end)
        self.versions[contender.name] = pair.version
        return pair

    def _measure(self, pairs, work, seen):
        for pair in pairs:
            pair.plan(work)
        if seen.checked:
            pairs[0].initiator.ask("once")  # links, pages
        else:
            pairs[0].check(work)
            seen.checked = True
        for pair in pairs[1:]:
            pair.initiator.ask("once")
        used = -sum(pair.processor() for pair in pairs)
        for pair in pairs:
            pair.initiator.send("run", seconds=self._asked.seconds)
        said = [pair.initiator.received() for pair in pairs]
        used += sum(pair.processor() for pair in pairs) + sum(one["processor"] for one in said)
        moved = sum(one["bytes"] for one in said)
        latencies = sorted(latency for one in said for latency in one["microseconds"])
        seen.speed.append(sum(one["bytes"] / one["seconds"] for one in said) / 1e9)
        seen.middle.append(median(latencies))
        seen.high.append(percentile(latencies, 0.99))
        seen.processor.append(used / (moved / 1e9))
        seen.latencies += latencies
        seen.moves += sum(one["moves"] for one in said)

    # -- engines

    def engine_round(self, transport, work):
        """`troupe bench` on a cache of as many blocks. A short run measures start and end, which are subtracted from
        the processor time."""
        contender = Contender(ENGINES, "", transport)
        seen = self.of(contender, work)
        if seen.refused:
            return
        try:
            if not seen.checked:
                self._engines(transport, work, "--requests", "8", "--verify")
                seen.checked = True
            _, short = self._engines(transport, work, "--requests", "1")
            said, used = self._engines(transport, work, "--duration", f"{max(200, int(self._asked.seconds * 1000))}ms")
        except Refused as why:
            seen.refused = str(why)
            note(f"{transport} {ENGINES}: {work}: {why}")
            return
        if said["load"]["bytes_per_transfer"] != work.bytes:
            raise RuntimeError(f"troupe bench moves {said['load']['bytes_per_transfer']} bytes instead of {work.bytes}")
        seen.speed.append(said["bytes_per_second"] / 1e9)
        seen.middle.append(said["latency_us"]["p50"])
        seen.high.append(said["latency_us"]["p99"])
        seen.processor.append(max(0.0, used - short) / (said["bytes"] / 1e9))
        seen.moves += said["transfers"]

    def _engines(self, transport, work, *more):
        blocks, layers, heads, size = CACHES[work.count, work.size]
        results = self._folder / "engines.json"
        words = [self._asked.troupe, "bench", "--layers", layers, "--kv-heads", heads, "--head-dim", size, "--dtype", "bf16",
                 "--block-tokens", 16, "--blocks", blocks, "--concurrency", 1, "--mode", "write" if work.write else "read",
                 "--backend", transport, "--log-level", "error", "--json", results, *more]
        with open(self._folder / "engines.log", "ab") as log:
            child = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            _, code, used = os.wait4(child.pid, 0)  # including its children's usage
            child.returncode = os.waitstatus_to_exitcode(code)
        if child.returncode != 0:
            raise Refused(f"troupe bench ended with {child.returncode}: see engines.log")
        return json.loads(results.read_text()), used.ru_utime + used.ru_stime

    # -- registration

    def register(self, contender, size):
        known = self.registrations.setdefault((contender.transport, contender.name), [size])
        if any(isinstance(one, str) for one in known):
            return
        try:
            side = Process(contender, "registers", 1, self._python, self._folder)
            try:
                known.append(side.ask("register", bytes=size)["seconds"])
            finally:
                side.end()
        except Refused as why:
            known.append(str(why))

    # -- faults

    def fault(self, contender, name, number, patience):
        """What the initiator learns if the target gets this signal while blocks move."""
        seconds, words, left = self.faults.setdefault((name, contender.transport, contender.name), ([], [], []))
        if any(one.startswith("nothing") for one in words):
            return  # the next try would end likewise
        files = []
        try:
            pair = self._pair(contender, 1, 1)
            try:
                pair.plan(Work(True, 128, 64 * KIB))
                pair.initiator.ask("once")
                files = pair.target.ask("mapped")["paths"]
                pair.initiator.send("endless")
                time.sleep(0.5)
                began = time.monotonic()
                pair.target.signal(number)
                said = pair.initiator.received(patience)
                seconds.append(said["at"] - began)
                words.append(said["said"])
            finally:
                pair.end()
        except Refused as why:
            words.append(str(why))
        left.append(remove(files))


def remove(files):
    """Removes files that a process left in /dev/shm, and returns their bytes."""
    left = 0
    for file in map(pathlib.Path, files):
        with contextlib.suppress(OSError):
            left += file.stat().st_size
            file.unlink()
    return left


def percentile(ordered, share):
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def note(text):
    print(text, file=sys.stderr, flush=True)


def registered_bytes(quick):
    """16 GiB, or what fits into half of the free memory."""
    with open("/proc/meminfo", encoding="ascii") as file:
        [free] = [int(line.split()[1]) * KIB for line in file if line.startswith("MemAvailable:")]
    return max(1, min(1 if quick else 16, free // 2 // GIB)) * GIB


def run(asked, bench, contenders):
    by_transport = {}
    for one in contenders:
        by_transport.setdefault(one.transport, []).append(one)
    for transport, some in by_transport.items():
        for (threads, pairs), listed in works(asked.quick).items():
            note(f"{transport}: {len(listed)} works, {threads} threads, {pairs} pairs")
            for number in range(asked.rounds):
                for place in range(len(some)):
                    bench.round(some[(number + place) % len(some)], listed)
                if (threads, pairs) == (1, 1) and asked.troupe:
                    for work in listed:
                        if (work.count, work.size) in CACHES:
                            bench.engine_round(transport, work)
    size = registered_bytes(asked.quick)
    for _ in range(asked.rounds):
        for one in contenders:
            if one.is_plain:
                bench.register(one, size)
    for name, number, rounds, patience in (("killed", signal.SIGKILL, asked.rounds, asked.patience),
                                           ("stopped", signal.SIGSTOP, asked.rounds if not asked.quick else 1, asked.patience)):
        for _ in range(rounds):
            for one in contenders:
                if one.is_plain:
                    bench.fault(one, name, number, patience)


# -- results ------------------------------------------------------------------------------------------------------

# The rows for each work: the field of Seen, unit, which is better, what is wanted.
MEASURES = (("speed", "GB/s", "higher", 1.0), ("middle", "us", "lower", 1.0), ("high", "us", "lower", 1.0),
            ("processor", "s/GB", "lower", 1.0))
WORDS = {"speed": "", "middle": ", p50", "high": ", p99", "processor": ", processor"}


def row(name, ours, rival, unit, better="lower", wanted=1.0, says=""):
    """A row of two figures, of which either may be missing."""
    ratio = ours / rival if ours is not None and rival else None
    return {"name": name, "ours": ours, "rival": rival, "ratio": ratio, "unit": unit,
            "wanted": wanted if rival is not None else None, "better": better, **({"says": says} if says else {})}


def figure(seen, field):
    values = getattr(seen, field) if seen else []
    return median(values) if values else None


def rows_of(bench, contenders):
    listed = {(transport, work) for transport, _, work in bench.seen}
    for one in contenders:
        for ours in (one.against, POLLING, OWN, ENGINES):
            if one.against:
                yield from rows_of_works(bench, one, ours, listed)
    for (transport, name), (size, *took) in bench.registrations.items():
        rival = rival_of(contenders, transport, name)
        if rival:
            yield from rows_of_seconds(f"{transport}: registration of {text_of(size)}{fits(size)}: {name}",
                                       bench.registrations.get((transport, rival.against), [size])[1:], took)
    for (fault, transport, name), (took, words, left) in bench.faults.items():
        rival = rival_of(contenders, transport, name)
        if rival:
            ours = bench.faults.get((fault, transport, rival.against), ([], [], []))
            yield from rows_of_seconds(f"{transport}: target {fault}, initiator hears: {name}", [*ours[0], *ours[1]],
                                       [*took, *words])
            if fault == "killed" and left:
                yield row(f"{transport}: left in /dev/shm by a target that was killed: {name}",
                          max(ours[2], default=0) / MIB, max(left) / MIB, "MiB", wanted=None)


def rival_of(contenders, transport, name):
    return next((one for one in contenders if one.against and (one.transport, one.name) == (transport, name)), None)


def fits(size):
    return "" if size == 16 * GIB else " (16 GiB are too much here)"


def rows_of_works(bench, rival, ours, listed):
    for transport, work in sorted(listed, key=lambda one: (one[1].pairs, one[1].threads, one[1].size, one[1].count,
                                                           not one[1].write)):
        mine, its = bench.seen.get((transport, ours, work)), bench.seen.get((transport, rival.name, work))
        if transport != rival.transport or not mine or not its:
            continue
        if mine.refused or its.refused:
            says = "; ".join(f"{name}: {seen.refused}" for name, seen in ((ours, mine), (rival.name, its)) if seen.refused)
            yield row(f"{transport} {work}: {ours} to {rival.name}", figure(mine, "speed"), figure(its, "speed"), "GB/s",
                      "higher", says=says)
            continue
        for field, unit, better, wanted in MEASURES:
            yield row(f"{transport} {work}{WORDS[field]}: {ours} to {rival.name}", figure(mine, field), figure(its, field),
                      unit, better, wanted)


def rows_of_seconds(name, ours, its):
    """Rows of values that are seconds or words."""
    seconds = [[one for one in some if not isinstance(one, str)] for some in (ours, its)]
    words = [one for some in (ours, its) for one in some[-1:] if isinstance(one, str)]
    mine, rival = [median(some) if some else None for some in seconds]
    yield row(name, mine, rival, "s", wanted=None, says=" / ".join(words))


def details_of(bench, asked):
    """All results, for plot.py and for readers."""
    some = []
    for (transport, name, work), seen in bench.seen.items():
        some.append({"transport": transport, "contender": name, "direction": "write" if work.write else "read",
                     "count": work.count, "size": work.size, "threads": work.threads, "pairs": work.pairs,
                     "gb_per_s": seen.speed, "p50_us": seen.middle, "p99_us": seen.high,
                     "processor_s_per_gb": seen.processor, "moves": seen.moves, "refused": seen.refused or None,
                     "p99_us_of_all": percentile(sorted(seen.latencies), 0.99) if seen.latencies else None})
    return {"rounds": asked.rounds, "seconds": asked.seconds, "cores": len(os.sched_getaffinity(0)),
            "versions": bench.versions, "works": some,
            "registrations": [{"transport": key[0], "contender": key[1], "bytes": value[0], "seconds": value[1:]}
                              for key, value in bench.registrations.items()],
            "faults": [{"fault": key[0], "transport": key[1], "contender": key[2], "seconds": value[0], "said": value[1],
                        "left_bytes": value[2]} for key, value in bench.faults.items()]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--troupe", type=pathlib.Path, help="the troupe command; without it the engines are left out")
    parser.add_argument("--library", type=pathlib.Path, required=True, help="libtroupe.so.0")
    parser.add_argument("--quick", action="store_true", help="a few workloads, for a look")
    parser.add_argument("--only", default="", metavar="PATTERN", help="contenders such as 'tcp*' or 'shm NIXL'")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="seconds per workload in each round (0.3; quick: 0.1)")
    parser.add_argument("--patience", type=float, help="seconds that an initiator has to notice a fault (45; quick: 8)")
    parser.add_argument("--results", type=pathlib.Path, help="where to keep results.json and logs; default: nowhere")
    asked = parser.parse_args()
    asked.seconds = asked.seconds or (0.1 if asked.quick else 0.3)
    asked.patience = asked.patience or (8 if asked.quick else 45)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes are ended and the rows are printed
    with contextlib.ExitStack() as stack:
        folder = asked.results or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            log.unlink()
        contenders = [one for one in CONTENDERS if fnmatch.fnmatch(f"{one.transport} {one.name}", f"*{asked.only}*")]
        try:
            bench = Bench(asked, folder.resolve())
        except environment.Failed as why:
            note(f"compare.py: {why}")
            return 1
        try:
            run(asked, bench, contenders)
        finally:  # a run that is stopped late still prints what it has measured
            (folder / "results.json").write_text(json.dumps(details_of(bench, asked), indent=1) + "\n")
            print(json.dumps(list(rows_of(bench, contenders))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
