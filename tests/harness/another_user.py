"""Another user of this machine, with a clone and a build of its own at the same path. Nothing is shared except what
all users share, such as ports, /tmp and /dev/shm."""
import contextlib
import pathlib
import pwd
import shutil
import stat
import subprocess
import tempfile

from build import ROOT

# The mode bit that lets every user enter a folder. The clone and all folders above it need it.
OPEN = stat.S_IXOTH
FIRST_USER = 61_000


def unused_user():
    """An unused number for a user and a group."""
    taken = {entry.pw_uid for entry in pwd.getpwall()} | {entry.pw_gid for entry in pwd.getpwall()}
    return next(number for number in range(FIRST_USER, 65_000) if number not in taken)


def closed_ancestor(path):
    """The topmost folder above `path` that some users may not enter; None if there is none."""
    return next((above for above in reversed(path.parents) if not above.stat().st_mode & OPEN), None)


def copy_clone(to, build):
    """Copies everything except .git and other builds."""
    to.mkdir()
    sources = [str(entry) for entry in ROOT.iterdir() if entry.name not in (".git", "build")]
    subprocess.run(["cp", "-a", "--reflink=auto", *sources, str(to)], check=True)
    there = to / build.relative_to(ROOT)
    there.parent.mkdir(parents=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(build), str(there)], check=True)


@contextlib.contextmanager
def as_another_user(build):
    """Yields the command prefix that starts a program as that user, its environment, and the folder of its build as
    seen from here. Root only. In a mount namespace the clone is mounted over this one, since a build records the
    path that it was made at."""
    user = unused_user()
    (ROOT / "build").mkdir(exist_ok=True)
    place = pathlib.Path(tempfile.mkdtemp(prefix="another_user-", dir=ROOT / "build"))
    clone = place / "clone"
    try:
        copy_clone(clone, build)
        (clone / "home").mkdir()
        subprocess.run(["chown", "-R", "--no-dereference", f"{user}:{user}", str(place)], check=True)
        closed = closed_ancestor(ROOT)
        # The user's clone is the working folder meanwhile, since its path may be covered.
        cover = f"mount -t tmpfs -o mode=755 tmpfs '{closed}' && mkdir -p '{ROOT}' && " if closed else ""
        script = (f"cd '{clone}' && {cover}mount --no-canonicalize --bind . '{ROOT}' && cd '{ROOT}' && "
                  f'exec setpriv --reuid {user} --regid {user} --clear-groups "$@"')
        yield (("unshare", "--mount", "sh", "-c", script, "sh"),
               {"HOME": str(ROOT / "home"), "USER": str(user), "LOGNAME": str(user)},
               clone / build.relative_to(ROOT))
    finally:
        shutil.rmtree(place, ignore_errors=True)
