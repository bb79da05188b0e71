"""`kv_transfer_params`: what a prefill engine tells a decode engine about a request, through the router.

Routers copy the prefill engine's answer into the decode request. The keys are those that NIXL's connector uses, so that
any router works, with one key of our own for the rest. A router that copies only NIXL's keys works, too. Routers for
MoRIIO's connector name the transfer themselves, and may copy less.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.hand_off import KEY, VERSION, new_transfer, source_params
from troupe.vllm.place import MAX_RANKS, Ranks, nodes_behind, nodes_of

__all__ = [
    "BadParamsError",
    "HandOff",
    "is_asked_in_turn",
    "is_name",
    "named_transfer",
    "new_transfer",
    "prompt_digest",
    "wants_decode_elsewhere",
    "wants_prefill_elsewhere",
]

MORIIO_KEY = "transfer_id"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}")
_TRANSFER = re.compile(r"[a-z0-9_.-]{1,200}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_LIFE = re.compile(r"[0-9a-f]{16}")  # a text, since some routers round large JSON numbers
_ENGINE = re.compile(r"[^\ud800-\udfff]{1,256}")  # vLLM's id of one
# A router for MoRIIO's connector puts into the id of a request what each engine has told it (`Proxy.message`).
_DECODE_PEER = "___decode_addr_"
_PREFILL_PEER = re.compile(r",engine:([a-z0-9_-]{1,64}),ranks:([0-9]{1,3})\Z")


class BadParamsError(ValueError):
    """The decode request does not say where its cache is. The message says why."""


def wants_decode_elsewhere(params: object) -> bool:
    """Whether a request is a prefill whose decode happens at another engine."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def wants_prefill_elsewhere(params: object) -> bool:
    """Whether a request is a decode whose prompt was computed by another engine."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


def named_transfer(params: object) -> str | None:
    """The name that a router gave a prefill request's transfer, one that asks both engines at once or one for MoRIIO's
    connector; None: the transfer is named here."""
    if not isinstance(params, Mapping):
        return None
    own = params.get(KEY, {"v": VERSION, "request": params.get(MORIIO_KEY)})
    if not isinstance(own, Mapping) or own.get("v") != VERSION or not _is_like(_TRANSFER, own.get("request")):
        return None
    return str(own["request"])


def is_asked_in_turn(params: object) -> bool:
    """Whether the router has named the transfer of a prefill request, and asks another engine for the text afterwards.
    """
    own = params.get(KEY) if isinstance(params, Mapping) else None
    return isinstance(own, Mapping) and bool(own.get("in_turn"))


def is_name(text: str) -> bool:
    """Whether a transfer may have this name."""
    return _is_like(_TRANSFER, text)


def prompt_digest(tokens: Iterable[int], *, adapter: str = "", salt: str = "") -> str:
    """A digest of everything but the model that a cache depends on: equal if the caches are interchangeable."""
    digest = hashlib.blake2b(digest_size=16)
    for text in (adapter, salt):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.hexdigest()


@dataclass(frozen=True)
class HandOff:
    """A prompt whose cache waits at a prefill engine, or that a prefill engine is asked for at the same time.

    `transfer`: the id of the send. `nodes`: of the prefill replica in rank order. `lives`: the incarnation of each of
    them, or nothing. `digest`: of the prompt. A router that asks both engines at once knows neither the digest nor the
    `tokens`; a router that copies only part of the prefill engine's answer omits them for a prompt that is `computed`.
    """

    transfer: str
    nodes: tuple[str, ...]
    tokens: int | None = None
    digest: str | None = None
    computed: bool = False
    lives: tuple[int, ...] = ()

    @property
    def is_early(self) -> bool:
        """Whether the prompt may still be waiting or computing."""
        return self.digest is None and not self.computed

    def to_params(
        self,
        *,
        engine_id: str,
        ranks: Ranks | None = None,
        blocks: Sequence[Sequence[int]] = (),
        address: tuple[str, int] = ("", 0),
    ) -> dict[str, Any]:
        """`ranks`: how the engine is divided. `blocks`, of each KV cache group, and `address`, of the first node, are
        for routers that check for these keys: engines ask their cluster where a node is, and never dial an address from
        a client."""
        params = source_params(self.transfer, self.nodes, engine_id=engine_id)
        own = params[KEY]
        own.update(tokens=self.tokens, prompt=self.digest)
        if self.lives:
            own["lives"] = [f"{life:016x}" for life in self.lives]
        divided = ranks or Ranks(size=len(self.nodes))
        params.update(tp_size=divided.size, pp_size=divided.parts, remote_block_ids=[list(group) for group in blocks])
        params["remote_host"], params["remote_port"] = address
        return {**params, MORIIO_KEY: self.transfer}

    @classmethod
    def from_params(cls, params: Mapping[str, Any], request_id: str = "") -> HandOff:
        """Parses parameters from a client; `BadParamsError` for anything that a prefill engine would not say.
        `request_id`: vLLM's, which contains the client's own."""
        own = params.get(KEY)
        if own is None and params.get(MORIIO_KEY) is not None:
            return cls._from_moriio(params, request_id)
        if own is None and params.get("remote_request_id") is not None:
            return cls._from_nixl(params)
        if not isinstance(own, Mapping):
            raise BadParamsError(
                f"kv_transfer_params have no {KEY!r}: the prefill engine does not have Troupe's connector"
            )
        if own.get("v") != VERSION:
            raise BadParamsError(f"kv_transfer_params are of version {own.get('v')!r}, and this engine reads {VERSION}")
        nodes = own.get("nodes")
        if not isinstance(nodes, (list, tuple)) or not nodes or not all(_is_like(_NAME, node) for node in nodes):
            raise BadParamsError("'nodes' of kv_transfer_params is not a list of names of nodes")
        if not _is_like(_TRANSFER, own.get("request")):
            raise BadParamsError("'request' of kv_transfer_params is not the id of a transfer")
        lives = _lives_of(own.get("lives"), len(nodes))
        if "tokens" not in own and "prompt" not in own:
            return cls(transfer=own["request"], nodes=tuple(nodes), lives=lives)
        tokens = own.get("tokens")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens < 2**32:
            raise BadParamsError("'tokens' of kv_transfer_params is not a number of tokens")
        if not _is_like(_DIGEST, own.get("prompt")):
            raise BadParamsError("'prompt' of kv_transfer_params is not the digest of a prompt")
        return cls(transfer=own["request"], nodes=tuple(nodes), tokens=tokens, digest=own["prompt"], lives=lives)

    @classmethod
    def _from_nixl(cls, params: Mapping[str, Any]) -> HandOff:
        """For a router that left out our key: NIXL's keys name the transfer and the engine."""
        transfer, engine = params["remote_request_id"], params.get("remote_engine_id")
        if not _is_like(_TRANSFER, transfer) or not _is_like(_ENGINE, engine):
            raise BadParamsError(
                f"kv_transfer_params have no {KEY!r}, and their 'remote_request_id' and 'remote_engine_id' are not "
                "those of an engine with Troupe's connector"
            )
        ranks = _ranks_of(params.get("tp_size", 1), params.get("pp_size", 1))
        if ranks is None:
            raise BadParamsError("'tp_size' and 'pp_size' of kv_transfer_params name no engine's nodes")
        return cls(transfer=transfer, nodes=nodes_behind(transfer, str(engine), ranks), computed=True)

    @classmethod
    def _from_moriio(cls, params: Mapping[str, Any], request_id: str) -> HandOff:
        """Only the id of the prefill engine's answer is there, or nothing, if both engines are asked at once."""
        transfer, engine = params[MORIIO_KEY], params.get("remote_engine_id")
        if not _is_like(_TRANSFER, transfer):
            raise BadParamsError(
                f"{MORIIO_KEY!r} of kv_transfer_params is not the id of a transfer, 1 to 200 characters of "
                "a-z 0-9 _ . -"
            )
        computed = engine is not None
        if computed:
            ranks = params.get("remote_tp_size")  # all ranks, as registered with the proxy
            if not ranks:
                divided = _ranks_of(params.get("tp_size"), params.get("pp_size", 1))
                ranks = divided.count if divided is not None else None
            if not _is_like(_ENGINE, engine) or isinstance(ranks, bool) or not isinstance(ranks, int):
                raise BadParamsError(
                    "'remote_engine_id' and 'remote_tp_size' of kv_transfer_params name no engine's nodes"
                )
        else:
            found = _PREFILL_PEER.search(request_id.partition(_DECODE_PEER)[0])
            if found is None:
                raise BadParamsError(
                    "neither kv_transfer_params nor X-Request-Id says which engine computes the prompt: ask through a "
                    "router that this engine registers with ('proxy_ip'), through `troupe router`, or with 'read_mode' "
                    "true"
                )
            engine, ranks = found[1], int(found[2])
        if not 0 < ranks <= MAX_RANKS:
            raise BadParamsError(f"the engine that computes the prompt is said to have {ranks} ranks")
        return cls(transfer=transfer, nodes=nodes_of(str(engine), ranks), computed=computed)


def _ranks_of(size: object, parts: object) -> Ranks | None:
    """None if there can be no such engine."""
    counts = [one for one in (size, parts) if isinstance(one, int) and not isinstance(one, bool) and one > 0]
    if len(counts) != 2 or counts[0] * counts[1] > MAX_RANKS:
        return None
    return Ranks(*counts)


def _lives_of(said: object, nodes: int) -> tuple[int, ...]:
    if said is None:
        return ()
    if not isinstance(said, (list, tuple)) or len(said) != nodes or not all(_is_like(_LIFE, life) for life in said):
        raise BadParamsError("'lives' of kv_transfer_params does not have an incarnation of each of 'nodes'")
    return tuple(int(life, 16) for life in said)


def _is_like(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
