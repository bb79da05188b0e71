"""The worker side of Troupe's vLLM connector without vLLM's servers: a prefill and a decode worker in this process,
each with a cache as vLLM allocates it, and a real supervisor.

Run by ctest, engines.vllm_worker, with the paths of the troupe command and of libtroupe.so.0.
"""
import concurrent.futures
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
# pylint: disable=wrong-import-position
import msgspec
import prometheus_client
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import (FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheLayout, KVCacheTensor,
                                        MambaSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs)
from vllm.v1.worker.utils import allocate_kv_cache

import servers
import troupe.vllm
from troupe.cluster import Cluster
from troupe.engine import Engine
from troupe.errors import ErrorCode, TroupeError
from troupe.events import Failed
from troupe.hand_off import RELEASE
from troupe.open_cluster import deployment_of
from troupe.vllm.layouts import Group, Share, describe_cache, numbers_of, packed_planes, strided_planes
from troupe.vllm.metadata import Chunk, Drop, Push, Receive, Seal, Send, TroupeMetadata
from troupe.vllm.params import HandOff, new_transfer, prompt_digest
from troupe.vllm.place import Place, Ranks, http_address, nodes_of, place_of, replica_of
from troupe.vllm.proxy import Heartbeat, Proxy
from troupe.vllm.releases import Releases
from troupe.vllm.stats import TransferStats
from troupe.vllm.worker import RELEASED, Worker

LAYERS = ["layers.0", "layers.1", "layers.2"]
BLOCKS, HEADS, BLOCK, DIM = 40, 2, 32, 64
PATIENCE = 60  # seconds
DIGEST = prompt_digest(range(70))


def allocate(layers=None, heads=HEADS, block=BLOCK, dtype=torch.bfloat16):
    """A cache as vLLM's CPU backend makes it, by vLLM's own code, in which no two elements are equal by chance."""
    layers = LAYERS if layers is None else layers
    page = heads * block * 2 * DIM * 2
    spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=DIM, dtype=dtype)
    size = page * BLOCKS * len(layers)
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[KVCacheTensor(size, layers, page * BLOCKS, page)],
                           kv_cache_groups=[KVCacheGroupSpec(layers, spec)])
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    for cache in caches.values():
        cache.view(torch.int16).random_(0, 2**15)
    return caches


def receive(name, source, blocks, prefix_tokens, digest, refused=""):
    """A hand-off of all tokens of a source, into blocks of one group."""
    return Receive(name, source, [blocks], source.tokens if source else 0, prefix_tokens, digest, refused)


class Side:
    """A worker, and the transfers that it reported as ended."""

    def __init__(self, deployment, node, pushes=False):
        self.caches = allocate()
        self.worker = Worker(Place((node,), file=str(deployment), pushes=pushes))
        self.worker.register(self.caches, groups=[Group(LAYERS, BLOCK)], packing="vec")
        self.sent, self.loaded, self.failed = [], [], []

    def step(self, **orders):
        self.worker.carry_out(TroupeMetadata(**orders))
        self.look()

    def look(self):
        results = self.worker.results(idle=True)
        self.sent += results.sent
        self.loaded += results.loaded
        self.failed += results.failed


class TwoSides(unittest.TestCase):
    """A prefill and a decode worker of one deployment."""

    pushes = False

    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.deployment = deployment = folder / "deployment.yaml"
        text = servers.DEPLOYMENT.format(port=servers.free_ports(1)[0])
        deployment.write_text(text.replace("mode: read", "mode: write") if cls.pushes else text)
        cls.enterClassContext(servers.Process(
            "supervisor", [TROUPE, "node", deployment, "--name", "supervisor"], folder))
        cls.prefill, cls.decode = Side(deployment, "prefill-0", cls.pushes), Side(deployment, "decode-0", cls.pushes)
        for side in (cls.prefill, cls.decode):
            cls.addClassCleanup(side.worker.stop)

    def setUp(self):
        for side in (self.prefill, self.decode):
            side.sent, side.loaded, side.failed = [], [], []

    def until(self, done, what):
        limit = time.monotonic() + PATIENCE
        while not done():
            self.prefill.look()
            self.decode.look()
            self.assertLess(time.monotonic(), limit, what)


