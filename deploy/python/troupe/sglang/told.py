"""What decode servers learn of a prefill server's nodes: each rank reports its own, the bootstrap server those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["RankNodes", "ServerNodes"]


@dataclass(frozen=True)
class RankNodes:
    """The nodes of one rank, one per cache, with their incarnations.

    `protocol`: of Troupe. `cluster`: the name of the cluster and where its supervisor is; empty: a file gives it.
    """

    protocol: int
    cluster: str
    caches: tuple[str, ...]
    nodes: tuple[str, ...]
    lives: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, said: Any) -> RankNodes:
        """`ValueError`: it is nothing of the kind."""
        return cls(*_read(said, _text, _number))


@dataclass(frozen=True)
class ServerNodes:
    """The nodes of every rank that is a source of one transfer, in Troupe's order: for each cache the nodes of all
    ranks."""

    protocol: int
    cluster: str
    caches: tuple[str, ...]
    nodes: tuple[tuple[str, ...], ...]
    lives: tuple[tuple[int, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, said: Any) -> ServerNodes:
        """`ValueError`: it is nothing of the kind."""
        found = cls(*_read(said, _texts, _numbers))
        if any(len(names) != len(lives) or not names for names, lives in zip(found.nodes, found.lives, strict=True)):
            raise ValueError("there is not one life for each node")
        return found

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankNodes | None]) -> ServerNodes | None:
        """None if one of the ranks has no nodes, or has other caches than the first one."""
        known = [rank for rank in ranks if rank is not None]
        if not known or len(known) != len(ranks) or any(rank.caches != known[0].caches for rank in known):
            return None
        return cls(
            known[0].protocol,
            known[0].cluster,
            known[0].caches,
            tuple(zip(*(rank.nodes for rank in known), strict=True)),
            tuple(zip(*(rank.lives for rank in known), strict=True)),
        )

    def life_of(self, node: str) -> int | None:
        """The incarnation of one of the nodes; None if it is not among them."""
        for names, lives in zip(self.nodes, self.lives, strict=True):
            if node in names:
                return lives[names.index(node)]
        return None


def _read(said: Any, node: Any, life: Any) -> tuple[int, str, tuple[str, ...], tuple[Any, ...], tuple[Any, ...]]:
    if not isinstance(said, dict):
        raise ValueError("it is not a mapping")
    caches = _texts(said.get("caches"))
    nodes, lives = (
        tuple(read(one) for one in _list(said.get(key))) for key, read in (("nodes", node), ("lives", life))
    )
    if not len(caches) == len(nodes) == len(lives) > 0:
        raise ValueError("there are not as many nodes and lives as caches")
    return _number(said.get("protocol")), _text(said.get("cluster")), caches, nodes, lives


def _list(said: Any) -> list[Any]:
    if not isinstance(said, list):
        raise ValueError(f"{said!r} is not a list")
    return said


def _text(said: Any) -> str:
    if not isinstance(said, str):
        raise ValueError(f"{said!r} is not a string")
    return said


def _number(said: Any) -> int:
    if isinstance(said, bool) or not isinstance(said, int) or not 0 <= said < 1 << 64:
        raise ValueError(f"{said!r} is not a number")
    return int(said)


def _texts(said: Any) -> tuple[str, ...]:
    return tuple(_text(one) for one in _list(said))


def _numbers(said: Any) -> tuple[int, ...]:
    return tuple(_number(one) for one in _list(said))
