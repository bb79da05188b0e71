"""One build of the project (a preset of CMakePresets.json): builds it and runs its tests with ctest."""
import json
import os
import pathlib
import pwd
import random
import re
import shutil
import subprocess
import threading
import time

from outcomes import Outcome, read_report

ROOT = pathlib.Path(__file__).resolve().parents[2]
GIVES_WAY = ("nice", "-n", "19")  # gives way to tests that run meanwhile
JOBS = int(os.environ.get("TROUPE_JOBS") or 0) or os.cpu_count()
# Seconds after which a test without a limit of its own is killed.
LIMIT = 600
# A pattern that matches no name.
NOTHING = "^$"


class Broken(Exception):
    """A step that failed: `title` names it, `output` is what it printed."""

    def __init__(self, title, output=""):
        super().__init__(title)
        self.title = title
        self.output = output


def fixed_addresses():
    """The command prefix that starts a program without address space randomisation, where the kernel permits it:
    the thread sanitizer of g++ 12 cannot start when addresses are randomised widely."""
    words = ["setarch", os.uname().machine, "-R"]
    try:
        allowed = subprocess.run(words + ["true"], capture_output=True, check=False).returncode == 0
    except OSError:
        allowed = False
    return words if allowed else []


def labels_of(test):
    """The labels of a test, as ctest lists it."""
    return next((entry["value"] for entry in test.get("properties", ()) if entry["name"] == "LABELS"), [])


def user(number):
    """A user's name, or its number if it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def foreign(folder):
    """Why this user cannot build in a folder: another user built there, or owns the clone. None if it can."""
    if folder.exists():
        paths = [folder, *(folder / name for name in ("CMakeCache.txt", "build.ninja", ".ninja_log"))]
        advice = f"sudo rm -rf {folder}, or build in a clone of your own"
    else:
        paths = [next(path for path in folder.parents if path.exists())]
        advice = "build in a clone of your own" + (f", or sudo rm -rf {paths[0]}" if paths[0].name == "build" else "")
    for path in paths:
        if path.exists() and not os.access(path, os.W_OK):
            return f"{path} belongs to {user(path.stat().st_uid)}, {user(os.getuid())} may not write there: {advice}"
    return None


class Build:
    """Threads may build one build and test another at once; for one build, each happens one at a time.

    `place` is where its tests run, if not plainly on this machine: the command prefix that starts a program there,
    additional environment variables, and the folder of the build as seen from here."""

    def __init__(self, preset, folder=None, title=None, place=None):
        self.preset = preset
        self.title = title or preset
        self.folder = folder or ROOT / "build" / preset
        self.prefix = list(place.words) if place else fixed_addresses() if preset == "tsan" else []
        self._environment = place.environment if place else {}
        self._from_here = place and place.folder or self.folder
        self._reports = 0
        self._lock = threading.Lock()

    def make(self, targets):
        """Configures and builds; raises Broken with the output. Tests that run meanwhile have priority."""
        if reason := foreign(self.folder):
            raise Broken(reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        for title, words in ((f"the {self.preset} build could not be configured", ["cmake", "--preset", self.preset]),
                             (f"the {self.preset} build", [*GIVES_WAY, "cmake", "--build", str(self.folder), "--parallel",
                                                           str(JOBS), "--target", *targets])):
            said, status = self._follow(words, seconds_between_lines=20)
            if status != 0:
                raise Broken(title, said)

    def _follow(self, words, *, seconds_between_lines=0, shown=True, environment=None):
        """Runs a command and shows its output, or a line of it now and then. Returns the output and the exit
        status."""
        said = []
        last = time.monotonic()
        with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace",
                              env={**os.environ, **self._environment, **(environment or {})}) as running:
            for line in running.stdout:
                said.append(line)
                if shown and time.monotonic() - last >= seconds_between_lines:
                    last = time.monotonic()
                    print(line if seconds_between_lines == 0 else f"{self.title}: {line}", end="", flush=True)
        return "".join(said), running.returncode

    def _ctest(self, *words, folder=None):
        return [*self.prefix, "ctest", "--test-dir", str(folder or self.folder), *words]

    def _shuffled(self, seed, names):
        """A folder where ctest finds the same tests in an order derived from the seed: the costliest begin first."""
        folder = self.folder / "shuffled"
        shutil.rmtree(folder, ignore_errors=True)  # otherwise slow and failed tests would go first
        folder.mkdir()
        order = sorted(names, reverse=True)
        random.Random(seed).shuffle(order)
        costs = [f"set_tests_properties([==[{name}]==] PROPERTIES COST {cost})" for cost, name in enumerate(order, 1)]
        (folder / "CTestTestfile.cmake").write_text("\n".join([f'subdirs("{self.folder}")', *costs]))
        return folder

    def tests(self, labels, only="."):
        """The tests that carry one of the labels and match `only`, as a map from name to labels."""
        words = self._ctest("--show-only=json-v1", "-L", f"^({'|'.join(labels)})$", "-R", only)
        run = subprocess.run(words, capture_output=True, text=True, check=False,
                             env={**os.environ, **self._environment})
        try:
            return {test["name"]: labels_of(test) for test in json.loads(run.stdout)["tests"]}
        except (ValueError, KeyError):
            raise Broken(f"ctest could not list the tests of {self.title}", run.stdout + run.stderr) from None

    def run(self, labels, parallel, only=".", *, but=NOTHING, seed=None, quiet=False, environment=None):
        """Runs tests and returns their outcomes; raises Broken if there are none, or ctest could not run. With a
        seed, and more than one test at a time, they begin in an order derived from the seed."""
        with self._lock:
            self._reports += 1
            report = self.folder / f"report-{self._reports}.xml"
        read_at = self._from_here / report.name
        read_at.unlink(missing_ok=True)
        words = self._ctest("-L", f"^({'|'.join(labels)})$", "-R", only, "-E", but, "--parallel", str(parallel),
                            "--no-tests=error", "--timeout", str(LIMIT), "--output-junit", str(report),
                            folder=None if seed is None else self._shuffled(seed, self.tests(labels, only)))
        said, status = self._follow(words, shown=not quiet, environment=environment)
        outcomes = read_report(self.title, read_at)
        if not outcomes:
            raise Broken(f"no test of {self.title} carries the label {'|'.join(labels)}, or ctest could not run", said)
        if status != 0 and not any(outcome.result == "failed" for outcome in outcomes):
            outcomes.append(Outcome(self.title, "ctest", "failed", 0, said))
        return outcomes

    def run_again(self, outcome, times):
        """Runs one test alone until it fails, at most that many times. Returns the outcomes."""
        outcomes = []
        for _ in range(times):
            outcomes += self.run([".*"], 1, f"^{re.escape(outcome.name)}($|  # GetParam)", quiet=True)
            if outcomes[-1].result != "passed":
                break
        return outcomes
