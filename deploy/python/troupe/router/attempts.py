"""One request, from the line to its end, whatever is lost meanwhile.

| lost | said so far | what is done next |
| --- | --- | --- |
| the engine that computes the prompt | nothing, or a part | another one computes it |
| the same, of a pair that was asked at once | something, by the other engine | nothing: that one has the cache |
| the same, of an answer that is no stream | nothing | nothing, unless the other engine says that it has no cache |
| the engine that writes, before it was asked | nothing | another one takes the cache, which is pinned still |
| the engine that writes | nothing | the same, once; if the cache is gone, the prompt is computed again |
| the engine that writes | a part | the prompt and that part are computed again, and the rest is written elsewhere |
| the engine that writes | all but the end of the stream | the router says the end |

Each costs one of `limits.retries`. An answer that is not a stream is asked for again, since the client has none of it.
If a pair was asked at once, the loss of one engine ends the request at the other, and no cache is kept.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from troupe.hand_off import new_transfer, source_params
from troupe.router.carry import continued
from troupe.router.choice import Seat, Wanted
from troupe.router.chunks import check_answer, chunk_of, has_given_up, message_of, params_of
from troupe.router.errors import ApiError, one_line
from troupe.router.events import data_of, event_of, is_comment
from troupe.router.incoming import COMPLETIONS, Incoming
from troupe.router.instances import Fleet, Instance
from troupe.router.legs import decode_leg, encoded, prefill_leg
from troupe.router.line import Line
from troupe.router.members import Members
from troupe.router.metrics import Metrics
from troupe.router.reply import Reply
from troupe.router.said import Said
from troupe.router.settings import Settings
from troupe.router.upstream import LostError, RefusedError, Upstream
from troupe.router.waiting import end, within

__all__ = ["Attempts", "Parts"]

logger = logging.getLogger("troupe.router")

_DONE = b"data: [DONE]\n\n"
# Seconds. A decode that cannot load the cache may say so before the loss of the prefill is known.
_BLAME = 0.5
# vLLM's answer when a load has failed, and when something else fails in it.
_CANNOT_LOAD = 500

_Computes = asyncio.Task[Mapping[str, Any] | None]


@dataclass(frozen=True)
class Parts:
    """Shared by all requests. `members`: None without a cluster of Troupe. `over`: done when no request may go on any
    longer, because the router stops."""

    settings: Settings
    fleet: Fleet
    line: Line
    upstream: Upstream
    metrics: Metrics
    members: Members | None
    over: asyncio.Future[None]


@dataclass
class _Source:
    """The cache of a prompt, pinned at the engine that computed it. `said`: number of tokens of the text in that
    prompt. `tried`: a decode may have taken it."""

    at: Instance
    params: Mapping[str, Any]
    said: int
    tried: bool = False


@dataclass(frozen=True)
class _Leg:
    """The current question. `rest`: of a text that was begun elsewhere."""

    path: str
    body: Mapping[str, Any]
    chat: bool
    rest: bool
    whole: bool


class Attempts:
    """One request. Use it once."""

    def __init__(self, parts: Parts, incoming: Incoming, reply: Reply) -> None:
        self._parts = parts
        self._incoming = incoming
        self._reply = reply
        self._said = Said(chat=incoming.chat, wants_tokens=incoming.wants_tokens, fixed=incoming.fixed)
        self._failed: set[Instance] = set()
        self._source: _Source | None = None
        self._kept: list[tuple[Sequence[str], str]] = []  # transfers that may be kept for this request, and where
        self._place_id = f"{incoming.id}#{secrets.token_hex(4)}"  # a client may give an id twice
        self._placed = False
        self._longest: int | None = None  # the model's limit, from the first engine
        self._complete = False  # the client has the whole answer
        self._tried = 0
        self._began = time.monotonic()
        self._where = "nowhere"
        self._first: float | None = None

    async def run(self) -> None:
        """Answers the client. Raises only if the client has gone."""
        seconds, over = self._parts.settings.times.request, self._parts.over
        try:
            await within(seconds, self._run(), over)
        except asyncio.TimeoutError:
            late = ApiError(504, f"the request was not served within {seconds:g} s")
            await self._refuse(ApiError(503, "the router stops", retry_after=5) if over.done() else late)
        except ApiError as why:
            await self._refuse(why)
        else:
            self._log("")
        finally:
            self._give_back()
            if self._placed and self._parts.members is not None:
                self._parts.members.finished(self._place_id)

    async def _refuse(self, why: ApiError) -> None:
        if not self._complete:
            await self._reply.error(why)
        self._log(one_line(str(why)))

    # -- attempts

    async def _run(self) -> None:
        while True:
            leg = self._next_leg()
            if leg is None:
                await self._end("length")
                return
            wanted = await self._wanted(leg)
            async with self._parts.line.seat(wanted, again=self._tried > 0) as seat:
                self._tried += 1
                try:
                    await self._attempt(seat, leg)
                    self._kept.clear()
                    return
                except (LostError, RefusedError) as why:
                    lost = why
            if await self._is_over(lost):
                return
            if self._source is None:
                self._give_back()

    def _next_leg(self) -> _Leg | None:
        """None if the client has everything."""
        incoming = self._incoming
        if not self._said.tokens:
            return _Leg(incoming.path, incoming.body, incoming.chat, rest=False, whole=bool(incoming.whole))
        body = continued(incoming.body, self._said, self._longest)
        if isinstance(body, str):
            raise self._cannot_go_on(body)
        if body["max_tokens"] == 0:
            return None
        return _Leg(COMPLETIONS, body, False, rest=True, whole=body["max_tokens"] == 1)

    async def _wanted(self, leg: _Leg) -> Wanted:
        wanted = Wanted(self._incoming.model, whole=leg.whole, failed=self._failed)
        if self._source is not None:
            wanted.source = self._source.at
            if self._source.at.usable and self._parts.line.can(wanted):
                return wanted
            self._source = wanted.source = None
            self._give_back()
        members = self._parts.members
        failed = sorted(node for one in self._failed for node in one.nodes)
        asks = (self._tried == 0 or failed) and not leg.whole and not self._parts.line.full
        if asks and members is not None and members.may_place(self._incoming.model):
            self._placed = True
            wanted.placed = await members.place(self._place_id, self._incoming.affinity, failed)
        return wanted

    async def _attempt(self, seat: Seat, leg: _Leg) -> None:
        self._where = seat.decode.name
        self._said.begin()
        prefill, decode = seat.prefill, seat.decode
        if prefill is not None:
            self._where = f"{prefill.name} -> {decode.name}"
            self._parts.metrics.placements.labels("supervisor" if seat.as_placed else "router").inc()
        if prefill is not None and prefill.pushes_to(decode):
            await self._push(seat, prefill, leg, self._named(prefill))
        else:
            if prefill is not None:
                transfer = self._named(prefill) if prefill.ranks else None
                params = await self._prefill(seat, prefill, leg, transfer, in_turn=True)
                self._source = None if params is None else _Source(prefill, params, len(self._said.tokens))
            await self._decode_from_source(decode, leg)
        decode.served()

    def _named(self, prefill: Instance) -> str:
        """Names the transfer of an attempt, so that it can be released even if the engine's answer never comes."""
        transfer = new_transfer(prefill.ranks[0])
        self._kept.append((prefill.ranks, transfer))
        return transfer

    def _give_back(self) -> None:
        """Releases the caches that are kept for the request."""
        kept, self._kept = self._kept, []
        if self._parts.members is not None:
            for nodes, transfer in kept:
                self._parts.members.release(nodes, transfer)

    async def _prefill(
        self, seat: Seat, prefill: Instance, leg: _Leg, transfer: str | None, *, in_turn: bool
    ) -> Mapping[str, Any] | None:
        """Returns where the cache of the prompt is; None if the engine keeps none."""
        try:
            body = encoded(prefill_leg(leg.body, chat=leg.chat, transfer=transfer, in_turn=in_turn))
            answer = await self._parts.upstream.ask(prefill, leg.path, body, self._incoming.headers)
            params = params_of(prefill, answer.body)
            prefill.served()
        finally:
            self._parts.line.leave_prefill(seat)
        if params is None:
            logger.warning(
                "%s: %s keeps no cache of the prompt, which is computed twice", self._incoming.id, prefill.name
            )
        return params

    async def _decode_from_source(self, decode: Instance, leg: _Leg) -> None:
        """The holder of the cache may be gone without the router knowing yet: a decode that cannot load the cache is to
        blame only if it refuses the prompt itself as well."""
        if self._source is None:
            await self._decode(decode, leg, None)
            return
        try:
            await self._decode(decode, leg, self._source.params)
            return
        except RefusedError as why:
            if not self._may_lack_the_cache(why):
                raise
            refused = why
        self._source = None
        await self._decode_without_cache(decode, leg, refused)

    def _may_lack_the_cache(self, why: RefusedError) -> bool:
        return not self._said.heard and why.status == _CANNOT_LOAD

    async def _decode_without_cache(self, decode: Instance, leg: _Leg, refused: RefusedError) -> None:
        """Asks the engine that refused to load a cache for the whole request."""
        logger.warning("%s: %s; it computes the prompt itself now", self._incoming.id, refused)
        self._give_back()
        await self._decode(decode, leg, None)

    async def _decode(
        self, decode: Instance, leg: _Leg, source: Mapping[str, Any] | None, *, waits: bool = False
    ) -> None:
        """`waits`: the source is still being computed."""
        self._parts.metrics.attempts.labels("pair" if source is not None else "alone").inc()
        if self._longest is None:
            self._longest = decode.longest(self._incoming.model)
        tokens = self._incoming.stream and not self._said.fixed and decode.says_tokens
        body = encoded(decode_leg(leg.body, source, tokens=tokens))
        if self._incoming.stream:
            await self._stream(decode, leg, body, waits=waits)
            return
        answer = await self._parts.upstream.ask(decode, leg.path, body, self._incoming.headers)
        check_answer(decode, answer.body)
        self._reply.whole(answer.body, answer.content_type or "application/json")

    async def _push(self, seat: Seat, prefill: Instance, leg: _Leg, transfer: str) -> None:
        """Asks both engines at once: the cache moves while the prompt is computed."""
        self._parts.metrics.pushed.inc()
        source = source_params(transfer, prefill.ranks, engine_id=prefill.engine_id)
        computes = asyncio.create_task(self._prefill(seat, prefill, leg, transfer, in_turn=False))
        writes = asyncio.create_task(self._decode(seat.decode, leg, source, waits=True))
        try:
            await self._written(seat.decode, computes, writes)
            return
        except RefusedError as why:
            if not self._may_lack_the_cache(why):
                raise
            await asyncio.wait({computes}, timeout=_BLAME)
            if computes.done():
                computes.result()  # a failed prefill raises its own error
            refused = why
        finally:
            await end(computes, writes)
            self._log_late_loss(computes, writes)
        # The prefill may have preempted the prompt or not offered it, so the decode is to blame only if it refuses
        # again. No wait is needed: the prefill keeps no cache of a prompt that is computed again.
        await self._decode_without_cache(seat.decode, leg, refused)

    async def _written(self, decode: Instance, computes: _Computes, writes: asyncio.Task[None]) -> None:
        """Returns when `writes` has succeeded. Raises its error, or that of `computes` if the decode has said nothing
        until then. The decode's silence is counted from the end of `computes`."""
        both: set[asyncio.Future[Any]] = {computes, writes}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not writes.done() and not self._said.heard and not self._may_be_written_by_now(computes):
            computes.result()
            silence = self._parts.settings.times.silence
            await asyncio.wait({writes}, timeout=silence if self._incoming.stream else None)
            if not writes.done() and not self._said.heard:
                raise LostError(decode, f"it has said nothing for {silence:g} s", asked=True)
        await asyncio.wait({writes})
        writes.result()

    def _may_be_written_by_now(self, computes: _Computes) -> bool:
        """Whether the decode may have got the cache before the answer of the prefill was lost. A decode that does not
        stream says nothing before the end; if it did not get the cache, the cluster tells it so and it refuses."""
        why = computes.exception()
        return not self._incoming.stream and isinstance(why, LostError) and why.asked

    def _log_late_loss(self, computes: _Computes, writes: asyncio.Task[None]) -> None:
        """Logs a failure of the prefill after the decode had begun, and so had the cache."""
        why = None if computes.cancelled() else computes.exception()
        written = not writes.cancelled() and writes.exception() is None
        if why is not None and (self._said.heard or written):
            trace = None if isinstance(why, (LostError, RefusedError)) else why
            said = "%s: the prefill failed after the text had begun: %s"
            logger.warning(said, self._incoming.id, why, exc_info=trace)

    async def _stream(self, decode: Instance, leg: _Leg, body: bytes, *, waits: bool) -> None:
        headers = self._incoming.headers
        async with self._parts.upstream.stream(decode, leg.path, body, headers, waits=waits) as events:
            async for event in events:
                data = data_of(event)
                if data is None:
                    if self._reply.streams and is_comment(event):
                        await self._reply.event(event + b"\n\n")
                    continue
                if data == b"[DONE]":
                    if self._said.finish is None and not self._said.fixed:
                        break
                    await self._done()
                    return
                if has_given_up(data):
                    raise LostError(decode, "it gave the request up", asked=True)
                if self._incoming.fixed and b'"error"' not in data:  # passed on as it is: nothing in it is needed here
                    self._said.pass_on()
                    await self._tell(event + b"\n\n")
                    continue
                told = self._said.take(chunk_of(decode, data, chat=self._incoming.chat and leg.rest))
                if told:
                    await self._tell(b"".join(map(event_of, told)))
        raise LostError(decode, "its stream ended before its text", asked=True)

    async def _tell(self, data: bytes) -> None:
        if self._first is None:
            self._first = time.monotonic() - self._began
            self._parts.metrics.first_token.observe(self._first)
        await self._reply.event(data)

    # -- after a loss

    async def _is_over(self, lost: LostError | RefusedError) -> bool:
        """Whether the client has its whole answer by now. `ApiError`: it will not get it."""
        passes = isinstance(lost, RefusedError) and not lost.may_pass
        # The engine before may have taken the cache: this one is not to blame if it is gone.
        no_fault = isinstance(lost, RefusedError) and self._source is not None and self._source.tried
        if not passes and not no_fault:
            self._failed.add(lost.instance)
            lost.instance.failed()
        # With several choices, one may have ended and not the others.
        if self._said.finish is not None and not self._incoming.fixed:
            await self._end(None)
            return True
        if passes or self._tried > self._parts.settings.limits.retries:
            raise self._given_up(lost)
        if self._said.started and self._said.fixed:
            raise self._cannot_go_on(self._said.fixed)
        self._keep_source(lost)
        how = "pinned" if self._source is not None else "continued" if self._said.tokens else "restarted"
        self._parts.metrics.carried_on.labels(how).inc()
        logger.warning(
            "%s: goes on elsewhere (%s), after %d tokens: %s", self._incoming.id, how, len(self._said.tokens), lost
        )
        return False

    def _keep_source(self, lost: LostError | RefusedError) -> None:
        """Keeps the source if the next decode may still take its cache."""
        source = self._source
        if source is None:
            return
        if len(self._said.tokens) != source.said or isinstance(lost, RefusedError) or lost.instance is source.at:
            self._source = None
        elif lost.asked:
            self._source = None if source.tried else replace(source, tried=True)

    def _given_up(self, lost: LostError | RefusedError) -> ApiError:
        if isinstance(lost, RefusedError):
            later = self._parts.line.retry_after() if lost.status in (429, 503) else None
            said = message_of(lost.body)
            return ApiError(lost.status, said or str(lost), retry_after=later, body=lost.body if said else None)
        times = f" after {self._tried} attempts" if self._tried > 1 else ""
        return ApiError(502, f"no engine could serve it{times}; the last one was lost: {lost}")

    def _cannot_go_on(self, why: str) -> ApiError:
        return ApiError(502, f"the engine that wrote this text was lost, and it cannot be continued elsewhere: {why}")

    async def _end(self, finish: str | None) -> None:
        """Ends the stream in place of an engine that was lost before it could."""
        if finish is not None:
            empty: dict[str, Any] = {"delta": {}} if self._incoming.chat else {"text": ""}
            chunk = self._said.like(choices=[{"index": 0, **empty, "logprobs": None, "finish_reason": finish}])
            await self._reply.event(event_of(chunk))
        if self._incoming.wants_usage and not self._said.counted:
            await self._reply.event(event_of(self._said.like(choices=[], usage=self._said.usage())))
        await self._done()

    async def _done(self) -> None:
        self._complete = True
        await self._reply.event(_DONE)

    def _log(self, why: str) -> None:
        seconds = time.monotonic() - self._began
        first = "" if self._first is None else f", the first token after {self._first:.3f} s"
        logger.info(
            "%s: %s %s at %s, attempt %d, %.3f s%s%s",
            self._incoming.id,
            self._incoming.path,
            self._reply.status,
            self._where,
            self._tried,
            seconds,
            first,
            f": {why}" if why else "",
        )
