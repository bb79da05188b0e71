"""The parts of `tests/run`: what each builds, which tests it runs, and in which order they run on the machine's
cores."""
import dataclasses
import functools
import re
import shutil
import subprocess
import threading
import time
import traceback

from build import GIVES_WAY, NOTHING, Broken, Build, JOBS, ROOT
from machines import MACHINES, RESULTS, kept_machines
from outcomes import plain

# Most tests mostly wait; tests that need a whole core are RUN_SERIAL.
TEST_JOBS = 3 * JOBS
# The suites for the thread sanitizer: together they cover every way in which our threads interact.
WITH_THREADS = ("transport_core_test", "transport_contract_test", "shm_test", "planted_race",
                "event_queue_test", "engine_test", "side_threads_test", "door_test", "door_tls_test", "network_test",
                "node_test", "closed_connection_test", "crossing_dials_test", "supervisor_test", "supervisor_begin_test",
                "transfer_test", "value_test", "hetero_test", "io_agent_test", "xgmi_test", "staging_test",
                "tcp_gpu_test", "shm_gpu_test")
# Instrumented code computes more than it waits, and servers of engines run beside it.
BESIDE_SERVERS = 2 * JOBS
ALONE, BESIDE = "verbs", "engines"  # parts; see `batches`
CROWDED = "tsan"  # a build whose tests need both cores to themselves
SKIPPED = 77  # the exit status of a check that cannot run here
AGAIN = 3  # how often a failed test is run again, alone


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of one build that carry one of the labels, match `only` and do not match `but`."""
    preset: str
    labels: tuple
    targets: tuple
    parallel: int = TEST_JOBS
    only: str = "."
    but: str = NOTHING


@dataclasses.dataclass(frozen=True)
class Check:
    """A command that counts as one test."""
    name: str
    words: tuple


def threaded():
    return f"^({'|'.join(WITH_THREADS)})\\."


PARTS = {
    "unit": (Tests("release", ("unit",), ("troupe_tests_unit", "troupe_header_checks")),),
    "integration": (Tests("release", ("integration",), ("troupe_tests_integration",)),),
    "faults": (Tests("release", ("faults",), ("troupe_tests_faults",)),),
    "simulation": (Tests("release", ("simulation",), ("troupe_tests_simulation",)),),
    # Where a test runs over each backend, the address sanitizer checks it over tcp, which parses, and the thread
    # sanitizer over shared memory; the release build runs it over both.
    "sanitizers": (
        Tests("asan", ("unit", "integration", "faults"),
              ("troupe_tests_unit", "troupe_tests_integration", "troupe_tests_faults"), parallel=BESIDE_SERVERS,
              but="/shm"),
        # The other suites have one thread, or nodes whose threads interact as in these.
        Tests("tsan", ("unit", "integration"), (*WITH_THREADS, "troupe_tests_faults"), only=threaded(),
              but="/tcp"),
        Tests("tsan", ("faults",), (), but="/tcp"),
    ),
    "verbs": (Tests("release", ("verbs",), ("troupe_tests_verbs",), parallel=MACHINES),),
    # One test whose servers compute, and one whose servers are mostly idle: tests/engines says which.
    "engines": (Tests("release", ("engines",), ("troupe_tests_engines",), parallel=2),),
    "fuzz": (Tests("fuzz", ("fuzz",), ("troupe_tests_fuzz",), parallel=JOBS),),
    "lint": (Check("clang-format", ("tests/lint/format",)), Check("shellcheck", ("tests/lint/shell",)),
             Check("ruff and mypy", ("tests/lint/python",)), Check("clang-tidy", ("tests/lint/tidy",))),
}
# The parts for someone who changed a line; `all` is for continuous integration.
SHORT = ("unit", "integration", "faults", "simulation")


def packages(parts):
    """The sets of deploy/install-packages that the parts need."""
    sets = ["build", "test"]
    if {"fuzz", "lint"} & set(parts):
        sets.append("check")
    if "verbs" in parts:
        sets.append("verbs")
    if "engines" in parts:
        sets.append("engines")
    # The unit tests compile for both makers of GPUs: for AMD's with this set, for NVIDIA's where nvcc is installed.
    if "unit" in parts:
        sets.append("gpu")
    return sets


def say(words):
    print(f"\n== {words}", flush=True)


class Batch:
    """Steps of one build whose tests run together."""

    def __init__(self, build, steps):
        self._build = build
        self.preset = build.preset
        self.steps = steps  # (part, Tests)
        self.labels = tuple(dict.fromkeys(label for _, step in steps for label in step.labels))
        self.parts = {part for part, _ in steps}
        self.parallel = min(step.parallel for _, step in steps)
        self.name = f"testing {build.preset}: {', '.join(self.labels)}"
        self._parts = {}  # by a test's plain name

    def run(self, quiet=False, environment=None):
        """The outcomes. The names of the tests are known only once the build is made."""
        whole, chosen, left_out = set(), [], []
        for part, step in self.steps:
            names = [plain(name) for name in self._build.tests(step.labels, step.only)]
            if not names and step.only == ".":
                raise Broken(f"no test of {self._build.title} is of {part}: none carries {'|'.join(step.labels)}")
            self._parts.update((name, part) for name in names)
            programs = {re.escape(name.partition(".")[0]) for name in names}
            if step.only != ".":
                chosen += [step.only] if programs else []
            elif programs:
                whole |= programs
            if programs and step.but != NOTHING:
                left_out.append(f"^({'|'.join(sorted(programs))})\\..*{step.but}")
        # All whole programs in one pattern: ctest accepts at most nine groups.
        if whole:
            chosen.append(f"^({'|'.join(sorted(whole))})(\\.|$)")
        return self._build.run(self.labels, self.parallel, "|".join(chosen) or NOTHING,
                               but="|".join(left_out) or NOTHING, quiet=quiet, environment=environment)

    def run_on_this_machine(self):
        """Returns the outcomes; tests on real verbs share virtual machines."""
        with kept_machines(self._build, self.labels) as environment:
            return self.run(environment=environment)

    def part(self, outcome):
        return self._parts.get(outcome.name, self.steps[0][0])

    def shares(self, outcomes):
        """The share of each part in the time of all the tests."""
        seconds = dict.fromkeys((part for part, _ in self.steps), 0)
        for outcome in outcomes:
            seconds[self.part(outcome)] += outcome.seconds
        whole = sum(seconds.values()) or 1
        return {part: own / whole for part, own in seconds.items()}


def make(build, targets):
    build.make(targets)
    return True


def batches(steps, builds):
    """The batches in the order in which they begin. The machines of verbs take every core, and so run alone.
    Servers of engines mostly take one core: they begin when the other tests of their build have ended, and run
    beside those of other builds, except the thread sanitizer's, beside which they take minutes for seconds of work.
    """
    groups = {}
    for part, step in steps:
        if isinstance(step, Tests):
            groups.setdefault((step.preset, part if part in (ALONE, BESIDE) else ""), []).append((part, step))
    places = {group: (place, 0) for place, group in enumerate(groups)}
    for preset, lane in groups:
        if lane == BESIDE and (preset, "") in groups:
            places[preset, lane] = (places[preset, ""][0], 1)
    return [Batch(builds[preset], groups[preset, lane]) for preset, lane in sorted(groups, key=places.__getitem__)]


def in_machines(folder):
    """The outcome of each test that a virtual machine ran: one ctest test is a whole suite of them."""
    for path in sorted(folder.glob("*/tests")):
        for line in path.read_text(errors="replace").splitlines():
            result, _, rest = line.partition(" ")
            if result in ("passed", "failed", "skipped"):
                yield path.parent.name, result, rest


def judge(tally, part, build, outcome):
    """Counts a failed test. It is run again alone, and is unsteady if it then passes, unless a sanitizer reported
    something, which no later run undoes."""
    if outcome.result != "failed" or outcome.reported_by_sanitizer or outcome.name == "ctest":
        tally.add(part, outcome)
        return
    say(f"again by itself: {outcome.title}")
    again = build.run_again(outcome, AGAIN)
    if len(again) == AGAIN and all(one.result == "passed" for one in again):
        tally.add_unsteady(part, outcome, again[-1])
        return
    tally.add(part, outcome)
    for one in again:
        if one.result == "failed":
            tally.fail(f"{outcome.title}, by itself", one.output)


class Run:
    """Some parts. Compilers run at a low priority while the tests of finished builds run: those mostly wait. A
    build is complete before its first test starts, since ctest reads files that a build writes."""

    def __init__(self, parts, tally):
        self._tally = tally
        self._steps = [(part, step) for part in parts for step in PARTS[part]]
        self._builds = {step.preset: Build(step.preset) for _, step in self._steps if isinstance(step, Tests)}
        self._batches = batches(self._steps, self._builds)
        self._made = {preset: threading.Event() for preset in self._builds}
        self._usable = set()

    def run(self):
        builder, beside = self._begin("the thread that builds", self._build_all), []
        for batch in self._batches:
            self._made[batch.preset].wait()
            if batch.preset not in self._usable:
                continue
            if BESIDE in batch.parts:
                beside.append(self._begin(f"the thread of {batch.name}", functools.partial(self._test, batch)))
                continue
            if ALONE in batch.parts or batch.preset == CROWDED:
                for thread in beside:
                    thread.join()
            self._test(batch)
        for thread in (builder, *beside):
            thread.join()

    def _begin(self, what, work):
        """A thread; an exception in it is reported and fails the run."""
        def worked():
            try:
                work()
            except BaseException:  # pylint: disable=broad-exception-caught
                self._tally.broken("harness", what, traceback.format_exc())

        thread = threading.Thread(target=worked)
        thread.start()
        return thread

    def _build_all(self):
        """However this ends, no test waits for a build that will not come."""
        try:
            self._build_and_check()
        finally:
            for made in self._made.values():
                made.set()

    def _timed(self, part, step, work, shares=None):
        """Times a step; `shares` computes from its result the share of each part, if the step belongs to several."""
        start = time.monotonic()
        result = None
        try:
            result = work()
        except Broken as broken:
            self._tally.broken(part, broken.title, broken.output)
        seconds = time.monotonic() - start
        self._tally.took(shares(result) if shares and result else {part: 1}, step, seconds)
        say(f"{step} took {seconds:.0f} s")
        return result

    def _build_and_check(self):
        for preset, build in self._builds.items():
            wanted = [(part, step) for part, step in self._steps if getattr(step, "preset", None) == preset]
            targets = list(dict.fromkeys(target for _, step in wanted for target in step.targets))
            say(f"building {preset}: {' '.join(targets)}")
            if self._timed(wanted[0][0], f"building {preset}", functools.partial(make, build, targets)):
                self._usable.add(preset)
            self._made[preset].set()
        # A check compiles, so it runs after the builds, which the tests wait for.
        for part, step in self._steps:
            if isinstance(step, Check):
                self.check(part, step)

    def check(self, part, step):
        say(step.name)
        self._timed(part, step.name, lambda: self._check(part, step))

    def _check(self, part, step):
        run = subprocess.run((*GIVES_WAY, *step.words), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
        print(run.stdout, end="", flush=True)
        if run.returncode == SKIPPED:
            self._tally.count(part, skipped=1)
        elif run.returncode != 0:
            raise Broken(step.name, run.stdout)
        else:
            self._tally.count(part, passed=1)

    def _test(self, batch):
        say(batch.name)
        build = self._builds[batch.preset]
        results = build.folder / RESULTS
        machines = "verbs" in batch.labels
        if machines:
            shutil.rmtree(results, ignore_errors=True)

        first = batch.steps[0][0]
        for outcome in self._timed(first, batch.name, batch.run_on_this_machine, batch.shares) or ():
            judge(self._tally, batch.part(outcome), build, outcome)
        if machines:
            self._count_machines(first, results)

    def _count_machines(self, part, results):
        """The suite itself is already counted, as failed if any of its tests is."""
        suites = {}
        for suite, result, rest in in_machines(results):
            print(f"{suite}: {result} {rest}")
            suites.setdefault(suite, {"passed": 0, "failed": 0, "skipped": 0})[result] += 1
        for counts in suites.values():
            if counts["failed"]:
                counts["failed"] -= 1
            elif counts["passed"]:
                counts["passed"] -= 1
            self._tally.count(part, **counts)
