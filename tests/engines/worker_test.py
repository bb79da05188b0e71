"""The worker's side of Troupe's vLLM connector without vLLM's servers: a prefill and a decode worker in this process,
each with a cache as vLLM allocates one, and a real supervisor.

Run by ctest, engines.vllm_worker, with the paths of the troupe command and of libtroupe.so.0.
"""
import os
import pathlib
import sys
import tempfile
import time
import unittest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
# pylint: disable=wrong-import-position
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheLayout, KVCacheTensor
from vllm.v1.worker.utils import allocate_kv_cache

import servers
from troupe.vllm.layouts import cpu_planes, describe_cpu_cache
from troupe.vllm.metadata import Receive, Send, TroupeMetadata
from troupe.vllm.params import HandOff, new_transfer, prompt_digest
from troupe.vllm.place import Place, http_address, place_of, replica_of
from troupe.vllm.worker import Worker

LAYERS = ["layers.0", "layers.1", "layers.2"]
BLOCKS, HEADS, BLOCK, DIM = 40, 2, 32, 64
PATIENCE = 60  # seconds
DIGEST = prompt_digest(range(70))


def allocate():
    """A cache as vLLM's CPU backend has it, by vLLM's own code, in which no two elements are equal bytes by chance."""
    page = HEADS * BLOCK * 2 * DIM * 2
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
    size = page * BLOCKS * len(LAYERS)
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[KVCacheTensor(size, LAYERS, page * BLOCKS, page)],
                           kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)])
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    for cache in caches.values():
        cache.view(torch.int16).random_(0, 2**15)
    return caches


class Side:
    """A worker, and what it said has ended."""

    def __init__(self, deployment, node):
        self.caches = allocate()
        self.worker = Worker(Place(node, file=str(deployment)))
        self.worker.register(self.caches, layers=LAYERS, block_size=BLOCK, packing="vec")
        self.sent, self.loaded, self.failed = [], [], []

    def step(self, **orders):
        self.worker.carry_out(TroupeMetadata(**orders))
        self.look()

    def look(self):
        results = self.worker.results(idle=True)
        self.sent += results.sent
        self.loaded += results.loaded
        self.failed += results.failed


