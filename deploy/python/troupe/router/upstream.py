"""HTTP to the engines. Distinguishes an answer from a loss, and a loss after the request was sent from one before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from troupe.router.errors import one_line
from troupe.router.events import Cutter, TooLongError
from troupe.router.instances import Instance
from troupe.router.settings import Times

__all__ = ["Answer", "LostError", "RefusedError", "Upstream"]

#: Bound on an answer that is not a stream, in bytes.
LONGEST_ANSWER = 256 * 2**20

# Servers close connections that are idle for five seconds; our requests must not meet that.
_KEEP_ALIVE = 3.0

_Result = TypeVar("_Result")


class LostError(Exception):
    """An engine will not answer. `asked`: it may have read the request."""

    def __init__(self, instance: Instance, why: str, *, asked: bool) -> None:
        super().__init__(f"{instance.name}: {one_line(why)}")
        self.instance = instance
        self.asked = asked


class RefusedError(Exception):
    """An engine answered with an error."""

    def __init__(self, instance: Instance, status: int, body: bytes) -> None:
        super().__init__(f"{instance.name} answered {status}: {one_line(body[:300].decode(errors='replace'))}")
        self.instance = instance
        self.status = status
        self.body = body

    @property
    def may_pass(self) -> bool:
        """Whether another engine may answer differently: the fault need not be the request's."""
        return self.status >= 500 or self.status in (408, 425, 429)


@dataclass(frozen=True)
class Answer:
    """`content_type`: "" if the engine gives none that can be passed on."""

    body: bytes
    content_type: str


class Upstream:
    """A client for all engines. Make it in a running event loop, and close it."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=True,
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """The whole answer, however long it takes. `LostError`, `RefusedError`."""

        async def work() -> Answer:
            async with self._post(instance, path, body, headers, silence=None) as response:
                return await _checked(instance, response)

        return await self._unless_lost(instance, work())

    async def get(
        self, instance: Instance, path: str, seconds: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The answer to a small question. `LostError`, `RefusedError`."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.get(
                instance.url + path, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return (await _checked(instance, response)).body
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as why:
            raise LostError(instance, _said(why), asked=False) from None

    @contextlib.asynccontextmanager
    async def stream(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], *, waits: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The events of a stream. Leaving the context ends the request at the engine.

        The iterator raises `LostError` if the stream breaks, or the engine is silent for `times.silence`. `waits`: the
        engine waits for another one first; its silence counts from its first event on.
        """
        silence = self._times.silence
        response = await self._unless_lost(
            instance,
            self._opened(instance, path, body, headers, None if waits else silence),
            unused=lambda late: late.close(),
        )

        def end(why: str) -> None:
            response.close()

        instance.when_lost(end)
        try:
            if response.status != 200:
                try:
                    await _checked(instance, response)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as why:
                    raise LostError(instance, _said(why), asked=True) from None
            async with contextlib.aclosing(_events(instance, response, silence if waits else None)) as events:
                yield events
        finally:
            instance.forget(end)
            response.close()

    # -- parts

    def _post(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], silence: float | None
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._times.connect, sock_read=silence)
        sent = {"Content-Type": "application/json", **headers}
        return self._session.post(instance.url + path, data=body, headers=sent, timeout=timeout, allow_redirects=False)

    async def _opened(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], silence: float | None
    ) -> Any:
        return await self._post(instance, path, body, headers, silence)

    async def _unless_lost(
        self, instance: Instance, work: Coroutine[Any, Any, _Result], unused: Any = lambda _: None
    ) -> _Result:
        """The result of the work, or `LostError` as soon as the engine is known to be lost. `unused`: called with a
        result that is no longer wanted."""
        task = asyncio.ensure_future(work)
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def tell(why: str) -> None:
            if not gone.done():
                gone.set_result(why)

        def clean(ended: asyncio.Task[_Result]) -> None:
            if not ended.cancelled() and ended.exception() is None:
                unused(ended.result())

        instance.when_lost(tell)
        try:
            both: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise LostError(instance, gone.result(), asked=True)
            return task.result()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as why:
            raise LostError(instance, _said(why), asked=False) from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as why:
            raise LostError(instance, _said(why), asked=True) from None
        except asyncio.CancelledError:
            if task.done():
                clean(task)
            raise
        finally:
            instance.forget(tell)
            if not task.done():
                task.add_done_callback(clean)
                task.cancel()


async def _checked(instance: Instance, response: Any) -> Answer:
    """`RefusedError` for a status other than 200."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > LONGEST_ANSWER:
            raise LostError(instance, f"its answer has more than {LONGEST_ANSWER} bytes", asked=True)
    body = b"".join(parts)
    if response.status != 200:
        raise RefusedError(instance, response.status if response.status >= 400 else 502, body)
    content_type = response.headers.get("Content-Type", "")
    return Answer(body, content_type if content_type.isascii() and content_type.isprintable() else "")


async def _events(instance: Instance, response: Any, silence: float | None) -> AsyncGenerator[bytes, None]:
    """`silence`: seconds that the engine may be silent after a first event; None: the connection watches this."""
    cutter = Cutter()
    loop = asyncio.get_running_loop()
    late: asyncio.TimerHandle | None = None
    try:
        async for part in response.content.iter_any():
            if late is not None:
                late.cancel()
            for event in cutter.feed(part):
                yield event
            if silence is not None:
                said = asyncio.TimeoutError(f"it has said nothing for {silence:g} s")
                late = loop.call_later(silence, response.content.set_exception, said)
    except (aiohttp.ClientError, asyncio.TimeoutError, TooLongError, OSError) as why:
        raise LostError(instance, _said(why), asked=True) from None
    finally:
        if late is not None:
            late.cancel()


def _said(why: BaseException) -> str:
    return f"{type(why).__name__}: {why}" if str(why) else type(why).__name__
