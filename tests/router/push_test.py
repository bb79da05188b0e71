"""Pairs of engines that the router asks at once, since the cache moves while the prompt is computed. The engines
are doubles of vLLM's servers, and the membership is a file; members_test.py covers what a real supervisor says of
such engines."""
import concurrent.futures
import os
import signal
import sys
import unittest

import router_test
from parts import Stream, chat_prompt, eventually, text_after, tokens_after
from router_test import MESSAGES, PROMPT, chat, completion
from troupe.errors import ErrorCode, TroupeError


def node(name, url, role, rank=0, ranks=1, **labels):
    """A node as a membership lists it."""
    return {"name": f"engines.{name}.{rank}", "replica_name": name, "rank": rank, "ranks": ranks, "host": "127.0.0.1",
            "state": "up", "fingerprint": "f",
            "labels": {"http": url.removeprefix("http://"), "role": role, "engine_id": f"id of {name}", **labels}}


STEP = 2.0  # seconds of an engine's step, at which it hears of the calls made meanwhile that are not out of time


def membership(nodes, calls):
    """Replaces `troupe.Cluster`: a fixed membership, a supervisor that places nothing, and files that list the
    called nodes, and the nodes that had failed the requests to be placed."""
    class Membership:
        def __init__(self, **_):
            pass

        def members(self):
            return {"cluster": "test", "nodes": nodes}

        def place(self, *_, failed=(), **__):
            with open(calls.with_suffix(".failed"), "a", encoding="utf-8") as file:
                file.write(f"{' '.join(failed)}\n")
            raise TroupeError(ErrorCode.NOT_FOUND, "nobody places here")

        def finished(self, _):
            pass

        def call(self, name, method, payload, timeout):
            if timeout <= STEP:
                raise TroupeError(ErrorCode.DEADLINE, "the engine did not answer the call in time")
            with open(calls, "a", encoding="utf-8") as file:
                file.write(f"{name} {method} {payload.decode()}\n")
            return b""

    return Membership


class Pushed(router_test.Routed):
    def setUp(self):
        self.gate = self.folder / f"{self.id().rpartition('.')[2]}.gate"  # prefills answer once this file exists
        self.calls = self.gate.with_suffix(".calls")
        self.calls.touch()

    def assert_nothing_is_left(self, front):
        """Checks that the router, whatever happened, has given up nothing and forgotten nothing."""
        for of in ("engine_requests", "running", "waiting"):
            eventually(lambda of=of: front.metric(f"troupe_router_{of}") == 0, "nothing runs")
        os.kill(front.pid, signal.SIGTERM)
        eventually(lambda: not front.running, "the router ends")
        self.assertEqual(front.exit_code, 0)
        for trouble in ("Traceback", "never retrieved", "was destroyed"):
            self.assertNotIn(trouble, front.log.read_text())

    @staticmethod
    def name_of(engine):
        return engine.url.removeprefix("http://")

    def engines(self, prefills=1, decodes=2, **behaviour):
        """Prefills that wait for the gate, and decodes that do not."""
        self.behaviour = {"caches": str(self.folder)}
        self.prefills = [self.double(f"p{place}", gate=str(self.gate), **self.behaviour, **behaviour)
                         for place in range(prefills)]
        self.decodes = [self.double(f"d{place}", pause=0.002, **self.behaviour) for place in range(decodes)]
        for engine in (*self.prefills, *self.decodes):
            engine.wait()

    def cluster(self, settings="times: {probe: 60s}\n", nodes=None, seconds=None):
        """The router in front of them; `nodes`: other nodes than those of engines that push."""
        nodes = nodes or [node(f"{role}-{place}", one.url, role, mode="write")
                          for role, engines in (("prefill", self.prefills), ("decode", self.decodes))
                          for place, one in enumerate(engines)]
        self.front = self.router(usable=len(self.prefills) + len(self.decodes), settings=settings,
                                 seconds={"members.Cluster": membership(nodes, self.calls), **(seconds or {})})
        self.addCleanup(self.assert_nothing_is_left, self.front)

    def asked(self, engines, request="r"):
        return [body for one in engines if one.running for body in one.asked(request)]

    def both_asked(self, times=1):
        """Waits until that many prefills and decodes were asked."""
        for engines in (self.prefills, self.decodes):
            eventually(lambda engines=engines: len(self.asked(engines)) >= times, "both are asked")

    def begin(self, body=None, path="/v1/completions"):
        """A request on a thread of its own, with the id r. Its result: the stream, or (status, headers, answer)."""
        def work():
            if not body.get("stream"):
                return self.front.ask(path, body, {"X-Request-Id": "r"})
            with self.front.open(path, body, {"X-Request-Id": "r"}) as answer:
                return Stream(answer)

        body = completion(stream=True) if body is None else body
        pool = self.enterContext(concurrent.futures.ThreadPoolExecutor(1))
        return pool.submit(work)

    def ended_early(self, engine):
        return engine.journal["ended_early"]

    def carried_on(self, how=None):
        return self.front.metric("troupe_router_carried_on_total" + (f'{{how="{how}"}}' if how else ""))

    @property
    def pushed(self):
        return self.front.metric("troupe_router_pushed_total")


