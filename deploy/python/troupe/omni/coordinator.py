"""The coordinator of vLLM-Omni's replicas, in place of its own: the same protocol for the same clients.

Stages report that they live and how long their queues are, hubs learn which replicas are up. Neither is changed.

    python3 -m troupe.omni.coordinator --host HOST [--ports ROUTER,PUB] [--heartbeat-timeout SECONDS]

runs one by itself, prints both addresses or why it does not start, and ends with its standard input or by a signal.
vLLM-Omni uses it in place of its own if TROUPE_OMNI_COORDINATOR=1 is in the environment.
TROUPE_OMNI_COORDINATOR_PORTS=ROUTER,PUB gives it ports that do not change when the head of vLLM-Omni starts again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import zmq

from troupe.omni.replicas import MAX_MESSAGE, BadEventError, Replicas

__all__ = ["Coordinator", "CoordinatorRuntime"]

logger = logging.getLogger(f"vllm.{__name__}")

PORTS = "TROUPE_OMNI_COORDINATOR_PORTS"
SPACING = 0.1  # seconds between two publications
BEGINNING = 10.0  # seconds at the start in which it publishes every second
AT_ONCE = 256  # events that are read before the time is checked again
READY = 30.0  # seconds for a process to listen
ENDED = 5.0  # seconds for it to end
AGAIN = (0.2, 5.0)  # seconds until a dead process is restarted: the first time, and at most


class Coordinator:
    """Listens at two ZMQ addresses: a ROUTER for reports of stages, a PUB for hubs.

    Publishes the replicas that are up when that changes, a tenth of a second apart at least, and every max(1,
    min(heartbeat_timeout / 2, 5)) seconds, for hubs that come later; every second at first. Thread-safe.
    """

    def __init__(self, router_zmq_addr: str, pub_zmq_addr: str, heartbeat_timeout: float = 30.0) -> None:
        """`heartbeat_timeout`: seconds after which a silent replica is not up. For port 0 the system chooses one.
        `ValueError`; `RuntimeError` if an address cannot be listened on."""
        if not heartbeat_timeout > 0:
            raise ValueError(f"heartbeat_timeout is {heartbeat_timeout}; give seconds, more than 0")
        self._replicas = Replicas(heartbeat_timeout)
        self._period = max(1.0, min(heartbeat_timeout / 2, 5.0))
        self._lock = threading.Lock()  # guards the replicas
        self._sending = threading.Lock()  # guards the PUB
        self._context = zmq.Context()
        self._ending = threading.Event()
        self._closed = False
        self._bad = 0
        self._told_bad = 0.0
        self._why = ""
        try:
            self._router = self._listen(zmq.ROUTER, router_zmq_addr)
            self._pub = self._listen(zmq.PUB, pub_zmq_addr)
        except RuntimeError:
            self._context.destroy(linger=0)
            raise
        self.router_address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.pub_address = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="troupe-omni-coordinator", daemon=True)
        self._thread.start()

    def get_active_replicas(self) -> Any:
        """vLLM-Omni's `ReplicaList` of the replicas that are up."""
        from vllm_omni.distributed.omni_coordinator.messages import ReplicaInfo, ReplicaList, ReplicaStatus

        with self._lock:
            active = self._replicas.active()
        replicas = [ReplicaInfo(**{**one, "status": ReplicaStatus(one["status"])}) for one in active]
        return ReplicaList(replicas=replicas, timestamp=time.time())

    def publish_replica_list_update(self) -> bool:
        """Publishes to all hubs now; returns whether that was sent."""
        with self._lock:
            said = {"replicas": self._replicas.active(), "timestamp": time.time()}
        with self._sending:
            try:
                self._pub.send(json.dumps(said).encode(), flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
        return True

    def wait_for_shutdown(self) -> None:
        """Waits until `close`."""
        self._ending.wait()

    def close(self) -> None:
        """Stops listening. `RuntimeError`: it is closed already."""
        if self._closed:
            raise RuntimeError("the coordinator is closed already")
        self._closed = True
        self._ending.set()
        self._thread.join(ENDED)
        self._context.destroy(linger=0)

    def _listen(self, kind: int, address: str) -> Any:
        listener = self._context.socket(kind)
        listener.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        listener.setsockopt(zmq.LINGER, 0)
        try:
            listener.bind(address)
        except zmq.ZMQError as why:
            raise RuntimeError(
                f"the coordinator cannot listen at {address}: {why}; give another port, or end the process that has it"
            ) from None
        return listener

    def _run(self) -> None:
        began = ticked = time.monotonic()
        told, pending = began - SPACING, True
        while not self._ending.is_set():
            self._router.poll(int(SPACING * 1000))
            with self._lock:
                pending = self._hear() or pending
                now = time.monotonic()
                if now - ticked >= min(self._period, 1.0):
                    pending = self._replicas.tick(now) or pending
                    ticked = now
            # Hubs of the previous coordinator are about to reconnect, and miss what is published meanwhile.
            period = self._period if now - began > BEGINNING else min(self._period, 1.0)
            if now - told >= (SPACING if pending else period):
                pending = not self.publish_replica_list_update()
                told = now
            self._tell_bad(now)

    def _hear(self) -> bool:
        changed = False
        for _ in range(AT_ONCE):
            try:
                frames = self._router.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            try:
                changed = self._replicas.hear(frames[-1], now=time.monotonic(), wall=time.time()) or changed
            except BadEventError as why:
                self._bad += 1
                self._why = str(why)
        return changed

    def _tell_bad(self, now: float) -> None:
        """Logs bad events, at most once a second, since any process may send anything."""
        if self._bad and now - self._told_bad >= 1.0:
            logger.warning("the coordinator dropped %d events, the last one was %s", self._bad, self._why)
            self._bad, self._told_bad = 0, now


class CoordinatorRuntime:
    """A coordinator in a process of its own, as vLLM-Omni's head starts one.

    `router_address` is for stages, `pub_address` for hubs. A process that dies is restarted at the same ports; replicas
    register with it by their next heartbeats. It ends with `close`, or with this process, even if this process is
    killed.
    """

    def __init__(self, *, host: str, heartbeat_timeout: float) -> None:
        """`ValueError`; `RuntimeError` if it does not start, with the reason."""
        if not host:
            raise ValueError("host is empty; give an address of this machine that stages reach")
        if not heartbeat_timeout > 0:
            raise ValueError(f"heartbeat_timeout is {heartbeat_timeout}; give seconds, more than 0")
        self._host, self._timeout = host, heartbeat_timeout
        self._ending = threading.Event()
        self._process, self.router_address, self.pub_address = self._start(_ports(os.environ.get(PORTS, "")))
        self._finalizer = weakref.finalize(self, _end, [self._process])
        self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True)
        self._watcher.start()
        logger.info("the coordinator listens at %s, and publishes at %s", self.router_address, self.pub_address)

    def close(self) -> None:
        """Ends the process. A second call does nothing."""
        self._ending.set()
        self._finalizer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self, ports: tuple[int, int]) -> tuple[subprocess.Popen[str], str, str]:
        words = [sys.executable, "-m", __name__, "--host", self._host, "--ports", f"{ports[0]},{ports[1]}"]
        process = subprocess.Popen(
            [*words, "--heartbeat-timeout", str(self._timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], READY)
        said = process.stdout.readline().strip() if readable else f"the coordinator printed nothing for {READY:.0f} s"
        router, _, pub = said.partition(" ")
        if not router.startswith("tcp://") or not pub.startswith("tcp://"):
            _end([process])
            raise RuntimeError(said or "the coordinator ended before it listened; its output says why")
        return process, router, pub

    def _start_again(self) -> None:
        """Restarts the process at the same ports, which its clients go on using."""
        ports = _port_of(self.router_address), _port_of(self.pub_address)
        pause = AGAIN[0]
        while not self._ending.wait(pause):
            _end([self._process])  # its pipes
            try:
                self._process, _, _ = self._start(ports)
            except RuntimeError as why:
                logger.warning("%s; trying again", why)
                pause = min(2 * pause, AGAIN[1])
                continue
            self._finalizer.detach()  # of the previous process
            self._finalizer = weakref.finalize(self, _end, [self._process])
            if self._ending.is_set():  # it was closed meanwhile
                self._finalizer()
            else:
                logger.warning("the coordinator had died and was restarted")
            return


def _watch(of: weakref.ref[CoordinatorRuntime]) -> None:
    while (runtime := of()) is not None and not runtime._ending.is_set():
        process, ending = runtime._process, runtime._ending
        if process.poll() is not None:
            runtime._start_again()
        del runtime
        ending.wait(AGAIN[0])


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.terminate()
        try:
            process.wait(ENDED)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _ports(said: str) -> tuple[int, int]:
    if not said:
        return 0, 0
    router, _, pub = said.partition(",")
    if not (router.isdecimal() and pub.isdecimal() and int(router) < 65536 and int(pub) < 65536):
        raise ValueError(f"the ports of the coordinator are {said!r}; give two, such as 7500,7501")
    return int(router), int(pub)


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m troupe.omni.coordinator", description="vLLM-Omni's coordinator")
    parser.add_argument("--host", required=True, help="an address of this machine")
    parser.add_argument("--ports", default=os.environ.get(PORTS, ""), help="ROUTER,PUB; else the system chooses")
    parser.add_argument("--heartbeat-timeout", type=float, default=30.0, help="seconds (30)")
    given = parser.parse_args(words)
    host = f"[{given.host.strip('[]')}]" if ":" in given.host else given.host
    try:
        router, pub = _ports(given.ports)
        coordinator = Coordinator(f"tcp://{host}:{router}", f"tcp://{host}:{pub}", given.heartbeat_timeout)
    except (RuntimeError, ValueError) as why:
        print(why, flush=True)
        return 1
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(coordinator.router_address, coordinator.pub_address, flush=True)

    def until_end_of_input() -> None:
        while os.read(0, 4096):
            pass
        ended.set()

    threading.Thread(target=until_end_of_input, daemon=True).start()
    ended.wait()
    coordinator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
