"""Decode requests of this engine that name the same source: a client may want several texts of one prompt (`n`), and
routers copy the answer for the first prompt of a list to the whole list."""

from __future__ import annotations

__all__ = ["Sources"]

TAKEN = 4096  # number of transfers that are remembered


class Sources:
    """By transfer: the requests that have no blocks yet, and the one that loads.

    A source serves one load of an engine. Later requests find what the first one loaded in vLLM's prefix cache, or
    compute the prompt.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[str]] = {}
        self._loading: dict[str, str] = {}
        self._taken: dict[str, None] = {}  # the latest ones, loaded or not

    def is_empty(self) -> bool:
        """Whether no request waits or loads."""
        return not self._waiting and not self._loading

    def waits(self, transfer: str, request_id: str) -> None:
        self._waiting.setdefault(transfer, set()).add(request_id)

    def is_loading(self, transfer: str) -> bool:
        return transfer in self._loading

    def is_taken(self, transfer: str) -> bool:
        """Whether a request has loaded it, loads it, or got nothing to load of it."""
        return transfer in self._taken

    def is_awaited(self, transfer: str) -> bool:
        """Whether a request still waits for blocks for it."""
        return transfer in self._waiting

    def take(self, transfer: str, request_id: str, *, loads: bool) -> None:
        """Records that the request has blocks, and loads or need not."""
        self._leave(transfer, request_id)
        self._taken[transfer] = None
        while len(self._taken) > TAKEN:
            del self._taken[next(iter(self._taken))]
        if loads:
            self._loading[transfer] = request_id

    def leaves(self, transfer: str, request_id: str) -> bool:
        """Records that the request will not load it; returns whether no other request here does, or did."""
        self._leave(transfer, request_id)
        return transfer not in self._waiting and transfer not in self._taken

    def ended(self, request_ids: set[str]) -> None:
        """Records that loads of these have ended, with or without success."""
        self._loading = {transfer: one for transfer, one in self._loading.items() if one not in request_ids}

    def _leave(self, transfer: str, request_id: str) -> None:
        waiting = self._waiting.get(transfer, set())
        waiting.discard(request_id)
        if not waiting:
            self._waiting.pop(transfer, None)