class BothAtOnce(Pushed):
    def test_both_engines_are_asked_before_either_answers_and_told_of_one_transfer(self):
        self.engines(decodes=1)
        self.cluster()
        answer = self.begin()
        self.both_asked()
        [first], [second] = self.asked(self.prefills), self.asked(self.decodes)
        said = first["kv_transfer_params"]
        transfer = said.pop("troupe")["request"]
        self.assertRegex(transfer, r"^engines\.prefill-0\.0-[0-9a-f]{32}$")
        self.assertEqual(said, {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                                "remote_block_ids": None, "remote_host": None, "remote_port": None})
        self.assertEqual((first["max_tokens"], first["stream"]), (1, False))
        self.assertEqual(second["kv_transfer_params"], {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "id of prefill-0",
            "remote_request_id": transfer, "remote_block_ids": [], "remote_host": "", "remote_port": 0, "tp_size": 1,
            "troupe": {"v": 1, "request": transfer, "nodes": ["engines.prefill-0.0"]}})
        self.gate.touch()
        self.assert_whole(answer.result())
        self.assertEqual((self.pushed, self.carried_on()), (1, 0))
        self.assertEqual(self.front.metric('troupe_router_attempts_total{how="pair"}'), 1)
        self.assertEqual(self.front.metric("troupe_router_attempts_total"), 1)

    def test_the_nodes_of_an_engine_of_several_ranks_are_named_in_their_order(self):
        self.engines(decodes=1)
        [prefill], [decode] = self.prefills, self.decodes
        ranks = [node("p", prefill.url, "prefill", rank, 11, mode="write") for rank in (3, 0, 10, 1, 2, 9, 8, 7, 6, 5, 4)]
        self.cluster(nodes=[*ranks, node("d", decode.url, "decode", mode="write")])
        self.gate.touch()
        self.assert_whole(self.begin().result())
        [body] = self.asked(self.decodes)
        self.assertEqual(body["kv_transfer_params"]["tp_size"], 11)
        self.assertEqual(body["kv_transfer_params"]["troupe"]["nodes"], [f"engines.p.{rank}" for rank in range(11)])

    def test_no_two_requests_have_one_transfer(self):
        self.engines()
        self.cluster()
        self.gate.touch()
        for _ in range(6):
            self.assert_whole(self.begin().result())
        self.assertEqual(len({body["kv_transfer_params"]["troupe"]["request"] for body in self.asked(self.prefills)}), 6)

    def test_answers_that_are_no_streams_chats_and_texts_that_cannot_be_continued_are_served_likewise(self):
        self.engines()
        self.cluster()
        self.gate.touch()
        _, _, answer = self.begin(completion()).result()
        self.assertEqual(answer["choices"][0]["text"], text_after(PROMPT, 40))
        _, _, answer = self.begin(chat(), "/v1/chat/completions").result()
        self.assertEqual(answer["choices"][0]["message"]["content"], text_after(chat_prompt(MESSAGES), 40))
        self.assert_whole(self.begin(chat(stream=True), "/v1/chat/completions").result(), chat_prompt(MESSAGES))
        self.assert_whole(self.begin(completion(stream=True, stop=["x"])).result())
        stream = self.begin(completion(stream=True, return_token_ids=True)).result()
        self.assertEqual(stream.tokens, tokens_after(PROMPT, 40))
        self.assertEqual((self.pushed, self.carried_on()), (5, 0))

    def test_what_one_engine_serves_is_pushed_nowhere(self):
        self.engines()
        self.cluster()
        self.front.ask("/v1/completions", completion(max_tokens=1))
        self.assertEqual(self.pushed, 0)

    def test_a_prefill_has_room_again_when_it_has_answered(self):
        self.engines(decodes=1)
        self.cluster()
        self.decodes[0].behave(pause=0.05, **self.behaviour)
        busy = f'troupe_router_engine_requests{{engine="{self.name_of(self.prefills[0])}"'
        answer = self.begin()
        self.both_asked()
        self.assertEqual(self.front.metric(busy), 1)
        self.gate.touch()
        eventually(lambda: self.front.metric(busy) == 0, "the prefill has room")
        self.assertEqual(self.front.metric("troupe_router_running"), 1)
        self.assert_whole(answer.result())


