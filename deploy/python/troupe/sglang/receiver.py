"""A decode server's end of a room."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from troupe.errors import ErrorCode, TroupeError
from troupe.sglang.manager import TroupeKVManager
from troupe.sglang.receives import Receives
from troupe.sglang.told import ServerNodes

__all__ = ["TroupeKVReceiver"]

logger = logging.getLogger(__name__)

_STALE = (ErrorCode.NOT_FOUND, ErrorCode.PEER_LOST, ErrorCode.PEER_UNREACHABLE, ErrorCode.STALE_INCARNATION)


class TroupeKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """SGLang makes one for each request, and polls it: the status already reflects the nodes' events."""

    kv_mgr: TroupeKVManager
    bootstrap_infos: Any
    conclude_state: Any

    def __init__(self, mgr: TroupeKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self._receives: Receives | None = None
        self._row_index: int | None = None
        self.has_asked = False  #: the prefill server knows the destination pages
        with mgr.troupe_lock:
            super().__init__(mgr, bootstrap_addr, bootstrap_room)
            mgr.receivers[self.bootstrap_room] = self
            mgr.is_wanted_again(self.bootstrap_room)

    def init(self, prefill_dp_rank: int) -> None:
        try:
            super().init(prefill_dp_rank)
        except KeyError:  # it vanished while SGLang looked
            why = f"the prefill server at {self.bootstrap_addr} is gone"
            self.kv_mgr.fail_room(self.bootstrap_room, why)
            self.conclude_state = KVPoll.Failed

    def send_metadata(  # noqa: PLR0917
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        mgr, room = self.kv_mgr, self.bootstrap_room
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("the transfer backend 'troupe' receives only into the KV cache of the device")
        if self.bootstrap_infos is None or self.conclude_state == KVPoll.Failed:
            mgr.fail_room(room, f"the nodes of the prefill server at {self.bootstrap_addr} are not known")
            return
        self.init_time = time.time()
        self._row_index = aux_index
        prefix = decode_prefix_len or 0
        with mgr.troupe_lock:
            try:
                if mgr.nodes is None:
                    raise ValueError("the server has released its memory, and receives nothing")
                if prefix % mgr.kv_args.page_size:
                    raise ValueError(f"a prefix of {prefix} tokens ends inside a page of {mgr.kv_args.page_size}")
                self._receives = Receives(mgr.nodes, room, self._sources(), self)
                mgr.receives.setdefault(room, []).append(self._receives)
                self._receives.begin(np.asarray(kv_indices), prefix, state_indices, mgr.deadline)
                self.has_asked = True
            except (TroupeError, TypeError, ValueError) as why:
                mgr.fail_room(room, str(why))

    def failure_exception(self) -> None:
        self._give_up("another rank of the decode server failed")
        super().failure_exception()

    def abort(self) -> None:
        super().abort()
        if getattr(self, "bootstrap_infos", None) is None:
            self._find_and_give_back()

    def _clear(self) -> None:
        super()._clear()
        self._give_up("the decode server has dropped the request")
        with self.kv_mgr.troupe_lock:
            if self.kv_mgr.receivers.get(self.bootstrap_room) is self:
                del self.kv_mgr.receivers[self.bootstrap_room]
            self.kv_mgr.is_abort_release_safe(self.bootstrap_room, 0)

    def _register_kv_args(self) -> bool:
        """Registers nothing: nodes compare their layouts when they connect."""
        for row in self.bootstrap_infos or ():
            unfit = self.kv_mgr.unfit_row(row)
            if unfit is not None:
                why = f"the prefill server at {self.bootstrap_addr} does not fit this decode server: {unfit}"
                self.kv_mgr.fail_room(self.bootstrap_room, why)
                self.conclude_state = KVPoll.Failed
                self.bootstrap_infos = None
                return False
        return self.bootstrap_infos is not None

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        with self.kv_mgr.failure_lock:
            reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "the decode server has aborted the request")
        if self._receives is not None:
            self._receives.abort(reason)
        else:
            self.kv_mgr.give_back(self.bootstrap_room, self._sources())

    def _give_up(self, reason: str) -> None:
        if self._receives is not None:
            self._receives.abort(reason)

    def _sources(self) -> ServerNodes:
        return ServerNodes.of_json(self.bootstrap_infos[0]["troupe"])

    def _find_and_give_back(self) -> None:
        """Looks up an unknown prefill server, which may have the request, on another thread, and releases the request
        there."""
        mgr = self.kv_mgr
        mgr._ensure_prefill_recompute_executor().submit(self._give_back_unknown)

    def _give_back_unknown(self) -> None:
        try:
            if not self.kv_mgr.try_ensure_parallel_info(self.bootstrap_addr):
                return
            info = self.kv_mgr.prefill_info_table[self.bootstrap_addr]
            if info.dp_size > 1 and not info.follow_bootstrap_room:
                return
            row = self._get_bootstrap_info_from_server(self.bootstrap_room % info.dp_size, 0, 0, 0)
            if row is not None and self.kv_mgr.unfit_row(row) is None:
                self.kv_mgr.give_back(self.bootstrap_room, ServerNodes.of_json(row["troupe"]))
        except Exception:  # pylint: disable=broad-exception-caught
            logger.exception("the prefill server was not told that room %s is aborted", self.bootstrap_room)

    # -- a listener of `Receives`, under the lock

    def received(self, row: bytes) -> None:
        mgr, room = self.kv_mgr, self.bootstrap_room
        if self._row_index is not None:
            try:
                mgr.rows.unpack(row, self._row_index)
            except (ValueError, IndexError) as why:
                mgr.fail_room(room, str(why))
                return
        mgr.has_delivered(room)
        mgr.update_status(room, KVPoll.Success)

    def receive_failed(self, error: TroupeError, why: str) -> None:
        if error.code in _STALE:
            self.invalidate_cached_bootstrap_infos()
        self.kv_mgr.fail_room(self.bootstrap_room, why)