class Workers(TwoSides):
    def send(self, blocks, tokens, *, digest=DIGEST):
        transfer = new_transfer("prefill-0")
        self.prefill.step(sends=[Send(transfer, transfer, [blocks], tokens, digest)])
        return HandOff(transfer, ("prefill-0",), tokens, digest)

    def test_a_load_moves_whole_blocks_and_touches_no_other(self):
        source_blocks, own_blocks, tokens = [5, 39, 7], [30, 2, 11], 2 * BLOCK + 6
        before = {name: cache.clone() for name, cache in self.decode.caches.items()}
        source = self.send(source_blocks, tokens)
        self.decode.step(receives=[receive("r", source, own_blocks, 0, DIGEST)])
        self.until(lambda: self.decode.loaded and source.transfer in self.prefill.sent, "the load did not end")
        self.assertEqual((self.decode.loaded, self.decode.failed), (["r"], []))
        self.assertIn(source.transfer, self.prefill.sent)
        for name in LAYERS:
            expected = before[name]
            expected[own_blocks] = self.prefill.caches[name][source_blocks]
            self.assertTrue(torch.equal(self.decode.caches[name].view(torch.int16), expected.view(torch.int16)), name)

    def test_blocks_of_a_prefix_that_is_here_are_not_written(self):
        before = {name: cache.clone() for name, cache in self.decode.caches.items()}
        source = self.send([1, 2, 3], 3 * BLOCK)
        self.decode.step(receives=[receive("r", source, [21, 22, 23], 2 * BLOCK, DIGEST)])
        self.until(lambda: self.decode.loaded and source.transfer in self.prefill.sent, "the load did not end")
        self.assertEqual(self.decode.failed, [])
        for name in LAYERS:
            expected = before[name]
            expected[23] = self.prefill.caches[name][3]
            self.assertTrue(torch.equal(self.decode.caches[name].view(torch.int16), expected.view(torch.int16)), name)

    def test_the_load_may_come_first(self):
        source = HandOff(new_transfer("prefill-0"), ("prefill-0",), 40, DIGEST)
        self.decode.step(receives=[receive("r", source, [8, 9], 0, DIGEST)])
        self.assertEqual(self.decode.loaded, [])
        self.prefill.step(sends=[Send(source.transfer, source.transfer, [[3, 4]], 40, DIGEST)])
        self.until(lambda: self.decode.loaded and source.transfer in self.prefill.sent, "the load did not end")
        self.assertEqual(self.decode.failed, [])

    def test_the_cache_of_another_prompt_is_a_failure(self):
        source = self.send([5], 20, digest=prompt_digest([1, 2, 3]))
        self.decode.step(receives=[receive("r", source, [6], 0, DIGEST)])
        self.until(lambda: self.decode.loaded, "the load did not end")
        self.assertEqual(self.decode.failed, ["r"])
        self.assertNotIn(source.transfer, self.prefill.sent)  # the source is still there for a correct request
        right = HandOff(source.transfer, source.nodes, 20, prompt_digest([1, 2, 3]))
        self.decode.step(receives=[receive("again", right, [6], 0, right.digest)])
        self.until(lambda: source.transfer in self.prefill.sent, "the source did not go on")
        self.assertEqual(self.decode.failed, ["r"])

    def test_a_second_load_of_a_source_does_not_end_the_first(self):
        source = self.send([5, 6], 60)
        self.decode.step(receives=[receive("first", source, [7, 8], 0, DIGEST),
                                   receive("second", source, [9, 10], 0, DIGEST)])
        self.until(lambda: len(self.decode.loaded) >= 2, "the loads did not end")
        self.assertEqual(sorted(self.decode.loaded), ["first", "second"])
        own = {"first": [7, 8], "second": [9, 10]}
        # The second request may come before the source has ended, and then gets it as well, or after that.
        self.assertIn(self.decode.failed, ([], ["second"]))
        for name in set(own) - set(self.decode.failed):
            for layer in LAYERS:
                self.assertTrue(torch.equal(self.decode.caches[layer][own[name]].view(torch.int16),
                                            self.prefill.caches[layer][[5, 6]].view(torch.int16)), (name, layer))

    def test_a_load_from_here_itself_frees_what_was_sent(self):
        source = self.send([5, 6], 60)
        self.prefill.step(receives=[receive("r", source, [7, 8], 0, DIGEST)])
        self.until(lambda: source.transfer in self.prefill.sent, "the source was not given up")
        self.assertEqual(self.prefill.failed, ["r"])

    def test_what_cannot_be_loaded_fails_at_once(self):
        nowhere = HandOff(new_transfer("nowhere-0"), ("nowhere-0",), 20, DIGEST)
        self.decode.step(receives=[receive("no source", None, [6], 0, DIGEST, "garbage"),
                                   receive("no node", nowhere, [7], 0, DIGEST),
                                   receive("no block", self.send([5], 20), [BLOCKS], 0, DIGEST)])
        self.assertEqual(sorted(self.decode.loaded), ["no block", "no node", "no source"])
        self.assertEqual(sorted(self.decode.failed), ["no block", "no node", "no source"])

    def test_a_send_of_blocks_that_are_none_ends_at_once(self):
        self.assertIn(self.send([BLOCKS], 20).transfer, self.prefill.sent)

    def test_who_waits_for_what_cannot_be_sent_hears_why_at_once(self):
        source = HandOff(new_transfer("prefill-0"), ("prefill-0",), 20, DIGEST)
        self.decode.step(receives=[receive("r", source, [6], 0, DIGEST)])
        with self.assertLogs("vllm.troupe.vllm.worker", "WARNING") as said:
            self.prefill.step(sends=[Send(source.transfer, source.transfer, [[BLOCKS]], 20, DIGEST)])
            self.until(lambda: self.decode.loaded, "the load did not end")
        self.assertEqual(self.decode.failed, ["r"])
        self.assertRegex(said.output[-1], "r: 20 tokens were not loaded .* it cannot be offered: .*out_of_range")

    def test_a_release_ends_the_source(self):
        source = self.send([5, 6], 60)
        self.assertNotIn(source.transfer, self.prefill.sent)
        self.decode.step(releases=[source])
        self.until(lambda: source.transfer in self.prefill.sent, "the source was not released")
        self.assertEqual(self.decode.loaded, [])

    def test_a_transfer_that_a_router_gives_back_is_not_kept_for_its_lease(self):
        source = self.send([5, 6], 60)
        self.call(RELEASE, source.transfer)
        self.until(lambda: source.transfer in self.prefill.sent, "the source was not released")

    def test_it_may_be_given_back_before_it_begins(self):
        transfer = new_transfer("prefill-0")
        self.call(RELEASE, transfer)
        self.prefill.step(sends=[Send(transfer, transfer, [[5, 6]], 60, DIGEST)])
        self.until(lambda: transfer in self.prefill.sent, "the source was not released")
        self.assertNotIn(transfer, self.prefill.worker._released)

    def test_names_of_what_never_begins_are_forgotten(self):
        for number in range(RELEASED + 5):
            self.prefill.worker._answer(unittest.mock.Mock(method=RELEASE, payload=str(number).encode()))
        self.assertEqual(list(self.prefill.worker._released)[:2], ["5", "6"])
        self.assertEqual(len(self.prefill.worker._released), RELEASED)

    def test_other_calls_are_refused(self):
        with self.assertRaisesRegex(TroupeError, "a vLLM engine has no method 'query'"):
            self.call("query", "x")

    def call(self, method, payload):
        """Calls as a frontend would, while the prefill side steps."""
        with Cluster(file=self.deployment) as cluster, concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(cluster.call, "prefill-0", method, payload.encode(), timeout=PATIENCE)
            self.until(answer.done, "the call was not answered")
            return answer.result()

    def test_an_abort_ends_a_load_whose_source_never_comes(self):
        source = HandOff(new_transfer("prefill-0"), ("prefill-0",), 20, DIGEST)
        self.decode.step(receives=[receive("r", source, [6], 0, DIGEST)])
        self.decode.worker.take_stats()
        self.decode.step(aborts=["r", "unknown"])
        self.until(lambda: self.decode.loaded, "the load was not given up")
        self.assertEqual((self.decode.loaded, self.decode.failed), (["r"], ["r"]))
        self.assertIsNone(self.decode.worker.take_stats())  # a client that has left is no failure

    def test_an_order_that_raises_takes_no_other_along_and_ends_by_name(self):
        broken = unittest.mock.Mock(side_effect=RuntimeError("broken on purpose"))
        for order in ("_send", "_receive", "_abort", "_hold", "_release_once", "_seal", "_drop", "_push", "_chunk"):
            with self.subTest(order):
                self.setUp()
                bad = HandOff(new_transfer("prefill-0"), ("prefill-0",), 20, DIGEST)
                with unittest.mock.patch.object(Worker, order, broken):
                    self.prefill.step(sends=[Send(bad.transfer, bad.transfer, [[3]], 20, DIGEST)] * (order == "_send"),
                                      pushes=[Push("pushed", [4], 20)] * (order in ("_push", "_chunk")),
                                      chunks=[Chunk("pushed", [], 20, 20)] * (order in ("_push", "_chunk")),
                                      seals=[Seal("sealed", "unheard of", 20, DIGEST)] * (order == "_seal"),
                                      drops=[Drop("", "unheard of")] * (order == "_drop"))
                    self.decode.step(receives=[receive("bad", bad, [6], 0, DIGEST)] * (order == "_receive"),
                                     aborts=["x"], holds=[bad], releases=[bad])
                self.assertTrue(broken.called)
                broken.reset_mock()
                source = self.send([5, 6], 60)
                self.decode.step(receives=[receive("good", source, [7, 8], 0, DIGEST)])
                self.until(lambda name=source.transfer: "good" in self.decode.loaded and name in self.prefill.sent,
                           "the load beside it did not end")
                self.assertNotIn("good", self.decode.failed)
                if order == "_receive":
                    self.assertEqual((self.decode.loaded.count("bad"), self.decode.failed), (1, ["bad"]))
                self.assertEqual(self.prefill.sent.count(bad.transfer), int(order == "_send"))
                self.assertEqual(self.prefill.sent.count("sealed"), int(order == "_seal"))
                if order in ("_push", "_chunk"):
                    self.prefill.step(drops=[Drop("its request", "pushed")])
                    self.until(lambda: "its request" in self.prefill.sent, "the push did not end")

    def test_an_event_that_raises_takes_no_other_along(self):
        broken = RuntimeError("broken on purpose")
        for side in (self.prefill, self.decode):
            for inside in (side.worker._stats, "add_load"), (side.worker, "_hear"), (side.worker._holds, "hear"):
                with self.subTest(inside[1]), unittest.mock.patch.object(*inside, side_effect=broken):
                    self.setUp()
                    names = [self.send([number], 20) for number in range(3)]
                    self.decode.step(holds=names)
                    self.decode.step(receives=[receive(source.transfer, source, [number + 9], 0, DIGEST)
                                               for number, source in enumerate(names)])
                    ends = sorted(source.transfer for source in names)
                    self.until(lambda ends=ends: set(ends) <= set(self.decode.loaded) & set(self.prefill.sent),
                               "some did not end")
                    self.assertEqual((sorted(self.decode.loaded), self.decode.failed), (ends, []))

    def test_a_load_that_failed_counts_as_failed_whatever_raises(self):
        broken, worker = RuntimeError("broken on purpose"), self.decode.worker
        for inside in (worker, "_hear"), (worker._stats, "add_failed_load"), (worker, "_release"):
            with self.subTest(inside[1]), unittest.mock.patch.object(*inside, side_effect=broken):
                self.setUp()
                source = self.send([5], 20, digest=prompt_digest([1, 2, 3]))
                self.decode.step(receives=[receive("r", source, [6], 0, DIGEST)])
                self.until(lambda: self.decode.loaded, "the load did not end")
                self.assertEqual((self.decode.loaded, self.decode.failed), (["r"], ["r"]))

    def test_each_end_is_told_once(self):
        own, transfers = [str(number) for number in range(20)], []
        for number, name in enumerate(own):
            source = self.send([number], 10)
            transfers.append(source.transfer)
            self.decode.step(receives=[receive(name, source, [number], 0, DIGEST)])

        def told():  # other tests' leftovers may end here as well
            return (sorted(name for name in self.decode.loaded if name in own),
                    sorted(name for name in self.prefill.sent if name in transfers))

        self.until(lambda: all(len(ends) >= 20 for ends in told()), "some loads did not end")
        for _ in range(50):
            self.prefill.look()
            self.decode.look()
        self.assertEqual(told(), (sorted(own), sorted(transfers)))
        self.assertEqual(self.decode.failed, [])


