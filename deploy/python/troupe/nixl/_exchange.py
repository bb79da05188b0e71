"""Passes metadata from agent to agent over a listener, for programs that do not carry it themselves.

Metadata lets its holder in, so it goes over loopback only. A connection has one request: a line with a verb (send,
fetch, forget) and a name, followed, for `send`, by the metadata up to the end of the stream. The answer to `fetch` is
metadata up to the end, too.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from troupe.nixl._errors import nixlBackendError, nixlNotSupportedError

logger = logging.getLogger("troupe.nixl")

_SECONDS = 10.0  # for one request; a request without a listener is retried for this long
_MOST = 2**20 + 512
_PAUSE = 0.05


class Listener:
    """Answers requests of other agents: `described` returns the own metadata; `learn` and `forget` are called for
    others'."""

    def __init__(
        self,
        port: int,
        described: Callable[[], bytes],
        learn: Callable[[bytes], object],
        forget: Callable[[str], object],
    ) -> None:
        self._described, self._learn, self._forget = described, learn, forget
        try:
            self._socket = socket.create_server(("127.0.0.1", port))
        except OSError as why:
            raise nixlBackendError(f"cannot listen at 127.0.0.1:{port}: {why}; give another listen_port") from why
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="troupe-nixl-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        _join(self._thread)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    self._answer(connection, time.monotonic() + _SECONDS)
                except Exception as why:
                    logger.error("a request for metadata failed: %s", why)

    def _answer(self, connection: socket.socket, end: float) -> None:
        line, rest = _line_of(connection, end)
        wanted, _, name = line.partition(" ")
        if wanted == "fetch":
            connection.sendall(self._described())
        elif wanted == "send":
            self._learn(rest + _all_of(connection, end))
        elif wanted == "forget":
            self._forget(name)
        else:
            raise ValueError(f"{wanted!r} is not a request")


class Courier:
    """Carries out requests in order on a thread of its own, as NIXL does: `check_remote_metadata` gives the result."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="troupe-nixl-courier", daemon=True)
        self._thread.start()

    def send(self, address: tuple[str, int], metadata: bytes) -> None:
        self._later(address, b"send \n" + metadata, lambda answer: None)

    def fetch(self, address: tuple[str, int], learn: Callable[[bytes], object]) -> None:
        self._later(address, b"fetch \n", learn)

    def forget(self, address: tuple[str, int], name: str) -> None:
        self._later(address, b"forget " + name.encode() + b"\n", lambda answer: None)

    def close(self) -> None:
        self._closed.set()
        self._work.put(None)
        _join(self._thread)

    def _later(self, address: tuple[str, int], request: bytes, then: Callable[[bytes], object]) -> None:
        check_address(address[0])
        self._work.put(lambda: self._ask(address, request, then))

    def _carry(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as why:
                logger.error("metadata was not exchanged: %s", why)

    def _ask(self, address: tuple[str, int], request: bytes, then: Callable[[bytes], object]) -> None:
        end = time.monotonic() + _SECONDS
        while True:
            try:
                connection = socket.create_connection(address, _SECONDS)
                break
            except ConnectionRefusedError:  # the listener has not started yet
                if time.monotonic() >= end or self._closed.wait(_PAUSE):
                    raise
        with connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            then(_all_of(connection, time.monotonic() + _SECONDS))


def _join(thread: threading.Thread) -> None:
    """Joins the thread, unless it is the calling one: an agent may end on the thread that referenced it last."""
    if thread is not threading.current_thread():
        thread.join(_SECONDS)


def check_address(ip_addr: str) -> None:
    """`nixlNotSupportedError`: a central server, or another host."""
    if not ip_addr:
        raise nixlNotSupportedError(
            "Troupe knows no central metadata server (etcd); name an ip_addr, or carry get_agent_metadata() yourself"
        )
    try:
        near = ip_addr == "localhost" or ipaddress.ip_address(ip_addr).is_loopback
    except ValueError:
        near = False
    if not near:
        raise nixlNotSupportedError(
            f"metadata gives access to its holder, so it goes to loopback addresses only, not to {ip_addr}; carry "
            "get_agent_metadata() to other hosts yourself, over a channel that only its reader can read"
        )


def _some_of(connection: socket.socket, end: float) -> bytes:
    """The next bytes. `end` is that of the whole request: a request that arrives byte by byte must not hold up others.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    connection.settimeout(left)
    return connection.recv(65536)


def _line_of(connection: socket.socket, end: float) -> tuple[str, bytes]:
    got = b""
    while b"\n" not in got:
        some = _some_of(connection, end)
        if not some or len(got) > 4096:
            raise ValueError("no request came")
        got += some
    line, _, rest = got.partition(b"\n")
    return line.decode("utf-8", "replace"), rest


def _all_of(connection: socket.socket, end: float) -> bytes:
    parts = []
    size = 0
    while some := _some_of(connection, end):
        parts.append(some)
        size += len(some)
        if size > _MOST:
            raise ValueError("more than 1 MiB of metadata")
    return b"".join(parts)
