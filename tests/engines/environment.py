"""Where the tests' vLLM lives: a virtual environment with what requirements.lock pins, made once and kept outside the
checkout. Made in about a minute from the package index (4.9 GB unpacked).

    environment.py                      prints the path of its Python
    environment.py SCRIPT ARGUMENT...   runs a script with it, and with the troupe package of this checkout

Exit status 77: the package index cannot be reached.

It is ${XDG_CACHE_HOME:-~/.cache}/troupe/engines-HASH, where HASH is of the lock file. One of another lock file that
has not been used for a week is removed.
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
PACKAGE = HERE.parents[1] / "deploy/python"
LOCK_FILE = HERE / "requirements.lock"
PYTHON = "python3.11"  # the wheels that the lock file names are for this one
UNREACHABLE = 77
WEEK = 7 * 24 * 3600


class Failed(Exception):
    """The environment could not be made; says why."""


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
    """Raises Unreachable unless the index answers, even if only with a refusal."""
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


def install(folder):
    """uv, which downloads and unpacks several packages at once, and by it everything else."""
    if shutil.which(PYTHON) is None:
        raise Failed(f"there is no {PYTHON}: the wheels of requirements.lock are for that version; install it")
    url = index_url()
    check_index(url)
    try:
        run(PYTHON, "-m", "venv", folder)
        pins = LOCK_FILE.read_text().splitlines()
        own = folder / "uv.lock"
        own.write_text("".join(pin + "\n" for pin in pins if pin.startswith("uv==")))
        python = folder / "bin/python"
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", own)
        with tempfile.TemporaryDirectory(dir=folder.parent) as cache:  # on the same disk: files are linked, not copied
            run(folder / "bin/uv", "pip", "install", "--quiet", "--no-config", "--python", python, "--no-deps",
                "--require-hashes", "--only-binary", ":all:", "-r", LOCK_FILE,
                env={**os.environ, "UV_CACHE_DIR": cache, "UV_DEFAULT_INDEX": url, "UV_HTTP_TIMEOUT": "120"})
    except Failed:
        check_index(url)  # it may have been lost meanwhile
        raise


def remove_old(home, but):
    for folder in home.glob("engines-*"):
        try:
            if folder != but and folder.is_dir() and time.time() - (folder / "used").stat().st_mtime > WEEK:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is being made, or somebody else removes it
            continue


def environment():
    """The folder of the environment, which is made if it is not there. Two that want it make it once."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "troupe"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"engines-{hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()[:16]}"
    with open(home / "engines.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "used").exists():  # written last
            shutil.rmtree(folder, ignore_errors=True)
            try:
                install(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        (folder / "used").touch()
        remove_old(home, folder)
    return folder


def variables(**more):
    """Of the process's environment, for a program that has vLLM in it, on the CPU and without the network."""
    return {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "PYTHONHASHSEED": "0", "PYTHONPATH": f"{PACKAGE}:{HERE}", **more}


def main(words):
    try:
        python = environment() / "bin/python"
        if words:
            sys.stdout.flush()
            os.execve(python, [str(python), *words], variables())
        print(python)
    except Failed as failed:
        print(f"environment.py: {failed}", file=sys.stderr)
        return UNREACHABLE if isinstance(failed, Unreachable) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