class HeldPrompts(unittest.TestCase):
    """A cache that nobody requests is kept for eight seconds: longer than a busy machine stalls."""

    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        deployment = folder / "deployment.yaml"
        deployment.write_text(servers.DEPLOYMENT.format(port=servers.free_ports(1)[0])
                              + "limits: {source_lease: 8s}\n")
        cls.enterClassContext(servers.Process(
            "supervisor", [TROUPE, "node", deployment, "--name", "supervisor"], folder))
        cls.prefill, cls.decode = Side(deployment, "prefill-0"), Side(deployment, "decode-0")
        for side in (cls.prefill, cls.decode):
            cls.addClassCleanup(side.worker.stop)

    def look_until(self, done):
        limit = time.monotonic() + PATIENCE
        while not done():
            self.prefill.look()
            self.decode.look()
            self.assertLess(time.monotonic(), limit)

    def send(self, transfer, block):
        self.prefill.step(sends=[Send(transfer, transfer, [[block]], BLOCK, DIGEST)])
        return HandOff(transfer, ("prefill-0",), BLOCK, DIGEST)

    def test_what_waits_in_a_queue_is_kept_longer_than_what_nobody_wants(self):
        held, early = (new_transfer("prefill-0") for _ in range(2))
        # One of them is requested before it exists.
        self.decode.step(holds=[HandOff(early, ("prefill-0",), BLOCK, DIGEST)])
        self.decode.step(holds=[self.send(held, 1)])
        self.send(early, 2)
        unwanted = new_transfer("prefill-0")
        self.send(unwanted, 3)  # last, so that its lease ends after theirs
        self.look_until(lambda: unwanted in self.prefill.sent)
        self.assertFalse({held, early} & set(self.prefill.sent))
        sources = [HandOff(transfer, ("prefill-0",), BLOCK, DIGEST) for transfer in (held, early)]
        self.decode.step(receives=[receive("r1", sources[0], [11], 0, DIGEST)])
        self.decode.step(releases=[sources[1]])
        self.look_until(lambda: self.decode.loaded and {held, early} <= set(self.prefill.sent))
        self.assertEqual((self.decode.loaded, self.decode.failed), (["r1"], []))

    def test_what_is_not_waited_for_any_more_is_kept_for_its_lease_alone(self):
        given_up = new_transfer("prefill-0")
        self.decode.step(holds=[self.send(given_up, 4)])
        self.decode.step(unholds=[given_up])
        self.look_until(lambda: given_up in self.prefill.sent)


class TellingAgain(unittest.TestCase):
    """An engine with a prompt that nobody wants is stopped, and is told later. Uses a double of the engine."""

    def setUp(self):
        self.said = []
        self.engine = types.SimpleNamespace(release=self.release)
        self.releases = Releases()
        self.enterContext(unittest.mock.patch("troupe.vllm.releases.AGAIN", 0.0))

    def release(self, transfer, nodes, lives):
        self.said.append((transfer, nodes, lives))
        return len(self.said)

    def begin(self):
        self.releases.begin(self.engine, HandOff("t", ("p",), 1, DIGEST, lives=(7,)))

    def fail(self, code):
        self.releases.hear(Failed(len(self.said), TroupeError(code, "why")))
        self.releases.ask_again(self.engine)

    def test_until_it_has_heard(self):
        self.begin()
        for code in (ErrorCode.PEER_UNREACHABLE, ErrorCode.PEER_LOST, ErrorCode.DEADLINE):
            self.fail(code)
        self.assertEqual(self.said, 4 * [("t", ("p",), (7,))])
        self.releases.hear(types.SimpleNamespace(operation=4))
        self.releases.ask_again(self.engine)
        self.assertEqual(len(self.said), 4)

    def test_a_refusal_is_an_answer(self):
        self.begin()
        self.fail(ErrorCode.ALREADY_EXISTS)
        self.assertEqual(len(self.said), 1)

    def test_not_for_ever(self):
        with unittest.mock.patch("troupe.vllm.releases.SAID_FOR", 0.0), \
                self.assertLogs("vllm.troupe.vllm.releases", "WARNING") as said:
            self.begin()
            self.fail(ErrorCode.PEER_LOST)
        self.assertEqual(len(self.said), 1)
        self.assertIn("t was not released, its lease will end", said.output[0])


class Joined(Side):
    """A worker that joins an open cluster, with a cache of its own kind."""

    def __init__(self, name, supervisor, *, packing="vec", model=b"m" * 32, ranks=1, block=BLOCK, extra=None, **cache):
        self.caches = allocate(block=block, **cache)
        where = {"supervisor": supervisor} if supervisor else {}
        self.worker = Worker(place_of({**where, **(extra or {})}, name, ranks=Ranks(size=ranks)))
        self.worker.register(self.caches, groups=[Group(LAYERS, block)], packing=packing,
                             share=Share(model=model, tp_size=ranks, kv_heads=ranks * cache.get("heads", HEADS)))
        self.node = self.worker._place.nodes[0]
        self.sent, self.loaded, self.failed = [], [], []


