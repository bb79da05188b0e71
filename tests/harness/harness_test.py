"""Checks what the harness reports for tests that fail now and then, always, or with a sanitizer's report, using
planted tests."""
import contextlib
import importlib.util
import io
import os
import pathlib
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

import steady
from build import Broken, Build, foreign, user
from outcomes import Tally
from parts import Check, Run, Tests, batches, judge
from planted import plant

PASSES = "echo all is well"
FAILS = "echo this never works; exit 1"
# A second run finds the file that the first run left.
FAILS_ONCE = "test -e here && exit 0; touch here; echo not yet; exit 1"
FAILS_TWICE = "test -e here2 && exit 0; test -e here1 && touch here2; touch here1; exit 1"
RACES_ONCE = "test -e raced && exit 0; touch raced; echo 'WARNING: ThreadSanitizer: data race'; exit 1"
LEAKS_ONCE = "test -e leaked && exit 0; touch leaked; echo 'ERROR: LeakSanitizer: detected memory leaks'; exit 1"
# Fails unless it gets a core to itself, which a quiet machine gives it.
HASTY = (sys.executable + " -c \"import sys, time; start = time.monotonic(); "
         "[None for _ in iter(lambda: time.process_time() < 0.4, False)]; "
         "sys.exit(time.monotonic() - start > 0.5)\"")


def only(things):
    [thing] = things
    return thing


