"""The parts of `tests/run`: what each builds, which tests it runs, and in which order the machine's cores meet them."""
import dataclasses
import shutil
import subprocess
import threading
import time
import traceback

from build import Broken, Build, JOBS, ROOT

# Most of the time of most tests is waiting; those that work instead, and are judged by the clock, are RUN_SERIAL.
TEST_JOBS = 2 * JOBS
# The suites that run more than one thread: what the thread sanitizer is for.
WITH_THREADS = ("transport_core_test", "transport_contract_test", "shm_test", "planted_race", "supervisor_test",
                "transfer_test", "value_test", "hetero_test", "xgmi_test", "staging_test", "tcp_gpu_test",
                "shm_gpu_test")
AGAIN = 3  # times that what failed is run by itself


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of one build that carry one of the labels and match `only`."""
    preset: str
    labels: tuple
    targets: tuple
    parallel: int = TEST_JOBS
    only: str = "."


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
    "simulation": (Tests("release", ("simulation",), ("troupe_tests_simulation",), parallel=JOBS),),
    "sanitizers": (
        Tests("asan", ("unit", "integration"),
              ("troupe_tests_unit", "troupe_tests_integration", "troupe_tests_faults")),
        Tests("asan", ("faults",), ()),
        # The other suites have one thread, which was looked at above.
        Tests("tsan", ("unit", "integration"), (*WITH_THREADS, "troupe_tests_faults"), only=threaded()),
        Tests("tsan", ("faults",), ()),
    ),
    "verbs": (Tests("release", ("verbs",), ("troupe_tests_verbs",), parallel=1),),
    "fuzz": (Tests("fuzz", ("fuzz",), ("troupe_tests_fuzz",), parallel=JOBS),),
    "lint": (Check("clang-format", ("tests/lint/format",)), Check("shellcheck", ("tests/lint/shell",)),
             Check("clang-tidy", ("tests/lint/tidy",))),
}
# What one who changed a line wants to know; `all` is for continuous integration.
SHORT = ("unit", "integration", "faults", "simulation")


def packages(parts):
    """The sets of deploy/install-packages that the parts need."""
    sets = ["build", "test"]
    if {"fuzz", "lint"} & set(parts):
        sets.append("check")
    if "verbs" in parts:
        sets.append("verbs")
    # The unit tests compile for both makers of GPUs: for AMD's with this, for NVIDIA's where nvcc is.
    if "unit" in parts:
        sets.append("gpu")
    return sets


def say(words):
    print(f"\n== {words}", flush=True)


def in_machines(folder):
    """What came of each test that a virtual machine ran: one ctest test is a whole suite of them."""
    for path in sorted(folder.glob("*/tests")):
        for line in path.read_text(errors="replace").splitlines():
            result, _, rest = line.partition(" ")
            if result in ("passed", "failed", "skipped"):
                yield path.parent.name, result, rest


def judge(tally, part, build, outcome):
    """Counts it. What failed is run again by itself: it is unsteady if that passes, unless a sanitizer reported
    something, which no later run takes back."""
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
    """Some parts. What compiles does so at a low priority while the tests of what is built already run: most of
    their time they wait. A build is finished before its first test starts: ctest reads what a build writes."""

    def __init__(self, parts, tally):
        self._tally = tally
        self._steps = [(part, step) for part in parts for step in PARTS[part]]
        self._builds = {step.preset: Build(step.preset) for _, step in self._steps if isinstance(step, Tests)}
        self._made = {preset: threading.Event() for preset in self._builds}
        self._usable = set()

    def run(self):
        builder = threading.Thread(target=self._build_all)
        builder.start()
        for part, step in self._steps:
            if isinstance(step, Tests):
                self._made[step.preset].wait()
                if step.preset in self._usable:
                    self._test(part, step)
        builder.join()

    def _build_all(self):
        """Whatever this thread ends by, no test waits for what it would have built, and the run fails."""
        try:
            self._build_and_check()
        except BaseException:  # pylint: disable=broad-exception-caught
            self._tally.broken("harness", "the thread that builds", traceback.format_exc())
        finally:
            for made in self._made.values():
                made.set()

    def _timed(self, part, step, work):
        start = time.monotonic()
        try:
            return work()
        except Broken as broken:
            self._tally.broken(part, broken.title, broken.output)
            return None
        finally:
            seconds = time.monotonic() - start
            self._tally.took(part, step, seconds)
            say(f"{step} took {seconds:.0f} s")

    def _build_and_check(self):
        for preset, build in self._builds.items():
            wanted = [(part, step) for part, step in self._steps if getattr(step, "preset", None) == preset]
            targets = list(dict.fromkeys(target for _, step in wanted for target in step.targets))
            say(f"building {preset}: {' '.join(targets)}")
            if self._timed(wanted[0][0], f"building {preset}", lambda: build.make(targets) or True):
                self._usable.add(preset)
            self._made[preset].set()
        # A check compiles, so it waits behind the builds: tests wait for those.
        for part, step in self._steps:
            if isinstance(step, Check):
                say(step.name)
                self._timed(part, step.name, lambda: self._check(part, step))

    def _check(self, part, step):
        run = subprocess.run(("nice", *step.words), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
        print(run.stdout, end="", flush=True)
        if run.returncode != 0:
            raise Broken(step.name, run.stdout)
        self._tally.count(part, passed=1)

    def _test(self, part, step):
        name = f"testing {step.preset}: {', '.join(step.labels)}"
        say(name)
        build = self._builds[step.preset]
        results = build.folder / "tests/verbs/results"
        if "verbs" in step.labels:
            shutil.rmtree(results, ignore_errors=True)
        outcomes = self._timed(part, name, lambda: build.run(step.labels, step.parallel, step.only))
        for outcome in outcomes or ():
            judge(self._tally, part, build, outcome)
        if "verbs" in step.labels:
            self._count_machines(part, results)

    def _count_machines(self, part, results):
        """The suite itself is counted already, as failed if any of its tests is."""
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
