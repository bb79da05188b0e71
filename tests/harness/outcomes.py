"""The outcomes of tests: read from ctest's reports, counted, and printed at the end of a run."""
import collections
import dataclasses
import re
import threading
import time
import xml.etree.ElementTree

# The report of a sanitizer or a fuzzer that has found something: such a test has failed for good.
SANITIZER_REPORT = re.compile(
    r"(?:ERROR|WARNING): (?:Address|Leak|Thread|Memory|UndefinedBehavior)Sanitizer"
    r"|SUMMARY: \w+Sanitizer|: runtime error: |ERROR: libFuzzer")
# How many tests may be unsteady in a run that passes.
UNSTEADY_ALLOWED = 2
LINES_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One test, run once."""
    build: str    # the preset
    name: str
    result: str   # passed, failed or skipped
    seconds: float
    output: str

    @property
    def title(self):
        return f"{self.build}: {self.name}"

    @property
    def reported_by_sanitizer(self):
        return bool(SANITIZER_REPORT.search(self.output))


def plain(name):
    """A test's name without GoogleTest's rendering of its parameter, which may be its bytes."""
    return name.partition("  # GetParam()")[0]


def read_report(build, path):
    """The outcomes in a JUnit report of ctest; none if there is no report."""
    try:
        suite = xml.etree.ElementTree.parse(path).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return []
    outcomes = []
    for case in suite.iter("testcase"):
        result = {"run": "passed", "fail": "failed"}.get(case.get("status"), "skipped")
        # ctest gives a test that it could not start the same status as a skipped one.
        unstarted = case.find("skipped")
        if result == "skipped" and unstarted is not None and \
                unstarted.get("message", "") not in ("SKIP_REGULAR_EXPRESSION_MATCHED",
                                                     "SKIP_RETURN_CODE=77", "Disabled"):
            result = "failed"
        name = plain(case.get("name"))
        outcomes.append(Outcome(build, name, result, float(case.get("time") or 0),
                                case.findtext("system-out") or ""))
    return outcomes


def ends(text):
    """The first and the last lines of what a test printed."""
    lines = text.rstrip().splitlines()
    if len(lines) > 2 * LINES_SHOWN:
        lines = lines[:LINES_SHOWN] + ["..."] + lines[-LINES_SHOWN:]
    return "\n".join("  " + line for line in lines)


def duration(seconds):
    """Minutes and seconds, for people."""
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


class Tally:
    """Counts for a whole run, called from any thread; the argument is how many tests may be unsteady in a run that
    passes."""

    def __init__(self, unsteady_allowed=UNSTEADY_ALLOWED):
        self._allowed = unsteady_allowed
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._counts = {}       # by part: passed, failed, skipped
        self._seconds = collections.Counter()  # by part
        self._steps = []        # (seconds, name): builds, and the tests of a label together
        self._tests = []        # (seconds, title)
        self._failures = []     # (title, output)
        self._unsteady = []     # (outcome that failed, outcome that passed)

    def count(self, part, passed=0, failed=0, skipped=0):
        with self._lock:
            counts = self._counts.setdefault(part, [0, 0, 0])
            for place, more in enumerate((passed, failed, skipped)):
                counts[place] += more

    def took(self, shares, step, seconds):
        """Adds a step's time, and the share of it that each part has."""
        with self._lock:
            for part, share in shares.items():
                self._counts.setdefault(part, [0, 0, 0])
                self._seconds[part] += share * seconds
            self._steps.append((seconds, step))

    def add(self, part, outcome):
        self.count(part, **{outcome.result: 1})
        with self._lock:
            self._tests.append((outcome.seconds, outcome.title))
        if outcome.result == "failed":
            self.fail(outcome.title, outcome.output)

    def add_unsteady(self, part, failed, passed):
        """A test that failed among others and passes alone: it counts as passed, and is reported."""
        self.count(part, passed=1)
        with self._lock:
            self._tests.append((failed.seconds, failed.title))
            self._unsteady.append((failed, passed))

    def fail(self, title, output=""):
        """Notes a failure to be printed at the end; the caller counts it."""
        print(f"failed: {title}", flush=True)
        with self._lock:
            self._failures.append((title, output))

    def broken(self, part, title, output=""):
        """Counts a step that could not be run as one failed test."""
        self.count(part, failed=1)
        self.fail(title, output)

    @property
    def passed(self):
        return not sum(c[1] for c in self._counts.values()) and len(self._unsteady) <= self._allowed

    def print(self, begun_with=""):
        """Everything for the end of the log. The last line is the closing line; above it stands what the run began
        with."""
        if self._failures:
            print("\n== what failed")
            for title, output in self._failures:
                print(f"\nfailed: {title}\n{ends(output)}".rstrip())
        if self._unsteady:
            print(f"\n== unsteady: failed once and passed three times by itself; {self._allowed} do not fail a run")
            for failed, passed in self._unsteady:
                print(f"\nunsteady: {failed.title}: when it failed\n{ends(failed.output)}"
                      f"\nunsteady: {passed.title}: when it passed\n{ends(passed.output)}")
        for heading, rows in (("the slowest tests", self._tests), ("the slowest steps", self._steps)):
            print(f"\n== {heading}")
            for seconds, name in sorted(rows, reverse=True)[:10]:
                print(f"{seconds:8.1f} s  {name}")
        width = max(map(len, (*self._counts, " " * 12)))
        print(f"\n{'part':<{width}} {'passed':>8} {'failed':>8} {'skipped':>8} {'time':>10}")
        for part, (passed, failed, skipped) in self._counts.items():
            print(f"{part:<{width}} {passed:8d} {failed:8d} {skipped:8d} {duration(self._seconds[part]):>10}")
        passed, failed, skipped = (sum(c[i] for c in self._counts.values()) for i in range(3))
        whole = duration(time.monotonic() - self._start)
        print(f"{'total':<{width}} {passed:8d} {failed:8d} {skipped:8d} {whole:>10}\n")
        if len(self._unsteady) > self._allowed:
            print(f"{len(self._unsteady)} unsteady tests are more than the {self._allowed} that a run may have")
            failed += len(self._unsteady) - self._allowed
        if begun_with:
            print(begun_with)
        closing = f"{passed} passed, {failed} failed"
        if skipped:
            closing += f", {skipped} skipped"
        if self._unsteady:
            closing += f", {len(self._unsteady)} unsteady"
        print(closing, flush=True)