class Harness(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.folder = pathlib.Path(place.name)

    def build(self, labels=(), **commands):
        plant(self.folder, labels, **commands)
        return Build("planted", self.folder)

    def told(self, **commands):
        """What a run prints at its end, and whether it passed."""
        build = self.build(**commands)
        tally = Tally()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            for outcome in build.run(("planted",), 2, quiet=True):
                judge(tally, "planted", build, outcome)
            tally.print()
        return out.getvalue(), tally.passed

    def test_what_passes_passes(self):
        text, passed = self.told(one=PASSES, other=PASSES)
        self.assertTrue(passed)
        self.assertEqual(text.splitlines()[-1], "2 passed, 0 failed")

    def test_a_builder_that_ends_by_surprise_fails_the_run_and_keeps_nobody_waiting(self):
        tally = Tally()
        run = Run(("unit",), tally)
        run._build_and_check = lambda: 1 / 0  # pylint: disable=protected-access
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run.run()
            tally.print()
        self.assertFalse(tally.passed)
        self.assertIn("ZeroDivisionError", out.getvalue())

    def test_engines_go_on_beside_other_tests_and_those_that_want_both_cores_wait_for_them(self):
        steps = [(part, Tests(preset, (part,), ())) for part, preset in (
            ("unit", "release"), ("sanitizers", "asan"), ("sanitizers", "tsan"), ("verbs", "release"),
            ("engines", "release"), ("fuzz", "fuzz"))]
        presets = ("release", "asan", "tsan", "fuzz")
        planned = batches(steps, {preset: Build(preset, self.folder) for preset in presets})
        self.assertEqual([batch.parts for batch in planned],
                         [{"unit"}, {"engines"}, {"sanitizers"}, {"sanitizers"}, {"verbs"}, {"fuzz"}])
        run, asan_began, order = Run(("unit", "sanitizers", "verbs", "engines", "fuzz"), Tally()), threading.Event(), []

        def tested(batch):
            if "sanitizers" in batch.parts:
                asan_began.set()
            if "engines" in batch.parts:
                asan_began.wait()
                time.sleep(0.2)  # threads that do not wait for it come first
            order.append((batch.preset, min(batch.parts)))

        with unittest.mock.patch.multiple(run, _batches=planned, _test=tested, _usable=set(presets),
                                          _build_and_check=lambda: None):
            run.run()
        self.assertEqual(order, [("release", "unit"), ("asan", "sanitizers"), ("release", "engines"),
                                 ("tsan", "sanitizers"), ("release", "verbs"), ("fuzz", "fuzz")])

    def checked(self, words):
        """What a run prints for a check, and whether it passed."""
        tally = Tally()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            Run((), tally).check("lint", Check("planted", ("sh", "-c", words)))
            tally.print()
        return out.getvalue().splitlines()[-1], tally.passed

    def test_a_check_that_cannot_be_made_here_is_skipped(self):
        self.assertEqual(self.checked("exit 0"), ("1 passed, 0 failed", True))
        self.assertEqual(self.checked("echo no index; exit 77"), ("0 passed, 0 failed, 1 skipped", True))
        self.assertEqual(self.checked("exit 1"), ("0 passed, 1 failed", False))

    def test_what_fails_always_fails_with_both_outputs(self):
        text, passed = self.told(one=PASSES, bad=FAILS)
        self.assertFalse(passed)
        self.assertEqual(text.splitlines()[-1], "1 passed, 1 failed")
        self.assertEqual(text.count("  this never works"), 2)

    def test_what_fails_once_is_unsteady_and_told_of_with_both_outputs(self):
        text, passed = self.told(good=PASSES, odd=FAILS_ONCE)
        self.assertTrue(passed)
        self.assertEqual(text.splitlines()[-1], "2 passed, 0 failed, 1 unsteady")
        self.assertIn("unsteady: planted: odd: when it failed\n  not yet", text)

    def test_what_fails_twice_fails(self):
        text, passed = self.told(odd=FAILS_TWICE)
        self.assertFalse(passed)
        self.assertEqual(text.splitlines()[-1], "0 passed, 1 failed")

    def test_two_that_are_unsteady_do_not_fail_a_run_and_a_third_does(self):
        self.assertTrue(self.told(a=FAILS_ONCE, b=FAILS_ONCE)[1])
        with tempfile.TemporaryDirectory() as place:
            self.folder = pathlib.Path(place)
            text, passed = self.told(a=FAILS_ONCE, b=FAILS_ONCE, c=FAILS_ONCE)
        self.assertFalse(passed)
        self.assertEqual(text.splitlines()[-1], "3 passed, 1 failed, 3 unsteady")

    def test_what_a_sanitizer_reports_fails_whatever_comes_after(self):
        text, passed = self.told(race=RACES_ONCE, leak=LEAKS_ONCE)
        self.assertFalse(passed)
        self.assertEqual(text.splitlines()[-1], "0 passed, 2 failed")

    def test_parts_of_one_build_run_at_once_and_are_counted_apart(self):
        labels = {"fast.a": "unit", "fast.b/shm": "unit", "slow.over/tcp": "faults", "slow.over/shm": "faults"}
        build = self.build(labels, **{"fast.a": PASSES, "fast.b/shm": FAILS, "slow.over/tcp": PASSES,
                                      "slow.over/shm": FAILS})
        one, other = Tests("planted", ("unit",), ()), Tests("planted", ("faults",), (), but="/shm")
        batch = only(batches([("first", one), ("second", other)], {"planted": build}))
        outcomes = batch.run(quiet=True)
        self.assertEqual(sorted((batch.part(outcome), outcome.name, outcome.result) for outcome in outcomes),
                         [("first", "fast.a", "passed"), ("first", "fast.b/shm", "failed"),
                          ("second", "slow.over/tcp", "passed")])
        self.assertAlmostEqual(sum(batch.shares(outcomes).values()), 1)

    def test_any_number_of_parts_runs_at_once(self):
        names = [f"{letter}.test" for letter in "abcdefgh"]
        build = self.build({name: f"part_{name[0]}" for name in names}, **dict.fromkeys(names, PASSES))
        steps = [(name[0], Tests("planted", (f"part_{name[0]}",), ())) for name in names]
        outcomes = only(batches(steps, {"planted": build})).run(quiet=True)
        self.assertEqual(sorted(outcome.name for outcome in outcomes), names)

    def test_the_names_that_one_part_is_limited_to_do_not_limit_the_other(self):
        build = self.build({"other.c": "faults"}, **{"fast.a": PASSES, "slow.b": FAILS, "other.c": PASSES})
        one = Tests("planted", ("planted",), (), only=r"^(fast)\.")
        batch = only(batches([("part", one), ("part", Tests("planted", ("faults",), ()))], {"planted": build}))
        outcomes = batch.run(quiet=True)
        self.assertEqual(sorted(outcome.name for outcome in outcomes), ["fast.a", "other.c"])

    def test_a_folder_that_another_user_built_in_is_named_with_its_owner_and_what_to_do(self):
        built = self.folder / "build" / "release"
        built.mkdir(parents=True)
        self.assertIsNone(foreign(built))
        (built / "CMakeCache.txt").touch()
        for path in (built / "CMakeCache.txt", built, built.parent):
            path.chmod(0o555)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            if os.getuid() == 0:
                self.folder.chmod(0o755)
                os.setresuid(61_000, 61_000, 61_000)
            os.write(writer, "\n".join(str(foreign(built.parent / name)) for name in ("release", "asan")).encode())
            os._exit(0)
        os.waitpid(child, 0)
        release, asan = os.read(reader, 4096).decode().splitlines()
        for said, where in ((release, built), (asan, built.parent)):
            self.assertIn(f"{where} belongs to {user(os.getuid())}, ", said)
            self.assertIn(f"sudo rm -rf {where}", said)
        for path in (built.parent, built):
            path.chmod(0o755)

    def test_a_simulation_with_options_is_explored_and_another_word_is_refused(self):
        spec = importlib.util.spec_from_file_location("program", pathlib.Path(__file__).with_name("__main__.py"))
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        words = ["--of", "links", "--seeds", "1..9"]
        with unittest.mock.patch.object(program, "explore", return_value=7) as explored:
            self.assertEqual(program.main(["simulation", *words]), 7)
        explored.assert_called_once_with(words)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(program.main(["simulation", "links"]), 2)
        self.assertIn("no part named 'links'", said.getvalue())

    def test_a_label_that_no_test_carries_is_a_failure(self):
        build = self.build(one=PASSES)
        with self.assertRaises(Broken):
            build.run(("other",), 1, quiet=True)

    def test_a_seed_says_in_which_order_tests_begin(self):
        names = "abcdefgh"
        build = self.build(**{name: f"echo {name} >>../order" for name in names})
        with open(self.folder / "CTestTestfile.cmake", "a", encoding="utf-8") as file:
            file.write(f"set_tests_properties({' '.join(names)} PROPERTIES RUN_SERIAL TRUE)\n")

        def order(seed):
            (self.folder / "order").unlink(missing_ok=True)
            build.run(("planted",), 2, quiet=True, seed=seed)
            return (self.folder / "order").read_text().split()

        first = order(7)
        self.assertEqual(sorted(first), list(names))
        self.assertEqual(first, order(7))
        self.assertNotEqual(first, order(8))

    def test_what_a_run_begins_with_stands_above_its_closing_line(self):
        tally = Tally()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            tally.print("TROUPE_COMMIT_SEED=17")
        self.assertEqual(out.getvalue().splitlines()[-2:], ["TROUPE_COMMIT_SEED=17", "0 passed, 0 failed"])

    def test_steady_finds_what_takes_the_time_of_the_machine_for_granted(self):
        build = self.build(well=PASSES, hasty=HASTY)
        os.environ.setdefault("TROUPE_COMMIT_SEED", "1")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            good = steady.repeat([("planted", Tests("planted", ("planted",), ()), build, ".")], 3)
        self.assertFalse(good)
        self.assertRegex(out.getvalue(), r"of 3  planted: hasty; in round \(seed\): \d \(\d+\)")
        self.assertNotRegex(out.getvalue(), "failed: planted: well")


if __name__ == "__main__":
    unittest.main()