class OnceMore(Pushed):
    def test_a_request_that_lost_an_engine_is_placed_without_that_ones_nodes(self):
        trigger = self.folder / "trigger"  # the engine that removes it dies
        trigger.touch()
        self.engines(prefills=0, decodes=3)
        for one in self.decodes:
            one.behave(trigger=str(trigger), pause=0.005, die_after=9, **self.behaviour)
        nodes = {one: node(name, one.url, "both") for name, one in zip("abc", self.decodes, strict=True)}
        self.cluster(nodes=list(nodes.values()))
        self.assert_whole(self.begin().result())
        [dead] = [one for one in self.decodes if not one.running]
        self.assertEqual(self.calls.with_suffix(".failed").read_text().splitlines(), ["", nodes[dead]["name"]])


class OneAfterTheOther(Pushed):
    def assert_in_turn(self):
        """As with engines that do not push."""
        self.gate.touch()
        self.assert_whole(self.begin().result())
        [first], [second] = self.asked(self.prefills), self.asked(self.decodes)
        self.assertTrue(first["kv_transfer_params"].get("troupe", {"in_turn": True})["in_turn"])
        self.assertIn("at", second["kv_transfer_params"])
        self.assertEqual((self.pushed, self.carried_on()), (0, 0))

    def test_where_neither_says_that_it_pushes(self):
        for mode in ({}, {"mode": "read"}):
            with self.subTest(mode=mode):
                self.engines(decodes=1)
                self.cluster(nodes=[node("p", self.prefills[0].url, "prefill", **mode),
                                    node("d", self.decodes[0].url, "decode")])
                self.assert_in_turn()

    def test_where_a_rank_of_the_prefill_is_missing(self):
        self.engines(decodes=1)
        self.cluster(nodes=[node("p", self.prefills[0].url, "prefill", 0, 2, mode="write"),
                            node("d", self.decodes[0].url, "decode", mode="write")])
        self.assert_in_turn()

    def test_where_an_engine_does_either(self):
        """Two requests could wait for each other's blocks."""
        for first, second in (("both", "decode"), ("prefill", "both")):
            with self.subTest(prefill=first, decode=second):
                self.engines(decodes=1)
                self.cluster(nodes=[node("p", self.prefills[0].url, first, mode="write"),
                                    node("d", self.decodes[0].url, second, mode="write")])
                self.assert_in_turn()

    def test_where_one_pushes_and_the_other_does_not_no_cache_moves(self):
        """The engines would refuse each other."""
        for first, second in (({}, {"mode": "write"}), ({"mode": "write"}, {"mode": "read"})):
            with self.subTest(prefill=first, decode=second):
                self.engines(decodes=1)
                self.cluster(nodes=[node("p", self.prefills[0].url, "prefill", **first),
                                    node("d", self.decodes[0].url, "decode", **second)])
                self.assert_whole(self.begin().result())
                self.assertEqual(self.asked(self.prefills), [])
                self.assertNotIn("kv_transfer_params", self.asked(self.decodes)[0])

    def test_where_several_engines_are_behind_one_address(self):
        self.engines(decodes=1)
        self.cluster(nodes=[*(node(name, self.prefills[0].url, "prefill", mode="write") for name in ("p", "q")),
                            node("d", self.decodes[0].url, "decode", mode="write")])
        self.assert_in_turn()

    def test_where_engines_are_known_by_their_addresses_alone(self):
        self.engines(decodes=1)
        self.front = self.router("--prefill", self.prefills[0].url, "--decode", self.decodes[0].url, usable=2)
        self.assert_in_turn()


