"""Clients of the servers and of the router, which may leave, and may find no server."""
import collections
import contextlib
import http.client
import json
import threading
import urllib.parse

from proxy import WILL_DECODE_ELSEWHERE
from servers import PATIENCE, Failed, wait_until


class Lost(Failed):
    """No answer came, or only part of one: the server is absent or has died, or a router answered 503, since it
    knows no server."""


@contextlib.contextmanager
def asked_of(url, body, path="/v1/completions"):
    """A connection on which a completion was requested. The client leaves at the end of the context."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=PATIENCE)
    with contextlib.closing(connection):
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            yield connection
        except TimeoutError:
            raise Failed(f"{url} has not answered for {PATIENCE} s") from None
        except (OSError, http.client.HTTPException) as why:
            raise Lost(f"{url} does not answer: {why!r}") from None


def answer_of(url, connection):
    """The server's answer, which has status 200."""
    answer = connection.getresponse()
    if answer.status != 200:
        raise (Lost if answer.status == 503 else Failed)(f"{url} answered {answer.status}: {answer.read()[:500]!r}")
    return answer


def ask(url, body, leave_after=None):
    """A server's answer to a completion; None for a client that left after that many seconds."""
    with asked_of(url, body) as connection:
        if leave_after is not None:
            connection.sock.settimeout(max(leave_after, 0.001))
        try:
            return json.load(answer_of(url, connection))
        except TimeoutError:
            if leave_after is None:
                raise
            return None


def read_stream(url, body):
    """The token ids of a stream, read to its end."""
    tokens = []
    with asked_of(url, {**body, "stream": True}) as connection:
        for line in answer_of(url, connection):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return tokens
            if line.startswith(b"data:"):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise Failed(f"{url} broke a stream off after {len(tokens)} tokens: {chunk['error']}")
                tokens += chunk["choices"][0]["token_ids"]
    raise Lost(f"{url} ended a stream after {len(tokens)} tokens")


def read_some(url, body, events):
    """A client that leaves after that many events of a stream."""
    with asked_of(url, {**body, "stream": True}) as connection:
        answer = connection.getresponse()
        while events > 0 and (line := answer.readline()):
            events -= line.startswith(b"data:")


def body_of(prompt, tokens):
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "detokenize": False}


def prefill_body(prompt):
    return {**body_of(prompt, 1), "kv_transfer_params": WILL_DECODE_ELSEWHERE}


def decode_body(prompt, params, tokens):
    """`params`: the answer of the prefill server."""
    return {**body_of(prompt, tokens), "kv_transfer_params": params}


def prefilled(pair, prompt):
    """The `kv_transfer_params` of a computed prompt."""
    return ask(pair.prefill.url, prefill_body(prompt))["kv_transfer_params"]


def decoded(pair, prompt, params, tokens, leave_after=None):
    """The token ids of the text; None for a client that left."""
    answer = ask(pair.decode.url, decode_body(prompt, params, tokens), leave_after)
    return answer and answer["choices"][0]["token_ids"]


class Crowd:
    """Clients of the router, each of which asks again as soon as it is answered, for whole texts and streams
    alternately. As long as the context lasts the texts must be the expected ones. `may_be_lost`: clients that find
    no router, or lose it, ask again; otherwise no client may see an error."""

    def __init__(self, url, due, count, *, may_be_lost=False):
        """`due`: prompts and their expected texts."""
        self._url, self._due, self._may_be_lost = url, due, may_be_lost
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._fault = None
        self._ends = collections.Counter()
        self._clients = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def __enter__(self):
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, kind, *_):
        self._over.set()
        for client in self._clients:
            client.join()
        if kind is None:
            self._check()

    def __str__(self):
        return f"{self._ends['equal']} texts are equal, {self._ends['lost']} found no router"

    def wait_for(self, count, end="equal"):
        """Waits until that many more requests have ended so: the text was `equal`, or the request was `lost`."""
        limit = self._ends[end] + count
        wait_until(lambda: self._check() or self._ends[end] >= limit, lambda: f"{count} more are {end}, but {self}")

    # -- parts

    def _check(self):
        if self._fault is not None:
            raise self._fault

    def _run(self, number):
        turn = number
        while not self._over.is_set() and self._fault is None:
            prompt, text = self._due[turn % len(self._due)]
            try:
                self._ask(prompt, text, stream=turn % 2 == 1)
            except Lost as why:
                if not self._may_be_lost:
                    self._fault = why
                self._count("lost")
                self._over.wait(0.1)
            except Failed as why:
                self._fault = why
            else:
                self._count("equal")
            turn += 1

    def _ask(self, prompt, text, *, stream):
        body = body_of(prompt, len(text))
        said = read_stream(self._url, body) if stream else ask(self._url, body)["choices"][0]["token_ids"]
        if said != text:
            raise Failed(f"the router's text of {len(prompt)} tokens is {said} instead of {text}")

    def _count(self, end):
        with self._lock:
            self._ends[end] += 1
