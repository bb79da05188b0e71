"""Orders of the connector's scheduler side to the worker side, once a step; and, once, the worker's identity."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from troupe.vllm.params import HandOff

__all__ = ["Chunk", "Drop", "Push", "RankIdentity", "Receive", "Seal", "Send", "TroupeMetadata"]


@dataclass(frozen=True)
class RankIdentity(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The node of a rank, its incarnation, and the address by which its peers reach it."""

    node: str
    incarnation: int
    host: str
    port: int


@dataclass
class Send:
    """A prompt that was computed here: offer its cache. `request_id` is vLLM's; `tokens` are those of the prompt,
    `blocks` those of each KV cache group."""

    request_id: str
    transfer: str
    blocks: list[list[int]]
    tokens: int
    digest: str


@dataclass
class Push:
    """A prompt of `tokens` that is about to be computed here: its cache is offered as it grows, beginning with
    `blocks`."""

    transfer: str
    blocks: list[int]
    tokens: int


@dataclass
class Chunk:
    """This step computes `tokens` of such a prompt, up to token `end`, for which it got further `blocks`."""

    transfer: str
    blocks: list[int]
    end: int
    tokens: int


@dataclass
class Seal:
    """Such a prompt is computed. `request_id`: vLLM's; the request ends with the transfer."""

    request_id: str
    transfer: str
    tokens: int
    digest: str


@dataclass
class Drop:
    """A transfer whose prompt will not be computed, whether offered or not. `request_id`: as in `Seal`; none: its
    request goes on, and the end of the offer is reported by the transfer's name."""

    request_id: str
    transfer: str


@dataclass
class Receive:
    """The first `tokens` of a prompt to load, of which `prefix_tokens` are in `blocks` (of each group) already.

    `refused`: why it cannot be loaded; `source` is None then.
    """

    request_id: str
    source: HandOff | None
    blocks: list[list[int]]
    tokens: int
    prefix_tokens: int
    digest: str
    refused: str = ""


@dataclass
class TroupeMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """`holds`: sources of requests that wait in the queue here. `unholds`: transfers that no request here waits for any
    more, though others may. `releases`: sources that will not be loaded. `aborts`: vLLM's ids of requests that end
    while they load. `idle`: this step computes nothing, so the worker may wait for transfers."""

    sends: list[Send] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    holds: list[HandOff] = field(default_factory=list)
    unholds: list[str] = field(default_factory=list)
    releases: list[HandOff] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    idle: bool = False
