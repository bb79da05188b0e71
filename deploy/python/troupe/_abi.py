"""The C ABI (troupe/troupe.h, troupe/io.h) as ctypes sees it. Private: nothing here is for users.

It uses ctypes, because one file then serves every Python without a compiler, and a call costs about a microsecond
(bench/python_calls measures it on your machine). ctypes releases the GIL in every call, as calls that wait must and
calls that take a lock should.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    c_char,
    c_char_p,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from troupe import _io_abi
from troupe.errors import ErrorCode, TroupeError, WaitTimeout

FOREVER = 2**64 - 1
TIMED_OUT = int(ErrorCode.TIMED_OUT)


class LogOptions(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reserved", c_uint32),
        ("level", c_char_p),
        ("node", c_char_p),
        ("file", c_char_p),
    ]


class CLayerShape(Structure):
    _fields_ = [("kind", c_uint32), ("kv_heads", c_uint32), ("head_dim", c_uint32)]


class CLayerDetails(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("value_dim", c_uint32),
        ("element_size", c_uint32),
        ("unit", c_uint32),
        ("dtype", c_char_p),
        ("packing", c_char_p),
    ]


class CPlane(Structure):
    _fields_ = [
        ("region", c_uint32),
        ("heads", c_uint32),
        ("base", c_uint64),
        ("block_stride", c_uint64),
        ("token_stride", c_uint64),
        ("head_stride", c_uint64),
        ("head_bytes", c_uint64),
    ]


class CacheGeometry(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("element_size", c_uint32),
        ("dtype", c_char_p),
        ("block_tokens", c_uint32),
        ("blocks", c_uint32),
        ("tp_rank", c_uint32),
        ("tp_size", c_uint32),
        ("model", POINTER(c_uint8)),
    ]


class CArrangement(Structure):
    _fields_ = [("order", c_uint32), ("kv", c_uint32), ("inner", c_uint32), ("regions", c_uint32)]


class CStatePart(Structure):
    _fields_ = [
        ("bytes", c_uint64),
        ("sharding", c_uint32),
        ("reserved", c_uint32),
    ]


class CStateTensor(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("sharding", c_uint32),
        ("name", c_char_p),
        ("region", c_uint32),
        ("slots", c_uint32),
        ("base", c_uint64),
        ("slot_stride", c_uint64),
        ("slot_bytes", c_uint64),
        ("parts", c_void_p),
        ("part_count", c_uint32),
        ("reserved", c_uint32),
    ]


class CachePlace(Structure):
    _fields_ = [("layer", c_uint32), ("plane", c_uint32), ("token", c_uint32), ("head", c_uint32)]


class RegionBytes(Structure):
    _fields_ = [("region", c_uint32), ("reserved", c_uint32), ("offset", c_uint64), ("length", c_uint64)]


class CMemory(Structure):
    _fields_ = [("data", c_void_p), ("size", c_size_t)]


class CLabel(Structure):
    _fields_ = [("key", c_char_p), ("value", c_char_p)]


class CAnnouncement(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("label_count", c_uint32),
        ("stage", c_char_p),
        ("replica", c_char_p),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("labels", POINTER(CLabel)),
    ]


class EngineOptions(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("deployment_file", c_char_p),
        ("deployment_text", c_char_p),
        ("node", c_char_p),
        ("supervisor_host", c_char_p),
        ("supervisor_port", c_uint32),
        ("allocate", c_uint32),
        ("layout", c_void_p),
        ("regions", c_void_p),
        ("region_count", c_size_t),
        ("numa_node_plus_1", c_uint32),
        ("reserved", c_uint32),
        ("cores", c_void_p),
        ("core_count", c_size_t),
        ("join", POINTER(CAnnouncement)),
    ]


class CIdentity(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("pid", c_uint32),
        ("incarnation", c_uint64),
        ("epoch", c_uint64),
        ("replica", c_uint32),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("port", c_uint32),
        ("supervisor_incarnation", c_uint64),
    ]


class PlacementRequest(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("timeout_ms", c_uint32),
        ("request", c_char_p),
        ("from_", c_char_p),
        ("to", c_char_p),
        ("affinity", c_char_p),
        ("failed", POINTER(c_char_p)),
        ("failed_count", c_uint32),
        ("keep_source", c_uint32),
    ]


class PlacementInfo(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("mode", c_uint32),
        ("request", c_char_p),
        ("supervisor_incarnation", c_uint64),
        ("epoch", c_uint64),
        ("attempt", c_uint32),
        ("prefill_count", c_uint32),
        ("decode_count", c_uint32),
        ("same_source", c_uint32),
        ("fingerprint", c_uint8 * 16),
    ]


class CNodeInfo(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("port", c_uint32),
        ("name", c_char_p),
        ("stage", c_char_p),
        ("host", c_char_p),
        ("incarnation", c_uint64),
        ("replica", c_uint32),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("pid", c_uint32),
        ("replica_name", c_char_p),
        ("fingerprint", c_uint8 * 16),
        ("labels", POINTER(CLabel)),
        ("label_count", c_uint32),
        ("reserved", c_uint32),
    ]


class MemberInfo(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("state", c_uint32),
        ("reason", c_char_p),
        ("queue_length", c_uint32),
        ("reserved", c_uint32),
    ]


class CGroupBlocks(Structure):
    _fields_ = [
        ("first_token", c_uint32),
        ("reserved", c_uint32),
        ("blocks", c_void_p),
        ("block_count", c_size_t),
    ]


class SendSpec(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("state_slot", c_uint32),
        ("request", c_char_p),
        ("blocks", c_void_p),
        ("block_count", c_size_t),
        ("deadline_ms", c_uint64),
        ("consumers", c_uint32),
        ("held_for_count", c_uint32),
        ("held_for", POINTER(c_char_p)),
        ("flags", c_uint32),
        ("reserved", c_uint32),
        ("groups", c_void_p),
        ("group_count", c_uint32),
        ("reserved_2", c_uint32),
    ]


class ReceiveSpec(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("state_slot", c_uint32),
        ("request", c_char_p),
        ("placement", c_void_p),
        ("sources", POINTER(c_char_p)),
        ("source_count", c_uint32),
        ("mode", c_uint32),
        ("tokens", c_uint32),
        ("prefix_tokens", c_uint32),
        ("blocks", c_void_p),
        ("block_count", c_size_t),
        ("deadline_ms", c_uint64),
        ("placed_by", c_uint64),
        ("placed_at", c_uint64),
        ("fail_when_full", c_uint32),
        ("reserved", c_uint32),
        ("lives", c_void_p),
        ("park_ms", c_uint64),
        ("expect", c_char_p),
        ("expect_size", c_size_t),
        ("flags", c_uint32),
        ("reserved_2", c_uint32),
        ("groups", c_void_p),
        ("group_count", c_uint32),
        ("reserved_3", c_uint32),
    ]


class CSources(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("source_count", c_uint32),
        ("request", c_char_p),
        ("sources", POINTER(c_char_p)),
        ("lives", c_void_p),
    ]


class ComputePoint(Structure):
    _fields_ = [("size", c_uint32), ("gpu", c_uint32), ("event", c_void_p), ("shared", c_void_p)]


class ComputeStream(Structure):
    _fields_ = [("size", c_uint32), ("gpu", c_uint32), ("stream", c_void_p)]


class _Layers(Structure):
    _fields_ = [
        ("layer_begin", c_uint32),
        ("layer_end", c_uint32),
        ("token_begin", c_uint32),
        ("token_end", c_uint32),
    ]


class _Pair(Structure):
    _fields_ = [("first", c_uint64), ("second", c_uint64)]


class _Wanted(Structure):
    _fields_ = [
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("expected", c_uint32),
        ("token_begin", c_uint32),
        ("token_end", c_uint32),
    ]


class _Member(Structure):
    _fields_ = [
        ("incarnation", c_uint64),
        ("state", c_uint32),
        ("replica", c_uint32),
        ("rank", c_uint32),
        ("label_count", c_uint32),
    ]


class _Done(Structure):
    _fields_ = [
        ("bytes", c_uint64),
        ("aux_size", c_uint64),
        ("waited_us", c_uint32),
        ("moving_us", c_uint32),
        ("segments", c_uint32),
        ("backend", c_char * 4),
    ]


class _EventUnion(Union):
    _fields_ = [
        ("done", _Done),
        ("layers", _Layers),
        ("pair", _Pair),
        ("wanted", _Wanted),
        ("member", _Member),
        ("reserved", c_uint64 * 4),
    ]


class CEvent(Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("code", c_int32),
        ("operation", c_uint64),
        ("u", _EventUnion),
        ("detail", c_void_p),
    ]


class COutcome(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("kind", c_uint32),
        ("bytes", c_uint64),
        ("aux_size", c_uint64),
        ("value_size", c_uint64),
        ("ttl_ms", c_uint64),
        ("owner", c_uint64),
        ("block_count", c_uint64),
        ("detail", c_void_p),
        ("waited_us", c_uint64),
        ("moving_us", c_uint64),
        ("segments", c_uint64),
        ("backend", c_char * 8),
    ]


class ClusterOptions(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("deployment_file", c_char_p),
        ("deployment_text", c_char_p),
        ("host", c_char_p),
        ("port", c_uint32),
        ("timeout_ms", c_uint32),
    ]


class CAttempt(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reserved", c_uint32),
        ("where", c_void_p),
        ("source", c_char_p),
        ("left_ms", c_uint64),
    ]


CarriedCall = CFUNCTYPE(c_int32, c_void_p, POINTER(CAttempt), POINTER(CNodeInfo), c_void_p)


class CarriedRequest(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("source_is_kept", c_uint32),
        ("request", c_char_p),
        ("from_", c_char_p),
        ("to", c_char_p),
        ("affinity", c_char_p),
        ("deadline_ms", c_uint64),
        ("prefill", CarriedCall),
        ("decode", CarriedCall),
        ("abort", CarriedCall),
        ("user", c_void_p),
        ("stop", c_void_p),
    ]


class CarriedInfo(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("attempts", c_uint32),
        ("prefills", c_uint32),
        ("prefill_count", c_uint32),
        ("decode_count", c_uint32),
        ("reserved", c_uint32),
    ]


#: Name -> arguments. Every one of these returns a status.
_FALLIBLE: dict[str, list[Any]] = {
    "log": [c_void_p],
    "layout_make_with": [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p],
    "layout_new": [c_void_p, c_void_p],
    "layout_add_layer_with": [c_void_p, c_void_p, c_void_p, c_void_p, c_size_t],
    "layout_add_state": [c_void_p, c_void_p],
    "layout_check": [c_void_p],
    "layout_validate": [c_void_p, c_void_p, c_size_t],
    "layout_compatible": [c_void_p, c_void_p],
    "layout_geometry": [c_void_p, c_void_p],
    "layout_layer_count": [c_void_p, c_void_p],
    "layout_layer": [c_void_p, c_uint32, c_void_p, c_void_p, c_size_t, c_void_p],
    "layout_layer_details": [c_void_p, c_uint32, c_void_p],
    "layout_add_group": [c_void_p, c_void_p, c_size_t, c_uint32],
    "layout_set_part": [c_void_p, c_uint32, c_uint32],
    "layout_part": [c_void_p, c_void_p, c_void_p],
    "layout_group_count": [c_void_p, c_void_p],
    "layout_group": [c_void_p, c_uint32, c_void_p, c_size_t, c_void_p, c_void_p],
    "layout_region_sizes": [c_void_p, c_void_p, c_size_t, c_void_p],
    "layout_locate": [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p],
    "layout_encode": [c_void_p, c_void_p, c_void_p],
    "layout_decode": [c_char_p, c_size_t, c_void_p],
    "layout_fingerprint": [c_void_p, c_void_p],
    "engine_start": [c_void_p, c_void_p],
    "engine_wait_registered": [c_void_p, c_uint64],
    "engine_stop": [c_void_p],
    "engine_identity": [c_void_p, c_void_p],
    "engine_layout": [c_void_p, c_void_p],
    "engine_region": [c_void_p, c_uint32, c_void_p],
    "engine_allocate_blocks": [c_void_p, c_uint32, c_void_p, c_void_p],
    "engine_free_blocks": [c_void_p, c_uint64, c_void_p, c_size_t],
    "engine_send": [c_void_p, c_void_p, c_void_p],
    "engine_add_group_blocks": [c_void_p, c_uint64, c_uint32, c_void_p, c_size_t],
    "engine_layers_ready": [c_void_p, c_uint64, c_uint32, c_uint32, c_uint32, c_void_p],
    "engine_seal": [c_void_p, c_uint64, c_uint32, c_char_p, c_size_t],
    "engine_receive": [c_void_p, c_void_p, c_void_p],
    "engine_release": [c_void_p, c_void_p, c_void_p],
    "engine_hold": [c_void_p, c_void_p, c_void_p],
    "engine_await_layers": [c_void_p, c_uint64, c_uint32, c_uint32, c_uint32, c_void_p],
    "engine_abort": [c_void_p, c_uint64, c_char_p],
    "engine_put": [c_void_p, c_char_p, c_char_p, c_void_p, c_size_t, c_uint64, c_void_p],
    "engine_get": [c_void_p, c_char_p, c_char_p, c_void_p],
    "engine_query": [c_void_p, c_char_p, c_char_p, c_void_p],
    "engine_remove": [c_void_p, c_char_p, c_char_p, c_void_p],
    "engine_place": [c_void_p, c_void_p, c_void_p],
    "engine_placed_request_ended": [c_void_p, c_char_p],
    "engine_set_queue_length": [c_void_p, c_uint32],
    "engine_draining": [c_void_p, c_void_p],
    "engine_report_failure": [c_void_p, c_char_p],
    "engine_recover": [c_void_p],
    "engine_report": [c_void_p, c_void_p],
    "engine_event_fd": [c_void_p, c_void_p],
    "engine_take": [c_void_p, c_void_p, c_size_t, c_size_t, c_uint64, c_void_p],
    "engine_wait": [c_void_p, c_uint64, c_uint64, c_void_p],
    "engine_poll": [c_void_p, c_void_p],
    "engine_reply": [c_void_p, c_uint64, c_int32, c_char_p, c_char_p, c_size_t],
    "placement_read": [c_void_p, c_void_p],
    "placement_node": [c_void_p, c_uint32, c_uint32, c_void_p],
    "detail_bytes": [c_void_p, c_void_p, c_void_p],
    "detail_blocks": [c_void_p, c_void_p, c_void_p, c_void_p],
    "detail_labels": [c_void_p, c_void_p, c_void_p],
    "detail_placement": [c_void_p, c_void_p],
    "cluster_connect": [c_void_p, c_void_p],
    "cluster_members": [c_void_p, c_void_p],
    "cluster_find_label": [c_void_p, c_char_p, c_char_p, c_void_p],
    "members_count": [c_void_p, c_void_p],
    "members_read": [c_void_p, c_uint32, c_void_p],
    "members_node": [c_void_p, c_uint32, c_void_p],
    "cluster_report": [c_void_p, c_char_p, c_void_p],
    "cluster_events": [c_void_p, c_uint64, c_uint32, c_void_p],
    "cluster_place": [c_void_p, c_void_p, c_void_p],
    "cluster_finished": [c_void_p, c_char_p],
    "cluster_call": [c_void_p, c_char_p, c_char_p, c_char_p, c_size_t, c_uint32, c_void_p, c_void_p],
    "cluster_drain": [c_void_p, c_char_p, c_uint32],
    "cluster_cancel_drain": [c_void_p, c_char_p],
    "cluster_carry": [c_void_p, c_void_p, c_void_p],
    "call_draft_set": [c_void_p, c_char_p, c_char_p, c_size_t],
    "stop_new": [c_void_p],
    "stop_request": [c_void_p],
    "carried_read": [c_void_p, c_void_p],
    "carried_answer": [c_void_p, c_uint32, c_uint32, c_void_p, c_void_p],
    "carried_placement": [c_void_p, c_void_p],
    **_io_abi.FALLIBLE,
}
_TEXTS: dict[str, list[Any]] = {
    "last_error": [],
    "status_name": [c_int32],
    "version": [],
    "detail_reason": [c_void_p],
    "detail_method": [c_void_p],
    "detail_node": [c_void_p],
    "detail_stage": [c_void_p],
}
_FREEING: dict[str, list[Any]] = {
    "free": [c_void_p],
    "layout_free": [c_void_p],
    "engine_free": [c_void_p],
    "placement_free": [c_void_p],
    "detail_free": [c_void_p],
    "events_free": [c_void_p, c_size_t, c_size_t],
    "cluster_free": [c_void_p],
    "members_free": [c_void_p],
    "stop_free": [c_void_p],
    "carried_free": [c_void_p],
    **_io_abi.FREEING,
}


class Library:
    """The functions of the library by their names without `troupe_`. Calls release the interpreter's lock, except
    `io_run_at_once`, which is `io_run` for transfers that take less time than a thread switch."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            loaded = ctypes.CDLL(path)
        except OSError as why:
            raise ImportError(
                f"Troupe's library cannot be loaded: {why}; install it, or set TROUPE_LIBRARY to its path"
            ) from None
        for names, result in ((_FALLIBLE, c_int32), (_TEXTS, c_char_p), (_FREEING, None)):
            for name, arguments in names.items():
                try:
                    function = getattr(loaded, f"troupe_{name}")
                except AttributeError:
                    raise ImportError(f"{path} has no troupe_{name}: it is older than this package") from None
                function.argtypes = arguments
                function.restype = result
                setattr(self, name, function)
        self.io_run_at_once = ctypes.PyDLL(path).troupe_io_run
        self.io_run_at_once.argtypes, self.io_run_at_once.restype = _io_abi.FALLIBLE["io_run"], c_int32
        loaded.troupe_protocol_version.argtypes = []
        loaded.troupe_protocol_version.restype = c_uint32
        self.protocol_version = loaded.troupe_protocol_version

    def __getattr__(self, name: str) -> Any:  # for type checkers; all names are set in __init__
        raise AttributeError(name)

    def fail(self, status: int) -> NoReturn:
        """Raises the error of the last call that failed on this thread."""
        reason = text_of(self.last_error())
        if status == TIMED_OUT:
            raise WaitTimeout(status, reason)
        raise TroupeError(status, reason)

    def check(self, status: int) -> None:
        if status:
            self.fail(status)

    def text(self, function: Any, *arguments: Any) -> str:
        """Calls a function that returns a text, and frees the text."""
        out = c_void_p()
        status = function(*arguments, ctypes.byref(out))
        if status:
            self.fail(status)
        text = ctypes.string_at(out.value or 0)
        self.free(out)
        return text.decode("utf-8", "replace")


