"""A double of a vLLM server, for what a real one cannot be made to do: it dies, freezes or fails when a test wants.

Its text is a function of the tokens before it, so a text that was continued in the right place equals that of one
server alone. About every fifth token is the first half of a character: it has no text until the next token comes,
and a prompt that ends in one gives nonsense, as with vLLM's detokenizer. A cache that is handed off is pinned until
a decode has taken it, once.

Behaviour that a test sets by POST /behave. After N tokens of a stream: `die_after` N (SIGKILL), `stop_after` N
(SIGSTOP), `break_after` N (breaks its connection), `fail_after` N (an error in the stream), `abort_after` N (it
ends like a server's stream does when the server stops); if there is a file `trigger`, only the server that removes
it does so. `status`: of every answer; `pause`: seconds before each token; `mute`: sends no token ids; `key`: the
Authorization that /v1/models requires; `reason` N: the number of reasoning tokens. `raw`: its streams consist of
these bytes, `cut` in pieces of N, `repeat` N times; `answer`: these bytes are its answers of 200.

A cache that is pushed is a file in the folder `caches`, named by its transfer, for which a decode waits. If there
is a file `gate`, the prefill answers only once that exists; the cache is there before that (`early`), or with the
answer. With `keeps` 0 there is no cache, and both engines say so.
GET /journal: the requests that it received, and how many of them ended before they were answered.
"""
import asyncio
import hashlib
import json
import os
import pathlib
import secrets
import signal

from aiohttp import ClientSession, web

VOCABULARY = 1000
EOS = 999
LONGEST = 512

def next_token(tokens):
    """Never the end by itself; sometimes half of a character."""
    digest = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % EOS


def is_half(token):
    return token % 5 == 0


def text_of(tokens):
    """The text of whole characters: a half that nothing follows has no text."""
    said, half = "", None
    for token in tokens:
        if half is not None:
            said, half = said + f"<{half}+{token}>", None
        elif is_half(token):
            half = token
        else:
            said += f" {token}"
    return said


def ends_in_a_half(tokens):
    half = False
    for token in tokens:
        half = is_half(token) and not half
    return half


def tokens_of(text):
    return [1 + byte % 4 for byte in text.encode()]  # never a half character


