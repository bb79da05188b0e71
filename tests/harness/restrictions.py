"""Machines that lack something, or are disturbed by something, that most are not: made from this one by real means.

Each restriction is a context that yields the Place where programs run under it, as long as it is open."""
import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
import tempfile

from another_user import as_another_user

HERE = pathlib.Path(__file__).resolve().parent
SHM_MIB = 64


class CannotBeMade(Exception):
    """Why this machine cannot make a restriction."""


@dataclasses.dataclass(frozen=True)
class Place:
    """`words` start a program there, with these environment variables added. `folder`: the folder of the build as
    seen from here, if programs there see another one. `crowded`: the user's own run goes on beside it."""
    words: tuple = ()
    environment: dict = dataclasses.field(default_factory=dict)
    folder: pathlib.Path | None = None
    crowded: bool = False


def refused(calls, tools):
    return Place((str(tools / "restricted"), calls))


@contextlib.contextmanager
def no_ptrace(tools, _build):
    yield refused("ptrace", tools)


@contextlib.contextmanager
def no_namespaces(tools, _build):
    yield refused("namespaces", tools)


@contextlib.contextmanager
def no_ipv6(tools, _build):
    yield refused("ipv6", tools)


@contextlib.contextmanager
def small_shm(_tools, _build):
    mount = f"mount -t tmpfs -o size={SHM_MIB}m,mode=1777 tmpfs /dev/shm || exit"
    if os.getuid() == 0:
        yield Place(("unshare", "--mount", "sh", "-c", f'{mount}; exec "$@"', "sh"))
    else:
        # The right to mount comes from a user namespace, and is given up again.
        yield Place(("unshare", "--user", "--map-current-user", "--keep-caps", "--mount", "sh", "-c",
                     f'{mount}; exec setpriv --ambient-caps -all --inh-caps -all "$@"', "sh"))


@contextlib.contextmanager
def jumping_clock(tools, _build):
    # Every user has access there, even one without access to the folder of the build.
    with tempfile.TemporaryDirectory(prefix="troupe-clock-") as folder:
        os.chmod(folder, 0o755)
        library = shutil.copy(tools / "libjumping_clock.so", folder)
        before = os.environ.get("LD_PRELOAD")
        yield Place(environment={"LD_PRELOAD": f"{library}:{before}" if before else library})


@contextlib.contextmanager
def another_user(_tools, build):
    if os.getuid() != 0:
        raise CannotBeMade("only root can run tests as another user")
    with as_another_user(build) as (words, environment, folder):
        yield Place(words, environment, folder, crowded=True)


KNOWN = {
    "no_ptrace": no_ptrace,
    "no_namespaces": no_namespaces,
    "no_ipv6": no_ipv6,
    "small_shm": small_shm,
    "jumping_clock": jumping_clock,
    "another_user": another_user,
}


def run_there(place, words):
    return subprocess.run((*place.words, *words), env={**os.environ, **place.environment}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)


def probe(name, place):
    """What a program finds there that the restriction should have removed; empty if it is in force."""
    if name not in KNOWN:
        return ""
    run = run_there(place, ("python3", "-B", "-c", (HERE / "probes.py").read_text(), name))
    return "" if run.returncode == 0 else run.stdout.strip() or f"the probe ended with {run.returncode}"


@contextlib.contextmanager
def restricted(name, tools, build):
    """The Place, after a trial: raises CannotBeMade if nothing starts there."""
    with KNOWN[name](tools, build) as place:
        try:
            run = run_there(place, ("true",))
        except OSError as error:
            raise CannotBeMade(str(error)) from None
        if run.returncode != 0:
            raise CannotBeMade(run.stdout.strip() or f"a program there ends with {run.returncode}")
        yield place