class UnfitEngines(unittest.TestCase):
    """A worker that differs in one thing, next to two that fit."""

    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.address = f"127.0.0.1:{servers.free_ports(1)[0]}"
        deployment = folder / "deployment.yaml"
        deployment.write_text(deployment_of(cls.address))
        cls.enterClassContext(servers.Process(
            "supervisor", [TROUPE, "node", deployment, "--name", "supervisor"], folder))
        cls.prefill, cls.decode = Joined("p", cls.address), Joined("d", cls.address)
        for side in (cls.prefill, cls.decode):
            cls.addClassCleanup(side.worker.stop)

    def join(self, name, address=None, **kind):
        side = Joined(name, address or self.address, **kind)
        self.addCleanup(side.worker.stop)
        return side

    def until(self, done, sides, what):
        limit = time.monotonic() + PATIENCE
        while not done():
            for side in sides:
                side.look()
            self.assertLess(time.monotonic(), limit, what)

    def offer(self, side, blocks=(5,), tokens=20):
        transfer = new_transfer(side.node)
        side.step(sends=[Send(transfer, transfer, [list(blocks)], tokens, DIGEST)])
        return HandOff(transfer, (side.node,), tokens, DIGEST, lives=(side.worker.identity().incarnation,))

    def why(self, source, decode, *others):
        """Why a load fails, while another one at the same time does not."""
        sides = [self.prefill, self.decode, *others]
        good = self.offer(self.prefill, [7, 8], 60)
        decode.loaded, decode.failed = [], []
        with self.assertLogs("vllm.troupe.vllm.worker", "WARNING") as logs:
            decode.step(receives=[receive("bad", source, [6], 0, DIGEST)])
            self.decode.step(receives=[receive("good", good, [9, 10], 0, DIGEST)])
            self.until(lambda: "bad" in decode.loaded and "good" in self.decode.loaded, sides, "a load did not end")
        self.assertEqual((decode.failed, "good" in self.decode.failed), (["bad"], False))
        for layer in LAYERS:
            self.assertTrue(torch.equal(self.decode.caches[layer][[9, 10]].view(torch.int16),
                                        self.prefill.caches[layer][[7, 8]].view(torch.int16)))
        [why] = [line for line in logs.output if ":bad: " in line]
        return why

    def test_an_engine_that_differs_in_one_thing_says_in_which(self):
        for name, sentence, kind in (
                ("model", "model", {"model": b"n" * 32}), ("type", "dtype", {"dtype": torch.float16}),
                ("size", "block", {"block": 2 * BLOCK}), ("packing", "packing", {"packing": "amx"}),
                ("heads", "heads", {"heads": 2 * HEADS}),
                ("mode", "write.*read|read.*write|mode", {"extra": {"read_mode": False}})):
            with self.subTest(name):
                odd = self.join(name, **kind)
                self.assertRegex(self.why(self.offer(odd), self.decode, odd), sentence)
                self.assertRegex(self.why(self.offer(self.prefill), odd, odd), sentence)

    def test_an_engine_of_other_ranks_than_were_named_is_refused(self):
        odd = self.join("half", ranks=2, heads=HEADS // 2)
        self.assertRegex(self.why(self.offer(odd), self.decode, odd), "rank")

    def test_an_engine_without_a_supervisor_says_so(self):
        alone = self.join("alone", f"127.0.0.1:{servers.free_ports(1)[0]}")
        self.assertRegex(self.why(self.offer(self.prefill), alone, alone), "supervisor has not been reached")
        self.assertRegex(
            self.why(self.offer(alone), self.decode, alone), "engines.alone.0 is not a member of the cluster"
        )

    def test_a_transfer_of_a_former_life_fails_at_once(self):
        """The engine that came back under the name knows nothing of it, and might yet be told of it."""
        former = self.join("returns")
        source = self.offer(former)
        former.worker.stop()
        back = self.join("returns")
        with unittest.mock.patch("troupe.vllm.worker.PARK", 10 * PATIENCE):
            # Nobody listens for the former life any more, which may be found before the new one is known.
            self.assertRegex(self.why(source, self.decode, back), "stale_incarnation|peer_unreachable")
        again = self.offer(back)
        self.decode.loaded, self.decode.failed = [], []
        self.decode.step(receives=[receive("again", again, [6], 0, DIGEST)])
        self.until(lambda: "again" in self.decode.loaded, [self.decode, back], "the load did not end")
        self.assertEqual(self.decode.failed, [])

    def test_a_cache_on_a_gpu_needs_a_library_for_gpus(self):
        with unittest.mock.patch.object(torch.UntypedStorage, "is_cuda", True), \
                self.assertRaisesRegex(TroupeError, "memory of a GPU.*not built.*TROUPE_GPU=cuda"):
            self.join("gpu")


class EnginesOfAFile(unittest.TestCase):
    """As on several machines: every process has the deployment file, which names none of the engines."""

    def test_join_its_open_stage_and_load_from_each_other(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        told = subprocess.run([TROUPE, "certs", "init", folder / "certs", "--cluster", "vllm"], capture_output=True, text=True,
                              check=True).stdout
        security = told[told.index("security:"):]
        file = folder / "vllm.yaml"
        file.write_text(f"""\
cluster: vllm
supervisor: {{host: 127.0.0.1, port: {servers.free_ports(1)[0]}}}
{security}
stages:
  - {{name: engines, role: both, open: {{max_nodes: 256}}, transport: {{peer_silence: 10s}}}}
edges:
  - {{from: engines, to: engines, mode: read}}
""")
        self.enterContext(servers.Process("supervisor", [TROUPE, "node", file, "--name", "supervisor"], folder))
        prefill, decode = (Joined(name, None, extra={"deployment": str(file)}) for name in ("p", "d"))
        for side in (prefill, decode):
            self.addCleanup(side.worker.stop)
        transfer = new_transfer(prefill.node)
        prefill.step(sends=[Send(transfer, transfer, [[7, 8]], 60, DIGEST)])
        source = HandOff(transfer, (prefill.node,), 60, DIGEST, lives=(prefill.worker.identity().incarnation,))
        decode.step(receives=[receive("there", source, [9, 10], 0, DIGEST)])
        limit = time.monotonic() + PATIENCE
        while "there" not in decode.loaded and time.monotonic() < limit:
            prefill.look()
            decode.look()
        self.assertEqual((decode.loaded, decode.failed), (["there"], []))
        for layer in LAYERS:
            self.assertTrue(torch.equal(decode.caches[layer][[9, 10]].view(torch.int16),
                                        prefill.caches[layer][[7, 8]].view(torch.int16)))


class Divided:
    """An engine with divided heads and layers: a worker and a cache for each rank."""

    MODEL_LAYERS = [f"layers.{number}" for number in range(4)]

    def __init__(self, name, ranks, supervisor):
        self.name, self.ranks = name, ranks
        self.place = place_of({"supervisor": supervisor}, name, ranks=ranks)
        self.caches, self.workers = [], []
        for rank in range(ranks.count):
            layers, heads = self.layers_of(rank), self.heads_of(rank)
            self.caches.append(allocate(layers, len(heads)))
            self.workers.append(Worker(self.place, rank))
            self.workers[rank].register(
                self.caches[rank], groups=[Group(layers, BLOCK)], packing="vec",
                share=Share(tp_rank=rank % ranks.size, tp_size=ranks.size, kv_heads=HEADS,
                            numbers=numbers_of(layers), total_layers=len(self.MODEL_LAYERS)))
        self.sent, self.loaded, self.failed = ([] for _ in range(3))

    def layers_of(self, rank):
        count = len(self.MODEL_LAYERS) // self.ranks.parts
        first = rank // self.ranks.size * count
        return self.MODEL_LAYERS[first:first + count]

    def heads_of(self, rank):
        """The first head in the model; vLLM gives several ranks the same head if there are fewer heads than ranks."""
        rank, size = rank % self.ranks.size, self.ranks.size
        return [rank * HEADS // size] if size > HEADS else list(range(rank * HEADS // size, (rank + 1) * HEADS // size))

    def step(self, **orders):
        for worker in self.workers:
            worker.carry_out(TroupeMetadata(**orders))

    def look(self):
        for worker in self.workers:
            results = worker.results(idle=True)
            self.sent += results.sent
            self.loaded += results.loaded
            self.failed += results.failed

    def fill(self, prompt, blocks):
        """Yields each rank's part of a prompt's cache, [layer][block][head][...]."""
        for rank, caches in enumerate(self.caches):
            for layer, cache in caches.items():
                cache[blocks] = prompt[int(layer.split(".")[1])][:, self.heads_of(rank)]

    def stop(self):
        for worker in self.workers:
            worker.stop()


class DividedEngines(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        address = f"127.0.0.1:{servers.free_ports(1)[0]}"
        deployment = folder / "deployment.yaml"
        deployment.write_text(deployment_of(address))
        cls.enterClassContext(servers.Process(
            "supervisor", [TROUPE, "node", deployment, "--name", "supervisor"], folder))
        # The model has two heads: with four ranks, two ranks hold each head.
        cls.engines = [Divided(f"t{size}p{parts}", Ranks(size, parts), address)
                       for size, parts in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))]
        for engine in cls.engines:
            cls.addClassCleanup(engine.stop)

    def load(self, prefill, decode):
        """A prompt of three blocks, of which the decode side already has the first."""
        prompt = torch.randint(0, 2**14, (len(prefill.MODEL_LAYERS), 3, HEADS, BLOCK, 2 * DIM), dtype=torch.int16)
        prompt = prompt.view(torch.bfloat16)
        source_blocks, own_blocks, tokens = [5, 39, 7], [30, 2, 11], 2 * BLOCK + 6
        prefill.fill(prompt, source_blocks)
        before = [{layer: cache.clone() for layer, cache in caches.items()} for caches in decode.caches]
        transfer = new_transfer(prefill.place.nodes[0])
        prefill.step(sends=[Send(transfer, transfer, [source_blocks], tokens, DIGEST)])
        source = HandOff(transfer, prefill.place.nodes, tokens, DIGEST)
        decode.step(receives=[receive(transfer, source, own_blocks, BLOCK, DIGEST)])
        limit = time.monotonic() + PATIENCE
        while len(prefill.sent) < prefill.ranks.count or len(decode.loaded) < decode.ranks.count:
            prefill.look()
            decode.look()
            self.assertLess(time.monotonic(), limit, "a rank did not end")
        self.assertEqual((decode.failed, set(prefill.sent), set(decode.loaded)), ([], {transfer}, {transfer}))
        for rank, caches in enumerate(decode.caches):
            for layer, cache in caches.items():
                expected = before[rank][layer]
                expected[own_blocks[1:]] = prompt[int(layer.split(".")[1])][1:, decode.heads_of(rank)]
                self.assertTrue(torch.equal(cache.view(torch.int16), expected.view(torch.int16)), (rank, layer))

    def test_every_rank_of_one_loads_its_share_from_all_of_another(self):
        for prefill in self.engines:
            for decode in self.engines:
                if prefill is decode:
                    continue
                for engine in self.engines:
                    engine.sent, engine.loaded, engine.failed = ([] for _ in range(3))
                with self.subTest(f"{prefill.name} to {decode.name}"):
                    self.load(prefill, decode)

    def test_what_nobody_loads_is_released_once_for_all_ranks(self):
        prefill, decode = self.engines[4], self.engines[1]
        prefill.sent = []
        transfer = new_transfer(prefill.place.nodes[0])
        prefill.step(sends=[Send(transfer, transfer, [[1, 2]], 40, DIGEST)])
        decode.step(releases=[HandOff(transfer, prefill.place.nodes, 40, DIGEST)])
        limit = time.monotonic() + PATIENCE
        while len(prefill.sent) < prefill.ranks.count:
            prefill.look()
            decode.look()
            self.assertLess(time.monotonic(), limit, f"{len(prefill.sent)} ranks of {prefill.ranks.count} ended")


class Stats(unittest.TestCase):
    def test_loads_of_all_ranks_stand_in_the_log_and_in_metrics(self):
        stats = TransferStats()
        self.assertTrue(stats.is_empty())
        for rank in range(10):
            of_rank = TransferStats()
            of_rank.add_load(seconds=0.001 * (rank + 1), waited=0.5, size=2**20, segments=4)
            stats = stats.aggregate(TransferStats(of_rank.to_dict()))
        failed = TransferStats()
        failed.add_failed_load()
        failed.add_expired_send()
        self.assertFalse(failed.is_empty())
        said = stats.aggregate(failed).reduce()
        self.assertEqual((said["Num successful transfers"], said["P90 xfer time (ms)"], said["Avg wait (ms)"]), (10, 9, 500))
        self.assertEqual((said["Num failed transfers"], said["Num KV expired reqs"]), (1, 1))
        self.assertEqual(set(failed.reduce()), set(said))
        data = failed.to_dict()
        TransferStats(data).aggregate(stats)  # as one of several loggers does
        self.assertEqual((data["bytes"], data["failed"]), ([], 1))
        registry = prometheus_client.CollectorRegistry()
        kinds = {kind: functools.partial(kind, registry=registry)
                 for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)}
        connector = troupe.vllm.TroupeConnector
        metrics = connector.build_prom_metrics(types.SimpleNamespace(kv_transfer_config=None), kinds, ["engine"],
                                               {0: ["0"], 1: ["1"]})
        self.assertIs(KVConnectorFactory.get_connector_class_by_name("TroupeConnector"), connector)  # as MultiConnector does
        metrics.observe(stats.to_dict(), 1)
        for name, value in (("bytes_transferred_sum", 10 * 2**20), ("xfer_time_seconds_count", 10),
                            ("num_failed_transfers_total", 1), ("num_kv_expired_reqs_total", 1)):
            self.assertEqual(registry.get_sample_value(f"vllm:troupe_{name}", {"engine": "1"}), value, name)
            self.assertEqual(registry.get_sample_value(f"vllm:troupe_{name}", {"engine": "0"}), 0, name)


class Layouts(unittest.TestCase):
    def test_k_and_v_are_the_halves_of_a_head_of_a_block(self):
        named = allocate()
        caches = list(named.values())
        view = describe_cache(named, [Group(LAYERS, BLOCK)], packing="vec")
        raw = torch.tensor([], dtype=torch.int8).set_(view.regions[0])
        for layer, plane, block, head in ((0, 0, 0, 0), (0, 1, 3, 1), (2, 0, 39, 1), (2, 1, 17, 0)):
            half = caches[layer][block, head].reshape(2, BLOCK, DIM)[plane].contiguous().view(torch.int8)
            region, begin, length = view.layout.locate([block], layer=layer, plane=plane, token=7, head=head)
            self.assertEqual((region, length), (0, half.numel()))
            self.assertTrue(torch.equal(raw[begin:begin + length], half.flatten()), (layer, plane, block, head))

    def test_a_block_of_vllm_may_be_several_of_the_kernels(self):
        view = describe_cache(allocate(), [Group(LAYERS, 2 * BLOCK)], packing="vec")
        self.assertEqual(view.blocks_of([[3, 0]], 70), {"blocks": [6, 7, 0]})

    def test_of_a_window_the_blocks_behind_the_last_null_block_are_named(self):
        caches = allocate()
        groups = [Group(LAYERS[:1], 2 * BLOCK), Group(LAYERS[1:], BLOCK, window=True)]
        view = describe_cache(caches, groups, packing="vec")
        self.assertEqual([group.layers for group in view.layout.groups()], [(0,), (1, 2)])

        def tables(whole, window, tokens):
            return [(table.first_token, table.blocks) for table in view.blocks_of([whole, window], tokens)["groups"]]

        self.assertEqual(tables([3, 4], [0, 0, 9, 8], 4 * BLOCK), [(0, [6, 7, 8, 9]), (2 * BLOCK, [9, 8])])
        self.assertEqual(tables([3, 4], [0, 0, 9, 8], 2 * BLOCK + 5), [(0, [6, 7, 8]), (2 * BLOCK, [9])])
        self.assertEqual(tables([3], [5, 0, 0], BLOCK), [(0, [6]), (0, [5])])  # nothing was dropped that early
        self.assertEqual(tables([3], [0, 0], 2 * BLOCK), [(0, [6, 7]), (2 * BLOCK, [])])
        alone = describe_cache(caches, [Group(LAYERS, BLOCK, window=True)], packing="vec")
        (table,) = alone.blocks_of([[0, 0, 9, 8]], 4 * BLOCK)["groups"]
        self.assertEqual((table.first_token, table.blocks), (2 * BLOCK, [9, 8]))

    def test_layers_are_in_the_order_of_the_model_and_a_part_may_lack_a_group(self):
        caches = allocate()
        groups = [Group([LAYERS[2], LAYERS[0]], BLOCK), Group([LAYERS[1]], BLOCK, window=True), Group([], BLOCK)]
        numbers = {layer: number + 3 for number, layer in enumerate(LAYERS)}
        view = describe_cache(caches, groups, packing="vec", share=Share(numbers=numbers, total_layers=6))
        self.assertEqual([group.layers for group in view.layout.groups()], [(0, 2), (1,), ()])
        numbers[LAYERS[1]] = 0
        with self.assertRaisesRegex(ValueError, "consecutive layers"):
            describe_cache(caches, groups, packing="vec", share=Share(numbers=numbers, total_layers=6))
        del numbers[LAYERS[1]]
        with self.assertRaisesRegex(ValueError, "'layers.1' has none"):
            describe_cache(caches, groups, packing="vec", share=Share(numbers=numbers, total_layers=6))

    def test_a_rank_that_has_all_layers_fits_one_that_has_some(self):
        """The fingerprint, by which workers are placed together, agrees too, although vLLM names layers group by
        group."""
        share = Share(numbers=numbers_of(LAYERS), total_layers=len(LAYERS))
        whole = describe_cache(allocate(), [Group([LAYERS[1]], BLOCK), Group([LAYERS[0], LAYERS[2]], BLOCK, window=True)],
                               packing="vec", share=share).layout
        first = describe_cache(allocate(LAYERS[:1]), [Group([], BLOCK), Group([LAYERS[0]], BLOCK, window=True)],
                               packing="vec", share=share).layout
        self.assertEqual([group.layers for group in whole.groups()], [(1,), (0, 2)])
        whole.check_compatible(first)
        self.assertEqual(whole.fingerprint(), first.fingerprint())

    def test_blocks_of_a_group_without_layers_are_divided_as_the_others(self):
        view = describe_cache(allocate(), [Group([], 4 * BLOCK), Group(LAYERS, 2 * BLOCK)], packing="vec",
                              share=Share(numbers=numbers_of(LAYERS), total_layers=6))
        self.assertEqual((view.block_tokens, view.ratios), ([2 * BLOCK, BLOCK], [2, 2]))

    def test_fewer_heads_than_ranks_are_each_of_several_ranks(self):
        share = Share(tp_size=4, kv_heads=2)
        self.assertEqual((share.heads_of_model(1), share.heads_of_model(2)), (2, 8))  # a layer may have more heads

    def test_each_order_of_vllm_says_where_a_token_of_a_head_lies(self):
        """[layer][block][token][head] and the other orders of a GPU's cache, by vLLM's own code."""
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float16)
        sizes = (len(LAYERS), BLOCKS, HEADS, BLOCK, 2 * DIM)
        for order in KVCacheLayout:
            strides, size = [0] * len(sizes), 2
            for axis in reversed(order.stride_order):
                strides[axis] = size
                size *= sizes[axis]
            config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)],
                                   kv_cache_tensors=[KVCacheTensor(size, LAYERS, *strides[:2])])
            with self.subTest(order.name):
                caches = allocate_kv_cache(config, torch.device("cpu"), order)
                for cache in caches.values():
                    cache.view(torch.int16).random_(0, 2**15)
                view = describe_cache(caches, [Group(LAYERS, BLOCK, key_dim=DIM)])
                raw = torch.tensor([], dtype=torch.int8).set_(view.regions[0])
                for layer, plane, block, token, head in ((0, 0, 0, 0, 0), (1, 1, 3, 31, 1), (2, 0, 39, 7, 1)):
                    there = caches[LAYERS[layer]][block, head, token, plane * DIM:(plane + 1) * DIM]
                    region, begin, length = view.layout.locate([block], layer=layer, plane=plane, token=token, head=head)
                    self.assertEqual((region, length), (0, 2 * DIM))
                    self.assertTrue(torch.equal(raw[begin:begin + length], there.contiguous().view(torch.int8)),
                                    (layer, plane, block, token, head))

    def test_k_and_v_may_be_of_unequal_sizes_and_a_latent_is_one(self):
        _, planes = strided_planes((4, 2, BLOCK, 96), (6144, 3072, 96, 1), 2, 10, Group([], BLOCK, key_dim=64))
        self.assertEqual([(plane.base, plane.head_bytes) for plane in planes], [(10, 128), (138, 64)])
        shape, planes = strided_planes((4, 1, BLOCK, 576), (18432, 18432, 576, 1), 2, 0,
                                       Group([], BLOCK, key_dim=576, latent=True))
        self.assertEqual((shape.head_dim, len(planes), planes[0].head_bytes), (576, 1, 1152))
        with self.assertRaisesRegex(ValueError, "does not have heads of 0 elements of K"):
            strided_planes((4, 2, BLOCK, 96), (6144, 3072, 96, 1), 2, 0, Group([], BLOCK))

    def test_a_cache_of_another_arrangement_is_refused(self):
        tokens_outside_heads = ((4, 2, 32, 128), (8192, 128, 256, 1))
        with self.assertRaisesRegex(ValueError, "not that of vLLM's CPU backend"):
            packed_planes(*tokens_outside_heads, 2, 0)
        with self.assertRaisesRegex(ValueError, "--kv-cache-dtype auto"):
            describe_cache({"layer": torch.zeros(4, 2, 32, 128, dtype=torch.int8)}, [Group(["layer"], BLOCK)],
                               packing="vec")