class Server:
    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.port = 0
        self.journal, self.ended_early = [], 0
        self.pinned = set()
        self.gathered = 0

    def application(self):
        app = web.Application(client_max_size=2**26)
        app.add_routes([
            web.get("/health", self.health), web.get("/v1/models", self.models), web.get("/journal", self.tell),
            web.post("/behave", self.behave), web.post("/take", self.take),
            web.post("/v1/completions", self.generate), web.post("/v1/chat/completions", self.generate)])
        return app

    async def health(self, _):
        return web.Response()

    async def models(self, request):
        if self.behaviour.get("key") and request.headers.get("Authorization") != self.behaviour["key"]:
            return error(401, "who asks?")
        card = {"id": "tiny", "object": "model", "max_model_len": LONGEST}
        return web.json_response({"object": "list", "data": [card]})

    async def tell(self, _):
        return web.json_response({"asked": self.journal, "ended_early": self.ended_early, "pinned": len(self.pinned)})

    async def behave(self, request):
        self.behaviour = await request.json()
        self.gathered = 0
        return web.Response()

    async def take(self, request):
        """A decode asks for a cache: 404 if it is gone."""
        transfer = (await request.json())["transfer"]
        if transfer not in self.pinned:
            return web.Response(status=404)
        self.pinned.discard(transfer)
        return web.Response()

    async def generate(self, request):
        body = await request.json()
        self.journal.append({"path": request.path, "body": body, "id": request.headers.get("X-Request-Id"),
                             "authorization": request.headers.get("Authorization")})
        try:
            return await self.answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.ended_early += 1
            raise

    async def fails_with_others(self):
        """The first `fail_together` requests are answered together, when the last of them has come."""
        count = self.behaviour.get("fail_together", 0)
        self.gathered += 1
        if self.gathered > count:
            return False
        while self.gathered < count:
            await asyncio.sleep(0.01)
        return True

    async def answer(self, request, body):
        await self.push(body.get("kv_transfer_params") or {})
        status = self.behaviour.get("status")
        if status:
            return error(status, "as the test wants it")
        if await self.fails_with_others():
            return error(500, "as the test wants it")
        if "raw" in self.behaviour and body.get("stream"):
            return await self.stream_raw(request)
        if "answer" in self.behaviour and not body.get("stream"):
            return web.Response(text=self.behaviour["answer"], content_type="application/json")
        chat = request.path.startswith("/v1/chat")
        prompt = body["messages"] if chat else body["prompt"]
        if chat:
            prompt = "".join(f"{one['role']}:{one['content']};" for one in prompt)
        prompt = tokens_of(prompt) if isinstance(prompt, str) else prompt
        most = body.get("max_completion_tokens") or body.get("max_tokens") or (LONGEST - len(prompt) if chat else 16)
        if len(prompt) + most > LONGEST:
            return error(400, f"this model takes {LONGEST} tokens")
        text = Text(request, body, chat, prompt, most)
        if body.get("stream"):
            return await self.stream(request, text)
        if not await self.load(body.get("kv_transfer_params") or {}):
            return error(500, "its cache cannot be loaded")
        await asyncio.sleep(self.behaviour.get("pause", 0) * most)
        return web.json_response(text.whole(self.hand_off(body)))

    async def push(self, params):
        """Makes a cache that a decode waits for, or ends its transfer."""
        if not params.get("do_remote_decode") or "troupe" not in params or "caches" not in self.behaviour:
            return
        made = None
        while True:
            gate = self.behaviour.get("gate")
            opened = gate is None or os.path.exists(gate)
            if made is None and (opened or self.behaviour.get("early")) and not self.behaviour.get("status"):
                made = "whole" if self.behaviour.get("keeps", 1) else "none"
                file = pathlib.Path(self.behaviour["caches"]) / params["troupe"]["request"]
                written = file.with_name(file.name + ".new")
                written.write_text(made)
                written.rename(file)
            if opened:
                return
            await asyncio.sleep(0.005)

    async def pushed(self, transfer):
        """Waits for a cache; returns False if there will be none."""
        file = pathlib.Path(self.behaviour["caches"]) / transfer
        while not file.exists():
            await asyncio.sleep(0.005)
        made = file.read_text()
        file.unlink()
        return made == "whole"

    async def load(self, params):
        if not params.get("do_remote_prefill"):
            return True
        if "at" not in params:
            return await self.pushed(params["troupe"]["request"])
        async with ClientSession() as client, client.post(params["at"] + "/take", json=params) as taken:
            return taken.status == 200

    def hand_off(self, body):
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_decode") or not self.behaviour.get("keeps", 1):
            return None
        transfer = params["troupe"]["request"] if "troupe" in params else secrets.token_hex(8)
        self.pinned.add(transfer)
        transfer = "gone" if self.behaviour.get("loses") else transfer
        return {"do_remote_prefill": True, "do_remote_decode": False, "transfer": transfer,
                "at": f"http://127.0.0.1:{self.port}"}

    def fires(self, what, count):
        if self.behaviour.get(what) != count:
            return False
        try:
            if "trigger" in self.behaviour:
                os.unlink(self.behaviour["trigger"])
        except FileNotFoundError:
            return False
        return True

    async def stream_raw(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        raw = self.behaviour["raw"].encode()
        step = self.behaviour.get("cut", len(raw) or 1)
        for _ in range(self.behaviour.get("repeat", 1)):
            for at in range(0, len(raw), step):
                await response.write(raw[at:at + step])
                await asyncio.sleep(0.001)  # one event at a time
        return response

    async def stream(self, request, text):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(document):
            data = document if isinstance(document, str) else json.dumps(document)
            await response.write(f"data: {data}\n\n".encode())

        if not await self.load(text.body.get("kv_transfer_params") or {}):
            await say({"error": {"message": "its cache cannot be loaded", "type": "InternalServerError", "code": 500}})
            await say("[DONE]")
            return response
        mute, reasons = self.behaviour.get("mute"), self.behaviour.get("reason", 0)
        if text.chat:
            await say(text.opening())
        for count in range(text.most + 1):
            await asyncio.sleep(self.behaviour.get("pause", 0))
            if self.fires("die_after", count):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fires("stop_after", count):
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fires("break_after", count):
                request.transport.abort()
                return response
            if self.fires("abort_after", count):
                chunk = text.next()
                chunk["choices"][0]["finish_reason"] = "abort"
                await say(chunk)
                await say("[DONE]")
                return response
            if self.fires("fail_after", count):
                await say({"error": {"message": "the engine died", "type": "InternalServerError", "code": 500}})
                await say("[DONE]")
                return response
            if count == text.most:
                break
            await say(text.next(mute=mute, reasons=count < reasons))
        if text.wants_usage:
            await say(text.usage_chunk())
        await say("[DONE]")
        return response


class Text:
    """One text, in the course of being written."""

    def __init__(self, request, body, chat, prompt, most):
        self.body, self.chat, self.prompt, self.most = body, chat, prompt, most
        self.said = []
        self.wants_tokens = bool(body.get("return_token_ids"))
        self.wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        kind = "chatcmpl" if chat else "cmpl"
        self.alike = {"id": f"{kind}-{request.headers.get('X-Request-Id', secrets.token_hex(4))}",
                      "object": "chat.completion.chunk" if chat else "text_completion",
                      "created": secrets.randbelow(10**6), "model": "tiny"}

    def opening(self):
        chunk = {**self.alike, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""},
                                            "logprobs": None, "finish_reason": None}]}
        if self.wants_tokens:
            chunk["prompt_token_ids"] = self.prompt
        return chunk

    def next(self, *, mute=False, reasons=False):
        before = text_of(self.said)
        self.said.append(next_token(self.prompt + self.said))
        text = text_of(self.said)[len(before):]
        if len(self.said) == 1 and ends_in_a_half(self.prompt):
            text = "NONSENSE"
        choice = {"index": 0, "logprobs": None, "finish_reason": "length" if len(self.said) == self.most else None}
        choice.update({"delta": {"reasoning" if reasons else "content": text}} if self.chat else {"text": text})
        if self.wants_tokens and not mute:
            choice["token_ids"] = self.said[-1:]
            if len(self.said) == 1 and not self.chat:
                choice["prompt_token_ids"] = self.prompt
        return {**self.alike, "choices": [choice]}

    def usage(self):
        return {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.said),
                "total_tokens": len(self.prompt) + len(self.said)}

    def usage_chunk(self):
        return {**self.alike, "choices": [], "usage": self.usage()}

    def whole(self, params):
        while len(self.said) < self.most:
            self.said.append(next_token(self.prompt + self.said))
        text = text_of(self.said)
        choice = {"index": 0, "logprobs": None, "finish_reason": "length"}
        choice.update({"message": {"role": "assistant", "content": text}} if self.chat else {"text": text})
        answer = {**self.alike, "choices": [choice], "usage": self.usage(), "kv_transfer_params": params}
        if self.wants_tokens:
            choice["token_ids"] = self.said
            (answer if self.chat else choice)["prompt_token_ids"] = self.prompt
        return answer


def error(status, message):
    return web.json_response({"error": {"message": message, "type": "double", "param": None, "code": status}},
                             status=status)


async def main(behaviour, listens=lambda port: None):
    """`listens` is called once the server listens."""
    server = Server(behaviour)
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    kept = listens(server.port)
    print(f"listens at http://127.0.0.1:{server.port}", flush=True)
    await asyncio.Event().wait()
    del kept
