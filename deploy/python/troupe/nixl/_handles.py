"""The configuration and the handles of `nixl_agent`."""
# ruff: noqa: N801, PLR0917 - names and calls are NIXL's

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from troupe import io
from troupe.errors import WaitTimeout
from troupe.nixl._errors import nixl_error, translated

DEFAULT_COMM_PORT = 8888
REST = 10.0  # seconds for a peer to finish with memory or a transfer that is withdrawn


class nixl_thread_sync_t(Enum):
    """Accepted and not needed: every call may be made from any thread."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0  # noqa: PIE796 - so it is in NIXL


class nixl_agent_config:
    """NIXL's settings, and two of Troupe's own: `host`, the address that peers dial, and `security`, without which that
    is a loopback address.

    `backends`: names of `get_plugin_list`; "UCX" stands for the best that reaches a peer. `num_threads`: how many make
    progress; 0: one.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
        *,
        host: str = "127.0.0.1",
        security: io.Security | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode is a nixl_thread_sync_t, not {type(sync_mode).__name__}")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode
        self.host = host
        self.security = security


@dataclass(frozen=True)
class nixlXferTelemetry:
    """Times in microseconds: since the epoch, and durations. A transfer ends when it is seen to have ended."""

    startTime: int  # noqa: N815
    postDuration: int  # noqa: N815
    xferDuration: int  # noqa: N815
    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815


class nixl_prepped_dlist_handle:
    """A prepared list. Released with `release`, or when it is no longer referenced."""

    def __init__(self, plan: io.Plan, agent_name: str, count: int) -> None:
        self._plan = plan
        self._agent_name = agent_name
        self._count = count
        self._released = False

    def __repr__(self) -> str:
        return f"<nixl_prepped_dlist_handle of {self._count} descriptors, released={self._released}>"

    def release(self) -> None:
        self._released = True
        with translated():
            self._plan.release()


class nixl_xfer_handle:
    """A transfer to be posted. Released with `release`, or when it is no longer referenced and has ended."""

    def __init__(self, transfer: io.Transfer, peer: io.Peer, notice: bytes, count: int) -> None:
        self._transfer = transfer
        self._peer = peer
        self._notice = notice
        self._count = count
        self._released = False
        self._posted_at = 0.0
        self._post_seconds = 0.0
        self._ended_at = 0.0

    def __repr__(self) -> str:
        return f"<nixl_xfer_handle of {self._count} descriptors, released={self._released}>"

    def release(self) -> None:
        """Releases it. An active transfer is cancelled first, so that none of its bytes move in memory of this agent
        afterwards."""
        if self._released:
            return
        with translated():
            if self._transfer.status.state is io.State.ACTIVE:
                self._transfer.cancel()
                try:
                    self._transfer.agent.wait([self._transfer], REST)
                except WaitTimeout as why:
                    raise nixl_error(why) from why
            self._transfer.release()
        self._released = True