class Workers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        deployment = folder / "deployment.yaml"
        deployment.write_text(servers.DEPLOYMENT.format(port=servers.free_ports(1)[0]))
        cls.enterClassContext(servers.Process(
            "supervisor", [TROUPE, "node", deployment, "--name", "supervisor"], folder))
        cls.prefill, cls.decode = Side(deployment, "prefill-0"), Side(deployment, "decode-0")
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

    def send(self, blocks, tokens, *, digest=DIGEST):
        transfer = new_transfer("prefill-0")
        self.prefill.step(sends=[Send(transfer, transfer, blocks, tokens, digest)])
        return HandOff(transfer, ("prefill-0",), tokens, digest)

    def test_a_load_moves_whole_blocks_and_touches_no_other(self):
        source_blocks, own_blocks, tokens = [5, 39, 7], [30, 2, 11], 2 * BLOCK + 6
        before = {name: cache.clone() for name, cache in self.decode.caches.items()}
        source = self.send(source_blocks, tokens)
        self.decode.step(receives=[Receive("r", source, own_blocks, 0, DIGEST)])
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
        self.decode.step(receives=[Receive("r", source, [21, 22, 23], 2 * BLOCK, DIGEST)])
        self.until(lambda: self.decode.loaded and source.transfer in self.prefill.sent, "the load did not end")
        self.assertEqual(self.decode.failed, [])
        for name in LAYERS:
            expected = before[name]
            expected[23] = self.prefill.caches[name][3]
            self.assertTrue(torch.equal(self.decode.caches[name].view(torch.int16), expected.view(torch.int16)), name)

    def test_the_load_may_come_first(self):
        source = HandOff(new_transfer("prefill-0"), ("prefill-0",), 40, DIGEST)
        self.decode.step(receives=[Receive("r", source, [8, 9], 0, DIGEST)])
        self.assertEqual(self.decode.loaded, [])
        self.prefill.step(sends=[Send(source.transfer, source.transfer, [3, 4], 40, DIGEST)])
        self.until(lambda: self.decode.loaded and source.transfer in self.prefill.sent, "the load did not end")
        self.assertEqual(self.decode.failed, [])

    def test_the_cache_of_another_prompt_is_a_failure(self):
        source = self.send([5], 20, digest=prompt_digest([1, 2, 3]))
        self.decode.step(receives=[Receive("r", source, [6], 0, DIGEST)])
        self.until(lambda: self.decode.loaded, "the load did not end")
        self.assertEqual(self.decode.failed, ["r"])
        self.assertNotIn(source.transfer, self.prefill.sent)  # it is there for whoever asks rightly
        right = HandOff(source.transfer, source.nodes, 20, prompt_digest([1, 2, 3]))
        self.decode.step(receives=[Receive("again", right, [6], 0, right.digest)])
        self.until(lambda: source.transfer in self.prefill.sent, "the source did not go on")
        self.assertEqual(self.decode.failed, ["r"])

    def test_a_second_load_of_a_source_does_not_end_the_first(self):
        source = self.send([5, 6], 60)
        self.decode.step(receives=[Receive("first", source, [7, 8], 0, DIGEST),
                                   Receive("second", source, [9, 10], 0, DIGEST)])
        self.until(lambda: len(self.decode.loaded) >= 2, "the loads did not end")
        self.assertEqual((sorted(self.decode.loaded), self.decode.failed), (["first", "second"], ["second"]))

    def test_a_load_from_here_itself_frees_what_was_sent(self):
        source = self.send([5, 6], 60)
        self.prefill.step(receives=[Receive("r", source, [7, 8], 0, DIGEST)])
        self.until(lambda: source.transfer in self.prefill.sent, "the source was not given up")
        self.assertEqual(self.prefill.failed, ["r"])

    def test_what_cannot_be_loaded_fails_at_once(self):
        nowhere = HandOff(new_transfer("nowhere-0"), ("nowhere-0",), 20, DIGEST)
        self.decode.step(receives=[Receive("no source", None, [6], 0, DIGEST, "garbage"),
                                   Receive("no node", nowhere, [7], 0, DIGEST),
                                   Receive("no block", self.send([5], 20), [BLOCKS], 0, DIGEST)])
        self.assertEqual(sorted(self.decode.loaded), ["no block", "no node", "no source"])
        self.assertEqual(sorted(self.decode.failed), ["no block", "no node", "no source"])

    def test_a_send_of_blocks_that_are_none_ends_at_once(self):
        self.assertIn(self.send([BLOCKS], 20).transfer, self.prefill.sent)

    def test_a_release_ends_the_source(self):
        source = self.send([5, 6], 60)
        self.assertNotIn(source.transfer, self.prefill.sent)
        self.decode.step(releases=[source])
        self.until(lambda: source.transfer in self.prefill.sent, "the source was not released")
        self.assertEqual(self.decode.loaded, [])

    def test_an_abort_ends_a_load_whose_source_never_comes(self):
        source = HandOff(new_transfer("prefill-0"), ("prefill-0",), 20, DIGEST)
        self.decode.step(receives=[Receive("r", source, [6], 0, DIGEST)])
        self.decode.step(aborts=["r", "unknown"])
        self.until(lambda: self.decode.loaded, "the load was not given up")
        self.assertEqual((self.decode.loaded, self.decode.failed), (["r"], ["r"]))

    def test_each_end_is_told_once(self):
        own, transfers = [str(number) for number in range(20)], []
        for number, name in enumerate(own):
            source = self.send([number], 10)
            transfers.append(source.transfer)
            self.decode.step(receives=[Receive(name, source, [number], 0, DIGEST)])

        def told():  # the ends of what other tests left may come as well
            return (sorted(name for name in self.decode.loaded if name in own),
                    sorted(name for name in self.prefill.sent if name in transfers))

        self.until(lambda: all(len(ends) >= 20 for ends in told()), "some loads did not end")
        for _ in range(50):
            self.prefill.look()
            self.decode.look()
        self.assertEqual(told(), (sorted(own), sorted(transfers)))
        self.assertEqual(self.decode.failed, [])


