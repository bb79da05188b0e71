"""The manager of a scheduler process: its nodes, the live rooms, and their peers."""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
import weakref
from collections import OrderedDict
from typing import Any

import requests
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

from troupe.engine import protocol_version
from troupe.events import MemberEvent
from troupe.sglang.geometry import geometry_of
from troupe.sglang.layouts import caches_of
from troupe.sglang.node import PAGE_SIZE, Identity, Nodes
from troupe.sglang.receives import Receives
from troupe.sglang.rows import Rows
from troupe.sglang.sends import Sends, request_of
from troupe.sglang.settings import read_settings
from troupe.sglang.told import RankNodes, ServerNodes

__all__ = ["TroupeKVManager"]

logger = logging.getLogger(__name__)

DELIVERED = 4096  # bound on rooms that a decode server remembers as received
ASKED = 5.0  # seconds for a bootstrap server to answer


class TroupeKVManager(CommonKVManager):  # type: ignore[misc]
    """SGLang makes one in each scheduler process. SGLang's calls come from the scheduler's thread; events of the nodes
    come from a thread of theirs, under `troupe_lock`."""

    supports_role_switch = True
    supports_deferred_decode_kv_release = True
    reports_transfer_latency = False  # the sender measures it better

    def __init__(
        self,
        args: Any,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        """`ValueError` names what Troupe does not move, or a wrong setting. `TroupeError`: a node cannot start."""
        self.troupe_lock = threading.RLock()
        self.nodes: Nodes | None = None
        self._is_ready = False
        self.sends: dict[int, Sends] = {}
        self.receives: dict[int, list[Receives]] = {}  # those whose pages peers may write to, the newest last
        self.receivers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._delivered: OrderedDict[int, None] = OrderedDict()
        self._unwanted: dict[int, tuple[ServerNodes, float]] = {}  # rooms to release again, until when
        self._check_options()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self._close_own_port()
        if self.enable_all_cp_ranks_for_transfer and self.attn_cp_size > 1:
            raise ValueError(
                "Troupe does not move caches that are divided among context-parallel ranks; leave "
                "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER and the sharding of the cache out"
            )
        self.rows = Rows(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
        self._settings = read_settings()
        self._geometry = geometry_of(
            args,
            tp=(self.attn_tp_rank, self.attn_tp_size),
            pp=(self.pp_rank, self.pp_size),
            is_mla=bool(self.is_mla_backend or self.is_hybrid_mla_backend),
        )
        self._caches = caches_of(args, self._geometry)
        self._start()

    # -- what the scheduler calls

    def register_to_bootstrap(self) -> None:
        if self._is_ready:  # SGLang's constructor calls this before there is a node
            super().register_to_bootstrap()

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Never raises: an exception would end SGLang's scheduler. A prefill server that does not fit fails its rooms
        with a sentence, and is asked again for the next one."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        try:
            answer = requests.get(
                f"http://{bootstrap_addr}/route",
                params=dict.fromkeys(("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"), -1),
                timeout=ASKED,
            )
            if answer.status_code != 200:
                logger.error("the prefill server at %s is not ready: %s", bootstrap_addr, answer.text)
                return False
            info = PrefillServerInfo(**answer.json())
        except (requests.RequestException, ValueError, TypeError) as error:
            logger.error("the bootstrap server at %s does not describe its prefill server: %s", bootstrap_addr, error)
            return False
        unfit = self._unfit(info)
        if unfit is not None:
            why = f"the prefill server at {bootstrap_addr} does not fit this decode server: {unfit}"
            logger.error(why)
            for room in list(self.addr_to_rooms_tracker.get(bootstrap_addr, ())):
                self.fail_room(room, why)
            return False
        self._resolve_rank_mapping(info)
        self.prefill_info_table[bootstrap_addr] = info
        return True

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """True only with a single rank on both sides: the row of metadata comes from the first rank of a prefill
        server, and has the checksum of that rank's cache."""
        info = self.prefill_info_table.get(bootstrap_addr)
        return info is not None and info.attn_tp_size * info.pp_size * self.attn_tp_size * self.pp_size == 1

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no peer can write to the pages of the room any more."""
        with self.troupe_lock:
            left = [one for one in self.receives.get(bootstrap_room, ()) if not one.is_quiet]
            if left:
                self.receives[bootstrap_room] = left
            else:
                self.receives.pop(bootstrap_room, None)
            return not left

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        self.is_abort_release_safe(bootstrap_room, 0)

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        with self.troupe_lock:  # the scheduler and the nodes may change one room at once
            super().update_status(bootstrap_room, status)

    def teardown(self) -> None:
        """Leaves the cluster. The memory of the caches belongs to SGLang again."""
        self._stop("the server changes its role")

    def deregister_buffer_to_engine(self) -> None:
        """SGLang releases the memory of the caches for a while."""
        self._stop("the server has released its memory")

    def register_buffer_to_engine(self) -> None:
        """The memory is back, at the same addresses."""
        if self.nodes is None:
            self._start()

    # -- what senders, receivers and nodes call

    @property
    def deadline(self) -> float:
        """Seconds of a receive: a little more than SGLang's own time-out, so that SGLang's sentence comes first."""
        return float(self.waiting_timeout) + 10.0

    def fail_room(self, room: int, why: str) -> None:
        """Fails a room, for this reason unless there is an earlier one."""
        with self.troupe_lock:
            if room not in self.request_status or self.request_status[room] in (KVPoll.Failed, KVPoll.Success):
                return
            with self.failure_lock:
                self.failure_records.setdefault(room, why)
            self.update_status(room, KVPoll.Failed)

    def has_delivered(self, room: int) -> None:
        self._delivered[room] = None
        while len(self._delivered) > DELIVERED:
            self._delivered.popitem(last=False)

    def give_back(self, room: int, sources: ServerNodes) -> None:
        """Releases a room of which nothing was asked for here. A prefill server that has delivered the room before does
        not remember the release, so it is repeated until the server sends the room."""
        with self.troupe_lock:
            nodes = self.nodes
            if nodes is None:
                return
            nodes.release(request_of(room), sources.nodes[0], sources.lives[0])
            if room in self._delivered:
                until = time.monotonic() + envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()
                self._unwanted[room] = sources, until

    def is_wanted_again(self, room: int) -> None:
        with self.troupe_lock:
            self._unwanted.pop(room, None)

    # -- events, under the lock

    def _on_tick(self) -> None:
        for room, send in list(self.sends.items()):
            send.look_at_wanted()
            # SGLang may never speak of an aborted request again.
            if send.is_over and not send.is_ending:
                del self.sends[room]
        for room in list(self.receives):
            self.is_abort_release_safe(room, 0)  # SGLang may have asked for the last time before it was
        for room, (sources, until) in list(self._unwanted.items()):
            if time.monotonic() > until or self.nodes is None:
                del self._unwanted[room]
            else:
                self.nodes.release(request_of(room), sources.nodes[0], sources.lives[0])

    def _on_member(self, event: MemberEvent) -> None:
        """The sender of a request may be known now. A prefill server that is gone is looked up again; rooms that wait
        for it fail."""
        if self.disaggregation_mode != DisaggregationMode.DECODE:
            for send in self.sends.values():
                send.look_at_wanted()
            return
        gone = event.state == "gone"
        why = f"the node {event.node} of the prefill server is gone: {event.reason or 'it left the cluster'}"
        with self.connection_lock:
            for key, infos in list(self.connection_pool.items()):
                life = _life_of(event.node, infos)
                if life is not None and (gone or life != event.incarnation):
                    del self.connection_pool[key]
                    self.prefill_info_table.pop(key.rsplit("_", 3)[0], None)
        for room, receiver in list(self.receivers.items()):
            life = _life_of(event.node, getattr(receiver, "bootstrap_infos", None))
            if gone and life == event.incarnation and not receiver.has_asked:
                self.fail_room(room, why)

    # -- parts of the life

    def _check_options(self) -> None:
        refused = (
            (envs.SGLANG_RUST_SERVER.get(), "SGLANG_RUST_SERVER, whose registry does not name nodes of Troupe"),
            (
                get_disagg().disaggregation_decode_allocation_policy == "prefill_complete",
                "--disaggregation-decode-allocation-policy prefill_complete",
            ),
            (get_parallel().attn_dcp_size > 1, "decode context parallelism"),
            (get_parallel().enable_kv_cache_sharding, "--enable-kv-cache-sharding"),
            (get_parallel().enable_dsa_cache_layer_split, "--enable-dsa-cache-layer-split"),
            (get_parallel().enable_cp_tp_group_sharing, "the sharing of groups by context and tensor parallelism"),
        )
        for is_on, what in refused:
            if is_on:
                raise ValueError(f"the transfer backend 'troupe' does not work with {what}; leave it out")

    def _close_own_port(self) -> None:
        """Closes the port that SGLang's constructor binds for frames that are not used here."""
        self.server_socket.close(linger=0)
        self._zmq_ctx.destroy(linger=0)
        self.rank_port = 0

    def _start(self) -> None:
        self._is_ready = True
        if not getattr(self, "is_dummy_cp_rank", False):
            self.nodes = Nodes(
                self._settings,
                self._identity(),
                self._caches,
                lock=self.troupe_lock,
                on_member=self._on_member,
                on_tick=self._on_tick,
            )
            self.rank_port = self.nodes.port
            logger.info("%s moves KV caches of this %s server", self.nodes.names[0], self.disaggregation_mode.value)
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.register_to_bootstrap()

    def _stop(self, why: str) -> None:
        with self.troupe_lock:
            nodes, self.nodes = self.nodes, None
            for send in self.sends.values():
                send.abort(why)
            for receive in [one for several in self.receives.values() for one in several]:
                receive.abort(why)
            for room in [*self.sends, *self.receivers]:
                self.fail_room(room, why)
            self.sends.clear()
        if nodes is not None:
            nodes.stop()  # not under the lock, which its thread takes
        with self.troupe_lock:
            self.receives.clear()  # no peer reaches the memory any more
        self._forget_prefills()

    def _forget_prefills(self) -> None:
        """Forgets prefill servers: without nodes their restarts would go unnoticed."""
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            with self.connection_lock:
                self.connection_pool.clear()
                self.prefill_info_table.clear()

    def _identity(self) -> Identity:
        mode, address = self.disaggregation_mode.value, self.dist_init_addr
        if not address:
            address = f"{socket.gethostname()} {self.local_ip}"
        port = self.bootstrap_port if mode == "prefill" else get_serving().port
        called = hashlib.blake2b(f"{mode} {address} {port}".encode(), digest_size=8).hexdigest()
        return Identity(
            replica=f"{mode}-{called}-dp{self.system_dp_rank}-{self.attn_dp_rank}",
            rank=self._geometry.rank,
            ranks=self._geometry.ranks,
            labels={
                "role": mode,
                "http": f"{self.local_ip}:{get_serving().port}",
                PAGE_SIZE: str(self._geometry.page_size),
            },
        )

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        super()._register_topology_row(url, {**payload, "troupe": self._announced()})

    def _announced(self) -> dict[str, Any] | None:
        """What decode servers learn of this rank."""
        if self.nodes is None:
            return None
        told = RankNodes(
            protocol_version(),
            self._settings.cluster,
            tuple(cache.name for cache in self._caches),
            tuple(self.nodes.names),
            tuple(self.nodes.lives),
        )
        return told.to_json()

    # -- a decode server's view of a prefill server

    def _unfit(self, info: PrefillServerInfo) -> str | None:
        """Why its caches do not fit. The nodes themselves compare the layouts."""
        ours = (
            ("kv_cache_dtype", info.kv_cache_dtype, self.kv_cache_dtype_str, "--kv-cache-dtype"),
            ("kv_layout", info.kv_layout, self.kv_layout, "SGLANG_DSV4_KV_LAYOUT"),
            ("dsv41_spec_layout", info.dsv41_spec_layout, self.dsv41_spec_layout, "speculative options"),
        )
        for what, theirs, own, how in ours:
            if theirs is not None and own is not None and theirs != own:
                return f"its {what} is {theirs}, and {own} here; start both with the same {how}"
        if info.enable_kv_cache_sharding or info.enable_dsa_cache_layer_split:
            return "its cache is divided among context-parallel ranks, which Troupe does not move"
        if self.attn_cp_size != 1:
            return f"a decode server cannot have context parallelism, and this one has {self.attn_cp_size} ranks of it"
        return None

    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        """One row of the bootstrap server names every rank: Troupe takes from each rank its part for this one."""
        info.target_tp_rank, info.target_tp_ranks = 0, [0]
        info.target_cp_ranks, info.target_pp_ranks = [0], [0]
        info.required_dst_info_num = info.required_prefill_response_num = 1

    def unfit_row(self, row: dict[str, Any]) -> str | None:
        """Why nothing can be received from the nodes that a row of a bootstrap server names."""
        if row.get("troupe") is None:
            return "it has another transfer backend; start both with --disaggregation-transfer-backend troupe"
        try:
            told = ServerNodes.of_json(row["troupe"])
        except ValueError as why:
            return f"its bootstrap server does not name Troupe's nodes as expected: {why}"
        if told.protocol != protocol_version():
            return f"its nodes speak protocol {told.protocol} and these {protocol_version()}; use one release on both"
        if told.cluster and self._settings.cluster and told.cluster != self._settings.cluster:
            return (
                f"its nodes are in another cluster ({told.cluster}) than these ({self._settings.cluster}); name one "
                "supervisor for both"
            )
        caches = tuple(cache.name for cache in self._caches)
        if told.caches != caches:
            theirs, ours = ", ".join(told.caches), ", ".join(caches)
            return f"it has the caches {theirs}, and this one {ours}; serve one model with both"
        return None


def _life_of(node: str, rows: Any) -> int | None:
    """The incarnation of a node in the rows of a bootstrap server. None if it is not among them."""
    for row in rows or ():
        if "troupe" in row and (life := ServerNodes.of_json(row["troupe"]).life_of(node)) is not None:
            return life
    return None
