"""The virtual machines that the tests on real verbs share: they start once in a run, and end with it."""
import contextlib
import shutil
import subprocess
import time

from build import ROOT

# The folder of a build that the tests may write to: the results of each suite.
RESULTS = "tests/verbs/results"


# Machines that run at once: a suite in one of them leaves half of two cores idle.
MACHINES = 2


@contextlib.contextmanager
def kept_machines(build, labels):
    """The environment variables that tell tests of the machines that are kept until the block ends; empty if no test
    needs one. A test that finds them gone starts one of its own (tests/verbs/machine)."""
    if "verbs" not in labels:
        yield {}
        return
    folders = [build.folder / f"tests/verbs/kept{number}" for number in range(MACHINES)]
    with contextlib.ExitStack() as kept:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            words = ("setpriv", "--pdeathsig", "TERM", "--", ROOT / "tests/verbs/machine",
                     "--write", build.folder / RESULTS, "--serve", folder)
            keeper = kept.enter_context(subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL))
            kept.callback(keeper.terminate)
            # The machine accepts commands before it has started.
            while not (folder / "keeper").exists() and keeper.poll() is None:
                time.sleep(0.1)
        yield {"TROUPE_VERBS_MACHINE": ":".join(map(str, folders))}
