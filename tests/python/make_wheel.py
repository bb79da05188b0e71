"""The wheel as its users get it: built from an installed Troupe, and made to bring along what it links.

    make_wheel.py BUILD FOLDER        makes that of a build folder of Troupe, and prints its path
"""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = pathlib.Path(sys.executable).parent
PLATFORM = "manylinux_2_35_x86_64"
SECONDS = 300


def run(*words, **options):
    ended = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS, check=False,
                           **options)
    if ended.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, words))} ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
    return ended.stdout


def make_wheel(build, folder):
    installed = folder / "installed"
    run("cmake", "--install", build, "--prefix", installed)
    path = f"{TOOLS}:{os.environ['PATH']}"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "built",
        ROOT / "deploy/python", env={**os.environ, "CMAKE_PREFIX_PATH": str(installed), "PATH": path})
    [built] = (folder / "built").glob("*.whl")
    run(TOOLS / "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", folder / "wheels", built,
        env={**os.environ, "PATH": path})
    [wheel] = (folder / "wheels").glob("*.whl")
    return wheel


if __name__ == "__main__":
    print(make_wheel(*map(pathlib.Path, sys.argv[1:])))
