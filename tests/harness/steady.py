"""`tests/run steady`: runs every test many times on a busy machine, to find tests that fail without a defect."""
import collections
import contextlib
import multiprocessing
import os
import re
import tempfile
import time

from build import JOBS, Broken, Build
from machines import kept_machines
from outcomes import duration, ends
from parts import PARTS, Tests, say

# More tests at once than in a normal run.
CROWD = 4 * JOBS
# Left out are parts that are steady by nature: a fuzzer runs for a given time, and linters run nothing.
DEFAULT = ("unit", "integration", "faults", "simulation", "sanitizers")


def spin():
    while True:
        pass


def write_and_sync(folder):
    """Keeps the disk busy with writes that it cannot defer."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        while True:
            file.seek(0)
            for _ in range(32):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def busy_machine(folder):
    """One computing process per core, and one that writes to the disk, until the block ends."""
    loads = [multiprocessing.Process(target=spin, daemon=True) for _ in range(JOBS)]
    loads.append(multiprocessing.Process(target=write_and_sync, args=(folder,), daemon=True))
    for load in loads:
        load.start()
    try:
        yield
    finally:
        for load in loads:
            load.terminate()
            load.join()


def choose(names):
    """The parts that are named, or the default ones, and the pattern of tests that is given, or None."""
    parts = [name for name in names if name in PARTS] or list(DEFAULT)
    patterns = [name for name in names if name not in PARTS]
    return parts, "|".join(f"({one})" for one in patterns) if patterns else None


def narrowed(build, step, pattern):
    """The pattern for ctest of the tests of a step that match one more pattern; None if none does."""
    if pattern is None:
        return step.only
    if step.only == ".":
        return pattern if build.tests(step.labels, pattern) else None
    names = [name for name in build.tests(step.labels, step.only) if re.search(pattern, name)]
    return f"^({'|'.join(map(re.escape, names))})$" if names else None


class Record:
    """The outcomes of each test over all rounds."""

    def __init__(self):
        self._runs = collections.Counter()
        self._failures = collections.defaultdict(list)

    def add(self, number, seed, outcomes):
        for outcome in outcomes:
            if outcome.result == "skipped":
                continue
            self._runs[outcome.title] += 1
            if outcome.result == "failed":
                self._failures[outcome.title].append((number, seed))
                print(f"failed: {outcome.title} (round {number}, TROUPE_COMMIT_SEED={seed})\n{ends(outcome.output)}",
                      flush=True)

    def print(self, rounds):
        """Prints the failure rate of each test that failed; returns whether none did."""
        say(f"{len(self._runs)} tests, {sum(self._runs.values())} runs in {rounds} rounds; "
            f"failed at least once: {len(self._failures)}")
        for title, times in sorted(self._failures.items(), key=lambda item: -len(item[1])):
            print(f"{len(times):4d} of {self._runs[title]}  {title}; in round (seed): "
                  + ", ".join(f"{number} ({seed})" for number, seed in times))
        return not self._failures


def repeat(work, rounds):
    """Runs each piece of work, (part, step, build, pattern of tests), in each round; returns whether nothing
    failed."""
    record = Record()
    first = int(os.environ["TROUPE_COMMIT_SEED"])
    for number in range(1, rounds + 1):
        seed = first + number - 1
        say(f"round {number} of {rounds}, TROUPE_COMMIT_SEED={seed}")
        for part, step, build, only in work:
            start = time.monotonic()
            environment = {"TROUPE_COMMIT_SEED": str(seed), "RC_PARAMS": f"seed={seed}"}
            with busy_machine(build.folder), kept_machines(build, step.labels) as kept:
                outcomes = build.run(step.labels, 1 if part == "verbs" else CROWD, only, but=step.but,
                                     seed=seed, quiet=True, environment={**environment, **kept})
            counts = collections.Counter(outcome.result for outcome in outcomes)
            print(f"{part}, {step.preset}, {', '.join(step.labels)}: "
                  + ", ".join(f"{count} {result}" for result, count in counts.items())
                  + f", {duration(time.monotonic() - start)}", flush=True)
            record.add(number, seed, outcomes)
    good = record.print(rounds)
    print("one of these rounds again, each test with the same seed and begun in the same order: "
          f"TROUPE_COMMIT_SEED={first}..{first + rounds - 1} tests/run steady --rounds 1")
    return good


def steady(names, rounds, install):
    """Builds, and runs each test in each round; returns the exit code."""
    parts, pattern = choose(names)
    if not install(parts):
        return 2
    steps = [(part, step) for part in parts for step in PARTS[part] if isinstance(step, Tests)]
    builds = {step.preset: Build(step.preset) for _, step in steps}
    for preset, build in builds.items():
        say(f"building {preset}")
        build.make([target for _, step in steps if step.preset == preset for target in step.targets])
    work = [(part, step, builds[step.preset], narrowed(builds[step.preset], step, pattern)) for part, step in steps]
    work = [one for one in work if one[3] is not None]
    if not work:
        raise Broken(f"no test of {', '.join(parts)} matches {pattern or 'anything'}")
    return 0 if repeat(work, rounds) else 1
