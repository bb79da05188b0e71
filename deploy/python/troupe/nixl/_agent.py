"""`nixl_agent`: NIXL's calls over an agent of `troupe.io`."""
# ruff: noqa: N801, N803, PLR0917 - names and calls are NIXL's

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from troupe import _tables, io
from troupe.errors import ErrorCode, TroupeError
from troupe.memory import Memory
from troupe.nixl import _descs
from troupe.nixl._descs import MEMORY_KINDS, nixlRegDList, nixlRemoteDList, nixlXferDList
from troupe.nixl._errors import (
    nixl_error,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRepostActiveError,
    translated,
)
from troupe.nixl._exchange import Courier, Listener
from troupe.nixl._handles import (
    DEFAULT_COMM_PORT,
    REST,
    nixl_agent_config,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
    nixlXferTelemetry,
)

logger = logging.getLogger("troupe.nixl")

_BACKENDS: dict[str, tuple[str, ...]] = {
    "UCX": (),  # the best that reaches the peer
    "SHM": ("shm",),
    "TCP": ("tcp",),
    "RDMA": ("rdma",),
    "XGMI": ("xgmi",),
}
_MOVED = ["DRAM", "VRAM"]
_OPERATIONS = {"WRITE": "write", "READ": "read"}
_LOCAL = ("", "NIXL_INIT_AGENT")