class GivesBack(Pushed):
    """A cache for which no client is left: the engine's nodes tell it, so it need not wait for a lease."""

    def nodes(self, **labels):
        return [*(node("p", self.prefills[0].url, "prefill", rank, 2, **labels) for rank in (1, 0)),
                node("d", self.decodes[0].url, "decode", **labels)]

    def assert_given_back(self, transfer):
        told = [f"engines.p.{rank} release {transfer}" for rank in (0, 1)]
        eventually(lambda: sorted(self.calls.read_text().splitlines()) == told, "the engine is told")

    def test_where_the_client_goes_away_while_the_prompt_is_computed(self):
        for labels in ({}, {"mode": "write"}):
            with self.subTest(labels=labels):
                self.calls.write_text("")
                self.engines(decodes=1)
                self.cluster(nodes=self.nodes(**labels))
                with router_test.Bounds.opened_only(self, completion(stream=True)):
                    eventually(lambda: self.prefills[0].journal["asked"], "asked")
                [asked] = self.prefills[0].journal["asked"]
                self.assert_given_back(asked["body"]["kv_transfer_params"]["troupe"]["request"])

    def test_where_no_decode_is_left_to_take_it(self):
        self.engines(decodes=1)
        self.cluster(settings="limits: {retries: 0}\ntimes: {probe: 60s}\n", nodes=self.nodes())
        self.decodes[0].stop()
        self.gate.touch()
        self.begin(completion()).result()
        [asked] = self.prefills[0].journal["asked"]
        self.assert_given_back(asked["body"]["kv_transfer_params"]["troupe"]["request"])

    def test_what_was_taken_is_not_given_back(self):
        for labels in ({}, {"mode": "write"}):
            with self.subTest(labels=labels):
                self.engines(decodes=1)
                self.cluster(nodes=self.nodes(**labels))
                self.gate.touch()
                self.assert_whole(self.begin().result())
                eventually(lambda: self.front.metric("troupe_router_running") == 0, "it is served")
                self.assertEqual(self.calls.read_text(), "")


