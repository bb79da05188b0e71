"""Virtual environments of Python with the packages that a lock file beside this one pins. Each is made once, from
the package index, and kept outside the checkout.

    environment.py NAME                      prints the path of the Python of NAME.lock
    environment.py NAME SCRIPT ARGUMENT...   runs a script with it

Exit status 77: the package index cannot be reached.

The environment is ${XDG_CACHE_HOME:-~/.cache}/troupe/NAME-HASH, where HASH is that of the lock file. An environment
of another lock file that has not been used for a week is removed. A line `# behind: OTHER` in a lock file adds the
packages of OTHER.lock, which are found where its own packages do not provide one.
"""
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = "python3.11"  # the wheels that the lock files name are for this one
UNREACHABLE = 77
WEEK = 7 * 24 * 3600


class Failed(Exception):
    """The environment could not be made; the message says why."""


class Unreachable(Failed):
    """The package index does not answer."""


def run(*words, **options):
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           errors="replace", check=False, **options)
    if ended.returncode != 0:
        raise Failed(f"{' '.join(map(str, words))} failed:\n{ended.stdout[-4000:]}")
    return ended.stdout


def index_url():
    """The index that pip is configured to use."""
    environment = os.environ.get("PIP_INDEX_URL")
    if environment:
        return environment.rstrip("/")
    asked = subprocess.run((PYTHON, "-m", "pip", "config", "get", "global.index-url"), capture_output=True, text=True,
                           check=False)
    if asked.stdout.strip():
        return asked.stdout.strip().rstrip("/")
    return run(PYTHON, "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)").strip()


def check_index(url):
    """Raises Unreachable unless the index answers, even with a refusal."""
    name = urllib.parse.urlsplit(url).hostname
    try:
        with urllib.request.urlopen(f"{url}/uv/", timeout=20):
            return
    except urllib.error.HTTPError as error:
        if error.code < 500:
            return
        why = error
    except OSError as error:
        why = error
    raise Unreachable(f"the package index {name} cannot be reached: {why}")


def install_all(lock_file, folder, url):
    """Uses uv if it is pinned: it downloads and unpacks several packages at once."""
    python = folder / "bin/python"
    by_pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "-r")
    pins = [pin for pin in lock_file.read_text().splitlines() if pin.startswith("uv==")]
    if not pins:
        run(*by_pip, lock_file)
        return
    own = folder / "uv.lock"
    own.write_text("\n".join(pins) + "\n")
    run(*by_pip, own)
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:  # on the same disk: files are linked, not copied
        run(folder / "bin/uv", "pip", "install", "--quiet", "--no-config", "--python", python, "--no-deps",
            "--require-hashes", "--only-binary", ":all:", "-r", lock_file,
            env={**os.environ, "UV_CACHE_DIR": cache, "UV_DEFAULT_INDEX": url, "UV_HTTP_TIMEOUT": "120"})


def install(lock_file, folder):
    if shutil.which(PYTHON) is None:
        raise Failed(f"there is no {PYTHON}: the wheels of {lock_file.name} are for that version; install it")
    url = index_url()
    check_index(url)
    try:
        run(PYTHON, "-m", "venv", folder)
        install_all(lock_file, folder, url)
    except Failed:
        check_index(url)  # the connection may have been lost meanwhile
        raise


def packages_of(folder):
    return folder / "lib" / PYTHON / "site-packages"


def put_behind(lock_file, folder):
    """The environment that it names may have changed since the last use."""
    for line in lock_file.read_text().splitlines():
        if line.startswith("# behind: "):
            other = environment(line.removeprefix("# behind: "))
            (packages_of(folder) / "behind.pth").write_text(f"{packages_of(other)}\n")


def remove_old(home, name, but):
    for folder in home.glob(f"{name}-*"):
        try:
            if folder != but and folder.is_dir() and time.time() - (folder / "used").stat().st_mtime > WEEK:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is being made, or another process removes it
            continue


def environment(name):
    """The folder of the environment, which is made if it does not exist. Concurrent callers make it once."""
    lock_file = HERE / f"{name}.lock"
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "troupe"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"{name}-{hashlib.sha256(lock_file.read_bytes()).hexdigest()[:16]}"
    with open(home / f"{name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "used").exists():  # written last
            shutil.rmtree(folder, ignore_errors=True)
            try:
                install(lock_file, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        (folder / "used").touch()
        remove_old(home, name, folder)
    put_behind(lock_file, folder)
    return folder


def variables(folder):
    """Returns the process's environment, changed for programs of a virtual environment: Python keeps compiled files
    beside the virtual environment, not in a checkout, whatever the process was told. Otherwise each process that
    imports vLLM compiles for half a minute."""
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def main(words):
    locks = sorted(lock.stem for lock in HERE.glob("*.lock"))
    if not words or words[0] not in locks:
        print(f"usage: environment.py NAME [SCRIPT ARGUMENT...], where NAME is one of {', '.join(locks)}", file=sys.stderr)
        return 2
    try:
        folder = environment(words[0])
        python = folder / "bin/python"
        if words[1:]:
            sys.stdout.flush()
            os.execve(python, [str(python), *words[1:]], variables(folder))
        print(python)
    except Failed as failed:
        print(f"environment.py: {failed}", file=sys.stderr)
        return UNREACHABLE if isinstance(failed, Unreachable) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