@lru_cache(maxsize=1)
def library() -> Library:
    """Loads libtroupe once: TROUPE_LIBRARY, the wheel's own, or the one that the loader finds."""
    named = os.environ.get("TROUPE_LIBRARY")
    if named:
        return Library(named)
    bundled = Path(__file__).parent / "_lib" / "libtroupe.so.0"
    return Library(str(bundled) if bundled.exists() else "libtroupe.so.0")


def text_of(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def bytes_at(address: int | None, size: int) -> bytes:
    return ctypes.string_at(address, size) if address and size else b""


def encoded(what: str, value: object) -> bytes:
    """A text for C. `TypeError` naming `what`; `ValueError` if C would truncate it."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, not {type(value).__name__}")
    raw = value.encode("utf-8")
    if b"\0" in raw:
        raise ValueError(f"{what} has a null character at {raw.index(0)}")
    return raw


def optional(what: str, value: object) -> bytes | None:
    return None if value is None else encoded(what, value)


def milliseconds(what: str, seconds: float | None, missing: int) -> int:
    """Seconds in the ABI's milliseconds, never rounded to 0. `missing` stands for None."""
    if seconds is None:
        return missing
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        raise TypeError(f"{what} is a number of seconds, not {type(seconds).__name__}")
    if not seconds >= 0:
        raise ValueError(f"{what} is {seconds} s; give 0 or more")
    if seconds > 1e12:
        return missing
    ms = int(-(-seconds * 1000 // 1))
    return max(ms, 1) if missing == 0 else ms


def free(release: Callable[[c_void_p], object], handle: c_void_p) -> None:
    """Frees a handle. Calls that come later, at the end of the interpreter, are refused by name."""
    raw = c_void_p(handle.value)
    handle.value = None
    release(raw)


def number(what: str, value: object, limit: int = 2**32) -> int:
    """A whole number of 0 to `limit` - 1, checked, since ctypes would silently truncate it."""
    try:
        whole = value.__index__()  # type: ignore[attr-defined]
    except AttributeError:
        raise TypeError(f"{what} is an int, not {type(value).__name__}") from None
    if not 0 <= whole < limit:
        raise ValueError(f"{what} is {whole}; give 0 to {limit - 1}")
    return int(whole)


__all__ = [name for name in dir() if not name.startswith("_")]