class CarriesOn(Pushed):
    LONG = {"attempts._BLAME": 60}  # as long as a slow machine needs

    def open_for_others(self, asked):
        """Lets every prefill but this one answer."""
        for one in self.prefills:
            if one is not asked:
                one.behave(**self.behaviour)

    def first_asked(self):
        self.both_asked()
        return tuple(next(one for one in engines if one.asked("r")) for engines in (self.prefills, self.decodes))

    def assert_restarted(self, answer, decode):
        """Expects that the decode was told to stop, and another pair got the request from its beginning."""
        if isinstance(answer, Stream):
            self.assert_whole(answer)
        else:
            self.assertEqual((answer[0], answer[2]["choices"][0]["text"]), (200, text_after(PROMPT, 40)))
        eventually(lambda: self.ended_early(decode) == 1, "the decode is told to stop")
        transfers = [body["kv_transfer_params"]["troupe"]["request"] for body in self.asked(self.decodes)]
        self.assertEqual(len(set(transfers)), 2)
        self.assert_restarted_once()

    def assert_restarted_once(self):
        self.assertEqual((self.pushed, self.carried_on("restarted"), self.carried_on()), (2, 1, 1))

    def test_a_prefill_that_refuses_before_the_decode_has_said_anything_is_replaced(self):
        for more in ({"stream": True}, {}):
            with self.subTest(**more):
                self.gate.unlink(missing_ok=True)
                self.engines(prefills=2)
                self.cluster()
                answer = self.begin(completion(**more))
                prefill, decode = self.first_asked()
                self.open_for_others(prefill)
                prefill.behave(status=500)
                self.assert_restarted(answer.result(), decode)
                self.assertEqual(len(prefill.asked("r")), 1)

    def test_a_prefill_that_dies_before_the_decode_has_said_anything_is_replaced(self):
        self.engines(prefills=2)
        self.cluster()
        answer = self.begin()
        prefill, decode = self.first_asked()
        self.open_for_others(prefill)
        prefill.stop()
        self.assert_restarted(answer.result(), decode)

    def test_of_an_answer_that_is_no_stream_it_is_replaced_when_the_decode_has_heard_of_it(self):
        self.engines(prefills=2)
        self.cluster(seconds=self.LONG)
        answer = self.begin(completion())
        prefill, decode = self.first_asked()
        self.open_for_others(prefill)
        prefill.stop()
        [body] = decode.asked("r")
        (self.folder / body["kv_transfer_params"]["troupe"]["request"]).write_text("none")
        status, _, said = answer.result()
        self.assertEqual((status, said["choices"][0]["text"]), (200, text_after(PROMPT, 40)))
        self.assert_restarted_once()
        self.assertIn(f"after 0 tokens: {self.name_of(prefill)}", self.front.log.read_text())

    def test_an_answer_that_is_no_stream_is_not_thrown_away_with_that_of_the_prefill(self):
        self.engines(decodes=1, early=1)
        self.decodes[0].behave(pause=0.1, **self.behaviour)
        self.cluster()
        answer = self.begin(completion())
        self.both_asked()
        eventually(lambda: not list(self.folder.glob("engines.*")), "the decode has the cache")
        self.prefills[0].stop()
        status, _, said = answer.result()
        self.assertEqual((status, said["choices"][0]["text"]), (200, text_after(PROMPT, 40)))
        self.assertEqual((self.pushed, self.carried_on(), len(self.asked(self.decodes))), (1, 0, 1))
        self.assertIn("the prefill failed after the text had begun", self.front.log.read_text())

    def test_what_the_prefill_refuses_for_good_comes_in_its_words_and_the_decode_stops(self):
        self.engines()
        self.cluster()
        answer = self.begin(completion())
        prefill, decode = self.first_asked()
        prefill.behave(status=400)
        status, _, said = answer.result()
        self.assertEqual((status, said["error"]["type"]), (400, "double"))
        eventually(lambda: self.ended_early(decode) == 1, "the decode is told to stop")
        self.assertEqual((self.pushed, self.carried_on()), (1, 0))

    def begun(self, lose):
        """Does something to the prefill once the client has the beginning of the text."""
        self.engines(early=1)
        self.cluster()
        for one in self.decodes:
            one.behave(pause=0.02, **self.behaviour)
        with self.front.open("/v1/completions", completion(stream=True), {"X-Request-Id": "r"}) as answer:
            self.assertTrue(answer.readline().startswith(b"data:"))
            self.assertEqual(self.front.metric(
                f'troupe_router_engine_requests{{engine="{self.name_of(self.prefills[0])}"'), 1)
            lose(self.prefills[0])
            rest = Stream(answer)
        self.assertIsNone(rest.error)
        self.assertTrue(rest.done)
        self.assertEqual([body["kv_transfer_params"]["do_remote_prefill"] for body in self.asked(self.decodes)], [True])
        self.assertEqual((self.pushed, self.carried_on()), (1, 0))

    def test_a_prefill_that_dies_when_the_text_has_begun_is_not_missed(self):
        self.begun(lambda prefill: prefill.stop())
        self.assertIn("the prefill failed after the text had begun", self.front.log.read_text())

    def test_neither_is_one_that_refuses_then(self):
        self.begun(lambda prefill: prefill.behave(status=500))
        self.assertIn("the prefill failed after the text had begun", self.front.log.read_text())

    def test_a_prefill_that_does_not_end_before_the_text_is_told_to_stop(self):
        self.engines(early=1)
        self.cluster()
        self.assert_whole(self.begin().result())
        eventually(lambda: self.ended_early(self.prefills[0]) == 1, "the prefill is told to stop")

    def test_a_decode_that_refuses_ends_the_prefill_and_another_pair_has_the_request(self):
        for more in ({"stream": True}, {}):
            with self.subTest(**more):
                self.gate.unlink(missing_ok=True)
                self.engines()
                self.decodes[0].behave(status=500)
                self.cluster()
                answer = self.begin(completion(**more))
                eventually(lambda: self.ended_early(self.prefills[0]) == 1, "the prefill is told to stop")
                self.gate.touch()
                answer = answer.result()
                text = answer.text if more else answer[2]["choices"][0]["text"]
                self.assertEqual(text, text_after(PROMPT, 40))
                # The second attempt asks for the whole request, since its prefill might have kept no cache.
                self.assertEqual((len(self.asked(self.prefills)), len(self.decodes[0].asked("r"))), (2, 2))
                self.assertEqual((self.pushed, self.carried_on("restarted"), self.carried_on()), (2, 1, 1))

    def test_so_does_one_that_dies(self):
        for more in ({"stream": True}, {}):
            with self.subTest(**more):
                self.gate.unlink(missing_ok=True)
                self.engines()
                self.cluster()
                answer = self.begin(completion(**more))
                _, decode = self.first_asked()
                decode.stop()
                eventually(lambda: self.ended_early(self.prefills[0]) == 1, "the prefill is told to stop")
                self.gate.touch()
                answer = answer.result()
                text = answer.text if more else answer[2]["choices"][0]["text"]
                self.assertEqual(text, text_after(PROMPT, 40))
                self.assertEqual((self.pushed, self.carried_on("restarted"), self.carried_on()), (2, 1, 1))

    def test_what_the_decode_refuses_for_good_comes_in_its_words_and_the_prefill_stops(self):
        self.engines(decodes=1)
        self.decodes[0].behave(status=404)
        self.cluster()
        status, _, said = self.begin(completion()).result()
        self.assertEqual((status, said["error"]["type"]), (404, "double"))
        eventually(lambda: self.ended_early(self.prefills[0]) == 1, "the prefill is told to stop")

    def test_a_decode_that_dies_within_its_text_is_continued_by_another_pair(self):
        self.engines()
        self.cluster()
        self.gate.touch()
        trigger = self.folder / "within.trigger"
        trigger.touch()
        for one in self.decodes:
            one.behave(die_after=11, trigger=str(trigger), pause=0.002, **self.behaviour)
        self.assert_whole(self.begin().result())
        self.assertFalse(trigger.exists())
        [rest] = self.asked(self.decodes)
        self.assertGreater(len(rest["prompt"]), len(PROMPT))
        self.assertEqual((self.pushed, self.carried_on("continued"), self.carried_on()), (2, 1, 1))

    def test_retries_are_bounded(self):
        self.engines()
        self.cluster(settings="limits: {retries: 1}\n")
        for one in self.decodes:
            one.behave(status=503)
        status, headers, _ = self.begin(completion()).result()
        self.assertEqual((status, "Retry-After" in headers), (503, True))
        self.assertEqual((self.pushed, len(self.asked(self.decodes))), (2, 2))

    def test_where_the_prefill_keeps_no_cache_the_decode_computes_the_prompt_and_is_not_blamed(self):
        for more in ({"stream": True}, {}):
            with self.subTest(**more):
                self.gate.unlink(missing_ok=True)
                self.engines(decodes=1, keeps=0)
                self.cluster(seconds=self.LONG)
                answer = self.begin(completion(**more))
                self.both_asked()
                self.gate.touch()
                self.assert_alone(answer.result(), bool(more))
                self.assertIn("keeps no cache", self.front.log.read_text())

    def decode_says_first(self, **more):
        """The decode reports that there is no cache before the prefill has answered."""
        self.engines(keeps=0, early=1, **more)
        self.cluster(seconds=self.LONG)
        answer = self.begin()
        self.both_asked()
        eventually(lambda: not list(self.folder.glob("engines.*")), "the decode knows")
        return answer

    def test_so_it_is_where_the_decode_says_first_that_there_is_none(self):
        answer = self.decode_says_first(decodes=1)
        self.gate.touch()
        self.assert_alone(answer.result(), True)
        self.assertIn("keeps no cache", self.front.log.read_text())

    def test_so_it_is_where_the_prefill_computes_the_prompt_again(self):
        """The engine has preempted the request, and sends nothing more for now."""
        for more in ({"stream": True}, {}):
            with self.subTest(**more):
                self.engines(decodes=1, keeps=0, early=1)
                self.cluster(settings="limits: {retries: 0}\ntimes: {probe: 60s}\n")
                self.assert_alone(self.begin(completion(**more)).result(), bool(more))
                eventually(lambda: self.ended_early(self.prefills[0]) == 1, "the prefill is told to stop")

    def test_a_prefill_that_dies_is_blamed_for_what_the_decode_says_first(self):
        answer = self.decode_says_first(prefills=2)
        prefill, _ = self.first_asked()
        self.open_for_others(prefill)
        prefill.stop()
        self.assert_whole(answer.result())
        self.assertEqual((self.pushed, self.carried_on("restarted"), self.carried_on()), (2, 1, 1))
        self.assertIn(f"after 0 tokens: {self.name_of(prefill)}", self.front.log.read_text())

    def assert_alone(self, answer, streams):
        text = answer.text if streams else answer[2]["choices"][0]["text"]
        self.assertEqual(text, text_after(PROMPT, 40))
        first, second = self.asked(self.decodes)
        self.assertIn("troupe", first["kv_transfer_params"])
        self.assertNotIn("kv_transfer_params", second)
        self.assertEqual((self.pushed, self.carried_on()), (1, 0))
        self.assertEqual(self.front.metric('troupe_router_attempts_total{how="alone"}'), 1)
        self.assertIn("computes the prompt itself now", self.front.log.read_text())