class Configurations(unittest.TestCase):
    """The settings that the connector takes from vLLM's configuration."""

    def share_of(self, layers, packing="vec", cache_dtype="auto", **parallel):
        model = types.SimpleNamespace(
            get_total_num_kv_heads=lambda: HEADS, get_total_num_hidden_layers=lambda: len(LAYERS), revision=None,
            quantization=None, dtype=torch.bfloat16, hf_config=types.SimpleNamespace(to_json_string=lambda use_diff: "{}"))
        config = types.SimpleNamespace(model_config=model, cache_config=types.SimpleNamespace(cache_dtype=cache_dtype),
                                       parallel_config=parallel_config(**parallel))
        return troupe.vllm._share_of(config, [Group(layers, BLOCK)], packing)

    def test_a_rank_knows_its_heads_and_its_layers(self):
        names = [f"model.{layer}.self_attn.attn" for layer in LAYERS]
        numbers = dict(zip(names, range(len(LAYERS))))
        last = self.share_of(names[2:], rank=3, tensor_parallel_size=2, pipeline_parallel_size=2)
        self.assertEqual((last.tp_rank, last.tp_size, last.numbers, last.total_layers), (1, 2, {names[2]: 2}, 3))
        whole = self.share_of(names)
        self.assertEqual((whole.tp_size, whole.numbers, whole.total_layers, whole.kv_heads), (1, numbers, 3, HEADS))
        for others in ([*names, "model.layers.3.self_attn.attn"], names[:2], [*names, "a.b"], [*names, "a.1.b.2"]):
            share = self.share_of(others)
            self.assertEqual((share.numbers, share.total_layers), ({}, 0), others)

    def test_equal_bytes_of_equal_models_have_one_hash(self):
        hashes = [self.share_of(LAYERS, **more).model for more in (
            {}, {"cache_dtype": "bfloat16"}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3},
            {"packing": "amx"}, {"cache_dtype": "fp8_e4m3"}, {"cache_dtype": "fp8_e5m2"})]
        self.assertEqual(len(set(hashes[:4])), 1)
        self.assertEqual(len(set(hashes)), 4)

    def refusal(self, *specs, **parallel):
        """The configuration of a model with a group of each of these."""
        groups = [KVCacheGroupSpec([f"layers.{place}"], spec) for place, spec in enumerate(specs)]
        with self.assertRaises(ValueError) as raised:
            troupe.vllm._check_supported(
                types.SimpleNamespace(parallel_config=parallel_config(**parallel)),
                KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups))
        return str(raised.exception)

    def test_what_is_not_served_is_said_at_the_start(self):
        dense = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
        state = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,))
        unequal = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"layers.0": dense})
        scaled = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8,
                                   state_content_bytes=200)
        compressed = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=DIM, dtype=torch.bfloat16,
                                      tokens_per_state=4)
        for specs, parallel, sentence in (
                ([dense, state], {}, "this one has MambaSpec"), ([unequal], {}, "has UniformTypeKVCacheSpecs"),
                ([dense, scaled], {}, r"the cache of layers.1 \(NONE\) does not hold K followed by V"),
                ([compressed], {}, "does not hold K followed by V"),
                ([dense], {"decode_context_parallel_size": 2}, "over 2 context-parallel ranks"),
                ([dense], {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "each has its own")):
            with self.subTest(sentence):
                self.assertRegex(self.refusal(*specs, **parallel), sentence)


def parallel_config(**settings):
    return types.SimpleNamespace(**{
        "rank": 0, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1, "distributed_executor_backend": "mp", **settings})


class Pushing(TwoSides):
    """Prompts whose caches move while they are computed."""

    TOKENS = 2 * BLOCK + 6
    SOURCE, OWN = [5, 39, 7], [30, 2, 11]
    pushes = True

    def setUp(self):
        super().setUp()
        self.transfer = new_transfer("prefill-0")
        self.request = f"request of {self.transfer}"
        self.early = HandOff(self.transfer, ("prefill-0",))
        self.enterContext(unittest.mock.patch("troupe.vllm.worker.TOGETHER", 0))  # each layer by itself
        for cache in self.decode.caches.values():
            cache.view(torch.int16).zero_()

    def ask(self, digest=DIGEST):
        self.decode.step(receives=[Receive("r", self.early, [self.OWN], self.TOKENS, 0, digest)])

    def begin(self, blocks=2, end=BLOCK):
        self.prefill.step(pushes=[Push(self.transfer, self.SOURCE[:blocks], self.TOKENS)],
                          chunks=[Chunk(self.transfer, [], end, end)])

    def compute(self, *layers):
        for name in layers or LAYERS:
            self.prefill.worker.layer_computed(name, self.prefill.caches["layers.0"])

    def seal(self, digest=DIGEST):
        self.prefill.step(seals=[Seal(self.request, self.transfer, self.TOKENS, digest)])

    def is_there(self, name, blocks):
        return torch.equal(self.decode.caches[name][self.OWN[:blocks]].view(torch.int16),
                           self.prefill.caches[name][self.SOURCE[:blocks]].view(torch.int16))

    def is_empty(self, name):
        return not self.decode.caches[name].view(torch.int16).any()

    def told(self):
        """How often the prefill reported that its blocks are free."""
        return sum(name in (self.transfer, self.request) for name in self.prefill.sent)

    def ended(self, what):
        self.until(lambda: self.decode.loaded and self.told(), what)

    def assert_loaded(self):
        self.ended("the load did not end")
        self.assertEqual((self.decode.loaded, self.decode.failed), (["r"], []))
        self.assertTrue(all(self.is_there(name, 3) for name in LAYERS))

    def test_a_layer_moves_while_the_next_one_is_computed(self):
        self.ask()
        self.begin()
        self.compute("layers.1")
        self.until(lambda: self.is_there("layers.1", 1), "the layer that was computed did not come")
        self.assertTrue(self.is_empty("layers.0") and self.is_empty("layers.2"))
        self.assertTrue(torch.equal(self.decode.caches["layers.1"][self.OWN[1:]],
                                    torch.zeros_like(self.decode.caches["layers.1"][self.OWN[1:]])))
        self.compute("layers.0", "layers.2")
        self.until(lambda: self.is_there("layers.0", 1) and self.is_there("layers.2", 1), "the others did not come")
        self.assertEqual(self.decode.loaded, [])
        self.assertEqual(self.told(), 0)
        self.prefill.step(chunks=[Chunk(self.transfer, self.SOURCE[2:], self.TOKENS, self.TOKENS - BLOCK)])
        self.compute()
        self.seal()
        self.assert_loaded()
        self.assertIn(self.request, self.prefill.sent)

    def test_the_peer_hears_of_small_layers_at_once(self):
        of_a_layer = BLOCK * HEADS * 2 * DIM * 2
        for together, wanted in ((0, [(0, 1), (1, 2), (2, 3)]), (of_a_layer * 2, [(0, 2), (2, 3)]), (1 << 20, [(0, 3)])):
            with self.subTest(together), unittest.mock.patch("troupe.vllm.worker.TOGETHER", together):
                self.begin()
                with unittest.mock.patch.object(Engine, "layers_ready", autospec=True, side_effect=Engine.layers_ready) as said:
                    self.compute()
                self.assertEqual([call.args[2:] for call in said.call_args_list], [(*pair, BLOCK) for pair in wanted])
                self.prefill.step(drops=[Drop(self.request, self.transfer)])
                self.transfer = new_transfer("prefill-0")
                self.request = f"request of {self.transfer}"

    def test_the_prompt_may_be_computed_before_it_is_asked_for(self):
        self.begin(3, self.TOKENS)
        self.compute()
        self.seal()
        self.ask()
        self.assert_loaded()

    def test_a_layer_that_nobody_named_is_there_with_the_seal(self):
        """A whole graph of a GPU calls for no layer."""
        self.ask()
        self.begin(3, self.TOKENS)
        self.compute("layers.2", "nothing of ours")
        self.seal()
        self.assert_loaded()

    def test_a_prompt_that_is_given_up_fails_its_load(self):
        self.ask()
        self.begin()
        self.compute()
        self.prefill.step(drops=[Drop("", self.transfer)])
        self.compute()  # completes the step in progress
        self.ended("the load did not end")
        self.assertEqual((self.decode.failed, self.told()), (["r"], 1))
        self.prefill.step(chunks=[Chunk(self.transfer, [], self.TOKENS, self.TOKENS)])

    def test_a_prompt_that_is_never_begun_fails_its_load(self):
        self.ask()
        self.prefill.step(drops=[Drop("", self.transfer)])
        self.until(lambda: self.decode.loaded, "the load did not end")
        self.assertEqual(self.decode.failed, ["r"])
        self.assertEqual(self.told(), 0)

    @staticmethod
    def overloaded(times):
        """Makes engines refuse the next sends."""
        send, left = Engine.send, iter(range(times))

        def refuse(engine, *arguments, **named):
            if next(left, None) is not None:
                raise TroupeError(ErrorCode.OVERLOADED, "16384 operations are open at this node")
            return send(engine, *arguments, **named)

        return unittest.mock.patch.object(Engine, "send", refuse)

    def test_a_prompt_that_is_refused_by_its_own_engine_fails_its_load_as_soon_as_there_is_room_to_say_so(self):
        self.ask()
        with self.overloaded(3), self.assertLogs("vllm.troupe.vllm.worker", "WARNING") as said:
            self.begin()
            self.assertEqual(len(self.prefill.worker._refused), 1)
            self.until(lambda: self.decode.loaded, "the load did not end")
        self.assertEqual((self.decode.failed, self.prefill.worker._refused), (["r"], {}))
        self.assertRegex(said.output[-1], "r: 70 tokens were not loaded .* it cannot be offered: .*overloaded")
        self.compute()
        self.seal()
        self.assertEqual(self.told(), 1)
        self.ask()  # from a router that asks for it afterwards
        self.until(lambda: len(self.decode.failed) == 2, "the second load did not end")

    def test_a_load_that_is_given_up_ends_the_transfer(self):
        self.ask()
        self.begin()
        self.compute()
        self.until(lambda: self.is_there("layers.0", 1), "nothing came")
        self.decode.step(aborts=["r"])
        pushed = self.prefill.worker._pushed
        self.until(lambda: self.decode.loaded and pushed[self.transfer] is None, "the transfer did not end")
        self.compute()
        self.assertEqual(self.told(), 0)  # since ranks would hear at different times
        self.seal()
        self.assertEqual((self.decode.failed, self.told(), pushed), (["r"], 1, {}))

    def test_the_cache_of_another_prompt_is_a_failure(self):
        self.ask()
        self.begin(3, self.TOKENS)
        self.compute()
        self.seal(prompt_digest([1, 2, 3]))
        self.until(lambda: self.decode.loaded, "the load did not end")
        self.assertEqual(self.decode.failed, ["r"])
        self.decode.step(releases=[self.early])
        self.until(self.told, "the source was not released")

    def test_a_load_that_waits_in_the_queue_is_held_until_its_prompt_has_come(self):
        holds = self.decode.worker._holds
        with unittest.mock.patch.object(holds, "begin", wraps=holds.begin) as begin:
            self.decode.step(holds=[self.early])
            self.until(lambda: begin.call_count >= 3 and holds._holds[self.transfer].operation is None,
                       "it is not asked for again and again")
            asked = begin.call_count
            self.begin(3, self.TOKENS)
            self.compute()
            self.seal()
            self.until(lambda: begin.call_count > asked, "it is not asked for again")
        self.ask()
        self.ended("the load did not end")
        self.assertEqual(self.decode.failed, [])

    def test_blocks_that_are_none_end_it(self):
        self.prefill.step(pushes=[Push(self.transfer, [BLOCKS], 20)], chunks=[Chunk(self.transfer, [], 20, 20)])
        self.compute()
        self.prefill.step(drops=[Drop(self.request, self.transfer)])
        self.assertEqual(self.told(), 1)
        self.begin()
        self.prefill.step(chunks=[Chunk(self.transfer, [BLOCKS], self.TOKENS, self.TOKENS)])
        self.seal()
        self.until(lambda: self.told() == 2, "it was not given up")
        self.assertEqual(self.prefill.worker._pushed, {})


class Registrations(unittest.TestCase):
    """The notifications that a proxy for MoRIIO's connector receives."""

    def setUp(self):
        self.enterContext(unittest.mock.patch("troupe.vllm.proxy.PERIOD", 0.1))
        self.context = self.enterContext(zmq.Context())
        self.port = servers.free_ports(1)[0]
        self.proxy = Proxy("127.0.0.1", self.port, "P", ":8000", "e", 2, False)

    def listen(self):
        router = self.enterContext(self.context.socket(zmq.ROUTER))
        router.linger = 0
        limit = time.monotonic() + PATIENCE
        while True:  # a closed socket frees its port a moment later
            try:
                router.bind(f"tcp://127.0.0.1:{self.port}")
                return router
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > limit:
                    raise
            time.sleep(0.02)

    def hear(self, router):
        self.assertTrue(router.poll(PATIENCE * 1000), "nothing came")
        _, message = router.recv_multipart()
        return msgspec.msgpack.decode(message)

    def begin(self, proxy, replicas=1):
        heartbeat = Heartbeat(proxy, replicas)
        self.addCleanup(heartbeat.stop)
        return heartbeat

    def test_an_engine_registers_again_and_again(self):
        router = self.listen()
        heartbeat = self.begin(self.proxy, 4)
        for _ in range(3):
            self.assertEqual(self.hear(router), {
                "type": "P", "http_address": "127.0.0.1:8000", "dp_size": 4, "tp_size": 2, "transfer_mode": "READ",
                "zmq_address": "host:127.0.0.1,handshake:6301,notify:61005,engine:e,ranks:2"})
        heartbeat.stop()
        self.assertFalse(heartbeat._thread.is_alive())
        heartbeat.stop()

    def test_a_proxy_may_come_later_and_come_back(self):
        heartbeat = self.begin(Proxy("127.0.0.1", self.port, "D", "[::1]:81", "e", 1, True))
        time.sleep(0.3)
        for _ in range(2):
            with self.listen() as router:
                said = self.hear(router)
                self.assertEqual((said["type"], said["http_address"], said["transfer_mode"]), ("D", "[::1]:81", "WRITE"))
                self.hear(router)
        heartbeat.stop()
        self.assertFalse(heartbeat._thread.is_alive())

    def test_a_proxy_that_is_none_stops_nothing(self):
        for host in ("no host", "nowhere.invalid"):
            heartbeat = self.begin(Proxy(host, self.port, "P", ":8000", "e", 1, False))
            time.sleep(0.2)
            heartbeat.stop()
            self.assertFalse(heartbeat._thread.is_alive())

    def test_the_host_of_vllm_is_the_one_that_is_told(self):
        with unittest.mock.patch.dict(os.environ, VLLM_HOST_IP="10.1.2.3"):
            router = self.listen()
            self.begin(self.proxy)
            self.assertEqual(self.hear(router)["http_address"], "10.1.2.3:8000")


class Places(unittest.TestCase):
    def test_nothing_said_is_a_node_that_joins(self):
        place = place_of({}, "0b9d7c3e-1f6a-4c65-a0a9-b54c1d0f2f11_dp0")
        self.assertEqual(place.nodes, ("engines.0b9d7c3e-1f6a-4c65-a0a9-b54c1d0f2f11_dp0.0",))
        self.assertIn("begin: true", place.text)
        self.assertRegex(replica_of("An engine: of mine"), "^[0-9a-f]{32}$")
        self.assertNotEqual(replica_of("a b"), replica_of("a  b"))

    def test_what_moriio_is_tuned_by_is_heard(self):
        place = place_of({"backend": "RDMA", "qp_per_transfer": "4", "num_workers": 2, "post_batch_size": -1,
                          "read_mode": "true", "transfer_timeout": "90", "defer_timeout": 45.5}, "e")
        for words in ('"backend": "rdma"', '"qp_per_transfer": 4', '"num_workers": 2', '"post_batch_size": -1',
                      "source_lease: 45500ms"):
            self.assertIn(words, place.text)
        self.assertEqual(place.load_seconds, 90.0)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(place.text)
            file.flush()
            checked = subprocess.run([TROUPE, "check", file.name], capture_output=True, text=True, check=False)
        self.assertEqual(checked.returncode, 0, checked.stderr)
        for extra, sentence in (
                ({"backend": "mooncake"}, "'backend' of .* is 'mooncake'; give one of auto, rdma, shm, tcp, xgmi"),
                ({"qp_per_transfer": "many"}, "'qp_per_transfer' of .* is 'many'; give a whole number"),
                ({"num_workers": True}, "give a whole number"), ({"transfer_timeout": 0}, "give seconds, 1 to 86400"),
                ({"defer_timeout": "soon"}, "is 'soon'; give seconds"), ({"defer_timeout": "nan"}, "give seconds"),
                ({"read_mode": "often"}, "is 'often'; give true .* or false"),
                ({"deployment": "f", "node": "n", "backend": "tcp"}, "cannot be given with 'deployment'; set it in that file"),
                ({"proxy_port": 36367}, "knows no 'proxy_port'; .* of MoRIIO's words .* proxy_ip, proxy_ping_port")):
            with self.assertRaisesRegex(ValueError, sentence):
                place_of(extra, "e")

    def test_what_moriio_tells_its_proxy_is_heard(self):
        said = {"proxy_ip": "10.0.0.1", "proxy_ping_port": "36367", "http_port": "8100", "handshake_port": 6302,
                "notify_port": "61006", "recv_abort_timeout": 120}
        place = place_of(said, "e", ranks=Ranks(size=2), role="kv_producer", http="h:8000")
        self.assertEqual(place.proxy, Proxy("10.0.0.1", 36367, "P", "h:8100", "e", 2, False, 6302, 61006))
        self.assertEqual(place.unused, ("handshake_port", "notify_port", "recv_abort_timeout"))
        self.assertEqual((place.joins[0].labels["http"], place.nodes), ("h:8100", nodes_of("e", 2)))
        place = place_of({**said, "host_ip": "::1", "read_mode": False}, "An engine", role="kv_consumer")
        self.assertEqual((place.proxy.role, place.proxy.http, place.proxy.replica, place.proxy.pushes),
                         ("D", "[::1]:8100", replica_of("An engine"), True))
        for extra in ({"proxy_ip": "", "host_ip": "", "http_port": 1}, {"proxy_ping_port": 36367, "notify_port": 1}):
            self.assertIsNone(place_of(extra, "e").proxy)
        self.assertEqual(place.unused, ("handshake_port", "notify_port", "recv_abort_timeout"))
        self.assertEqual(place_of({"proxy_ping_port": 36367}, "e").unused, ("proxy_ping_port",))

    def test_what_moriio_could_not_be_told_is_refused(self):
        proxy = {"proxy_ip": "10.0.0.1", "proxy_ping_port": 36367}
        for extra, sentence in (
                ({"proxy_ip": "10.0.0.1"}, "needs 'proxy_ping_port' as well"), ({"proxy_ip": 7}, "give a string"),
                ({"http_port": 0}, "'http_port' of .* is 0; give a port"), ({"notify_port": "x"}, "give a port"),
                ({"handshake_port": True}, "give a port"), ({**proxy, "proxy_ping_port": 65536}, "give a port"),
                ({"recv_abort_timeout": "soon"}, "give seconds"),
                ({**proxy, "read_mode": False, "deployment": "f", "node": "n"}, "read_mode true, or use `troupe router`")):
            with self.assertRaisesRegex(ValueError, sentence):
                place_of(extra, "e", role="kv_producer")
        with self.assertRaisesRegex(ValueError, "data-parallel replica"):
            place_of({**proxy, "read_mode": False}, "e_dp0", role="kv_producer")
        self.assertIsNotNone(place_of(proxy, "e_dp0", role="kv_producer").proxy)
        with self.assertRaisesRegex(ValueError, "give kv_producer or kv_consumer"):
            place_of(proxy, "e")
        with self.assertRaisesRegex(ValueError, "needs 'http_port' as well"):
            Heartbeat(place_of(proxy, "e", role="kv_producer").proxy, 1)

    def test_who_pushes_says_so(self):
        for said in (False, "false", 0):
            place = place_of({"read_mode": said}, "e")
            self.assertTrue(place.pushes)
            self.assertIn("mode: write", place.text)
            self.assertEqual(place.joins[0].labels["mode"], "write")
        self.assertTrue(place_of({"deployment": "f", "node": "n", "read_mode": False}, "e").pushes)
        self.assertTrue(troupe.vllm.TroupeConnector.requires_piecewise_for_cudagraph({"read_mode": False}))
        for extra in ({}, {"read_mode": True}, {"read_mode": "true"}):
            place = place_of(extra, "e")
            self.assertFalse(place.pushes)
            self.assertIn("mode: read", place.text)
            self.assertNotIn("mode", place.joins[0].labels)
            self.assertFalse(troupe.vllm.TroupeConnector.requires_piecewise_for_cudagraph(extra))

    def test_frontends_find_an_engine_by_what_its_node_says(self):
        place = place_of({}, "e", role="kv_producer", http=":8000")
        self.assertEqual(place.joins[0].labels, {"engine_id": "e", "role": "prefill", "http": ":8000"})
        self.assertEqual(place_of({"http": "h:1"}, "e", http=":8000").joins[0].labels["http"], "h:1")
        self.assertEqual(place_of({}, "e").joins[0].labels, {"engine_id": "e", "role": "both"})
        for bad in ("h", "h:0", "http://h:1", ":x"):
            with self.assertRaisesRegex(ValueError, "'http' of kv_connector_extra_config"):
                place_of({"http": bad}, "e")

    def test_the_address_of_a_server_is_that_of_its_command_line(self):
        serve, module = ["/usr/bin/vllm", "serve", "MODEL"], ["/x/vllm/entrypoints/openai/api_server.py", "--model", "M"]
        for words, address in ((serve, ":8000"), ([*serve, "--port", "81"], ":81"), ([*module, "--port=82"], ":82"),
                               ([*serve, "--host", "h", "--port", "83"], "h:83"), ([*serve, "--host", "0.0.0.0"], ":8000"),
                               ([*serve, "--host", "::1"], "[::1]:8000"), ([*serve, "--config", "f"], None),
                               ([*serve, "--config", "f", "--port", "84"], ":84"), ([*serve, "--uds", "/s"], None),
                               ([*serve, "--port", "0"], None), ([*serve, "--headless"], None),
                               ([*serve, "--ssl-keyfile", "k"], None), (["/usr/bin/vllm", "bench"], None),
                               (["mine.py", "--port", "85"], None), ([], None)):
            self.assertEqual(http_address(words), address, words)

    def test_every_rank_of_an_engine_is_a_node(self):
        place = place_of({}, "e", ranks=Ranks(size=2, parts=2), http=":8000")
        self.assertEqual(place.nodes, ("engines.e.0", "engines.e.1", "engines.e.2", "engines.e.3"))
        self.assertEqual([(join.rank, join.ranks, join.labels["http"]) for join in place.joins],
                         [(rank, 4, ":8000") for rank in range(4)])
        named = {"deployment": "f", "node": "prefill-0"}
        self.assertEqual(place_of(named, "e", ranks=Ranks(size=2)).nodes, ("prefill-0-tp0", "prefill-0-tp1"))
        self.assertEqual(place_of(named, "e", ranks=Ranks(parts=2)).nodes, ("prefill-0-pp0", "prefill-0-pp1"))

    def test_what_does_not_go_together_is_refused(self):
        self.assertEqual(place_of({"deployment": "f", "node": "prefill-0"}, "e").file, "f")
        self.assertIn("port: 7400", place_of({"supervisor": "[::1]:7400"}, "e").text)
        joins = place_of({"deployment": "f"}, "e", http=":8000")
        self.assertEqual((joins.file, joins.text, joins.nodes), ("f", None, ("engines.e.0",)))
        self.assertEqual(joins.joins[0].labels["http"], ":8000")
        for extra in ({"deployment": "f", "supervisor": "h:1"}, {"node": "n"}, {"deployment": "f", "node": "n", "supervisor": "h:1"},
                      {"supervisor": "h"}, {"supervisor": "h:0"}, {"supervisor": 7}, {"suprevisor": "h:1"}):
            with self.assertRaises(ValueError, msg=str(extra)):
                place_of(extra, "e")


if __name__ == "__main__":
    TROUPE, os.environ["TROUPE_LIBRARY"] = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as own:  # supervisors leave state files of their clusters
        os.environ["XDG_STATE_HOME"] = own
        unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
