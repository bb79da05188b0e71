"""Starts Python programs with their modules already imported, as forks of one process that has imported them.
vLLM's import costs each process of a server some ten seconds of a core, and a pair of servers has at least four of
them.

    with ForkServer(PYTHON, "vllm.entrypoints.openai.api_server", FOLDER) as forks:
        forks.popen(words, log, environment)    # as `python -m vllm.entrypoints.openai.api_server WORD...`

That process serves everyone who names the folder, and ends once it has had no client for a while: the tests of a
build, which run one after another, import once. Processes that a program starts by vLLM's own means are forks as
well, where vLLM on a CPU would start a new interpreter.
"""
import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback

# Modules that the other processes of a server import in addition.
OF_ENGINES = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor",
              "vllm.model_executor.models.llama", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
WITH_PROCESSES = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
IDLE_SECONDS = 30


class Ended(Exception):
    """The fork server is gone."""


class ForkServer:
    """Connects to the process that is forked, and starts it if there is none."""

    def __init__(self, python, module, folder, environment):
        name = hashlib.sha256(f"{python} {module} {folder.resolve()}".encode()).hexdigest()
        address = f"\0troupe-fork-server-{os.getuid()}-{name}"
        self._lock = threading.Lock()
        with open(folder / "fork_server.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._connect(address):
                with open(folder / "fork_server.log", "wb") as log:
                    begun = subprocess.Popen([str(python), __file__, module, address[1:]], stdin=subprocess.DEVNULL,
                                             stdout=log, stderr=subprocess.STDOUT, env=environment,
                                             start_new_session=True)
                while not self._connect(address):
                    if begun.poll() is not None:
                        raise Ended(f"the fork server ended while it began; {log.name} says why")
                    time.sleep(0.05)

    def _connect(self, address):
        """Returns False if no fork server is there, or it is about to end."""
        here = socket.socket(socket.AF_UNIX)
        try:
            here.connect(address)
        except ConnectionRefusedError:
            here.close()
            return False
        if not is_own(here):
            here.close()
            raise Ended("another user's process answers in the place of the fork server")
        self._talk = here.makefile("rw", encoding="utf-8")
        here.close()
        with contextlib.suppress(Ended):
            return self.ask({"here": True})
        return False

    def ask(self, question):
        with self._lock:
            try:
                self._talk.write(json.dumps(question) + "\n")
                self._talk.flush()
                answer = self._talk.readline()
            except OSError as error:
                raise Ended(str(error)) from error
        if not answer:
            raise Ended("the fork server has ended; its log says why")
        return json.loads(answer)

    def popen(self, words, log, environment):
        return Forked(self, self.ask({"begin": [str(word) for word in words], "log": str(log), "environment": environment}))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._talk.close()


class Forked:
    """The part of `subprocess.Popen` that the tests use, for a process in a session of its own."""

    def __init__(self, server, pid):
        self._server, self.pid, self._code = server, pid, None

    def poll(self):
        if self._code is None:
            self._code = self._server.ask({"ended": self.pid})
        return self._code

    def wait(self, timeout):
        limit = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return self._code


def is_own(other):
    """Whether a process of this user is at the other end."""
    _, user, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()


def become(module, words, log, environment):
    """Runs in the child."""
    os.setsid()
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for mine, its in ((0, nothing), (1, said), (2, said)):
        os.dup2(its, mine)
    os.environ.clear()
    os.environ.update(environment)
    for name in WITH_PROCESSES:
        sys.modules[name].get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def ended(pid):
    """None while the process runs."""
    gone, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if gone else None


class Service:
    """Runs in the process that is forked."""

    def __init__(self, module, name):
        self._module = module
        self._door, self._ready = socket.socket(socket.AF_UNIX), selectors.DefaultSelector()
        self._clients = {}  # their data, by connection
        self._door.bind("\0" + name)
        self._door.listen()
        self._ready.register(self._door, selectors.EVENT_READ)

    def run(self):
        while some := self._ready.select(None if self._clients else IDLE_SECONDS):
            for key, _ in some:
                if key.fileobj is self._door:
                    self._let_in()
                else:
                    self._hear(key.fileobj)

    def _let_in(self):
        client, _ = self._door.accept()
        if is_own(client):
            self._clients[client] = client.makefile("rw", encoding="utf-8")
            self._ready.register(client, selectors.EVENT_READ)

    def _hear(self, client):
        talk = self._clients[client]
        with contextlib.suppress(OSError):
            if line := talk.readline():
                talk.write(json.dumps(self._answer(json.loads(line))) + "\n")
                talk.flush()
                return
        self._ready.unregister(client)
        del self._clients[client]
        client.close()

    def _answer(self, asked):
        if "here" in asked:
            return True
        return self._begin(asked) if "begin" in asked else ended(asked["ended"])

    def _begin(self, asked):
        pid = os.fork()
        if pid:
            while os.getsid(pid) != pid:  # until then a signal to its session reaches nobody
                time.sleep(0.001)
            return pid
        self._ready.close()
        for one in (self._door, *self._clients):
            os.close(one.detach())
        code = 1
        try:
            become(self._module, asked["begin"], asked["log"], asked["environment"])
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:  # pylint: disable=broad-exception-caught
            traceback.print_exc()
        sys.exit(code)  # a process that waits for this one at exit sees it end


def main(module, name):
    for one in (module, *OF_ENGINES):
        __import__(one)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Service(module, name).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