class Bounds(Pushed):
    def test_a_client_that_goes_away_ends_its_request_at_both_engines(self):
        for stream in (True, False):
            with self.subTest(stream=stream):
                self.engines(decodes=1)
                self.cluster()
                with router_test.Bounds.opened_only(self, completion(stream=stream)):
                    eventually(lambda: self.prefills[0].journal["asked"] and self.decodes[0].journal["asked"], "asked")
                for engine in (self.prefills[0], self.decodes[0]):
                    eventually(lambda engine=engine: self.ended_early(engine) == 1, "it is ended")
                eventually(lambda: self.front.metric("troupe_router_running") == 0, "its seat is free")
                self.assertEqual(self.front.metric("troupe_router_disconnects_total"), 1)

    def test_so_does_one_that_goes_when_its_text_has_begun(self):
        self.engines(decodes=1, early=1)
        self.decodes[0].behave(pause=0.05, **self.behaviour)
        self.cluster()
        with self.front.open("/v1/completions", completion(stream=True, max_tokens=400)) as answer:
            next(iter(answer))
        for engine in (self.prefills[0], self.decodes[0]):
            eventually(lambda engine=engine: self.ended_early(engine) == 1, "it is ended")
        eventually(lambda: self.front.metric("troupe_router_running") == 0, "its seat is free")

    def test_the_time_of_a_request_is_that_of_both_engines(self):
        self.engines(decodes=1)
        self.cluster(settings="times: {request: 2s}\n")
        self.assertEqual(self.begin(completion()).result()[0], 504)
        for engine in (self.prefills[0], self.decodes[0]):
            eventually(lambda engine=engine: self.ended_early(engine) == 1, "it is ended")

    def test_a_decode_may_be_silent_for_as_long_as_the_prompt_is_computed(self):
        self.engines(decodes=1)
        self.cluster(settings="times: {silence: 2s}\n")
        answer = self.begin()
        self.both_asked()
        with self.assertRaises(concurrent.futures.TimeoutError):
            answer.result(4)
        self.gate.touch()
        self.assert_whole(answer.result())
        self.assertEqual((self.pushed, self.carried_on()), (1, 0))

    def test_behind_that_it_is_lost_when_it_is_silent_for_longer_than_any_other(self):
        for before in (0, 9):
            with self.subTest(before=before):
                self.engines()
                self.cluster(settings="times: {silence: 2s, probe: 60s}\n")
                self.gate.touch()
                trigger = self.folder / f"silent-{before}.trigger"
                trigger.touch()
                for one in self.decodes:
                    one.behave(stop_after=before, trigger=str(trigger), pause=0.002, **self.behaviour)
                self.assert_whole(self.begin().result())
                self.assertEqual(self.carried_on("continued" if before else "restarted"), 1)
                self.assertIn("it has said nothing for 2 s", self.front.log.read_text())
                for one in self.decodes:  # the stopped engine must not be asked
                    one.stop()


if __name__ == "__main__":
    unittest.main(argv=sys.argv, verbosity=2)
