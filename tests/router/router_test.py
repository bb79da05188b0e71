"""The router in front of doubles of vLLM's servers, all of them separate processes: what it routes, continues,
limits and refuses. tests/engines uses real servers.

Run by ctest, router.doubles, with the Python of the engines' environment.
"""
import concurrent.futures
import contextlib
import gzip
import http.client
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
import unittest
import urllib.parse

from parts import PATIENCE, Double, Router, RouterCommand, Stream, chat_prompt, eventually, text_after, tokens_after

PROMPT = "say something"
MESSAGES = [{"role": "user", "content": "say something"}]


def completion(**more):
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, **more}


def chat(**more):
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 0, **more}


class Routed(unittest.TestCase):
    """A router in front of doubles, which each test creates as it needs them."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def double(self, name, **behaviour):
        return self.enterContext(Double(f"{self.id().rpartition('.')[2][:60]}-{name}", self.folder, **behaviour))

    def router(self, *words, usable, settings=None, seconds=None):
        if settings:
            file = self.folder / f"{time.monotonic_ns()}.yaml"
            file.write_text(settings)
            words = (file, *words)
        made = self.enterContext(Router(f"{self.id().rpartition('.')[2][:60]}-router", self.folder, words, seconds))
        return made.wait_for(usable)

    def pair(self, settings=None, prefills=1, decodes=2, seconds=None):
        """Starts self.prefills and self.decodes behind self.front."""
        self.prefills = [self.double(f"prefill{place}") for place in range(prefills)]
        self.decodes = [self.double(f"decode{place}", pause=0.005) for place in range(decodes)]
        words = []
        for role, doubles in (("--prefill", self.prefills), ("--decode", self.decodes)):
            for one in doubles:
                words += [role, one.wait().url]
        self.front = self.router(*words, usable=prefills + decodes, settings=settings, seconds=seconds)

    def stream(self, body, path="/v1/completions", headers=None):
        with self.front.open(path, {**body, "stream": True}, headers) as answer:
            return Stream(answer)

    def assert_whole(self, stream, prompt=PROMPT, count=40):
        """Expects one stream without any trace of a failure."""
        self.assertIsNone(stream.error)
        self.assertTrue(stream.done)
        self.assertEqual(stream.text, text_after(prompt, count))
        self.assertEqual(len(stream.finish), 1)
        self.assertEqual(len(stream.ids), 1)


class Serves(Routed):
    """Cases in which nothing fails: one set of processes for all of them."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.prefill, cls.decode = (cls.enterClassContext(Double(name, cls.folder)) for name in ("prefill", "decode"))
        words = ["--prefill", cls.prefill.wait().url, "--decode", cls.decode.wait().url]
        cls.front = cls.enterClassContext(RouterCommand("router", cls.folder, words)).wait_for(2)

    def test_a_prompt_is_computed_by_one_engine_and_its_text_written_by_another(self):
        status, headers, answer = self.front.ask("/v1/completions", completion(), {"X-Request-Id": "one"})
        self.assertEqual((status, headers["X-Request-Id"]), (200, "one"))
        self.assertEqual(answer["choices"][0]["text"], text_after(PROMPT, 40))
        [first] = self.prefill.asked("one")
        self.assertEqual((first["max_tokens"], first["stream"]), (1, False))
        self.assertTrue(first["kv_transfer_params"]["do_remote_decode"])
        [second] = self.decode.asked("one")
        self.assertTrue(second["kv_transfer_params"]["do_remote_prefill"])
        self.assertEqual(self.prefill.journal["pinned"], 0)

    def test_a_stream_is_the_text_of_one_engine_and_shows_nothing_of_the_router(self):
        stream = self.stream(completion(stream_options={"include_usage": True}))
        self.assert_whole(stream)
        self.assertEqual(stream.usage[-1]["completion_tokens"], 40)
        self.assertFalse(stream.keys & {"token_ids", "prompt_token_ids", "kv_transfer_params"})

    def test_a_client_that_wants_token_ids_has_them_all_and_those_of_the_prompt_once(self):
        stream = self.stream(completion(return_token_ids=True))
        self.assertEqual(stream.tokens, tokens_after(PROMPT, 40))
        self.assertEqual(sum("prompt_token_ids" in one["choices"][0] for one in stream.chunks), 1)

    def test_a_chat_is_served_likewise(self):
        prompt = chat_prompt(MESSAGES)
        _, _, answer = self.front.ask("/v1/chat/completions", chat(), {"X-Request-Id": "chat"})
        self.assertEqual(answer["choices"][0]["message"]["content"], text_after(prompt, 40))
        self.assertEqual(self.prefill.asked("chat")[0]["max_completion_tokens"], 1)
        stream = self.stream(chat(), "/v1/chat/completions")
        self.assert_whole(stream, prompt)
        self.assertEqual(stream.roles, ["assistant"])

    def test_what_two_engines_cannot_share_one_of_them_serves(self):
        for more in ({"n": 2}, {"max_tokens": 1}, {"prompt": ["a", "b"]}, {"echo": True, "logprobs": 1}):
            self.front.ask("/v1/completions", completion(**more), {"X-Request-Id": "whole"})
        self.assertEqual(self.prefill.asked("whole"), [])
        self.assertEqual(len(self.decode.asked("whole")), 4)

    def test_a_request_without_an_id_gets_one_and_one_that_no_log_can_hold_another(self):
        for given in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 129}):
            _, headers, _ = self.front.ask("/v1/completions", completion(max_tokens=2), given)
            self.assertRegex(headers["X-Request-Id"], "^[0-9a-f]{24}$")

    def test_what_a_client_proves_itself_with_goes_on_to_the_engines(self):
        self.front.ask("/v1/completions", completion(max_tokens=2),
                       {"X-Request-Id": "key", "Authorization": "Bearer k"})
        for one in (self.prefill, self.decode):
            self.assertEqual([asked["authorization"] for asked in one.journal["asked"] if asked["id"] == "key"],
                             ["Bearer k"])

    def test_models_health_and_metrics(self):
        _, _, models = self.front.ask("/v1/models")
        self.assertEqual([card["id"] for card in models["data"]], ["tiny"])
        status, _, health = self.front.ask("/health")
        self.assertEqual((status, health["serves"], health["supervisor"]), (200, True, None))
        self.front.ask("/v1/completions", completion(max_tokens=2))
        self.assertGreater(self.front.metric('troupe_router_requests_total{path="/v1/completions",status="200"}'), 0)
        self.assertEqual(self.front.metric("troupe_router_running"), 0)
        self.assertEqual(self.front.metric("troupe_router_engine_usable"), 2)

    def test_garbage_is_refused_in_the_words_of_the_api(self):
        deep = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for body in (b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"prompt": "a"', deep, b'{"stream": "yes"}',
                     b'{"kv_transfer_params": {"do_remote_prefill": true}}'):
            status, _, answer = self.front.ask("/v1/completions", body, method="POST")
            self.assertEqual((status, answer["error"]["code"]), (400, 400), body[:40])
            self.assertTrue(answer["error"]["message"])
        for path, method, wanted in (("/v1/nothing", "POST", 404), ("/v1/completions", "GET", 405), ("/", "GET", 404)):
            status, _, answer = self.front.ask(path, b"{}" if method == "POST" else None, method=method)
            self.assertEqual((status, answer["error"]["code"]), (wanted, wanted))
        self.assertEqual(self.front.ask("/health")[0], 200)

    def test_a_body_that_is_not_as_its_headers_say_is_refused(self):
        for headers, body in ((b"Content-Encoding: gzip\r\nContent-Length: 4", b"nope"),
                              (b"Transfer-Encoding: chunked", b"zz\r\n\r\n"), (b"Content-Length: 2", b"\xff{")):
            at = urllib.parse.urlsplit(self.front.url)
            with socket.create_connection((at.hostname, at.port), timeout=PATIENCE) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n" + body)
                self.assertIn(b" 400 ", connection.recv(65536), headers)

    def test_headers_that_cannot_go_on_to_the_engines_are_refused(self):
        status, _, answer = self.front.ask("/v1/completions", completion(), {"Authorization": "Bearer \xff"})
        self.assertEqual(status, 400)
        self.assertIn("authorization", answer["error"]["message"])

    def test_bytes_that_are_no_request_end_their_connection_alone(self):
        at = urllib.parse.urlsplit(self.front.url)
        for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n"
                        b"Host: x\r\nContent-Length: -4\r\n\r\n", os.urandom(4096)):
            with socket.create_connection((at.hostname, at.port), timeout=10) as connection:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        self.assertEqual(self.front.ask("/v1/completions", completion(max_tokens=2))[0], 200)

    def test_what_an_engine_refuses_comes_with_its_own_words(self):
        status, _, answer = self.front.ask("/v1/completions", completion(max_tokens=600), {"X-Request-Id": "long"})
        self.assertEqual((status, answer["error"]["type"]), (400, "double"))
        self.assertEqual(len(self.decode.asked("long")), 1)
        with self.front.open("/v1/completions", completion(max_tokens=600, stream=True)) as refused:
            self.assertEqual(refused.status, 400)

    def test_many_requests_at_once_are_all_told_the_right_text(self):
        def one(number):
            prompt = f"number {number}"
            with self.front.open("/v1/completions", completion(prompt=prompt, stream=True)) as answer:
                return Stream(answer).text == text_after(prompt, 40)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            self.assertTrue(all(pool.map(one, range(48))))


