"""A fresh Debian 12 in a folder, with a clean clone, in which the two commands of README.md are run exactly as
written there: by root, or by a user who may use sudo. Only root can make one, with debootstrap and a network."""
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import time

from build import ROOT, Broken
from parts import say

KNOWN = {"fresh_root": "root", "fresh_user": "troupe"}
CLONE = "home/troupe/clone"
# The command, and its last output if all is well.
STEPS = {"quickstart": ("deploy/quickstart", r"^identical: yes$"),
         "tests": ("tests/run", r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?")}
SHM_MIB = 2048
# A machine of its own except for the kernel: processes started there end with the first process.
ENTER = f"""set -e
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o size={SHM_MIB}m,mode=1777 tmpfs "$1/dev/shm"
if [ -n "$2" ]; then mkdir -p "$1/ccache"; mount --bind "$2" "$1/ccache"; fi
exec chroot "$1" runuser -u "$3" -- env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "HOME=$4" "$5" \\
  sh -c 'cd "/{CLONE}" && exec "$0" </dev/null' "$6"
"""


def must(title, *words):
    run = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         errors="replace", check=False)
    if run.returncode != 0:
        raise Broken(title, run.stdout)
    return run.stdout.strip()


def missing():
    """Why no fresh Debian can be made here; None if it can."""
    if os.getuid() != 0:
        return "only root can make a fresh Debian 12"
    for command, package in (("debootstrap", "debootstrap"), ("git", "git"), ("unshare", "util-linux")):
        if not shutil.which(command):
            return f"there is no {command} here: apt-get install {package}"
    if not (ROOT / ".git").exists():
        return f"{ROOT} is not a git clone"
    return None


def archives():
    """Where this machine's apt finds Debian: the archive's address for each suite."""
    said = must("asking apt for its archives", "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)",
                "Created-By: Packages", "Component: main")
    found = {suite: address for address, suite in (line.split() for line in said.splitlines())}
    if "bookworm" not in found:
        raise Broken("apt on this machine has no archive of Debian 12", said)
    return found


def make(root, user):
    """Debian's smallest set and git. The user, if not root, may use sudo without a password."""
    say("debootstrap")
    known = archives()
    packages = "git,ca-certificates" + (",sudo" if user != "root" else "")
    must("debootstrap", "unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={packages}", "bookworm",
         str(root), known["bookworm"])
    (root / "etc/apt/sources.list").write_text("".join(f"deb {known[suite]} {suite} main\n" for suite in known
                                                       if suite.startswith("bookworm")))
    must("adding a user", "chroot", str(root), "useradd", "--create-home", "--shell", "/bin/bash", "troupe")
    if user != "root":
        (root / "etc/sudoers.d/troupe").write_text("troupe ALL=(ALL) NOPASSWD: ALL\n")
    must("a clean clone", "git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(root / CLONE))
    must("giving the clone away", "chroot", str(root), "chown", "-R", f"{user}:", f"/{CLONE}")


def shared_cache():
    """This user's ccache folder, whose objects are valid there too, since the compiler is the same; empty if there
    is none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        folder = subprocess.run(["ccache", "--get-config", "cache_dir"], capture_output=True, text=True,
                                check=True).stdout.strip()
        return folder if pathlib.Path(folder).is_dir() else ""
    return ""


def enter(root, user, command):
    """Runs a command in the clone there and shows its output. Returns the output and the exit status."""
    cache = shared_cache()
    variables = "CCACHE_DIR=/ccache CCACHE_READONLY=1 CCACHE_TEMPDIR=/tmp/ccache" if cache else "TERM=dumb"
    script = ENTER.replace('"$5"', shlex.join(variables.split()))
    home = "/root" if user == "root" else f"/home/{user}"
    said = []
    with subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh", str(root),
                           cache, user, home, "", command],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as running:
        for line in running.stdout:
            said.append(line)
            print(line, end="", flush=True)
    return "".join(said), running.returncode


def count(tally, name, step, said, status):
    command, wanted = STEPS[step]
    found = None
    for one in re.finditer(wanted, said, re.MULTILINE):
        found = one
    if found is not None and found.groups():
        passed, failed, skipped = (int(number or 0) for number in found.groups())
        tally.count(name, passed, failed, skipped)
        if failed or status != 0:
            tally.fail(f"{name}: {command}", said)
            tally.count(name, failed=0 if failed else 1)
    elif found is not None and status == 0:
        tally.count(name, passed=1)
    else:
        tally.broken(name, f"{name}: {command} ended with {status}", said)


def run(name, tally, only="."):
    """Runs the steps that match `only`, one after another as on one machine."""
    say(name)
    if reason := missing():
        print(f"{name}: skipped: {reason}", flush=True)
        tally.count(name, skipped=1)
        return
    user, start = KNOWN[name], time.monotonic()
    (ROOT / "build").mkdir(exist_ok=True)
    root = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=ROOT / "build"))
    root.chmod(0o755)
    try:
        make(root, user)
        for step, (command, _) in STEPS.items():
            if re.search(only, step):
                say(f"{name}: {command}")
                count(tally, name, step, *enter(root, user, command))
    except Broken as broken:
        tally.broken(name, f"{name}: {broken.title}", broken.output)
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=False)
    tally.took({name: 1}, f"testing on {name}", time.monotonic() - start)
