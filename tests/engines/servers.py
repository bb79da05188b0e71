"""Processes of the engine tests: vLLM's servers and their companions, each with a log and an orderly end."""
import contextlib
import fcntl
import http.client
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "deploy/python"
START_SECONDS = 300  # of a server; vLLM imports for half a minute in each of three processes
ASK_SECONDS = 120
PATIENCE = 120  # seconds, for events that must come: longer than any deadline of Troupe's
END_SECONDS = 30  # of a supervisor that was told to end
SEATS = 4  # requests that a server computes at once
LONGEST = 2048  # tokens of a prompt and its text
VLLM = "vllm.entrypoints.openai.api_server"
_of_this_process = itertools.count(os.getpid() * 97)  # ports


# The deployment of one prefill and one decode engine that a file names, which bring their own caches.
DEPLOYMENT = """\
cluster: engines
supervisor: {{host: 127.0.0.1, port: {port}}}
model: {{layers: 4, kv_heads: 2, head_dim: 64, dtype: bf16, block_tokens: 32}}
stages:
  - {{name: prefill, role: prefill, engine: external, hosts: [127.0.0.1], transport: {{peer_silence: 10s}}}}
  - {{name: decode, role: decode, engine: external, hosts: [127.0.0.1], transport: {{peer_silence: 10s}}}}
edges:
  - {{from: prefill, to: decode, mode: read}}
"""


class Failed(Exception):
    """A defect that a test found."""


def wait_until(happens, said, seconds=PATIENCE):
    """`said`: the event that does not happen, for the `Failed`; may be a function."""
    limit = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > limit:
            raise Failed(f"not within {seconds} s: {said() if callable(said) else said}")
        time.sleep(0.02)


def variables(**more):
    """Environment variables for a program that imports vLLM, on the CPU and without the network."""
    return {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "PYTHONHASHSEED": "0", "PYTHONPATH": f"{PACKAGE}:{HERE}", **more}


def free_ports(count):
    """Ports that nobody listens on. They are outside the kernel's ephemeral range, from which another process might
    get them first; tests that run at the same time start elsewhere (tests/support/free_port.hpp does the same)."""
    found = []
    while len(found) < count:
        port = 20_000 + next(_of_this_process) % 12_000
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


def end_supervisor(state):
    """The supervisor that a server started: it outlives the servers, and would end by itself in ten minutes. As
    long as it lives it holds a lock on its notice."""
    with contextlib.suppress(FileNotFoundError), open(notice_of(state), encoding="utf-8") as notice:
        limit = time.monotonic() + END_SECONDS
        while not is_free(notice) and time.monotonic() < limit:
            notice.seek(0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.load(notice)["pid"], signal.SIGTERM)
            time.sleep(0.2)


def notice_of(state):
    """The notice of a supervisor."""
    return state / "troupe/vllm/supervisor"


def supervisor_pid(state):
    """The notice of the supervisor that last said where it listens, dead or alive; None if there is none. Takes no
    lock: a supervisor that starts at this moment would find it taken."""
    try:
        return json.loads(notice_of(state).read_text(encoding="utf-8"))["pid"]
    except (FileNotFoundError, ValueError):
        return None


def is_free(file):
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def end_of(log, lines):
    """Without the test's own requests, which are many."""
    said = [line for line in log.read_text(errors="replace").splitlines() if '"GET /metrics ' not in line]
    return f"-- the end of {log}\n" + "\n".join(said[-lines:])


def popen(words, log, environment):
    """A program in a session of its own."""
    with open(log, "wb") as said:
        return subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=said,
                                stderr=subprocess.STDOUT, start_new_session=True, env=environment)


class Process:
    """A program in a session of its own, which ends with this object, as do its descendants. `begin`: starts it."""

    def __init__(self, name, words, folder, environment=None, begin=popen):
        self.name = name
        self.log = pathlib.Path(folder) / f"{name}.log"
        self._process = begin(words, self.log, variables(**(environment or {})))

    @property
    def pid(self):
        return self._process.pid

    @property
    def running(self):
        return self._process.poll() is None

    @property
    def exit_code(self):
        """None while the process runs."""
        return self._process.poll()

    def tail(self, lines=25):
        return end_of(self.log, lines)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_SECONDS)

    @contextlib.contextmanager
    def stopped(self):
        """Stops the program and its descendants."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self):
        for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        with contextlib.suppress(ProcessLookupError):  # children that outlived the program
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Answering:
    """A process that answers over HTTP: it has a `name`, a `url`, and the `tail` of a log to find causes."""

    @property
    def address(self):
        """host:port, the name of the server in the router's metrics."""
        return self.url.removeprefix("http://")

    def complete(self, prompt, tokens):
        """The token ids of the greedy continuation of some token ids."""
        with self._asked(prompt, tokens) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def stream(self, prompt, tokens):
        """The same as a stream, of single tokens or several at once. Yields lists of them."""
        with self._asked(prompt, tokens, stream=True) as answer:
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise Failed(f"{self.name} broke its stream off: {chunk['error']}\n{self.tail()}")
                yield chunk["choices"][0]["token_ids"]

    @contextlib.contextmanager
    def _asked(self, prompt, tokens, **more):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "detokenize": False, **more}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ASK_SECONDS) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise Failed(f"{self.name} answered {error.code} to {len(prompt)} tokens: {said}\n{self.tail()}") from None
        except OSError as error:
            raise Failed(f"{self.name} did not answer {len(prompt)} tokens: {error}\n{self.tail()}") from None

    def metric(self, name, **labels):
        """The sum of a metric over the labels that are not given; 0 if it does not exist yet."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ASK_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        given = [re.compile(rf'[{{,]{label}="{re.escape(value)}"') for label, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines
                   if re.split("[{ ]", line, maxsplit=1)[0] == name and all(one.search(line) for one in given))


class Elsewhere(Answering):
    """A server that another process has started."""

    def __init__(self, name, port, log):
        self.name, self.url, self._log = name, f"http://127.0.0.1:{port}", log

    def tail(self, lines=25):
        return end_of(self._log, lines)


class Served(Process, Answering):
    """A process that answers over HTTP."""

    def __init__(self, name, port, words, folder, environment=None, begin=popen):
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(name, words, folder, environment, begin)

    def wait_until_up(self, path="/health"):
        limit = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                with urllib.request.urlopen(self.url + path, timeout=10):
                    return
            if not self.running:
                raise Failed(f"{self.name} ended while it started\n{self.tail()}")
            if time.monotonic() > limit:
                raise Failed(f"{self.name} did not answer within {START_SECONDS} s\n{self.tail()}")
            time.sleep(0.2)


def vllm(name, python, model, port, cores, folder, *, dtype="bfloat16", transfer=None, environment=None, more=(),
         forks=None):
    """One vLLM server on the CPU, with a tensor-parallel rank on each of `cores`. `transfer`: its
    kv-transfer-config. `more`: command line words that override those before. `forks`: the ForkServer of `VLLM`
    that starts it; without one, the server imports vLLM in each of its processes, as a user's does."""
    words = ["--model", model, "--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager", "--dtype", dtype,
             "--max-model-len", LONGEST, "--max-num-seqs", SEATS, "--block-size", 32, "--no-enable-prefix-caching",
             "--host", "127.0.0.1", "--port", port, "--tensor-parallel-size", len(cores)]
    words += more
    if transfer:
        words += ["--kv-transfer-config", json.dumps(transfer)]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)), "OMP_NUM_THREADS": "1",
           **(environment or {})}
    if forks:
        return Served(name, port, words, folder, own, forks.popen)
    return Served(name, port, [python, "-m", VLLM, *words], folder, own)