class CarriesOn(Routed):
    def arm(self, **behaviour):
        """Something happens once, at the decode that reaches it first."""
        self.trigger = self.folder / f"{time.monotonic_ns()}.trigger"
        self.trigger.touch()
        for one in self.decodes:
            one.behave(trigger=str(self.trigger), **behaviour)

    def broken_streams(self, body, path="/v1/completions", after=range(13), **behaviour):
        """Each decode breaks once, after a different number of tokens."""
        for count in after:
            self.arm(break_after=count, **behaviour)
            stream = self.stream(body, path)
            self.assertFalse(self.trigger.exists())
            yield count, stream

    def test_a_killed_decode_is_continued_elsewhere_in_one_stream(self):
        self.pair(decodes=2)
        self.arm(die_after=11, pause=0.002)
        stream = self.stream(completion(stream_options={"include_usage": True}), headers={"X-Request-Id": "r"})
        self.assert_whole(stream)
        self.assertEqual(stream.usage, [{"prompt_tokens": len(PROMPT), "completion_tokens": 40,
                                         "total_tokens": len(PROMPT) + 40}])
        self.assertFalse(stream.keys & {"token_ids", "prompt_token_ids"})
        [survivor] = [one for one in self.decodes if one.running]
        [rest] = survivor.asked("r")
        said = rest["prompt"][len(PROMPT):]
        self.assertIn(len(said), (10, 11))
        self.assertEqual(said, tokens_after(PROMPT, len(said)))
        self.assertEqual(rest["max_tokens"], 40 - len(said))
        self.assertTrue(rest["kv_transfer_params"]["do_remote_prefill"])
        self.assertEqual(len(self.prefills[0].asked("r")), 2)
        self.assertEqual(self.front.metric('troupe_router_carried_on_total{how="continued"}'), 1)

    def test_wherever_a_stream_breaks_no_token_comes_twice_and_no_character_is_torn(self):
        self.pair()
        for wants in (False, True):
            for count, stream in self.broken_streams(completion(return_token_ids=wants)):
                with self.subTest(count=count, wants=wants):
                    self.assert_whole(stream)
                    self.assertEqual(stream.tokens, tokens_after(PROMPT, 40) if wants else [])

    def test_a_chat_goes_on_as_a_chat(self):
        self.pair()
        prompt = chat_prompt(MESSAGES)
        for count, stream in self.broken_streams(chat(stream_options={"include_usage": True}), "/v1/chat/completions"):
            with self.subTest(count=count):
                self.assert_whole(stream, prompt)
                self.assertEqual(stream.roles, ["assistant"])
                self.assertEqual({one["object"] for one in stream.chunks}, {"chat.completion.chunk"})
                self.assertEqual(stream.usage[-1]["prompt_tokens"], len(prompt))
                self.assertEqual(stream.usage[-1]["completion_tokens"], 40)

    def test_a_chat_without_a_length_goes_on_to_the_longest_that_there_is(self):
        self.pair()
        self.arm(break_after=500 - len(chat_prompt(MESSAGES)))
        body = chat()
        del body["max_tokens"]
        stream = self.stream(body, "/v1/chat/completions")
        self.assert_whole(stream, chat_prompt(MESSAGES), 512 - len(chat_prompt(MESSAGES)))

    def test_an_error_within_a_stream_is_a_loss_too_and_so_is_an_end_that_the_text_does_not_have(self):
        self.pair()
        for what in ("fail_after", "abort_after"):
            self.arm(**{what: 9})
            self.assert_whole(self.stream(completion()))
            self.assertFalse(self.trigger.exists())

    def test_an_end_that_was_not_told_is_told_by_the_router(self):
        self.pair()
        self.arm(break_after=40)
        stream = self.stream(completion(stream_options={"include_usage": True}))
        self.assert_whole(stream)
        self.assertEqual([one["completion_tokens"] for one in stream.usage], [40])

    def test_a_decode_that_was_never_reached_leaves_its_cache_to_another(self):
        self.pair(settings="times: {probe: 60s}\n")
        self.decodes[0].stop()
        for number in range(4):
            self.assert_whole(self.stream(completion(), headers={"X-Request-Id": f"p{number}"}))
            self.assertEqual(len(self.prefills[0].asked(f"p{number}")), 1)
        self.assertGreaterEqual(self.front.metric('troupe_router_carried_on_total{how="pinned"}'), 1)
        self.assertEqual(self.prefills[0].journal["pinned"], 0)

    def test_a_decode_that_stands_still_is_given_up(self):
        self.pair(settings="times: {silence: 3s, probe: 60s}\n")
        self.arm(stop_after=9)
        self.assert_whole(self.stream(completion()))

    def test_an_answer_that_is_no_stream_is_asked_for_again(self):
        self.pair()
        for one in self.decodes:
            one.behave(pause=0.02)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.front.ask, "/v1/completions", completion(), {"X-Request-Id": "n"})
            eventually(lambda: any(one.asked("n") for one in self.decodes), "asked")
            next(one for one in self.decodes if one.asked("n")).stop()
            status, _, answer = answer.result()
        self.assertEqual((status, answer["choices"][0]["text"]), (200, text_after(PROMPT, 40)))

    def test_a_prefill_that_dies_is_replaced(self):
        self.pair(prefills=2, decodes=1, settings="times: {probe: 60s}\n")
        self.prefills[0].stop()
        for _ in range(3):
            self.assert_whole(self.stream(completion()))

    def test_what_cannot_be_continued_ends_with_an_error_and_not_with_another_text(self):
        self.pair(decodes=1)
        for more, word in (({"stop": ["x"]}, "stop"), ({"seed": 7, "temperature": 1}, "seed"),
                           ({"logprobs": 1}, "logprobs"), ({"presence_penalty": 0.5}, "presence_penalty"),
                           ({"response_format": {"type": "json_object"}}, "response_format"),
                           ({"something_new": 1}, "something_new"), ({"n": 2}, "n")):
            with self.subTest(word):
                self.decodes[0].behave(break_after=9, pause=0.005)
                stream = self.stream(completion(**more))
                self.assertIn(word, stream.error["message"])
                self.assertFalse(stream.done)
                self.assertFalse(stream.finish)
                self.assertGreater(self.front.metric("troupe_router_broken_streams_total"), 0)
                self.assertEqual(text_after(PROMPT, 40)[:len(stream.text)], stream.text)

    def test_neither_is_what_an_engine_does_not_say_the_tokens_of_nor_what_it_thinks(self):
        self.pair(decodes=1)
        for behaviour, body, path, word in (
                ({"mute": 1}, completion(), "/v1/completions", "tokens"),
                ({"reason": 4}, chat(), "/v1/chat/completions", "reasoning")):
            with self.subTest(word):
                self.decodes[0].behave(break_after=9, pause=0.005, **behaviour)
                self.assertIn(word, self.stream(body, path).error["message"])

    def test_a_decode_that_finds_no_cache_computes_the_prompt_itself(self):
        self.pair(decodes=1)
        self.prefills[0].behave(loses=1)
        for more in ({}, {"stream": True}):
            with self.subTest(**more):
                request = f"gone{len(more)}"
                if more:
                    self.assert_whole(self.stream(completion(), headers={"X-Request-Id": request}))
                else:
                    answer = self.front.ask("/v1/completions", completion(), {"X-Request-Id": request})[2]
                    self.assertEqual(answer["choices"][0]["text"], text_after(PROMPT, 40))
                self.assertEqual([len(one.asked(request)) for one in (self.prefills[0], self.decodes[0])], [1, 2])
        self.assertEqual(self.front.metric("troupe_router_carried_on_total"), 0)

    def test_retries_are_bounded(self):
        self.pair(decodes=2, settings="limits: {retries: 1}\n")
        for one in self.decodes:
            one.behave(break_after=9, pause=0.005)
        stream = self.stream(completion(), headers={"X-Request-Id": "twice"})
        self.assertIn("2 attempts", stream.error["message"])
        self.assertEqual(sum(len(one.asked("twice")) for one in self.decodes), 2)

    def test_errors_of_engines_are_handed_on_when_nobody_else_can_serve(self):
        self.pair(decodes=2)
        for one in self.decodes:
            one.behave(status=500)
        status, _, answer = self.front.ask("/v1/completions", completion(), {"X-Request-Id": "five"})
        self.assertEqual((status, answer["error"]["type"]), (500, "double"))
        # Three attempts, each with the cache of the prompt and, since that might be gone, without.
        self.assertEqual(sum(len(one.asked("five")) for one in self.decodes), 6)
        self.decodes[1].behave()
        self.assert_whole(self.stream(completion()))


