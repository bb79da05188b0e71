"""The router and a real supervisor: the router finds the engines that join, gets placements, and hears of losses
that no connection shows. The engines are doubles of vLLM's servers, each with a real node of Troupe's.

    members_test.py TROUPE LIBRARY      the troupe command, libtroupe.so.0
"""
import asyncio
import json
import os
import pathlib
import signal
import sys
import tempfile
import unittest

import troupe
import double
from parts import Double, Forked, Router, Stream, eventually, text_after
from servers import end_supervisor
from troupe.open_cluster import STAGE, deployment_of

PROMPT = "say something"


def joins(replica, role, blocks, ranks=1, file=None, **more):
    """Has a node of Troupe's for each rank, with the label of its HTTP server, and `more` labels. `file`: the
    deployment of the node; None: it joins the open cluster of this machine."""
    where = {"file": file} if file else {"text": deployment_of(None)}

    def engine(rank, labels):
        shapes = [troupe.LayerShape(kv_heads=2, head_dim=8)] * 2
        layout = troupe.Layout.packed(shapes, dtype="bf16", block_tokens=4, blocks=blocks, tp_rank=rank, tp_size=ranks)
        announced = troupe.Announcement(STAGE, replica, rank, ranks, labels)
        return troupe.Engine(join=announced, **where, layout=layout, allocate="ordinary")

    def join(port):
        return [engine(rank, {"http": f":{port}", "role": role, **more}) for rank in range(ranks)]
    return join


class Member(Double):
    def __init__(self, name, folder, role="both", said=None, **behaviour):
        """`said`: labels of its nodes, besides the role."""
        join = joins(name, role, 8, **(said or {}))
        Forked.__init__(self, name, lambda: asyncio.run(double.main(behaviour, join)), folder)


class Members(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        os.environ["XDG_STATE_HOME"] = str(self.folder / "state")
        self.addCleanup(end_supervisor, self.folder / "state")
        self.engines = {}
        # No address is configured anywhere, and the router starts first.
        self.front = self.enterContext(Router("router", self.folder, []))

    def join(self, *names, role="both", said=None, **behaviour):
        for name in names:
            self.engines[name] = self.enterContext(Member(name, self.folder, role, said, **behaviour))
        for name in names:
            self.engines[name].wait()
        self.front.wait_for(len(self.running))

    @property
    def running(self):
        return [one for one in self.engines.values() if one.running]

    def stream(self, **more):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True, **more}
        with self.front.open("/v1/completions", body) as answer:
            stream = Stream(answer)
        self.assertIsNone(stream.error)
        self.assertEqual(stream.text, text_after(PROMPT, 40))
        return stream

    def lost_in_mid_stream(self, **behaviour):
        trigger = self.folder / "trigger"
        trigger.touch()
        for one in self.running:
            one.behave(trigger=str(trigger), pause=0.005, **behaviour)
        self.stream()
        self.assertFalse(trigger.exists())

    def test_engines_that_join_are_found_and_served_by_where_the_supervisor_places_requests(self):
        self.front.wait()
        self.assertEqual(self.front.ask("/health")[0], 503)
        self.join("a", "b")
        eventually(lambda: self.stream() and self.front.metric('troupe_router_placements_total{by="supervisor"}') > 3,
                   "the supervisor places requests")
        self.assertEqual(self.front.ask("/health")[2]["supervisor"], True)
        for one in self.engines.values():
            self.assertTrue(one.journal["asked"])
        self.join("c")
        for _ in range(6):
            self.stream()
        self.assertTrue(self.engines["c"].journal["asked"])

    def test_the_first_client_of_a_new_router_finds_the_engines(self):
        self.join("a", "b")
        for number in range(3):
            router = self.enterContext(Router(f"new-{number}", self.folder, [])).wait()
            status, _, said = router.ask("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 3})
            self.assertEqual(status, 200, said)

    def test_a_killed_engine_is_left_and_one_that_takes_its_place_is_used(self):
        self.join("a", "b", "c")
        self.lost_in_mid_stream(die_after=9)
        self.assertEqual(len(self.running), 2)
        eventually(lambda: sum(one["usable"] for one in self.front.ask("/health")[2]["engines"]) == 2, "it is left")
        self.join("d")
        for _ in range(6):
            self.stream()
        self.assertTrue(self.engines["d"].journal["asked"])

    def test_an_engine_that_stands_still_is_given_up_when_the_supervisor_says_so(self):
        self.join("a", "b", "c")
        self.lost_in_mid_stream(stop_after=9)

    def test_without_its_supervisor_the_router_serves_on(self):
        self.join("a", "b")
        notice = json.loads((self.folder / "state/troupe/vllm/supervisor").read_text())
        os.kill(notice["pid"], signal.SIGKILL)
        for _ in range(4):
            self.stream()

    def test_a_supervisor_that_dies_and_the_one_that_comes_after_it_cost_no_stream(self):
        self.join("a", "b", pause=0.02)
        notice = self.folder / "state/troupe/vllm/supervisor"
        first = json.loads(notice.read_text())["pid"]
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
        with self.front.open("/v1/completions", body) as answer:
            self.assertTrue(answer.readline().startswith(b"data:"))
            os.kill(first, signal.SIGKILL)
            rest = Stream(answer)
        self.assertIsNone(rest.error)
        self.assertTrue(rest.done)
        self.assertEqual(self.front.metric("troupe_router_carried_on_total"), 0)
        eventually(lambda: self.front.ask("/health")[2]["supervisor"] and json.loads(notice.read_text())["pid"] != first,
                   "there is another supervisor")
        for _ in range(3):
            self.stream()
        self.assertNotIn("has left the cluster", self.front.log.read_text(errors="replace"))

    def test_engines_of_one_role_do_what_they_are_for(self):
        self.join("p", role="prefill")
        self.join("d", "e", role="decode")
        for _ in range(4):
            self.stream()
        for name, one in self.engines.items():
            asked = [request["body"].get("kv_transfer_params", {}) for request in one.journal["asked"]]
            self.assertTrue(asked, name)
            self.assertEqual({params.get("do_remote_decode", False) for params in asked}, {name == "p"})

    def test_engines_that_push_are_asked_at_once_and_their_nodes_named_in_the_order_of_their_ranks(self):
        caches = str(self.folder)
        self.join("p", role="prefill", said={"ranks": 2, "mode": "write", "engine_id": "id of p"}, caches=caches)
        self.join("d", role="decode", said={"mode": "write"}, caches=caches)
        self.stream()
        [params] = [asked["body"]["kv_transfer_params"] for asked in self.engines["d"].journal["asked"]]
        self.assertEqual(params["troupe"]["nodes"], [f"{STAGE}.p.0", f"{STAGE}.p.1"])
        self.assertEqual((params["remote_engine_id"], params["tp_size"]), ("id of p", 2))
        self.assertEqual(self.front.metric("troupe_router_pushed_total"), 1)


if __name__ == "__main__":
    os.environ["TROUPE_COMMAND"], os.environ["TROUPE_LIBRARY"] = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
