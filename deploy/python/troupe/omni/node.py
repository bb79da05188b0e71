"""The node of a process: its calls to other nodes, their membership, and the values that were put here and not taken
yet."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger

from troupe.engine import Engine
from troupe.errors import ErrorCode, TroupeError, WaitTimeout
from troupe.events import Done, Event, Failed, Info, MemberEvent, Operation, Outcome, Value
from troupe.members import Announcement
from troupe.omni.settings import STAGE, Settings
from troupe.omni.shelf import Shelf

__all__ = ["Node", "acquire", "release"]

logger = init_logger(f"vllm.{__name__}")

#: The label of a node with its process's stage of vLLM-Omni.
LABEL = "omni_stage"

REGISTERED = 15.0  # seconds that a process waits for its supervisor before it continues without
SEEN = 1.0  # seconds that it then waits for the first list of members
LOCAL = 60.0  # seconds for a copy within this process
PAUSE = 0.02  # seconds between two polls of events; waits for an operation do not depend on them
TICK = 1.0  # seconds between two sweeps of taken and expired values
TROUBLE = 60.0  # seconds that `health` reports a node that did not answer
NOTICE = 60.0  # seconds that a node keeps a notice; without it readers find the payload a little later
NOTICES = 256  # notices on their way to one node, beyond which it gets no more
_ASKABLE = ("up", "suspect", "leaving")


@dataclass
class _Trouble:
    when: float
    why: str


@dataclass
class _Owed:
    """A removal that the node has not confirmed. `operation`: the newest try; None: to be tried again."""

    peer: str
    key: str
    operation: Operation | None = None


class Node:
    """One engine of Troupe, which the connectors of a process share. Thread-safe.

    Every wait has a time-out, and operations that are given up are aborted.
    """

    def __init__(self, settings: Settings) -> None:
        """Starts it, and waits for its supervisor. `TroupeError` as in `Engine`. A supervisor that does not answer is
        no error: the node goes on trying."""
        self.pid = os.getpid()
        self.users = 0  # connectors, counted by `acquire`
        labels = {} if settings.stage is None else {LABEL: settings.stage}
        called = "x" if settings.stage is None else "".join(c for c in settings.stage.lower() if c.isalnum())[:16]
        self._engine = Engine(
            join=Announcement(STAGE, f"{called or 'x'}-{os.getpid()}-{secrets.token_hex(6)}", labels=labels),
            file=settings.file,
            text=settings.text,
            watch=True,
        )
        self.name = self._engine.name
        self.shelf = Shelf(self)
        self._members: dict[str, MemberEvent] = {}
        # Outcomes that came before they were waited for, and operations whose outcome is not wanted.
        self._taking = threading.Lock()
        self._taken: dict[Operation, Event] = {}
        self._unwanted: set[Operation] = set()
        self._notices: dict[Operation, str] = {}  # nodes that are being sent a notice
        self._notices_at: dict[str, int] = {}  # number of them per node
        self._owed: deque[_Owed] = deque()
        self._trouble: dict[str, _Trouble] = {}
        self._slow: set[str] = set()  # nodes that have kept a caller waiting, and have not answered since
        self._gpus: bool | None = None  # whether the library reads GPU memory; None: unknown yet
        self._ending = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        try:
            self._wait_registered()
            self.memory = int(self.report()["pool"]["store_bytes"])
            self._keeper = threading.Thread(target=self._keep, name="troupe-omni", daemon=True)
            self._keeper.start()
        except BaseException:
            self._engine.stop()
            self._close_pipe()
            raise
        logger.info(
            "%s hands over payloads of stage %s, and has %d bytes for them", self.name, settings.stage, self.memory
        )

    def stop(self) -> None:
        """Leaves the cluster. Payloads that were not taken are lost, and their readers get an error. A second call does
        nothing."""
        if self._ending.is_set():
            return
        self._ending.set()
        os.write(self._wake_write, b"x")
        if self._keeper is not threading.current_thread():
            self._keeper.join(LOCAL)
        with contextlib.suppress(TroupeError):
            self._engine.stop()
        self._close_pipe()

    @property
    def stopped(self) -> bool:
        return self._ending.is_set()

    # -- values

    def put_own(self, key: str, value: Any) -> None:
        """Copies a value into this node's own memory: bytes, or a tensor of the host or of a GPU. `TroupeError`
        ALREADY_EXISTS, POOL_EXHAUSTED."""
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value = self._computed(value)
        self._ended(self._engine.put(self.name, key, value))

    def begin_get(self, peer: str, key: str) -> Operation:
        """Begins a get, which ends by itself at the deployment's deadline. `result` returns its outcome."""
        return self._engine.get(peer, key)

    def get(self, peer: str, key: str, timeout: float) -> memoryview | None:
        """The value, pinned while a view of it is referenced; None if there is none. `TroupeError` DEADLINE: not within
        `timeout` seconds."""
        outcome = self._asked(peer, self._engine.get(peer, key), timeout, f"the value {key}")
        return None if outcome is None else outcome.data

    def has_own(self, key: str) -> bool:
        return self._ended(self._engine.query(self.name, key), may_lack=True) is not None

    def remove(self, peer: str, key: str, timeout: float) -> bool:
        """Removes a value; returns whether it was there. Of several callers only one gets true.

        `TroupeError`: the node has not answered within `timeout` seconds, or cannot. It is asked again until it answers
        or is gone.
        """
        try:
            return self._asked(peer, self._engine.remove(peer, key), timeout, f"the end of {key}") is not None
        except TroupeError:
            self._owed.append(_Owed(peer, key))
            raise

    def remove_own(self, key: str) -> bool:
        return self._ended(self._engine.remove(self.name, key), may_lack=True) is not None

    def result(self, operation: Operation, timeout: float) -> Outcome | None:
        """The outcome of an operation; None if it has not ended within `timeout` seconds. `TroupeError`: that of the
        operation."""
        try:
            return self._engine.wait(operation, timeout)
        except WaitTimeout:
            return None
        except TroupeError as error:
            if error.code != ErrorCode.NOT_FOUND:
                raise
            # Or there is no such value, or the keeper was faster: it puts the outcomes that it takes here, under this
            # lock.
            with self._taking:
                event = self._taken.pop(operation, None)
            if event is None:
                raise
        return _outcome_of(event)

    def discard(self, operation: Operation) -> None:
        """Discards the outcome of an operation."""
        with self._taking:
            if self._taken.pop(operation, None) is None:
                self._unwanted.add(operation)
        with contextlib.suppress(TroupeError):
            self._engine.abort(operation, "nobody waits for it")

    # -- other nodes

    def peers(self, stage: str) -> tuple[list[str], list[str]]:
        """Nodes of that stage or of none, and all others, ordered by name, without this one."""
        own: list[str] = []
        others: list[str] = []
        for member in self._there():
            (own if _is_of(member, stage) else others).append(member.node)
        return own, others

    def knows(self, peer: str) -> bool:
        """Whether the node is a known member."""
        member = self._members.get(peer)
        return peer == self.name or (member is not None and member.state in _ASKABLE)

    def is_slow(self, peer: str) -> bool:
        return peer in self._slow

    def set_slow(self, peer: str) -> None:
        """Marks a node that has kept a caller waiting: no call waits for it until it has answered."""
        self._slow.add(peer)

    def has_answered(self, peer: str) -> None:
        self._slow.discard(peer)
        self._trouble.pop(peer, None)

    def failed(self, peer: str, error: TroupeError) -> None:
        """Records a failure for `health`, and logs it once."""
        if peer not in self._trouble:
            logger.warning("%s does not hear from %s: %s", self.name, peer, error)
        self._trouble[peer] = _Trouble(time.monotonic(), str(error))

    def tell(self, stage: str, notice: str) -> None:
        """Sends a notice to the nodes of that stage, which check their notices before they ask other nodes."""
        word = self.name.encode()
        for member in self._there():
            peer = member.node
            if member.state != "up" or not _is_of(member, stage) or self._notices_at.get(peer, 0) >= NOTICES:
                continue
            with contextlib.suppress(TroupeError):
                operation = self._engine.put(peer, notice, word, ttl=NOTICE)
                with self._taking:
                    if self._taken.pop(operation, None) is None:
                        self._notices[operation] = peer
                        self._notices_at[peer] = self._notices_at.get(peer, 0) + 1

    def told(self, notice: str) -> str | None:
        """The node that has a payload, if this node got the notice."""
        outcome = self._ended(self._engine.get(self.name, notice), may_lack=True)
        if outcome is None or outcome.data is None:
            return None
        return bytes(outcome.data).decode("utf-8", "replace")

    # -- how it is

    def report(self) -> dict[str, Any]:
        return self._engine.report()

    def trouble(self) -> dict[str, str]:
        """Nodes that have recently not answered, and why."""
        return {peer: trouble.why for peer, trouble in list(self._trouble.items())}

    # -- parts

    def _there(self) -> list[MemberEvent]:
        members = [member for member in list(self._members.values()) if member.state in _ASKABLE]
        return sorted((member for member in members if member.stage == STAGE), key=lambda member: member.node)

    def _wait_registered(self) -> None:
        try:
            self._engine.wait_registered(REGISTERED)
        except TroupeError as error:
            if error.code != ErrorCode.DEADLINE:
                raise
            logger.warning("%s is not registered after %.0f s, and keeps asking: %s", self.name, REGISTERED, error)
            return
        limit = time.monotonic() + SEEN
        while self._engine.identity().epoch == 0 and time.monotonic() < limit:
            time.sleep(0.005)
        self._take()

    def _ended(self, operation: Operation, *, may_lack: bool = False) -> Outcome | None:
        """Waits for an operation on this node's own values, which takes as long as a copy."""
        late = f"{self.name} did not copy a value within {LOCAL:.0f} s"
        return self._awaited(operation, LOCAL, late, may_lack=may_lack)

    def _asked(self, peer: str, operation: Operation, timeout: float, what: str) -> Outcome | None:
        late = f"{peer} did not bring {what} within {timeout:.1f} s"
        return self._awaited(operation, max(timeout, 0.0), late, may_lack=True)

    def _awaited(self, operation: Operation, seconds: float, late: str, *, may_lack: bool) -> Outcome | None:
        """None if there is no such value and `may_lack` is set. `TroupeError` DEADLINE, with the sentence `late`."""
        try:
            outcome = self.result(operation, seconds)
        except TroupeError as error:
            if may_lack and error.code == ErrorCode.NOT_FOUND:
                return None
            raise
        if outcome is None:
            self.discard(operation)
            raise TroupeError(ErrorCode.DEADLINE, late)
        return outcome

    def _computed(self, tensor: Any) -> Any:
        """The tensor of a GPU once its stream has computed it, or a copy on the host if the library has no code for
        GPUs."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        event.synchronize()
        return tensor if self._reads_gpus() else tensor.cpu()

    def _reads_gpus(self) -> bool:
        if self._gpus is None:
            reasons = [str(one["reason"]) for one in self.report()["backends"] if one["name"] == "xgmi"]
            self._gpus = bool(reasons) and not reasons[0].startswith("not built")
        return self._gpus

    def _keep(self) -> None:
        """The thread that handles member events, and removes values that are no longer wanted."""
        poller = select.poll()
        poller.register(self._engine.fileno(), select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        ticked = time.monotonic()
        while not self._ending.is_set():
            poller.poll(TICK * 1000)
            try:
                self._take()
                if time.monotonic() - ticked >= TICK:
                    ticked = time.monotonic()
                    self.shelf.sweep()
                    self._remove_owed()
                    self._forget_trouble()
            except Exception:  # pylint: disable=broad-exception-caught
                if not self._ending.is_set():
                    logger.exception("%s goes on after an error", self.name)
            self._ending.wait(PAUSE)

    def _take(self) -> None:
        for event in self._events():
            if isinstance(event, MemberEvent):
                self._hear(event)

    def _events(self) -> Iterator[Event]:
        while True:
            with self._taking:
                events = self._engine.take()
                for event in events:
                    if isinstance(event, (Done, Failed, Info, Value)):
                        self._set_aside(event)
            if not events:
                return
            yield from events

    def _set_aside(self, event: Done | Failed | Info | Value) -> None:
        peer = self._notices.pop(event.operation, None)
        if peer is not None:
            self._notices_at[peer] -= 1
            if self._notices_at[peer] == 0:
                del self._notices_at[peer]
        elif event.operation in self._unwanted:
            self._unwanted.remove(event.operation)
        else:
            self._taken[event.operation] = event

    def _hear(self, event: MemberEvent) -> None:
        if event.state == "gone":
            self._members.pop(event.node, None)
            self._slow.discard(event.node)
        else:
            self._members[event.node] = event

    def _remove_owed(self) -> None:
        for _ in range(len(self._owed)):
            owed = self._owed.popleft()
            if not self._is_removed(owed):
                self._owed.append(owed)

    def _is_removed(self, owed: _Owed) -> bool:
        """Whether the value is removed, or gone with its node. Tries the removal again if no try is pending."""
        try:
            if owed.operation is not None:
                return self.result(owed.operation, 0.0) is not None
            if owed.peer != self.name and owed.peer not in self._members:
                return True
            owed.operation = self._engine.remove(owed.peer, owed.key)
        except TroupeError as error:
            owed.operation = None
            return error.code == ErrorCode.NOT_FOUND
        return False

    def _forget_trouble(self) -> None:
        before = time.monotonic() - TROUBLE
        for peer, trouble in list(self._trouble.items()):
            if trouble.when < before:
                self._trouble.pop(peer, None)

    def _close_pipe(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)


def _is_of(member: MemberEvent, stage: str) -> bool:
    return member.labels.get(LABEL, stage) == stage


def _outcome_of(event: Event) -> Outcome:
    if isinstance(event, Failed):
        raise event.error
    if isinstance(event, Value):
        return Outcome(data=event.data)
    if isinstance(event, Info):
        return Outcome(size=event.size, ttl=event.ttl)
    return Outcome()


# -- one of each kind in a process

_nodes: dict[tuple[str | None, str | None, str | None], Node] = {}
_lock = threading.Lock()
_at_exit: list[bool] = []


def acquire(settings: Settings) -> Node:
    """The process's node for these settings, started if there is none. Pass it to `release` afterwards."""
    key = settings.stage, settings.file, settings.text
    with _lock:
        node = _nodes.get(key)
        if node is None:
            node = _nodes[key] = Node(settings)
            if not _at_exit:
                # Registered after the exit handler that ends engines, so it runs before that.
                atexit.register(_stop_all)
                _at_exit.append(True)
        node.users += 1
        return node


def release(node: Node) -> None:
    """Releases a node; its last user stops it."""
    with _lock:
        node.users -= 1
        if node.users > 0 or node.pid != os.getpid():
            return
        for key in [key for key, other in _nodes.items() if other is node]:
            del _nodes[key]
    node.stop()


def _stop_all() -> None:
    """Stops all nodes, so that keepers are gone before engines end by themselves."""
    with _lock:
        nodes = [node for node in _nodes.values() if node.pid == os.getpid()]
        _nodes.clear()
    for node in nodes:
        node.stop()


def _forget() -> None:
    """In a forked process: forgets the parent's nodes."""
    global _nodes, _lock
    _nodes, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget)