def event(text=None, tokens=None, finish=None, **more):
    """One event of a stream, as an engine writes it."""
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": tokens, **more}
    document = {"id": "i", "object": "text_completion", "model": "tiny", "choices": [choice]}
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


class HostileEngines(Routed):
    DONE = "data: [DONE]\n\n"
    TEXT = event("a", [1], prompt_token_ids=[7]) + event("é", [2]) + event("", [3], "length")

    def ask(self, raw, body=None, path="/v1/completions", **more):
        """Returns (text, message of the error, whether the stream was complete) for a stream with these bytes from
        the engine."""
        self.decodes[0].behave(raw=raw, **more)
        with self.front.open(path, {**(body or completion()), "stream": True}) as answer:
            if answer.status != 200:
                error = json.load(answer)["error"]
                self.assertEqual(answer.status, error["code"])
                return None, error["message"], False
            stream = Stream(answer)
            return stream.text, stream.error and stream.error["message"], stream.done

    def test_a_stream_is_read_however_it_is_written(self):
        self.pair(decodes=1)
        for raw in (self.TEXT + self.DONE, (self.TEXT + self.DONE).replace("\n", "\r\n"), self.TEXT + "data:[DONE] \n\n",
                    ": hello\n\n" + self.TEXT + ": bye\n\ndata:\n\nretry: 9\n\n" + self.DONE,
                    (self.TEXT + self.DONE).replace("data: {", "event: x\nid: 1\ndata: {").replace(', "choices"',
                                                                                                 '\ndata: , "choices"'),
                    self.TEXT, self.TEXT + "data: [DONE]"):  # the router writes its own end of the stream
            for cut in (3, 10_000):
                with self.subTest(raw=raw, cut=cut):
                    self.assertEqual(self.ask(raw, cut=cut), ("aé", None, True))

    def test_what_is_no_stream_of_the_api_is_a_loss_and_no_fault_of_the_router(self):
        self.pair(decodes=1, settings="limits: {retries: 0}\n", seconds={"events.LONGEST": 2**16})
        wrong = ("", "hello", '{"choices": [{"text": "a"}]}', self.DONE, "data: {\n\n", "data: []\n\n", "data: 7\n\n",
                 f"data: {'[' * 100_000}\n\n", f"data: {'x' * 2**17}", 'data: {"choices": 7}\n\n',
                 'data: {"choices": [7]}\n\n', event("a", "abc"), event("a", 7), event("a", ["b"]), event(7, [1]),
                 event("a", [1], delta="x"), event("a", [1], prompt_token_ids="x"),
                 'data: {"choices": [], "usage": 7}\n\n')
        for begun in ("", event("a", [1], prompt_token_ids=[7])):
            for raw in wrong:
                with self.subTest(raw=raw[:60], begun=bool(begun)):
                    text, message, done = self.ask(begun + raw)
                    self.assertIn("no engine could serve it", message)
                    self.assertEqual((text, done), ("a" if begun else None, False))
        self.assertNotIn("Traceback", self.front.log.read_text())

    def test_so_it_is_in_a_chat(self):
        self.pair(decodes=1, settings="limits: {retries: 0}\n")
        for delta in ("x", 7, {"content": 7}, {"content": ["a"]}):
            message = self.ask(event(None, [1], delta=delta), chat(), "/v1/chat/completions")[1]
            self.assertIn("no engine could serve it", message)
        self.assertNotIn("Traceback", self.front.log.read_text())

    def test_errors_in_a_stream_are_told_in_the_engines_words(self):
        self.pair(decodes=1, settings="limits: {retries: 0}\n")
        for error, message in (({"message": "not so", "code": 404}, "not so"), ("odd", "odd"), ({"code": "x"}, "code"),
                               ({"message": 7, "code": 999}, "999"), ({"message": "a\nINFO forged", "code": 400}, "forged")):
            with self.subTest(error=error):
                self.assertIn(message, self.ask(f"data: {json.dumps({'error': error})}\n\n" + self.DONE)[1])
        self.assertNotIn("\nINFO forged", self.front.log.read_text())

    def test_an_answer_of_200_that_has_no_text_is_none(self):
        self.pair(decodes=1, settings="limits: {retries: 0}\n")
        for answer, wanted in (("hello", 502), ("[]", 502), ("{}", 502), ('{"error": {"message": "m", "code": 503}}', 503),
                               ('{"error": "m"}', 500), ('{"choices": []}', 200)):
            self.decodes[0].behave(answer=answer)
            status, headers, _ = self.front.ask("/v1/completions", completion())
            self.assertEqual(status, wanted, answer)
            self.assertEqual("Retry-After" in headers, status == 503)
        self.decodes[0].behave()
        for answer in ("hello", "{}", '{"choices": [], "kv_transfer_params": 7}'):
            self.prefills[0].behave(answer=answer)
            wanted = 200 if "choices" in answer else 502  # while it is suspended, the other one serves alone
            eventually(lambda wanted=wanted: self.front.ask("/v1/completions", completion())[0] == wanted, answer)

    def test_an_engine_that_fails_many_at_once_rests_for_one(self):
        """As an engine answers whose prompts were to come from a killed engine."""
        self.pair(decodes=1)
        self.decodes[0].behave(fail_together=8)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: self.front.ask("/v1/completions", completion())[0], range(8)))
        self.assertEqual(answers, [200] * 8)

    def test_an_engine_that_is_full_sends_clients_away_until_later(self):
        self.pair(decodes=1, settings="limits: {retries: 0}\n")
        self.decodes[0].behave(status=429)
        status, headers, answer = self.front.ask("/v1/completions", completion())
        self.assertEqual((status, answer["error"]["type"]), (429, "double"))
        self.assertGreater(int(headers["Retry-After"]), 0)


