"""`tests/run anywhere`: runs the tests of the first three parts on a machine that lacks something. Each test must
pass there, or be skipped with a sentence that says what is missing."""
import argparse
import collections
import os
import re
import sys
import threading
import time

import fresh
import restrictions
from build import Broken, Build
from outcomes import UNSTEADY_ALLOWED, Tally
from parts import PARTS, TEST_JOBS, judge, say

LABELS = ("unit", "integration", "faults")
TOOLS = "tests/harness"
# The minimum length of a sentence that says what is missing.
SHORTEST_SENTENCE = 8
CHAOS_SECONDS = "30"


def sentence(output):
    """What a skipped test says is missing; empty if it says nothing."""
    of_googletest = re.search(r": Skipped\n(.*?)\n*(?=\[  SKIPPED \]|\S+:\d+: |\Z)", output, re.DOTALL)
    said = of_googletest.group(1) if of_googletest else (output.strip().splitlines() or [""])[-1]
    said = " ".join(said.split())
    return said if len(said) >= SHORTEST_SENTENCE else ""


class Skipped:
    """The skipped tests, by restriction and sentence."""

    def __init__(self):
        self._names = collections.defaultdict(lambda: collections.defaultdict(list))

    def add(self, restriction, said, name):
        self._names[restriction][said].append(name)

    def print(self):
        for restriction, sentences in self._names.items():
            say(f"skipped under {restriction}")
            for said, names in sorted(sentences.items(), key=lambda entry: -len(entry[1])):
                print(f"{len(names):4d}  {said}  ({names[0]}{', ...' if len(names) > 1 else ''})")


class Anywhere:
    """Runs the tests of one build under one restriction after another."""

    def __init__(self, tally, skipped, folder=None, tools=None, labels=LABELS, only="."):
        self._tally = tally
        self._preset = "release" if folder is None else "planted"
        self._plain = Build(self._preset, folder)
        self._tools = tools or self._plain.folder / TOOLS
        self._labels = labels
        self._only = only
        self._skipped = skipped

    def run(self, names):
        for name in names:
            say(name)
            start = time.monotonic()
            try:
                with restrictions.restricted(name, self._tools, self._plain.folder) as place:
                    if found := restrictions.probe(name, place):
                        raise Broken(f"{name} is not in force", found)
                    self._test(name, place)
            except restrictions.CannotBeMade as reason:
                print(f"{name}: skipped: this machine cannot be made like that: {reason}", flush=True)
                self._skipped.add(name, f"this machine cannot be made like that: {reason}", "all")
                self._tally.count(name, skipped=1)
            except Broken as broken:
                self._tally.broken(name, f"{name}: {broken.title}", broken.output)
            self._tally.took({name: 1}, f"testing under {name}", time.monotonic() - start)

    def _test(self, name, place):
        build = Build(self._preset, self._plain.folder, name, place)
        if not place.crowded:
            for outcome in build.run(self._labels, TEST_JOBS, self._only):
                self._judge(name, build, outcome)
            return
        beside = []
        own = threading.Thread(target=self._run_beside, args=(beside,))
        own.start()
        try:
            outcomes = build.run(self._labels, TEST_JOBS // 2 + 1, self._only)
        finally:
            own.join()
        for outcome in outcomes:
            self._judge(name, build, outcome)
        for outcome in beside:
            if isinstance(outcome, Broken):
                raise outcome
            self._judge(name, self._plain, outcome)

    def _run_beside(self, outcomes):
        try:
            outcomes += self._plain.run(self._labels, TEST_JOBS // 2 + 1, self._only, quiet=True)
        except Broken as broken:
            outcomes.append(broken)

    def _judge(self, name, build, outcome):
        if outcome.result != "skipped":
            judge(self._tally, name, build, outcome)
        elif said := sentence(outcome.output):
            self._skipped.add(name, said, outcome.name)
            self._tally.add(name, outcome)
        else:
            self._tally.broken(name, f"{outcome.title} is skipped without a sentence that says what is missing",
                               outcome.output)


def refuse_unknown(names):
    known = [*restrictions.KNOWN, *fresh.KNOWN]
    for name in names:
        if name not in known:
            print(f"tests/run anywhere: no restriction named '{name}'; those known are {' '.join(known)}",
                  file=sys.stderr)
            return True
    return False


def anywhere(words, install):
    """The exit code."""
    parser = argparse.ArgumentParser(prog="tests/run anywhere")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="a pattern of test names")
    parser.add_argument("names", nargs="*", metavar="RESTRICTION",
                        help=f"{', '.join(restrictions.KNOWN)} (all of them); {', '.join(fresh.KNOWN)}")
    asked = parser.parse_args(words)
    if refuse_unknown(asked.names):
        return 2
    names = list(dict.fromkeys(asked.names)) or list(restrictions.KNOWN)
    tally = Tally(UNSTEADY_ALLOWED * len(names))  # each restriction is a run of all the tests
    skipped = Skipped()
    only = "|".join(f"({one})" for one in asked.only or (".",))
    if under := [name for name in names if name in restrictions.KNOWN]:
        if not install(list(LABELS)):
            return 2
        run_under(under, only, tally, skipped)
    for name in names:
        if name in fresh.KNOWN:
            fresh.run(name, tally, only)
    skipped.print()
    tally.print()
    return 0 if tally.passed else 1


def run_under(names, only, tally, skipped):
    os.environ.setdefault("TROUPE_CHAOS_SECONDS", CHAOS_SECONDS)
    say("building release")
    targets = [target for part in LABELS for step in PARTS[part] for target in step.targets]
    try:
        Build("release").make(targets)
    except Broken as broken:
        tally.broken("release", broken.title, broken.output)
        return
    Anywhere(tally, skipped, only=only).run(names)
