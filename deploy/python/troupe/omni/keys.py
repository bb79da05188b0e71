"""The names of payloads: vLLM-Omni's, and those of Troupe's keyed values."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

__all__ = ["MAX_KEY", "Name", "claim_of", "name_of", "requests_of"]

#: Bytes of vLLM-Omni's key and both stages together. A key is the id of a request and a few numbers.
MAX_KEY = 4096

_LONGEST = 512 - 2  # bytes of a key of Troupe after the prefix for its kind of value
_OF_A_CHUNK = re.compile(r"(.+)_([^_]+)_([0-9]+)")
_OF_A_RANK = re.compile(r"(.+)_([^_]+)_0_([0-9]+)_([0-9]+)")
_OF_A_CACHE = re.compile(r"omni_.+_to_.+_kv_cache_(.+)")


@dataclass(frozen=True, slots=True)
class Name:
    """A payload from one stage to another.

    `identity`: both stages and vLLM-Omni's key, which readers compare. `header`: the key of the value that describes
    the payload, at the node that has it. `notice`: the key of the value that names that node, at the nodes of the
    receiving stage.
    """

    identity: bytes
    header: str
    notice: str


def name_of(from_stage: object, to_stage: object, key: object) -> Name:
    """`TypeError`, `ValueError`: naming the argument that is not a valid name."""
    stages = [_stage("from_stage", from_stage), _stage("to_stage", to_stage)]
    if not isinstance(key, str):
        raise TypeError(f"the key of a payload is a str, not {type(key).__name__}")
    if not key:
        raise ValueError("the key of a payload is empty; name the request that it belongs to")
    identity = "\0".join((*stages, key)).encode("utf-8", "surrogatepass")
    if len(identity) > MAX_KEY:
        raise ValueError(f"the key {key[:40]!r}... and its stages have {len(identity)} bytes; {MAX_KEY} are the most")
    # Text that C would truncate, or that is too long for a key, is replaced by its digest.
    own = "/".join((*(stage.replace("%", "%25").replace("/", "%2F") for stage in stages), key))
    if "\0" in own or len(own.encode("utf-8", "surrogatepass")) > _LONGEST or not _is_text(own):
        own = hashlib.sha256(identity).hexdigest()
    return Name(identity, f"v/{own}", f"n/{own}")


def claim_of(number: int) -> str:
    """The key of a payload's claim, a value that exists until a reader takes the payload: only one reader can remove
    it. Its bytes are the payload, unless the header contains it. `number`: of the payload, at its node."""
    return f"b/{number}"


def requests_of(key: str) -> tuple[str, ...]:
    """The requests that a key of vLLM-Omni may belong to, the likeliest first: from the forms of keys, and the key
    itself."""
    found = [match[1] for form in (_OF_A_CACHE, _OF_A_RANK, _OF_A_CHUNK) if (match := form.fullmatch(key))]
    return tuple(dict.fromkeys((*found, key)))


def _stage(what: str, stage: object) -> str:
    if isinstance(stage, bool) or not isinstance(stage, (str, int)):
        raise TypeError(f"{what} is a str or an int, not {type(stage).__name__}")
    if stage == "" or "\0" in str(stage):
        raise ValueError(f"{what} is {stage!r}; give the id of a stage")
    return str(stage)


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
