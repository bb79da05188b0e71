"""The program behind tests/run, once python3 is installed: reads the command line and runs the parts that it names.
"""
import argparse
import os
import subprocess
import sys

from anywhere import anywhere
from build import JOBS, ROOT, Broken, Build
from outcomes import Tally
from parts import PARTS, SHORT, Run, packages
from steady import steady


def commit_seed():
    """Never depends on the clock: a commit that passes today passes tomorrow."""
    try:
        run = subprocess.run(["git", "rev-parse", "--verify", "--quiet", "HEAD"], cwd=ROOT, capture_output=True,
                             text=True, check=False)
        return str(int(run.stdout[:7], 16))
    except (OSError, ValueError):
        return "1"


def prepare_environment():
    seed = os.environ.setdefault("TROUPE_COMMIT_SEED", commit_seed())
    os.environ.setdefault("RC_PARAMS", f"seed={seed}")
    os.environ.setdefault("TROUPE_FUZZ_SECONDS", "60")
    # ccache then treats the same sources in another checkout as equal.
    os.environ["CCACHE_BASEDIR"] = str(ROOT)
    os.environ["CCACHE_NOHASHDIR"] = "true"


def install(parts):
    return subprocess.run([ROOT / "deploy/install-packages", *packages(parts)], stdin=subprocess.DEVNULL,
                          check=False).returncode == 0


def explore(words):
    """Runs simulations with many seeds, or minimises one seed."""
    if not install(["simulation"]):
        return 2
    build = Build("release")
    build.make(["simulation_explorer"])
    return subprocess.run([build.folder / "tests/actors/simulation/simulation_explorer", "--jobs", str(JOBS), *words],
                          check=False).returncode


def run_parts(names):
    unknown = [name for name in names if name not in PARTS and name != "all"]
    if unknown:
        print(f"tests/run: no part named '{unknown[0]}'; the parts are {' '.join(PARTS)} all", file=sys.stderr)
        return 2
    parts = list(dict.fromkeys(names)) or list(SHORT)
    if "all" in names:
        parts = list(PARTS)
    tally = Tally()
    seed = f"TROUPE_COMMIT_SEED={os.environ['TROUPE_COMMIT_SEED']}"
    print(seed, flush=True)
    if install(parts):
        Run(parts, tally).run()
    else:
        tally.broken("packages", "the packages that are needed could not be installed")
    tally.print(seed)
    return 0 if tally.passed else 1


def run_steady(words):
    parser = argparse.ArgumentParser(prog="tests/run steady")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part, or a pattern of test names")
    asked = parser.parse_args(words)
    if asked.rounds < 1:
        parser.error("--rounds: at least 1")
    return steady(asked.names, asked.rounds, install)


def main(words):
    prepare_environment()
    try:
        if words[:1] == ["steady"]:
            return run_steady(words[1:])
        if words[:1] == ["anywhere"]:
            return anywhere(words[1:], install)
        if words[:1] == ["simulation"] and words[1:2] and words[1].startswith("-"):
            return explore(words[1:])
        return run_parts(words)
    except Broken as broken:
        print(broken.output, f"tests/run: {broken.title}", sep="\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
