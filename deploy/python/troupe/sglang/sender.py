"""A prefill server's end of a room."""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVSender

from troupe.errors import TroupeError
from troupe.sglang.manager import TroupeKVManager
from troupe.sglang.sends import Sends

__all__ = ["TroupeKVSender"]


class TroupeKVSender(CommonKVSender):  # type: ignore[misc]
    """SGLang makes one for each request, and polls it: the status already reflects the nodes' events."""

    kv_mgr: TroupeKVManager
    conclude_state: Any
    _early_send_wait_event: Any

    def __init__(
        self,
        mgr: TroupeKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self._sends: Sends | None = None
        self._size = 0
        self._seconds: float | None = None
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        with mgr.troupe_lock:
            if mgr.is_dummy_cp_rank or mgr.request_status.get(bootstrap_room) == KVPoll.Failed:
                return
            if mgr.nodes is None:
                mgr.fail_room(bootstrap_room, "the server has released its memory, and sends nothing")
                return
            former = mgr.sends.get(bootstrap_room)
            self._sends = Sends(mgr.nodes, bootstrap_room, int(mgr.kv_args.page_size), self, former)
            mgr.sends[bootstrap_room] = self._sends

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        if self._sends is not None and self._sends.sent_any:
            self._give_up("the request began again after parts of it had been sent")
            self.kv_mgr.fail_room(self.bootstrap_room, "the request began again after parts of it had been sent")

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        pages, _, is_last, is_skipped = self._prepare_send_indices(np.asarray(kv_indices), state_indices)
        if is_skipped or self._sends is None:
            return
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if indices_event is not None:
            indices_event.synchronize()
        try:
            row = None
            if is_last and self.kv_mgr.pp_rank == self.kv_mgr.pp_size - 1 and self.aux_index is not None:
                row = self.kv_mgr.rows.pack(self.aux_index)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Transferring)
            self._sends.send(
                pages, row=row, states=state_indices, is_last=is_last, event=event, gpu=self.kv_mgr.kv_args.gpu_id or 0
            )
        except (TroupeError, IndexError, TypeError, ValueError) as why:
            self._give_up(str(why))
            self.kv_mgr.fail_room(self.bootstrap_room, str(why))

    def get_transfer_metric(self) -> KVTransferMetric:
        """The bytes that moved, and the time from the first `send` until all had moved."""
        self._transfer_metric.transfer_total_bytes = self._size
        self._transfer_metric.transfer_latency_s = self._seconds
        return self._transfer_metric

    def failure_exception(self) -> None:
        self._give_up("another rank of the prefill server failed")
        super().failure_exception()

    def abort(self) -> None:
        super().abort()
        self._give_up("Aborted by AbortReq.")

    def clear(self) -> None:
        super().clear()
        with self.kv_mgr.troupe_lock:
            sends, self._sends = self._sends, None
            if sends is None:
                return
            sends.abort("the prefill server has dropped the request")
            if self.kv_mgr.sends.get(self.bootstrap_room) is sends and not sends.is_ending:
                del self.kv_mgr.sends[self.bootstrap_room]

    def _check_bootstrap_timeout(self) -> Any:
        status = super()._check_bootstrap_timeout()
        if status == KVPoll.Failed:
            self._give_up("no decode server asked for the request in time")
        return status

    def _give_up(self, reason: str) -> None:
        if self._sends is not None:
            self._sends.abort(reason)

    # -- a listener of `Sends`, under the lock

    def wanted(self, prefix: int) -> None:
        self.kv_mgr.req_to_decode_prefix_len[self.bootstrap_room] = prefix
        self.kv_mgr.transfer_infos.setdefault(self.bootstrap_room, {})
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def sent(self, size: int, seconds: float) -> None:
        self._size, self._seconds = size, seconds
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)

    def send_failed(self, why: str) -> None:
        self.kv_mgr.fail_room(self.bootstrap_room, why)
