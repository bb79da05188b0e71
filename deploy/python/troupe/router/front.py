"""The routes for clients and operators."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from troupe.router.attempts import Attempts, Parts
from troupe.router.bodies import Bodies
from troupe.router.errors import ApiError
from troupe.router.incoming import CHAT, COMPLETIONS, forwarded, id_of, read
from troupe.router.metrics import Metrics
from troupe.router.reply import ClientGoneError, Reply
from troupe.router.upstream import LostError, RefusedError

__all__ = ["Front"]

logger = logging.getLogger("troupe.router")

_MODELS_SECONDS = 5.0

_Handler = Callable[[web.Request], Awaitable[Any]]


class Front:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._bodies = Bodies(parts.settings.limits)

    def application(self) -> web.Application:
        async def guarded(request: web.Request, handler: _Handler) -> Any:
            return await self._guard(request, handler)

        made = web.Application(middlewares=[web.middleware(guarded)])
        made.router.add_post(CHAT, self._generate)
        made.router.add_post(COMPLETIONS, self._generate)
        made.router.add_get("/v1/models", self._models)
        made.router.add_get("/health", self._health)
        made.router.add_get("/metrics", self._metrics)
        return made

    # -- for clients

    async def _generate(self, request: web.Request) -> Any:
        began = time.monotonic()
        request_id = id_of(request.headers)
        reply = Reply(request, request_id)
        metrics = self._parts.metrics
        try:
            try:
                with self._bodies.room() as room:
                    incoming = read(request.path, await room.read(request), request.headers, request_id)
                    await Attempts(self._parts, incoming, reply).run()
            except ApiError as why:
                await reply.error(why)
            except ClientGoneError:
                raise
            except Exception:
                logger.exception("%s: %s failed", request_id, request.path)
                await reply.error(_own_fault(request_id))  # as an event, where a stream has begun
            return await reply.end()
        except (asyncio.CancelledError, ClientGoneError) as why:
            metrics.disconnects.inc()
            logger.info("%s: its client went away%s", request_id, f": {why}" if str(why) else "")
            if isinstance(why, asyncio.CancelledError):
                raise
            return reply.abandoned()
        finally:
            metrics.seconds.observe(time.monotonic() - began)
            if reply.status is not None:
                metrics.requests.labels(request.path, str(reply.status)).inc()
                metrics.broken.inc(reply.broken)

    async def _models(self, request: web.Request) -> Any:
        """The models of all engines. If the engines do not tell the router, because they require the client's
        authorization: of one."""
        fleet = self._parts.fleet
        models = fleet.models()
        if models:
            return _json(200, {"object": "list", "data": models})
        engine = next((one for one in fleet if one.usable), None)
        if engine is None:
            raise ApiError(503, "no engine is available", retry_after=5)
        try:
            answer = await self._parts.upstream.get(engine, request.path, _MODELS_SECONDS, forwarded(request.headers))
        except RefusedError as why:
            raise ApiError(why.status, str(why), body=why.body) from None
        except LostError as why:
            raise ApiError(502, str(why)) from None
        return web.Response(body=answer, headers={"Content-Type": "application/json"})

    # -- for operators

    async def _health(self, request: web.Request) -> Any:
        """200 if a request can be served."""
        fleet = self._parts.fleet
        engines = [
            {"engine": one.name, "role": one.role, "usable": one.usable, "member": one.member or None, "why": one.why}
            for one in fleet
        ]
        serves = any(one.usable and (one.decodes or one.plain) for one in fleet)
        members = self._parts.members
        supervisor = None if members is None else members.reachable
        return _json(200 if serves else 503, {"serves": serves, "supervisor": supervisor, "engines": engines})

    async def _metrics(self, request: web.Request) -> Any:
        text = self._parts.metrics.text(self._parts.fleet, self._parts.line)
        return web.Response(body=text, headers={"Content-Type": Metrics.CONTENT_TYPE})

    # -- errors

    async def _guard(self, request: web.Request, handler: _Handler) -> Any:
        """Answers every failure in the form of the API."""
        request_id = id_of(request.headers)
        try:
            return await handler(request)
        except ApiError as why:
            found = why
        except web.HTTPException as why:
            if why.status < 400:
                raise
            said = {404: f"there is no {request.path}", 405: f"{request.path} does not accept {request.method}"}
            found = ApiError(why.status, said.get(why.status, why.reason))
        except Exception:
            logger.exception("%s: %r failed", request_id, request.path)
            found = _own_fault(request_id)
        headers = {"X-Request-Id": request_id, "Content-Type": "application/json"}
        if found.retry_after is not None:
            headers["Retry-After"] = str(found.retry_after)
        return web.Response(status=found.status, body=found.document(), headers=headers)


def _own_fault(request_id: str) -> ApiError:
    return ApiError(500, f"the router failed; its log says more about request {request_id}")


def _json(status: int, document: object) -> Any:
    return web.Response(status=status, body=json.dumps(document).encode(), headers={"Content-Type": "application/json"})
