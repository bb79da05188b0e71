"""The exceptions of NIXL's bindings, and how Troupe's errors map to them."""
# ruff: noqa: N801 - the names are NIXL's

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from troupe.errors import ErrorCode, TroupeError


class nixlBackendError(Exception):
    """The link failed, or one of its bounds was reached: the sentence says which."""


class nixlCancelledError(Exception):
    """The transfer was given up: it was cancelled, a memory of it was deregistered here, or its agent was removed."""


class nixlInvalidParamError(Exception):
    """An argument that cannot be accepted as it is."""


class nixlMismatchError(Exception):
    """The bytes are not metadata or a list, or are of another version."""


class nixlNoTelemetryError(Exception):
    """`capture_telemetry` is off, or the transfer has not ended."""


class nixlNotAllowedError(Exception):
    """The owner of the memory does not allow it (any more)."""


class nixlNotFoundError(Exception):
    """No such agent, memory or backend."""


class nixlNotPostedError(Exception):
    """The transfer was not posted yet."""


class nixlNotSupportedError(Exception):
    """Troupe does not support this."""


class nixlRemoteDisconnectError(Exception):
    """The remote agent is gone, or the link to it is."""


class nixlRepostActiveError(Exception):
    """The transfer is active: post it again when it has ended."""


class nixlUnknownError(Exception):
    """A defect of Troupe itself."""


_OF_CODES: dict[ErrorCode, type[Exception]] = {
    ErrorCode.PEER_LOST: nixlRemoteDisconnectError,
    ErrorCode.PEER_UNREACHABLE: nixlRemoteDisconnectError,
    ErrorCode.LINK_BROKEN: nixlRemoteDisconnectError,
    ErrorCode.STALE_INCARNATION: nixlRemoteDisconnectError,
    ErrorCode.GRANT_REVOKED: nixlNotAllowedError,
    ErrorCode.UNAUTHORIZED: nixlNotAllowedError,
    ErrorCode.ABORTED: nixlCancelledError,
    ErrorCode.OUT_OF_RANGE: nixlInvalidParamError,
    ErrorCode.INVALID_CONFIG: nixlInvalidParamError,
    ErrorCode.NOT_FOUND: nixlNotFoundError,
    ErrorCode.UNKNOWN_REGION: nixlNotFoundError,
    ErrorCode.LAYOUT_MISMATCH: nixlMismatchError,
    ErrorCode.VERSION_MISMATCH: nixlMismatchError,
    ErrorCode.BACKEND_UNAVAILABLE: nixlNotSupportedError,
    ErrorCode.NO_DEVICE: nixlNotSupportedError,
    ErrorCode.INTERNAL: nixlUnknownError,
}


def nixl_error(why: TroupeError, but: Mapping[ErrorCode, type[Exception]] | None = None) -> Exception:
    """`but`: codes that mean something else here."""
    kind = (but or {}).get(why.code) or _OF_CODES.get(why.code, nixlBackendError)
    return kind(str(why))


@contextmanager
def translated(but: Mapping[ErrorCode, type[Exception]] | None = None) -> Iterator[None]:
    """Translates Troupe's errors into NIXL's."""
    try:
        yield
    except TroupeError as why:
        raise nixl_error(why, but) from why
