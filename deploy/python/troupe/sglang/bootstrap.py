"""The bootstrap server of a prefill server, which names its nodes."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from troupe.sglang.told import RankNodes, ServerNodes

__all__ = ["TroupeKVBootstrapServer"]

_RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


class TroupeKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """Answers like SGLang's own. A row of a rank also has, under `troupe`, the nodes of all ranks that are sources of
    one transfer, in their order."""

    def __init__(self, host: str, port: int) -> None:
        self._said: dict[tuple[int, int, int, int], RankNodes] = {}  # by dp, cp, tp, pp
        super().__init__(host, port)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        try:
            data = await request.json()
            rank = _rank_of(data)
            said = None if data.get("troupe") is None else RankNodes.of_json(data["troupe"])
        except (KeyError, TypeError, ValueError, AttributeError) as why:
            return web.Response(text=f"this is not the row of a rank: {why}", status=400)
        answer: web.Response = await super()._handle_route_put(request)
        if answer.status == 200:
            self._said.pop(rank, None)
            if said is not None:
                self._said[rank] = said
            # A rank that registers again counts once.
            self._registered_count = sum(
                len(tp) for dp in self.prefill_port_table.values() for cp in dp.values() for tp in cp.values()
            )
        return answer

    async def _handle_route_get(self, request: web.Request) -> web.Response:
        try:
            wanted = [int(request.query[name]) for name in _RANKS if request.query.get(name)]
        except ValueError as why:
            return web.Response(text=f"this is not the number of a rank: {why}", status=400)
        answer: web.Response = await super()._handle_route_get(request)
        if answer.status != 200 or wanted == [-1] * len(_RANKS):
            return answer
        nodes = self._nodes_of(wanted[0])
        if nodes is None:
            return answer
        return web.json_response({**json.loads(answer.text or "{}"), "troupe": nodes})

    def _nodes_of(self, dp: int) -> dict[str, Any] | None:
        """The nodes of every rank of every part. None if one of them has no nodes."""
        rows = [self._said.get((dp, 0, tp, pp)) for pp in range(self.pp_size) for tp in range(self.attn_tp_size)]
        told = ServerNodes.of_ranks(rows)
        return None if told is None else told.to_json()


def _rank_of(data: Any) -> tuple[int, int, int, int]:
    dp = data["attn_dp_rank"] if data["system_dp_size"] == 1 else data["system_dp_rank"]
    return int(dp), int(data["attn_cp_rank"]), int(data["attn_tp_rank"]), int(data["pp_rank"])