class Layouts(unittest.TestCase):
    def test_k_and_v_are_the_halves_of_a_head_of_a_block(self):
        caches = list(allocate().values())
        view = describe_cpu_cache(caches, block_size=BLOCK, packing="vec")
        raw = torch.tensor([], dtype=torch.int8).set_(view.regions[0])
        for layer, plane, block, head in ((0, 0, 0, 0), (0, 1, 3, 1), (2, 0, 39, 1), (2, 1, 17, 0)):
            half = caches[layer][block, head].reshape(2, BLOCK, DIM)[plane].contiguous().view(torch.int8)
            region, begin, length = view.layout.locate([block], layer=layer, plane=plane, token=7, head=head)
            self.assertEqual((region, length), (0, half.numel()))
            self.assertTrue(torch.equal(raw[begin:begin + length], half.flatten()), (layer, plane, block, head))

    def test_a_block_of_vllm_may_be_several_of_the_kernels(self):
        view = describe_cpu_cache(list(allocate().values()), block_size=2 * BLOCK, packing="vec")
        self.assertEqual(view.blocks_of([3, 0], 70), [6, 7, 0])

    def test_a_cache_of_another_arrangement_is_refused(self):
        tokens_outside_heads = ((4, 2, 32, 128), (8192, 128, 256, 1))
        with self.assertRaisesRegex(ValueError, "not that of vLLM's CPU backend"):
            cpu_planes(*tokens_outside_heads, 2, 0)
        with self.assertRaisesRegex(ValueError, "--kv-cache-dtype auto"):
            describe_cpu_cache([torch.zeros(4, 2, 32, 128, dtype=torch.int8)], block_size=BLOCK, packing="vec")


class Places(unittest.TestCase):
    def test_nothing_said_is_a_node_that_joins(self):
        place = place_of({}, "0b9d7c3e-1f6a-4c65-a0a9-b54c1d0f2f11_dp0")
        self.assertEqual(place.node, "engines.0b9d7c3e-1f6a-4c65-a0a9-b54c1d0f2f11_dp0.0")
        self.assertIn("begin: true", place.text)
        self.assertRegex(replica_of("An engine: of mine"), "^[0-9a-f]{32}$")
        self.assertNotEqual(replica_of("a b"), replica_of("a  b"))

    def test_frontends_find_an_engine_by_what_its_node_says(self):
        place = place_of({}, "e", role="kv_producer", http=":8000")
        self.assertEqual(place.join.labels, {"engine_id": "e", "role": "prefill", "http": ":8000"})
        self.assertEqual(place_of({"http": "h:1"}, "e", http=":8000").join.labels["http"], "h:1")
        self.assertEqual(place_of({}, "e").join.labels, {"engine_id": "e", "role": "both"})
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

    def test_what_does_not_go_together_is_refused(self):
        self.assertEqual(place_of({"deployment": "f", "node": "prefill-0"}, "e").file, "f")
        self.assertIn("port: 7400", place_of({"supervisor": "[::1]:7400"}, "e").text)
        for extra in ({"deployment": "f"}, {"node": "n"}, {"deployment": "f", "node": "n", "supervisor": "h:1"},
                      {"supervisor": "h"}, {"supervisor": "h:0"}, {"supervisor": 7}, {"suprevisor": "h:1"}):
            with self.assertRaises(ValueError, msg=str(extra)):
                place_of(extra, "e")


if __name__ == "__main__":
    TROUPE, os.environ["TROUPE_LIBRARY"] = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