class nixl_agent:
    """An agent with NIXL's calls. Ends with the object, or with `close`, which NIXL does not have."""

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        if not agent_name:
            raise ValueError("the agent's name is empty")
        if nixl_conf is not None and instantiate_all:
            logger.warning("instantiate_all is ignored, since there is a config")
            instantiate_all = False
        config = nixl_conf if nixl_conf is not None else nixl_agent_config()
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.plugin_list = list(_BACKENDS)
        self.backends: dict[str, int] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.nixl_mems = dict(MEMORY_KINDS)
        self.nixl_ops = dict(_OPERATIONS)
        named = self.plugin_list if instantiate_all else config.backends
        for backend in named:
            self._check_plugin(backend)
        self._allowed = () if not named or "UCX" in named else tuple(kind for one in named for kind in _BACKENDS[one])
        self._polled = not config.enable_pthread
        self._captures = config.capture_telemetry
        with translated():
            self._agent = io.Agent(
                agent_name,
                host=config.host,
                security=config.security,
                backends=self._allowed,
                threads=0 if self._polled else max(config.num_threads, 1),
            )
        for backend in named:
            self.create_backend(backend)
        self._lock = threading.RLock()  # of the tables below
        self._registered: dict[tuple[int, int, int, int], list[io.RegisteredMemory]] = {}
        self._remotes: dict[str, io.Peer] = {}
        self._connection: io.RegisteredMemory | None = None  # for metadata that names no memory
        # Their threads must not keep this object alive.
        self._courier: Courier | None = None
        self._listener: Listener | None = None
        if config.enable_listen:
            this = weakref.ref(self)
            self._listener = Listener(
                config.port,
                lambda: _living(this).get_agent_metadata(),
                lambda metadata: _living(this).add_remote_agent(metadata),
                lambda name: _living(this).remove_remote_agent(name),
            )

    def close(self) -> None:
        """Ends the agent: no peer touches its memory when this returns."""
        for one in (self._listener, self._courier):
            if one is not None:
                one.close()
        self._listener = self._courier = None
        self._agent.close()

    def __del__(self) -> None:
        if getattr(self, "_agent", None) is not None:
            for one in (getattr(self, "_listener", None), getattr(self, "_courier", None)):
                if one is not None:
                    one.close()

    # -- plugins and backends

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        return list(_MOVED) if self._is_known(backend, self.plugin_list) else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        self._is_known(backend, self.plugin_list)
        return {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return self.backend_mems[backend] if self._is_known(backend, self.backends) else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return self.backend_options[backend] if self._is_known(backend, self.backends) else {}

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """`nixlNotSupportedError`: parameters, which backends here do not have, or a backend that the agent was begun
        without."""
        self._check_plugin(backend)
        if initParams:
            raise nixlNotSupportedError(
                f"backend {backend} takes no parameters here, got {', '.join(initParams)}; "
                "nixl_agent_config has num_threads"
            )
        if self._allowed and not set(_BACKENDS[backend]) <= set(self._allowed):
            raise nixlNotSupportedError(
                f"this agent was begun with {', '.join(self.backends)} only; name {backend} in the config's backends"
            )
        self.backends[backend] = len(self.backends)
        self.backend_mems[backend] = list(_MOVED)
        self.backend_options[backend] = {}

    # -- memory

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixlRegDList | None:
        self._check_backends(backends)
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            raise nixlInvalidParamError("the argument has nothing to register; the log says why")
        self._check_moved(descs.getType())
        made: list[tuple[tuple[int, int, int, int], io.RegisteredMemory]] = []
        on_gpu = descs.getType() == MEMORY_KINDS["VRAM"]
        try:
            with translated():
                for address, length, device, _ in descs:
                    if not address or not length:
                        raise nixlInvalidParamError(f"there are no {length} bytes at address {address} to register")
                    memory = Memory(address, length, descs.owners, on_gpu=on_gpu)
                    made.append(((descs.getType(), device, address, length), self._agent.register(memory)))
        except BaseException:
            for _, one in made:
                one.deregister()
            raise
        with self._lock:
            for key, one in made:
                self._registered.setdefault(key, []).append(one)
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Returns when no peer touches the memory any more. `nixlBackendError`: after 10 s a peer still may."""
        self._check_backends(backends)
        if not isinstance(dereg_list, nixlRegDList):
            raise nixlInvalidParamError(f"{type(dereg_list).__name__} is not a nixlRegDList of register_memory")
        gone = []
        with self._lock:
            keys = [(dereg_list.getType(), device, address, length) for address, length, device, _ in dereg_list]
            for key in keys:
                if keys.count(key) > len(self._registered.get(key, ())):
                    raise nixlNotFoundError(f"{key[3]} bytes at address {key[2]} are not registered")
            for key in keys:
                gone.append((key, self._registered[key].pop()))
                if not self._registered[key]:
                    del self._registered[key]
        for place, (_, one) in enumerate(gone):
            try:
                one.deregister(REST)
            except BaseException as why:
                with self._lock:  # still withdrawn: kept to be deregistered again
                    for left_key, left in gone[place:]:
                        self._registered.setdefault(left_key, []).append(left)
                if isinstance(why, TroupeError):
                    raise nixl_error(why) from why
                raise

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """None for each: memory of hosts and GPUs has nothing to query."""
        if backend not in self.backends:
            raise ValueError(f"backend {backend!r} is not one of {list(self.backends)}")
        descs = self.get_reg_descs(reg_list, mem_type)
        return [None] * (len(descs) if descs is not None else 0)

    # -- descriptors

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        return _descs.xfer_descs(descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        return _descs.reg_descs(descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList | None:
        return _descs.remote_descs(descs, mem_type)

    def get_serialized_descs(self, descs: Any) -> bytes:
        if not isinstance(descs, _descs._DList):
            raise nixlInvalidParamError(f"{type(descs).__name__} is not a list of descriptors")
        return descs.encoded()

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        return _descs.decoded(bytes(serialized_descs))

    # -- agents

    def get_agent_metadata(self) -> bytes:
        with translated():
            return self._agent.describe()

    def get_partial_agent_metadata(
        self, descs: nixlRegDList | None, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """The metadata always says how to connect."""
        self._check_backends(backends)
        wanted = self._memories_of(descs) if descs is not None else []
        with translated(), self._lock:
            if not wanted:
                if self._connection is None:
                    self._connection = self._agent.allocate(64, name="connection", rights="read")
                wanted = [self._connection]
            return self._agent.describe(*wanted)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Returns the name, as bytes. `nixlNotAllowedError`: another life of the agent of that name is there, and is
        not known to be lost; remove it first."""
        with self._lock, translated({ErrorCode.INVALID_CONFIG: nixlMismatchError}):
            peer = self._agent.add_peer(metadata)
            peers = {one["peer"]: one for one in self._agent.report()["peers"]}
            name = str(peers[peer.number]["name"])
            if name == self.name:
                raise nixlInvalidParamError(f"{name!r} is the name of this agent itself, which needs no metadata")
            known = self._remotes.get(name)
            if known is not None and known != peer:
                there = peers.get(known.number)
                if there is not None and (there["lost"] is None or there["backend"] is not None):
                    peer.remove()
                    raise nixlNotAllowedError(f"agent {name!r} is known in another life; remove_remote_agent first")
                _forget(known)
            self._remotes[name] = peer
            return name.encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        with self._lock:
            known = self._remotes.pop(_text(agent), None)
        if known is not None:
            _forget(known)

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        self._check_backends(backends)
        peer = self._peer_of(remote_agent)
        if _text(remote_agent) != self.name:
            with translated():
                peer.connect()

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        with self._lock:
            peer = self._remotes.get(_text(agent))
        if peer is None:
            return False
        with translated():
            there = [(one.address, one.address + one.size) for one in peer.memories()]
        return all(
            any(first <= address and address + length <= last for first, last in there)
            for address, length, *_ in descs or ()
        )

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Sends to the listener of an agent of this host, in the background."""
        self._carrier().send((ip_addr, port), self.get_agent_metadata())

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        self._carrier().send((ip_addr, port), self.get_partial_agent_metadata(descs, inc_conn_info, backends))

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Fetches from the listener of an agent of this host, in the background: `check_remote_metadata` says when it
        came."""
        this = weakref.ref(self)
        self._carrier().fetch((ip_addr, port), lambda metadata: _living(this).add_remote_agent(metadata))

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        self._carrier().forget((ip_addr, port), self.name)

    # -- transfers

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        self._check_backends(backends)
        strided = _descs.strided_rows(xfer_list)
        if strided is not None:
            if mem_type is None:
                raise ValueError("name the memory type of strided descriptors")
            xfer_list = [
                (address + stride * i, length, device)
                for address, length, device, stride, count in strided
                for i in range(count)
            ]
        descs = self.get_xfer_descs(xfer_list, mem_type)
        return self._prepared(_text(agent_name), descs)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Iterable[int],
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Iterable[int],
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        direction = self.nixl_ops[operation]
        self._check_backends(backends)
        if local_xfer_side._agent_name not in _LOCAL or remote_xfer_side._agent_name in _LOCAL:
            raise nixlInvalidParamError("the first side must be this agent's own list, the second a named agent's")
        try:
            here = _tables.indices("local_indices", local_indices)
            there = _tables.indices("remote_indices", remote_indices)
        except ValueError as why:
            raise nixlInvalidParamError(str(why)) from why
        if not here or len(here) != len(there):
            raise nixlInvalidParamError(
                f"{len(here)} local indices do not match {len(there)} remote ones; give equally many, at least 1"
            )
        peer = self._peer_of(remote_xfer_side._agent_name)
        with translated():
            transfer = self._agent.make(
                direction,
                local_xfer_side._plan,
                remote_xfer_side._plan,
                local_index=here,
                remote_index=there,
                merge=not skip_desc_merge,
            )
        return nixl_xfer_handle(transfer, peer, _message(notif_msg), len(here))

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        direction = self.nixl_ops[operation]
        self._check_backends(backends)
        if len(local_descs) != len(remote_descs) or not len(local_descs):
            raise nixlInvalidParamError(
                f"{len(local_descs)} local descriptors do not match {len(remote_descs)} remote ones; give equally "
                "many, at least 1"
            )
        peer = self._peer_of(remote_agent)
        local = self._prepared("", local_descs)
        remote = self._prepared(_text(remote_agent), remote_descs)
        with translated():
            transfer = self._agent.make(direction, local._plan, remote._plan, merge=True)
        local.release()
        remote.release()
        return nixl_xfer_handle(transfer, peer, _message(notif_msg), len(local_descs))

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """ "DONE" or "PROC"; a failure raises."""
        if notif_msg:
            handle._notice = _message(notif_msg)
        begin = time.time()
        with translated():
            if handle._transfer.status.state is io.State.ACTIVE:
                raise nixlRepostActiveError("the transfer is active; post it again when it has ended")
            handle._ended_at = 0.0
            handle._transfer.post(handle._notice)
        handle._posted_at = begin
        handle._post_seconds = time.time() - begin
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        self._progress()
        with translated():
            status = handle._transfer.status
        if status.state is io.State.PREPARED:
            raise nixlNotPostedError("the transfer was not posted; call transfer(handle)")
        if status.state is io.State.ACTIVE:
            return "PROC"
        handle._ended_at = handle._ended_at or time.time()
        if status.error is not None:
            raise nixl_error(status.error)
        if status.state is io.State.CANCELLED:  # without an error: its caller wanted it
            raise nixlCancelledError("the transfer was cancelled, and not all of its bytes moved; post it again")
        return "DONE"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        if not self._captures:
            raise nixlNoTelemetryError("nothing was captured; set capture_telemetry=True in nixl_agent_config")
        if handle._posted_at == 0.0 or self.check_xfer_state(handle) != "DONE":
            raise nixlNoTelemetryError("the transfer has not ended")
        with translated():
            moved = handle._transfer.status.bytes_moved
        return nixlXferTelemetry(
            startTime=int(handle._posted_at * 1e6),
            postDuration=int(handle._post_seconds * 1e6),
            xferDuration=int((handle._ended_at - handle._posted_at) * 1e6),
            totalBytes=moved,
            descCount=handle._count,
        )

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Nothing is estimated: (0, 0, "UNKNOWN")."""
        return 0, 0, "UNKNOWN"

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """The backend that moves the bytes: "SHM", "TCP", "RDMA", "XGMI"; within one agent "UCX"."""
        with translated():
            for one in self._agent.report()["peers"]:
                if one["peer"] == handle._peer.number and one["name"] == self.name:
                    return "UCX"
            return handle._peer.connect().upper()

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    def prep_mem_view(self, dlist: Any, *, backends: Sequence[str] | None = None) -> int:
        raise nixlNotSupportedError("device code has no view of remote memory here; transfers are posted by the host")

    def release_mem_view(self, mvh: int) -> None:
        raise nixlNotSupportedError("there are no memory views here")

    # -- notifications

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        return self._add_new_notifs({}, backends)

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        with self._lock:
            return self._add_new_notifs(self.notifs, backends)

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Removes the notification that it finds."""
        tag = _message(lookup_tag)
        with self._lock:
            self._add_new_notifs(self.notifs, backends)
            came = self.notifs.get(_text(remote_agent_name), [])
            for place, message in enumerate(came):
                if message.startswith(tag) if tag_is_prefix else tag in message:
                    del came[place]
                    return True
        return False

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None
    ) -> None:
        self._check_backends(() if backend is None else (backend,))
        peer = self._peer_of(remote_agent_name)
        with translated():
            peer.notify(_message(notif_msg))

    # -- of this module's own

    def _add_new_notifs(self, to: dict[str, list[bytes]], backends: Sequence[str]) -> dict[str, list[bytes]]:
        self._check_backends(backends)
        self._progress()
        with translated():
            while came := self._agent.take_notices():
                for one in came:
                    to.setdefault(one.sender, []).append(one.data)
        return to

    def _progress(self) -> None:
        if self._polled:
            with translated():
                self._agent.poll()

    def _prepared(self, agent_name: str, descs: nixlXferDList | None) -> nixl_prepped_dlist_handle:
        if descs is None:
            raise nixlInvalidParamError("the argument has no descriptors; the log says why")
        self._check_moved(descs.getType())
        with translated():
            if agent_name in _LOCAL:
                plan = self._agent.prepare(_descs.entries(descs))
            else:
                plan = self._peer_of(agent_name).prepare(_descs.entries(descs))
        return nixl_prepped_dlist_handle(plan, agent_name, len(descs))

    def _peer_of(self, agent_name: str | bytes) -> io.Peer:
        name = _text(agent_name)
        with self._lock:
            known = self._remotes.get(name)
        if known is not None:
            return known
        if name == self.name:  # the memory that it has registered so far
            with translated():
                return self._agent.add_peer(self._agent.describe())
        raise nixlNotFoundError(f"agent {name!r} is not known; give its metadata to add_remote_agent first")

    def _memories_of(self, descs: nixlRegDList) -> list[io.RegisteredMemory]:
        with self._lock:
            found = []
            for address, length, device, _ in descs:
                registered = self._registered.get((descs.getType(), device, address, length))
                if not registered:
                    raise nixlNotFoundError(f"{length} bytes at address {address} are not registered")
                found.append(registered[-1])
            return found

    def _carrier(self) -> Courier:
        with self._lock:
            if self._courier is None:
                self._courier = Courier()
            return self._courier

    def _check_plugin(self, backend: str) -> None:
        if backend not in _BACKENDS:
            raise nixlNotFoundError(f"there is no backend {backend!r}; Troupe has {', '.join(_BACKENDS)}")

    def _check_backends(self, backends: Iterable[str]) -> None:
        for one in backends:
            if one not in self.backends:
                there = ", ".join(self.backends) or "none"
                raise nixlNotFoundError(f"backend {one!r} was not created; there are {there}")

    @staticmethod
    def _is_known(backend: str, among: Iterable[str]) -> bool:
        if backend in among:
            return True
        logger.warning("there is no backend %s", backend)
        return False

    @staticmethod
    def _check_moved(mem_type: int) -> None:
        if mem_type not in (MEMORY_KINDS["DRAM"], MEMORY_KINDS["VRAM"]):
            raise nixlNotSupportedError("Troupe moves memory of hosts and GPUs (DRAM, VRAM): no files, blocks, objects")


def _living(of: weakref.ref[nixl_agent]) -> nixl_agent:
    this = of()
    if this is None:
        raise RuntimeError("the agent has ended")
    return this


def _forget(peer: io.Peer) -> None:
    try:
        peer.remove()
    except TroupeError as why:
        if why.code != ErrorCode.NOT_FOUND:
            raise nixl_error(why) from why


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _message(said: bytes | str) -> bytes:
    return said.encode() if isinstance(said, str) else bytes(said)
