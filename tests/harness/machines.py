"""The virtual machine that the tests on real verbs share: it comes up once in a run, and is ended with it."""
import contextlib
import shutil
import subprocess
import time

from build import ROOT

# What the tests may write to, in the folder of a build: the results of each suite.
RESULTS = "tests/verbs/results"


@contextlib.contextmanager
def kept_machine(build, labels):
    """What tests are told in their environment of a machine that is kept until the block ends; nothing where none of
    them wants one. A test that finds it gone starts one of its own (tests/verbs/machine)."""
    if "verbs" not in labels:
        yield {}
        return
    folder = build.folder / "tests/verbs/kept"
    shutil.rmtree(folder, ignore_errors=True)
    words = ("setpriv", "--pdeathsig", "TERM", "--", ROOT / "tests/verbs/machine",
             "--write", build.folder / RESULTS, "--serve", folder)
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL) as keeper:
        # It takes commands before it has come up.
        while not (folder / "keeper").exists() and keeper.poll() is None:
            time.sleep(0.1)
        try:
            yield {"TROUPE_VERBS_MACHINE": str(folder)}
        finally:
            keeper.terminate()
