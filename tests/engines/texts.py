"""Texts as people write and read them: strings and chats, answered whole or piece by piece."""
import json

from clients import answer_of, asked_of
from servers import Failed

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
WISHES = {"model": "tiny", "temperature": 0, "ignore_eos": True}
SAID = "Wer fährt nach Łódź? 二人と猫 🐈. " * 12  # most characters take several tokens
SHORT, LONG = 60, 1200  # tokens
WRITTEN_TOO_SOON = 5


def body_of(path, tokens):
    asks = {"messages": [{"role": "user", "content": SAID}]} if path == CHAT else {"prompt": SAID}
    return {**WISHES, **asks, "max_tokens": tokens}


def whole(server, path, tokens):
    with asked_of(server.url, body_of(path, tokens), path) as connection:
        choice = json.load(answer_of(server.url, connection))["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def pieces(server, path, tokens):
    with asked_of(server.url, {**body_of(path, tokens), "stream": True}, path) as connection:
        for line in answer_of(server.url, connection):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise Failed(f"{server.name} broke a stream off: {chunk['error']}\n{server.tail()}")
                for choice in chunk["choices"]:
                    yield (choice["delta"].get("content") if path == CHAT else choice["text"]) or ""
    raise Failed(f"{server.name} ended a stream too soon\n{server.tail()}")


def check_read(router, prefill):
    """Two servers must write what one writes alone."""
    for path in (CHAT, COMPLETION):
        alone = whole(prefill, path, SHORT)
        for how, text in (("whole", whole(router, path, SHORT)), ("piece by piece", "".join(pieces(router, path, SHORT)))):
            if text != alone:
                raise Failed(f"{path} says, {how}, {text!r} instead of {alone!r}\n{router.tail()}")
    print("texts of strings and of chats, whole and piece by piece, are those of one server", flush=True)


def check_carried_on(router, prefill, decodes):
    """Kills the server that writes a chat in the middle; another one continues. Returns the killed server.
    `decodes`: how to kill each server."""
    alone = whole(prefill, CHAT, LONG)
    for _ in range(WRITTEN_TOO_SOON):
        text, killed = "", None
        for piece in pieces(router, CHAT, LONG):
            text += piece
            if killed is None and len(text) >= 20:
                writes = [one for one in decodes if router.metric("troupe_router_engine_requests", engine=one.address)]
                for killed in writes:
                    decodes[killed]()
        if text != alone:
            who = "nobody" if killed is None else killed.name
            begins = next((place for place, two in enumerate(zip(text, alone)) if two[0] != two[1]), min(len(text), len(alone)))
            raise Failed(f"of {len(alone)} characters, {who} being killed, another text came behind {begins}: "
                         f"{text[begins:begins + 40]!r} instead of {alone[begins:begins + 40]!r}\n{router.tail()}")
        if killed is not None:
            print(f"{killed.name} was killed, and a chat of {len(text)} characters went on", flush=True)
            return killed
    raise Failed(f"nobody was found at writing one of {WRITTEN_TOO_SOON} texts\n{router.tail()}")
