"""Tests `tests/run anywhere` on planted tests. The argument is the folder of the programs that make restrictions."""
import contextlib
import io
import os
import pathlib
import sys
import tempfile
import unittest

import fresh
from anywhere import Anywhere, Skipped, anywhere, sentence
from build import ROOT
from outcomes import Tally
from planted import plant

TOOLS = pathlib.Path(sys.argv.pop())
MAKES_SOCKET = "python3 -c 'import socket; socket.socket(socket.AF_INET6)'"


class AnywhereTest(unittest.TestCase):
    def run_planted(self, name, **commands):
        """What a run prints at its end, and whether it passed."""
        (ROOT / "build").mkdir(exist_ok=True)
        tally, skipped, out = Tally(), Skipped(), io.StringIO()
        with tempfile.TemporaryDirectory(prefix="planted-", dir=ROOT / "build") as place:
            folder = pathlib.Path(place)
            plant(folder, **commands)
            with contextlib.redirect_stdout(out):
                Anywhere(tally, skipped, folder, TOOLS, ("planted",)).run([name])
                skipped.print()
                tally.print()
        return out.getvalue(), tally.passed

    def test_what_needs_nothing_passes_and_what_says_what_it_needs_is_listed(self):
        text, passed = self.run_planted("no_ipv6", plain="true",
                                        socket=f"{MAKES_SOCKET} || {{ echo there is no IPv6 here; exit 77; }}")
        self.assertTrue(passed, text)
        self.assertIn("== skipped under no_ipv6\n   1  there is no IPv6 here  (socket)", text)
        self.assertEqual(text.splitlines()[-1], "1 passed, 0 failed, 1 skipped")

    def test_what_takes_for_granted_what_is_missing_fails(self):
        text, passed = self.run_planted("no_ipv6", plain="true", socket=MAKES_SOCKET)
        self.assertFalse(passed)
        self.assertIn("failed: no_ipv6: socket\n", text)
        self.assertEqual(text.splitlines()[-1], "1 passed, 1 failed")

    def test_what_is_skipped_without_a_word_fails(self):
        text, passed = self.run_planted("no_ipv6", plain="true", silent="exit 77")
        self.assertFalse(passed)
        self.assertIn("silent is skipped without a sentence", text)

    def test_a_restriction_that_cannot_be_made_is_skipped_with_the_reason(self):
        tools = TOOLS / "nowhere"
        tally, skipped, out = Tally(), Skipped(), io.StringIO()
        with contextlib.redirect_stdout(out):
            Anywhere(tally, skipped, TOOLS, tools).run(["no_ptrace"])
            skipped.print()
        self.assertTrue(tally.passed)
        self.assertRegex(out.getvalue(), r"1  this machine cannot be made like that: .*nowhere/restricted")

    @unittest.skipUnless(os.getuid() == 0, "only root can be another user")
    def test_another_user_runs_beside_its_own_user(self):
        # Each run waits for a file of the other in a folder open to all users: neither ends unless both run.
        with tempfile.TemporaryDirectory() as shared:
            os.chmod(shared, 0o777)
            text, passed = self.run_planted("another_user", meets=(
                f"touch own && touch {shared}/$(id -u) && "
                f"for i in $(seq 600); do [ $(ls {shared} | wc -l) = 2 ] && exit; sleep 0.1; done; exit 1"))
        if "cannot be made" in text:
            self.skipTest("no mount namespace can be made here")
        self.assertTrue(passed, text)
        self.assertEqual(text.splitlines()[-1], "2 passed, 0 failed")

    def count_fresh(self, step, said, status):
        tally, out = Tally(), io.StringIO()
        with contextlib.redirect_stdout(out):
            fresh.count(tally, "fresh_root", step, said, status)
            tally.print()
        return out.getvalue().splitlines()[-1]

    def test_what_a_command_says_on_a_fresh_machine_is_counted(self):
        self.assertEqual(self.count_fresh("quickstart", "link ...\nidentical: yes\n", 0), "1 passed, 0 failed")
        self.assertEqual(self.count_fresh("quickstart", "identical: yes\n", 1), "0 passed, 1 failed")
        self.assertEqual(self.count_fresh("quickstart", "identical: no\n", 0), "0 passed, 1 failed")
        tests = "part  passed\n\n12 passed, 0 failed, 3 skipped, 1 unsteady\n"
        self.assertEqual(self.count_fresh("tests", tests, 0), "12 passed, 0 failed, 3 skipped")
        self.assertEqual(self.count_fresh("tests", tests, 1), "12 passed, 1 failed, 3 skipped")
        self.assertEqual(self.count_fresh("tests", "12 passed, 2 failed\n", 1), "12 passed, 2 failed")
        self.assertEqual(self.count_fresh("tests", "Killed\n", 137), "0 passed, 1 failed")

    def test_unknown_restrictions_are_refused_with_those_known(self):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(anywhere(["no_ipv6", "no_gravity"], self.fail), 2)
        self.assertIn("no restriction named 'no_gravity'; those known are no_ptrace no_namespaces no_ipv6 small_shm "
                      "jumping_clock another_user", said.getvalue())

    def test_the_sentence_of_a_skipped_test_is_what_it_said(self):
        self.assertEqual(sentence("[ RUN      ] a.b\n/x/a_test.cpp:7: Skipped\nthere is no\nnetwork\n\n"
                                  "[  SKIPPED ] a.b (0 ms)\n[==========] 1 test ran.\n"), "there is no network")
        self.assertEqual(sentence("/x/a_test.cpp:7: Skipped\n\n[  SKIPPED ] a.b (0 ms)\n"), "")
        self.assertEqual(sentence("some output\nno compiler for AMD\n"), "no compiler for AMD")
        self.assertEqual(sentence(""), "")


if __name__ == "__main__":
    unittest.main()
