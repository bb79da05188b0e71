"""All errors, as one exception with a code to switch on."""

from __future__ import annotations

import enum

__all__ = ["ErrorCode", "TroupeError", "WaitTimeout"]


class ErrorCode(enum.IntEnum):
    """Why something failed. The names are those of the logs; docs/troubleshooting.md says what to do about each."""

    INVALID_CONFIG = 1
    NO_DEVICE = 2
    LAYOUT_MISMATCH = 3
    VERSION_MISMATCH = 4
    UNKNOWN_REGION = 5
    OUT_OF_RANGE = 6
    GRANT_REVOKED = 7
    POOL_EXHAUSTED = 8
    OVERLOADED = 9
    NOT_FOUND = 10
    ALREADY_EXISTS = 11
    PEER_UNREACHABLE = 12
    PEER_LOST = 13
    LINK_BROKEN = 14
    DEADLINE = 15
    ABORTED = 16
    LEASE_EXPIRED = 17
    STALE_INCARNATION = 18
    UNAUTHORIZED = 19
    BACKEND_UNAVAILABLE = 20
    INTERNAL = 21
    TIMED_OUT = 100  # only in `WaitTimeout`


class TroupeError(Exception):
    """A call that was refused, or an operation that failed.

    Attributes:
        code: the code to switch on.
        reason: one sentence: what was wrong and what to do about it.
    """

    code: ErrorCode
    reason: str

    def __init__(self, code: int, reason: str) -> None:
        try:
            self.code = ErrorCode(code)
        except ValueError:  # of a newer library
            self.code = ErrorCode.INTERNAL
            reason = f"{reason} (code {code})"
        self.reason = reason
        super().__init__(f"{self.code.name.lower()}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (int(self.code), self.reason)


class WaitTimeout(TroupeError, TimeoutError):  # noqa: N818
    """A wait reached its timeout. Nothing has ended, and no event was taken."""
