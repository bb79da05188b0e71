"""The routes: what clients and operators ask the router for."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from troupe.router.attempts import Attempts, Parts
from troupe.router.errors import ApiError
from troupe.router.incoming import CHAT, COMPLETIONS, id_of, read
from troupe.router.metrics import Metrics
from troupe.router.reply import ClientGoneError, Reply
from troupe.router.upstream import LostError, RefusedError

__all__ = ["Front"]

logger = logging.getLogger("troupe.router")

_BODY_SECONDS = 60.0
_MODELS_SECONDS = 5.0

_Handler = Callable[[web.Request], Awaitable[Any]]


class Front:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def application(self) -> web.Application:
        async def guarded(request: web.Request, handler: _Handler) -> Any:
            return await self._guard(request, handler)

        made = web.Application(client_max_size=self._parts.settings.limits.body, middlewares=[web.middleware(guarded)])
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
                incoming = read(request.path, await _body_of(request), request.headers, request_id)
            except ApiError as why:
                await reply.error(why)
            else:
                await Attempts(self._parts, incoming, reply).run()
            return await reply.end()
        except (asyncio.CancelledError, ClientGoneError) as why:
            metrics.disconnects.inc()
            logger.info("%s: its client went away", request_id)
            if isinstance(why, asyncio.CancelledError):
                raise
            return web.Response(status=499)  # nobody reads it
        finally:
            metrics.seconds.observe(time.monotonic() - began)
            if reply.status is not None:
                metrics.requests.labels(request.path, str(reply.status)).inc()
                metrics.broken.inc(reply.broken)

    async def _models(self, request: web.Request) -> Any:
        """Of all engines. Where they do not tell the router, because they want to know who asks: of one."""
        fleet = self._parts.fleet
        models = fleet.models()
        if models:
            return _json(200, {"object": "list", "data": models})
        engine = next((one for one in fleet if one.usable), None)
        if engine is None:
            raise ApiError(503, "no engine is there", retry_after=5)
        headers = {key: request.headers[key] for key in ("Authorization",) if key in request.headers}
        try:
            answer = await self._parts.upstream.get(engine, request.path, _MODELS_SECONDS, headers)
        except RefusedError as why:
            raise ApiError(why.status, str(why), body=why.body) from None
        except LostError as why:
            raise ApiError(502, str(why)) from None
        return web.Response(body=answer, headers={"Content-Type": "application/json"})

    # -- for operators

    async def _health(self, request: web.Request) -> Any:
        """200: there is a way to serve a request."""
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
        """Whatever is wrong is said in the words of the API."""
        request_id = id_of(request.headers)
        try:
            return await handler(request)
        except ApiError as why:
            found = why
        except web.HTTPRequestEntityTooLarge:
            found = ApiError(413, f"the body has more than {self._parts.settings.limits.body} bytes")
        except web.HTTPException as why:
            if why.status < 400:
                raise
            said = {404: f"there is no {request.path}", 405: f"{request.path} is not for {request.method}"}
            found = ApiError(why.status, said.get(why.status, why.reason))
        except Exception:
            logger.exception("%s: %s %s failed", request_id, request.method, request.path)
            found = ApiError(500, f"the router failed; its log says more of request {request_id}")
        headers = {"X-Request-Id": request_id, "Content-Type": "application/json"}
        if found.retry_after is not None:
            headers["Retry-After"] = str(found.retry_after)
        return web.Response(status=found.status, body=found.document(), headers=headers)


async def _body_of(request: web.Request) -> bytes:
    try:
        body: bytes = await asyncio.wait_for(request.read(), _BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {_BODY_SECONDS:g} s") from None
    except (ConnectionError, web.RequestPayloadError) as why:
        raise ClientGoneError(str(why)) from None
    return body


def _json(status: int, document: object) -> Any:
    return web.Response(status=status, body=json.dumps(document).encode(), headers={"Content-Type": "application/json"})
