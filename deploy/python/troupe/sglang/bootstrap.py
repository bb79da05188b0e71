"""The bootstrap server of a prefill server: which nodes it has."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

__all__ = ["TroupeKVBootstrapServer"]

_RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


class TroupeKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """Answers as SGLang's own does. A row of a rank has besides, under `troupe`, the nodes of all ranks that are
    sources of one transfer, in their order."""

    def __init__(self, host: str, port: int) -> None:
        self._said: dict[tuple[int, int, int, int], dict[str, Any]] = {}  # by dp, cp, tp, pp
        super().__init__(host, port)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        try:
            data = await request.json()
            rank = _rank_of(data)
            said = _checked(data.get("troupe"))
        except (KeyError, TypeError, ValueError, AttributeError) as why:
            return web.Response(text=f"no row of a rank: {why}", status=400)
        answer: web.Response = await super()._handle_route_put(request)
        if answer.status == 200:
            if said is not None:
                self._said[rank] = said
            # A rank that registers again is the same one.
            self._registered_count = sum(
                len(tp) for dp in self.prefill_port_table.values() for cp in dp.values() for tp in cp.values()
            )
        return answer

    async def _handle_route_get(self, request: web.Request) -> web.Response:
        try:
            wanted = [int(request.query[name]) for name in _RANKS if request.query.get(name)]
        except ValueError as why:
            return web.Response(text=f"no number of a rank: {why}", status=400)
        answer: web.Response = await super()._handle_route_get(request)
        if answer.status != 200 or wanted == [-1] * len(_RANKS):
            return answer
        nodes = self._nodes_of(wanted[0])
        if nodes is None:
            return answer
        return web.json_response({**json.loads(answer.text or "{}"), "troupe": nodes})

    def _nodes_of(self, dp: int) -> dict[str, Any] | None:
        """Every rank of every part, of the first context-parallel one, as Troupe counts them. None: one of them has
        said nothing of Troupe."""
        rows = [self._said.get((dp, 0, tp, pp)) for pp in range(self.pp_size) for tp in range(self.attn_tp_size)]
        first = rows[0]
        if first is None or any(row is None or row["caches"] != first["caches"] for row in rows):
            return None
        caches = range(len(first["caches"]))
        return {
            **{key: first[key] for key in ("protocol", "cluster", "caches")},
            "nodes": [[row["nodes"][cache] for row in rows if row] for cache in caches],
            "lives": [[row["lives"][cache] for row in rows if row] for cache in caches],
        }


def _rank_of(data: Any) -> tuple[int, int, int, int]:
    dp = data["attn_dp_rank"] if data["system_dp_size"] == 1 else data["system_dp_rank"]
    return int(dp), int(data["attn_cp_rank"]), int(data["attn_tp_rank"]), int(data["pp_rank"])


def _checked(said: Any) -> dict[str, Any] | None:
    if said is None:
        return None
    caches, nodes, lives = said["caches"], said["nodes"], said["lives"]
    if not isinstance(caches, list) or not len(caches) == len(nodes) == len(lives) > 0:
        raise ValueError("as many nodes and lives as caches")
    if not all(isinstance(name, str) for name in (*caches, *nodes)) or not isinstance(said["cluster"], str):
        raise ValueError("names are texts")
    return {
        "protocol": int(said["protocol"]),
        "cluster": said["cluster"],
        "caches": caches,
        "nodes": nodes,
        "lives": [int(life) for life in lives],
    }
