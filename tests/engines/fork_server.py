"""Programs in Python that begin with their modules imported: forks of one process that has done so. vLLM's import costs
each process of a server some ten seconds of a core; a pair of servers has four of them and more.

    with ForkServer(PYTHON, "vllm.entrypoints.openai.api_server", FOLDER) as forks:
        forks.popen(words, log, environment)    # as `python -m vllm.entrypoints.openai.api_server WORD...`

What a program begins by vLLM's own means is a fork as well, where vLLM on a CPU would begin it anew.
"""
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time

# What a server's other processes import beside that.
OF_ENGINES = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor",
              "vllm.model_executor.models.llama", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
WITH_PROCESSES = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")


class Ended(Exception):
    """The fork server is gone."""


class ForkServer:
    """The process that is forked."""

    def __init__(self, python, module, folder, environment):
        ours, its = socket.socketpair()
        with its, open(folder / "fork_server.log", "wb") as log:
            self._process = subprocess.Popen([str(python), __file__, module], stdin=its, stdout=log,
                                             stderr=subprocess.STDOUT, env=environment)
        self._talk, self._lock = ours.makefile("rw", encoding="utf-8"), threading.Lock()
        ours.close()

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
        self._process.wait()


class Forked:
    """As much of `subprocess.Popen` as the tests use, in a session of its own."""

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


def become(module, asked, talk):
    """In the child."""
    os.setsid()
    os.close(talk)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for mine, its in ((0, nothing), (1, log), (2, log)):
        os.dup2(its, mine)
    os.environ.clear()
    os.environ.update(asked["environment"])
    for name in WITH_PROCESSES:
        sys.modules[name].get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = [module, *asked["begin"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def begin(module, asked, talk):
    pid = os.fork()
    if pid:
        while os.getsid(pid) != pid:  # until then a signal to its session reaches nobody
            time.sleep(0.001)
        return pid
    try:
        become(module, asked, talk)
    except SystemExit as end:
        sys.exit(end.code)  # whoever waits for its end at exit hears of it
    sys.exit(0)


def ended(pid):
    """None: it runs."""
    gone, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if gone else None


def serve(module):
    for name in (module, *OF_ENGINES):
        __import__(name)
    with socket.socket(fileno=os.dup(0)) as here, here.makefile("rw", encoding="utf-8") as talk:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for line in talk:
            asked = json.loads(line)
            answer = begin(module, asked, here.fileno()) if "begin" in asked else ended(asked["ended"])
            talk.write(json.dumps(answer) + "\n")
            talk.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
