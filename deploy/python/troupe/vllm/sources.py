"""Decode requests of this engine that name the same source: a client may want several texts of one prompt (`n`), and
routers hand what the first prompt of a list was answered to all of the list."""

from __future__ import annotations

__all__ = ["Sources"]

TAKEN = 4096  # transfers that are remembered


class Sources:
    """By transfer: the requests that have yet to be given blocks, and the one that loads.

    A source serves one load of an engine. The requests behind the first one find what it has loaded in vLLM's prefix
    cache, or compute the prompt.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[str]] = {}
        self._loading: dict[str, str] = {}
        self._taken: dict[str, None] = {}  # the last ones, be they loaded or not

    def is_empty(self) -> bool:
        """Nobody waits or loads."""
        return not self._waiting and not self._loading

    def waits(self, transfer: str, request_id: str) -> None:
        self._waiting.setdefault(transfer, set()).add(request_id)

    def is_loading(self, transfer: str) -> bool:
        return transfer in self._loading

    def is_taken(self, transfer: str) -> bool:
        """Some request has loaded it, loads it, or was given nothing to load of it."""
        return transfer in self._taken

    def is_awaited(self, transfer: str) -> bool:
        """Some request has yet to be given blocks for it."""
        return transfer in self._waiting

    def take(self, transfer: str, request_id: str, *, loads: bool) -> None:
        """The request has blocks, and loads or has no need to."""
        self._leave(transfer, request_id)
        self._taken[transfer] = None
        while len(self._taken) > TAKEN:
            del self._taken[next(iter(self._taken))]
        if loads:
            self._loading[transfer] = request_id

    def leaves(self, transfer: str, request_id: str) -> bool:
        """The request will not load it: whether nobody else here does, or did."""
        self._leave(transfer, request_id)
        return transfer not in self._waiting and transfer not in self._taken

    def ended(self, request_ids: set[str]) -> None:
        """Loads of these have ended, whatever came of them."""
        self._loading = {transfer: one for transfer, one in self._loading.items() if one not in request_ids}

    def _leave(self, transfer: str, request_id: str) -> None:
        waiting = self._waiting.get(transfer, set())
        waiting.discard(request_id)
        if not waiting:
            self._waiting.pop(transfer, None)
