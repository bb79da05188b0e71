"""The part of the C ABI that troupe/io.h declares, as `_abi` has the rest. Private: nothing here is for users."""

from __future__ import annotations

from ctypes import Structure, c_char, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any


class IoOptions(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("name", c_char_p),
        ("host", c_char_p),
        ("port", c_uint32),
        ("security", c_uint32),
        ("cluster", c_char_p),
        ("secret", c_char_p),
        ("certificate", c_char_p),
        ("key", c_char_p),
        ("ca", c_char_p),
        ("backends", c_void_p),
        ("backend_count", c_size_t),
        ("threads", c_uint32),
        ("lanes", c_uint32),
        ("peer_silence_ms", c_uint32),
        ("connect_timeout_ms", c_uint32),
        ("max_peers", c_uint64),
        ("max_transfers", c_uint64),
        ("max_notices", c_uint64),
        ("max_notice_bytes", c_uint64),
        ("grant_timeout_ms", c_uint32),
        ("reserved", c_uint32),
    ]


class IoRemoteMemory(Structure):
    _fields_ = [
        ("number", c_uint64),
        ("address", c_uint64),
        ("length", c_uint64),
        ("rights", c_uint32),
        ("reserved", c_uint32),
    ]


class IoStatus(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("state", c_uint32),
        ("bytes", c_uint64),
        ("code", c_int32),
        ("bad_count", c_uint32),
        ("reason", c_char * 512),
    ]


class IoNotice(Structure):
    _fields_ = [
        ("peer", c_uint64),
        ("from_", c_char_p),
        ("bytes", c_void_p),
        ("byte_count", c_size_t),
    ]


class IoEvent(Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("code", c_int32),
        ("transfer", c_uint64),
        ("peer", c_uint64),
        ("reason", c_char_p),
    ]


#: Name -> arguments. Every one of these returns a status.
FALLIBLE: dict[str, list[Any]] = {
    "io_agent_create": [c_void_p, c_void_p],
    "io_agent_close": [c_void_p],
    "io_report": [c_void_p, c_void_p],
    "io_register": [c_void_p, c_void_p, c_size_t, c_char_p, c_uint32, c_void_p],
    "io_allocate": [c_void_p, c_uint64, c_char_p, c_uint32, c_void_p],
    "io_bytes": [c_void_p, c_uint64, c_void_p],
    "io_deregister": [c_void_p, c_uint64, c_uint64],
    "io_describe": [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p],
    "io_add_peer": [c_void_p, c_char_p, c_size_t, c_void_p],
    "io_remove_peer": [c_void_p, c_uint64],
    "io_connect": [c_void_p, c_uint64, c_uint64, c_void_p],
    "io_remote_memories": [c_void_p, c_uint64, c_void_p, c_size_t, c_void_p],
    "io_prepare_pieces": [c_void_p, c_void_p, c_size_t, c_void_p],
    "io_prepare_local": [c_void_p, c_void_p, c_size_t, c_void_p],
    "io_prepare_remote": [c_void_p, c_uint64, c_void_p, c_size_t, c_void_p],
    "io_session": [c_void_p, c_uint64, c_uint64, c_uint64, c_void_p],
    "io_release_plan": [c_void_p, c_uint64],
    "io_make": [
        c_void_p,
        c_uint32,
        c_uint64,
        c_void_p,
        c_size_t,
        c_uint64,
        c_void_p,
        c_size_t,
        c_uint32,
        c_void_p,
    ],
    "io_post": [c_void_p, c_uint64, c_char_p, c_size_t, c_uint64],
    "io_move": [c_void_p, c_uint32, c_uint64, c_void_p, c_size_t, c_char_p, c_size_t, c_uint64, c_void_p],
    "io_read_status": [c_void_p, c_uint64, c_void_p, c_void_p, c_size_t],
    "io_finish": [c_void_p, c_uint64, c_uint64, c_void_p],
    "io_run": [c_void_p, c_uint64, c_char_p, c_size_t, c_uint64, c_uint64, c_void_p],
    "io_wait": [c_void_p, c_void_p, c_size_t, c_uint32, c_uint64, c_void_p],
    "io_cancel": [c_void_p, c_uint64],
    "io_release_transfer": [c_void_p, c_uint64],
    "io_notify": [c_void_p, c_uint64, c_char_p, c_size_t],
    "io_take_notices": [c_void_p, c_void_p, c_size_t, c_size_t, c_uint64, c_void_p],
    "io_event_fd": [c_void_p, c_void_p],
    "io_take": [c_void_p, c_void_p, c_size_t, c_size_t, c_uint64, c_void_p],
    "io_poll": [c_void_p, c_void_p],
}
FREEING: dict[str, list[Any]] = {
    "io_agent_free": [c_void_p],
    "io_notices_free": [c_void_p, c_size_t, c_size_t],
    "io_events_free": [c_void_p, c_size_t, c_size_t],
}
