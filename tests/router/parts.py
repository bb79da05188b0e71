"""Shared by the tests of the router: doubles and routers as processes of their own, and a client."""
import asyncio
import contextlib
import ctypes
import http.client
import json
import os
import pathlib
import re
import signal
import sys
import time
import traceback
import urllib.parse

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "engines"))
# pylint: disable=wrong-import-position
import troupe.router.service  # imported for the forked processes
import double
from double import next_token, text_of, tokens_of
from servers import Process
from troupe.router.__main__ import main as router_main

assert troupe.router.service

PATIENCE = 60  # seconds; no result depends on how long something takes
PR_SET_PDEATHSIG = 1


def eventually(what, said):
    """Waits until the condition is true."""
    limit = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > limit:
            raise AssertionError(f"not within {PATIENCE} s: {said}")
        time.sleep(0.02)


class Forked:
    """A process that starts at once, since all its modules are already imported here."""

    def __init__(self, name, work, folder):
        self.name = name
        self.log = pathlib.Path(folder) / f"{name}.log"
        self.log.write_bytes(b"")
        self.exit_code = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(work, self.log)

    @property
    def running(self):
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is None

    def tail(self, lines=25):
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"-- the end of {self.log}\n" + "\n".join(text)

    def stop(self):
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
            eventually(lambda: not self.running, f"{self.name} ends")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def _become(work, log):
    """Runs in the child and never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # dies even if the test is killed
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((null, 0), (out, 1), (out, 2)):
            os.dup2(here, there)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # pylint: disable=broad-exception-caught
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Listening:
    """A process that reports where it listens."""

    url = None

    def wait(self):
        def found():
            said = re.search(r"listens at (http://\S+)", self.log.read_text(errors="replace"))
            if said:
                self.url = said[1]
            elif not self.running:
                raise AssertionError(f"{self.name} ended\n{self.tail()}")
            return said
        eventually(found, f"{self.name} listens")
        return self

    def ask(self, path, body=None, headers=None, method=None):
        """(status, headers, JSON or text) of a whole answer."""
        with self.open(path, body, headers, method) as answer:
            text = answer.read().decode()
            with contextlib.suppress(ValueError):
                text = json.loads(text)
            return answer.status, answer.headers, text

    @contextlib.contextmanager
    def open(self, path, body=None, headers=None, method=None):
        at = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(at.hostname, at.port, timeout=PATIENCE)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data,
                           {"Content-Type": "application/json", **(headers or {})})
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def metric(self, name):
        """The sum over the labels that follow the name; 0 if there are none."""
        _, _, text = self.ask("/metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


class Double(Listening, Forked):
    def __init__(self, name, folder, **behaviour):
        super().__init__(name, lambda: asyncio.run(double.main(behaviour)), folder)

    def behave(self, **behaviour):
        self.ask("/behave", behaviour)

    @property
    def journal(self):
        return self.ask("/journal")[2]

    def asked(self, request_id):
        """The bodies of the requests with one id."""
        return [one["body"] for one in self.journal["asked"] if one["id"] == request_id]


class _Router(Listening):
    def wait_for(self, usable):
        """Waits until this many engines are usable."""
        self.wait()
        eventually(lambda: sum(one["usable"] for one in self.ask("/health")[2]["engines"]) >= usable,
                   f"{usable} engines of {self.name}")
        return self


class Router(_Router, Forked):
    def __init__(self, name, folder, words, seconds=None):
        """`seconds`: replaces constants of its modules, by "module.NAME"."""
        words = ["--port", "0", *(str(word) for word in words)]

        def work():
            for at, value in (seconds or {}).items():
                module, _, constant = at.partition(".")
                module = sys.modules[f"troupe.router.{module}"]
                assert hasattr(module, constant), at
                setattr(module, constant, value)
            return router_main(words)

        super().__init__(name, work, folder)


class RouterCommand(_Router, Process):
    """The router as a user starts it."""

    def __init__(self, name, folder, words, environment=None):
        super().__init__(name, [sys.executable, "-m", "troupe.router", "--port", 0, *words], folder, environment)


def events_of(answer):
    """The data of each event of a stream, as it comes."""
    for line in answer:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


class Stream:
    """A stream, read to its end. `error`: the error that ended it; None if it ended well."""

    def __init__(self, answer):
        assert answer.status == 200, answer.read()
        said = list(events_of(answer))
        self.done = said[-1:] == ["[DONE]"]
        self.chunks = [json.loads(one) for one in said if one != "[DONE]"]
        self.error = next((one["error"] for one in self.chunks if "error" in one), None)
        choices = [one["choices"][0] for one in self.chunks if one.get("choices")]
        self.text = "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)
        self.tokens = [token for one in choices for token in one.get("token_ids") or ()]
        self.finish = [one["finish_reason"] for one in choices if one.get("finish_reason")]
        self.roles = [one["delta"]["role"] for one in choices if "role" in one.get("delta", {})]
        self.usage = [one["usage"] for one in self.chunks if one.get("usage")]
        self.ids = {one["id"] for one in self.chunks if "id" in one}
        self.keys = {key for one in choices for key in one} | {key for one in self.chunks for key in one}


def tokens_after(prompt, count):
    """The text that one server alone writes."""
    tokens = tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
    said = []
    for _ in range(count):
        said.append(next_token(tokens + said))
    return said


def text_after(prompt, count):
    return text_of(tokens_after(prompt, count))


def chat_prompt(messages):
    """The prompt as the doubles render it."""
    return "".join(f"{one['role']}:{one['content']};" for one in messages)