class Bounds(Routed):
    def test_a_client_that_goes_away_ends_its_request_at_the_engine(self):
        self.pair(decodes=1)
        self.decodes[0].behave(pause=0.05)
        for stream in (True, False):
            before = self.decodes[0].journal
            with self.front.open("/v1/completions", completion(stream=True, max_tokens=400)) if stream else \
                    self.opened_only(completion(max_tokens=400)) as answer:
                if stream:
                    next(iter(answer))
                eventually(lambda old=before: len(self.decodes[0].journal["asked"]) > len(old["asked"]), "asked")
            eventually(lambda old=before: self.decodes[0].journal["ended_early"] > old["ended_early"], "it was ended")
            eventually(lambda: self.front.metric("troupe_router_running") == 0, "its seat is free")
        self.assertEqual(self.front.metric("troupe_router_disconnects_total"), 2)

    def opened_only(self, body, holds=None):
        """A connection on which a request was sent. `holds`: bytes that may wait for a client that does not read."""
        at = urllib.parse.urlsplit(self.front.url)
        connection = http.client.HTTPConnection(at.hostname, at.port)
        if holds is not None:
            connection.sock = socket.socket()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, holds)
            connection.sock.connect((at.hostname, at.port))
        connection.request("POST", "/v1/completions", json.dumps(body))
        return _Closing(connection)

    def test_a_full_line_answers_429_and_when_to_come_again(self):
        self.pair(decodes=1, settings="limits: {running: 1, waiting: 1}\ntimes: {patience: 1s}\n")
        self.decodes[0].behave(pause=0.05)
        with self.front.open("/v1/completions", completion(stream=True, max_tokens=400)) as running:
            next(iter(running))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(self.front.ask, "/v1/completions", completion())
                eventually(lambda: self.front.metric("troupe_router_waiting") == 1, "one waits")
                # If the second outlasted its patience and the first did not, the second would be served.
                for status, headers, answer in (self.front.ask("/v1/completions", completion()), waiting.result()):
                    self.assertEqual((status, answer["error"]["type"]), (429, "rate_limit_error"))
                    self.assertGreater(int(headers["Retry-After"]), 0)
        self.decodes[0].behave()
        eventually(lambda: self.front.ask("/v1/completions", completion())[0] == 200, "there is room again")

    def test_requests_wait_for_room_at_an_engine_and_are_served_in_turn(self):
        self.pair(decodes=1, settings="limits: {per_engine: 1}\n")
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            statuses = list(pool.map(lambda _: self.front.ask("/v1/completions", completion())[0], range(6)))
        self.assertEqual(statuses, [200] * 6)

    def test_a_body_that_is_too_long_is_refused(self):
        self.pair(decodes=1, settings="limits: {body: 64KiB}\n")
        for data, headers in ((json.dumps(completion(prompt="a" * 100_000)).encode(), {}),
                              (gzip.compress(json.dumps(completion(prompt="a" * 10**6)).encode()),
                               {"Content-Encoding": "gzip"})):
            status, _, answer = self.front.ask("/v1/completions", data, headers)
            self.assertEqual((status, answer["error"]["code"]), (413, 413))
        self.assertEqual(self.front.metric('troupe_router_requests_total{path="/v1/completions",status="413"}'), 2)

    def test_engines_that_tell_their_models_to_those_with_a_key_only_are_used_all_the_same(self):
        one = self.double("one", key="Bearer k").wait()
        self.front = self.router("--both", one.url, usable=1)
        self.assert_whole(self.stream(completion()))
        self.assertEqual(self.front.ask("/v1/models")[0], 401)
        status, _, models = self.front.ask("/v1/models", headers={"Authorization": "Bearer k"})
        self.assertEqual((status, models["data"][0]["id"]), (200, "tiny"))
        self.assertEqual(self.front.ask("/v1/models", headers={"Authorization": "Bearer \xff"})[0], 400)

    def test_a_request_has_an_end(self):
        self.pair(decodes=1, settings="times: {request: 2s}\n")
        self.decodes[0].behave(pause=0.05)
        self.assertEqual(self.front.ask("/v1/completions", completion(max_tokens=400))[0], 504)
        self.assertIn("2 s", self.stream(completion(max_tokens=400)).error["message"])

    def test_where_nobody_is_there_health_says_so_and_clients_are_sent_away(self):
        self.pair(prefills=1, decodes=1, settings="times: {probe: 100ms}\n")
        self.decodes[0].stop()
        eventually(lambda: self.front.ask("/health")[0] == 503, "it is noticed")
        status, headers, answer = self.front.ask("/v1/completions", completion())
        self.assertEqual((status, answer["error"]["type"]), (503, "server_error"))
        self.assertIn("Retry-After", headers)
        self.assertEqual(self.front.ask("/metrics")[0], 200)

    def test_engines_without_a_connector_serve_whole_requests(self):
        plain = [self.double(name).wait() for name in ("a", "b")]
        self.front = self.router("--plain", plain[0].url, "--plain", plain[1].url, usable=2)
        self.assert_whole(self.stream(completion()))
        for one in plain:
            for asked in one.journal["asked"]:
                self.assertFalse(asked["body"].keys() & {"kv_transfer_params", "return_token_ids"})
        plain[0].behave(status=503)
        for _ in range(3):
            self.assertEqual(self.front.ask("/v1/completions", completion())[0], 200)

    def test_engines_that_do_either_share_requests_and_one_alone_serves_them_too(self):
        both = [self.double(name, pause=0.002).wait() for name in ("a", "b")]
        self.front = self.router("--both", both[0].url, "--both", both[1].url, usable=2)
        for _ in range(4):
            self.assert_whole(self.stream(completion()))
        counts = [len(one.journal["asked"]) for one in both]
        self.assertEqual(counts, [4, 4])
        both[0].stop()
        for _ in range(3):
            self.assert_whole(self.stream(completion()))

    def test_a_router_that_is_told_to_stop_lets_streams_come_to_their_end(self):
        self.pair(decodes=1)
        self.decodes[0].behave(pause=0.02)
        with self.front.open("/v1/completions", completion(stream=True)) as answer:
            first = answer.readline()
            os.kill(self.front.pid, signal.SIGTERM)
            rest = Stream(answer)
        self.assertTrue(first.startswith(b"data:"))
        self.assertTrue(rest.done)
        eventually(lambda: not self.front.running, "it ends")
        self.assertEqual(self.front.exit_code, 0)

    def test_a_second_signal_does_not_wait(self):
        self.pair(decodes=1, settings="times: {stop: 10m, silence: 10m}\n")
        self.decodes[0].behave(pause=2 * PATIENCE)
        with self.opened_only(completion(stream=True)):
            eventually(lambda: self.front.metric("troupe_router_running") == 1, "it runs")
            os.kill(self.front.pid, signal.SIGTERM)
            eventually(lambda: "stops; requests in progress" in self.front.log.read_text(), "it stops")
            os.kill(self.front.pid, signal.SIGTERM)
            eventually(lambda: not self.front.running, "it ends")
        self.assertEqual(self.front.exit_code, 0)

    def test_what_does_not_end_in_the_time_of_a_stop_ends_with_an_error(self):
        self.pair(decodes=1, settings="times: {stop: 500ms}\n")
        self.decodes[0].behave(pause=0.05)
        with self.front.open("/v1/completions", completion(stream=True, max_tokens=400)) as answer:
            answer.readline()
            os.kill(self.front.pid, signal.SIGTERM)
            rest = Stream(answer)
        self.assertIn("the router stops", rest.error["message"])
        self.assertFalse(rest.done)
        eventually(lambda: not self.front.running, "it ends")
        self.assertEqual(self.front.exit_code, 0)

    def test_clients_who_only_connect_are_bounded(self):
        self.pair(decodes=1, settings="limits: {connections: 4}\n")
        at = urllib.parse.urlsplit(self.front.url)
        with contextlib.ExitStack() as idle:
            def connect():
                idle.enter_context(socket.create_connection((at.hostname, at.port)))

            for _ in range(4):
                connect()
            answers = []

            def refused():
                answers.append(self.front.ask("/v1/models"))
                if answers[-1][0] != 503:  # refused because a client's end had not been noticed
                    connect()
                return answers[-1][0] == 503

            eventually(refused, "there is no room")
            status, headers, answer = answers[-1]
            self.assertEqual((status, headers["Retry-After"]), (503, "1"))
            self.assertIn("4 clients are connected", answer["error"]["message"])
        eventually(lambda: self.front.ask("/v1/models")[0] == 200, "there is room again")

    def test_a_connection_without_a_whole_request_is_closed_in_time(self):
        self.pair(decodes=1, seconds={"service._IDLE": 0.5})
        at = urllib.parse.urlsplit(self.front.url)
        for begun in (b"", b"POST /v1/completions HTTP/1.1\r\nX-Slow: "):
            with socket.create_connection((at.hostname, at.port), timeout=PATIENCE) as connection:
                connection.sendall(begun)
                self.assertEqual(connection.recv(1), b"")

    def test_a_body_that_does_not_come_is_given_up(self):
        self.pair(decodes=1, seconds={"bodies._SECONDS": 0.5})
        at = urllib.parse.urlsplit(self.front.url)
        with socket.create_connection((at.hostname, at.port), timeout=PATIENCE) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            self.assertIn(b" 408 ", connection.recv(65536))

    def test_the_bodies_of_all_that_is_under_way_are_bounded(self):
        self.pair(decodes=1, settings="limits: {body: 64KiB, bodies: 64KiB}\n")
        self.decodes[0].behave(pause=0.05)
        long = completion(metadata={"a": "a" * 40_000})
        with self.front.open("/v1/completions", {**long, "stream": True, "max_tokens": 400}) as running:
            next(iter(running))
            status, headers, answer = self.front.ask("/v1/completions", long)
            self.assertEqual((status, answer["error"]["type"]), (429, "rate_limit_error"))
            self.assertGreater(int(headers["Retry-After"]), 0)
            self.assertEqual(self.front.ask("/v1/completions", completion(max_tokens=2))[0], 200)
        self.decodes[0].behave()
        for _ in range(3):  # the buffered bytes are freed each time
            eventually(lambda: self.front.ask("/v1/completions", long)[0] == 200, "there is room again")

    def test_a_client_that_does_not_read_is_given_up(self):
        self.pair(decodes=1, settings="times: {request: 3s}\n", seconds={"reply._STREAM_SECONDS": 0.5})
        event = json.dumps({"choices": [{"index": 0, "text": "x" * 2**17, "finish_reason": None}]})
        self.decodes[0].behave(raw=f"data: {event}\n\n", repeat=200)
        # The buffer is full before the request has taken its time: otherwise the router's last event would still
        # fit.
        with self.opened_only(completion(stream=True), holds=4096):
            eventually(lambda: self.front.metric("troupe_router_disconnects_total") == 1, "it is given up")
            self.assertEqual(self.front.metric("troupe_router_running"), 0)
            self.assertIn("does not read", self.front.log.read_text())

    def test_an_engine_that_has_rested_is_used_although_another_one_goes_on(self):
        engines = [self.double(name).wait() for name in ("a", "b")]
        words = [word for one in engines for word in ("--plain", one.url)]
        self.front = self.router(*words, usable=2, settings="limits: {per_engine: 1, retries: 0}\n")
        for one in engines:
            one.behave(pause=0.05)
        with self.front.open("/v1/completions", completion(stream=True, max_tokens=400)) as running:
            next(iter(running))
            [free] = [one for one in engines if not one.journal["asked"]]
            free.behave(status=500)
            self.assertEqual(self.front.ask("/v1/completions", completion())[0], 500)
            free.behave()
            self.assertEqual(self.front.ask("/v1/completions", completion())[0], 200)
            self.assertTrue(running.readline())
            self.assertEqual(self.front.metric("troupe_router_running"), 1)


class _Closing:
    def __init__(self, connection):
        self._connection = connection

    def __enter__(self):
        return self._connection

    def __exit__(self, *_):
        with contextlib.suppress(OSError):  # the router has closed the connection
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


if __name__ == "__main__":
    unittest.main(argv=sys.argv, verbosity=2)
