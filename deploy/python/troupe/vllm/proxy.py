"""Proxies for MoRIIO's connector, as vLLM's toy proxy and `vllm-router --kv-connector moriio`. They ask the engines
that have registered with them."""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass

import msgspec
import zmq
from vllm import envs
from vllm.logger import init_logger

__all__ = ["Heartbeat", "Proxy"]

logger = init_logger(f"vllm.{__name__}")

PERIOD = 3.0  # seconds; vllm-router forgets an engine after 5
# Milliseconds.
_SEND_WAIT = 500  # for a proxy that is not there
_SILENCE = 10_000  # after which a silent proxy is connected to again


@dataclass(frozen=True)
class Proxy:
    """One proxy, and this engine's registration with it."""

    host: str
    port: int
    role: str  #: "P", the engine prefills, or "D", it decodes
    http: str | None  #: of the engine's server, host:port, or :port of this host; none: unknown
    replica: str
    ranks: int
    pushes: bool
    handshake_port: int = 6301  # of MoRIIO's connector; unused here
    notify_port: int = 61005

    def message(self, host: str, replicas: int) -> bytes:
        """`host`: this one. `replicas`: number of data-parallel replicas of the engine behind one HTTP server.

        Proxies put the `zmq_address` of a prefill engine into the ids of requests, unread. If both engines are asked at
        once, a decode engine learns nothing else of the other one.
        """
        name, _, port = (self.http or "").rpartition(":")
        peer = f"host:{host},handshake:{self.handshake_port},notify:{self.notify_port}"
        message: bytes = msgspec.msgpack.encode(
            {
                "type": self.role,
                "http_address": f"{name or _bracketed(host)}:{port}",
                "zmq_address": f"{peer},engine:{self.replica},ranks:{self.ranks}",
                "dp_size": replicas,
                "tp_size": self.ranks,
                "transfer_mode": "WRITE" if self.pushes else "READ",
            }
        )
        return message


class Heartbeat:
    """Registers this engine with a proxy every few seconds, from a thread of its own, until `stop`. The proxy may start
    later, or restart."""

    def __init__(self, proxy: Proxy, replicas: int) -> None:
        if proxy.http is None:
            raise ValueError(
                "'proxy_ip' of kv_connector_extra_config needs 'http_port' as well: the proxy is told where this "
                "engine's HTTP server listens, and the command line does not say it"
            )
        self._proxy = proxy
        self._replicas = replicas
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="troupe-proxy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops registering; the proxy forgets this engine by itself. A second call does nothing."""
        self._ended.set()
        self._thread.join(2 * _SEND_WAIT / 1000)

    # -- the thread

    def _run(self) -> None:
        address = f"{_bracketed(self._proxy.host)}:{self._proxy.port}"
        reached: bool | None = None
        with zmq.Context() as context:
            dealer: zmq.Socket[bytes] | None = None
            while not self._ended.is_set():
                why = ""
                try:
                    if dealer is None:
                        _check_listens(self._proxy)
                        dealer = self._connected(context, address)
                    dealer.send(self._proxy.message(_own_host(self._proxy), self._replicas))
                except (OSError, zmq.ZMQError) as error:
                    why = "no connection" if isinstance(error, zmq.Again) else str(error)
                    if dealer is not None:
                        dealer.close()
                        dealer = None
                if why == "" and not reached:
                    logger.info("this engine is registered with the proxy at %s", address)
                elif why and reached in (None, True):
                    said = "the proxy at %s cannot be reached; this engine keeps trying to register with it: %s"
                    logger.warning(said, address, why)
                reached = why == ""
                self._ended.wait(PERIOD)
            if dealer is not None:
                dealer.close()

    def _connected(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
        """A socket that does not reconnect by itself: connections are made only to a listening proxy."""
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.immediate = True  # nothing is queued for an absent proxy
        dealer.sndtimeo = _SEND_WAIT
        dealer.reconnect_ivl = -1
        dealer.heartbeat_ivl, dealer.heartbeat_timeout = _SILENCE // 2, _SILENCE
        dealer.ipv6 = ":" in self._proxy.host
        try:
            dealer.connect(f"tcp://{address}")
        except zmq.ZMQError:
            dealer.close()
            raise
        return dealer


def _check_listens(proxy: Proxy) -> None:
    """`OSError` if nothing listens there. If the port is also in the range of outgoing ports of this host, the kernel
    may give it to the very connection that asks for it, which TCP then makes with itself: the proxy could not bind that
    port any more."""
    with socket.create_connection((proxy.host, proxy.port), timeout=_SEND_WAIT / 1000) as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no trace of the port
        if asked.getsockname() == asked.getpeername():
            raise ConnectionRefusedError("nobody listens there; the socket connected to itself")


def _own_host(proxy: Proxy) -> str:
    """This host's address on the route to the proxy."""
    if envs.VLLM_HOST_IP:
        return str(envs.VLLM_HOST_IP)
    family, kind, protocol, _, address = socket.getaddrinfo(proxy.host, proxy.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asked:  # sends nothing
        asked.connect(address)
        return str(asked.getsockname()[0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
