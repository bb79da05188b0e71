"""Troupe's connector under vLLM's own scheduler, without a worker: the test supplies what a worker would report.

Run by ctest: engines.vllm_scheduler.
"""
import os
import tempfile
import unittest
import unittest.mock

import msgspec
import torch
import zmq

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
# pylint: disable=wrong-import-position
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import model
import troupe.vllm
from troupe.vllm.metadata import Drop, RankIdentity, Seal
from troupe.vllm.params import HandOff, prompt_digest
from troupe.vllm.place import nodes_of

FOLDER = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
BLOCK = 32
BLOCKS = 64
ABORTED = RequestStatus.FINISHED_ABORTED
HASHER = get_request_block_hasher(BLOCK, sha256)
TO_DECODE_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False}


def make_scheduler(policy="fail", pushes=False, role="kv_both", window=0, **extra):
    transfer = KVTransferConfig(
        kv_connector="TroupeConnector", kv_connector_module_path="troupe.vllm", kv_role=role, kv_load_failure_policy=policy,
        kv_connector_extra_config={"deployment": "none.yaml", "node": "here-0", "read_mode": not pushes, **extra})
    config = EngineArgs(model=FOLDER.name, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=2048,
                        max_num_seqs=4, block_size=BLOCK, enable_prefix_caching=pushes,
                        max_num_batched_tokens=2 * BLOCK if pushes else None,
                        kv_transfer_config=transfer).create_engine_config()
    page = 2 * BLOCK * 64 * 2 * 2
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    if window:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=window)))
    layers = [name for group in groups for name in group.layer_names]
    cache = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[KVCacheTensor(page * BLOCKS, layers, page * BLOCKS, page)],
        kv_cache_groups=groups)
    config.cache_config.num_gpu_blocks = BLOCKS
    with set_current_vllm_config(config):
        return Scheduler(config, cache, StructuredOutputManager(config), BLOCK)


class UnderScheduler(unittest.TestCase):
    """`pushes`: the engine pushes, computes 64 tokens per step, and has a prefix cache."""

    pushes = False

    def setUp(self):
        self.scheduler = make_scheduler(pushes=self.pushes)
        self.free_at_first = self.free()
        self.count = 0

    def free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, tokens, params, out=4, name=""):
        self.count += 1
        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True,
                                  extra_args={"kv_transfer_params": dict(params)})
        sampling.update_from_generation_config({}, 1)
        request = Request(name or f"request-{self.count}", list(range(tokens)), sampling, None, block_hasher=HASHER)
        self.scheduler.add_request(request)
        return request

    def step(self, **told):
        """One step of the engine, whose worker reports `told`. Returns (the metadata for the connector's worker,
        the answers)."""
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        # A request whose prompt this step completes gets a token.
        sampled = [[7] if self.scheduler.requests[name].num_computed_tokens >= self.scheduler.requests[name].num_tokens
                   else [] for name in ids]
        ran = ModelRunnerOutput(ids, {name: place for place, name in enumerate(ids)}, sampled,
                                kv_connector_output=KVConnectorOutput(**told))
        answers = self.scheduler.update_from_output(output, ran)
        said = [answer for one in answers.values() for answer in one.outputs]
        return output.kv_connector_metadata, said

    def prefilled(self, tokens):
        """A computed prompt: its request, and the answer for the router."""
        request = self.add(tokens, TO_DECODE_ELSEWHERE, out=1)
        _, (answer,) = self.step()
        self.assertEqual(request.status, RequestStatus.FINISHED_LENGTH_CAPPED)
        return request, answer.kv_transfer_params

    def loading(self, tokens=100):
        _, params = self.prefilled(tokens)
        self.step(finished_sending={"request-1"})
        request = self.add(tokens, params)
        (receive,) = self.step()[0].receives
        self.assertEqual(request.status, RequestStatus.WAITING_FOR_REMOTE_KVS)
        return request, receive

    def check_empty(self):
        self.step()
        self.assertEqual(self.scheduler.requests, {})
        self.assertEqual(self.free(), self.free_at_first)
        own = self.scheduler.connector._scheduler
        self.assertEqual((own._sending, own._loading, own._used, own._shared), (set(), set(), set(), {}))
        self.assertTrue(own._sources.is_empty())
        self.assertEqual((own._kept._of, +own._kept._count), ({}, {}))
        pushes = own._pushes
        self.assertEqual((pushes._pushes, pushes._of, pushes._ended, pushes._lost), ({}, {}, {}, set()))


class WindowsUnderScheduler(UnderScheduler):
    """Some layers keep the last 64 tokens."""

    WINDOW = 2 * BLOCK

    def setUp(self):
        super().setUp()
        self.scheduler = make_scheduler(window=self.WINDOW)
        self.free_at_first = self.free()

    def test_a_prompt_is_handed_off_if_the_windows_of_its_last_token_are_kept(self):
        """That token is recomputed when the others are loaded. vLLM has dropped the first token of its window if a
        block ends with that token."""
        offered = {}
        for tokens in (self.WINDOW - 1, self.WINDOW, *range(3 * BLOCK - 2, 3 * BLOCK + 2), 4 * BLOCK - 1):
            request, params = self.prefilled(tokens)
            sends = self.step()[0].sends
            offered[tokens] = params is not None
            self.assertEqual(len(sends), offered[tokens])
            for send in sends:
                seen = max(tokens - self.WINDOW, 0) // BLOCK
                self.assertNotIn(0, send.blocks[1][seen:])
                self.step(finished_sending={request.request_id})
        self.assertEqual([tokens for tokens, here in offered.items() if not here], [3 * BLOCK - 1, 4 * BLOCK - 1])
        self.check_empty()


class ConnectorUnderScheduler(UnderScheduler):
    def test_what_another_connector_loads_after_ours_is_told(self):
        request, _ = self.loading()
        own = self.scheduler.connector._scheduler
        self.step(finished_recving={request.request_id})
        again = KVConnectorOutput(finished_recving={request.request_id})
        own.settle(again)
        self.assertEqual(again.finished_recving, set())  # not reported twice
        own.matched_tokens(request, 0)
        other = KVConnectorOutput(finished_recving={request.request_id})
        own.settle(other)
        self.assertEqual(other.finished_recving, {request.request_id})

    def test_a_load_that_is_refused_holds_nothing(self):
        _, params = self.prefilled(100)
        self.step(finished_sending={"request-1"})
        self.add(99, params)
        step = self.step()[0]
        (receive,) = step.receives
        self.assertIsNone(receive.source)
        transfer = HandOff.from_params(params).transfer
        self.assertEqual(([source.transfer for source in step.holds], step.unholds, step.releases),
                         ([transfer], [transfer], []))

    # -- prefill

    def test_a_prefill_keeps_its_blocks_until_they_are_sent(self):
        request, params = self.prefilled(100)
        self.assertEqual(self.free(), self.free_at_first - 4)
        (send,) = self.step()[0].sends
        self.assertEqual((send.request_id, send.tokens, len(send.blocks[0])), (request.request_id, 100, 4))
        self.assertEqual(HandOff.from_params(params).transfer, send.transfer)
        self.assertEqual(self.step()[0].sends, [])
        self.assertTrue(self.scheduler.has_finished_requests())  # vLLM continues stepping
        self.step(finished_sending={request.request_id})
        self.check_empty()

    def test_a_worker_of_this_process_is_told_at_once(self):
        """An engine without a core process of its own makes no step after its last request."""
        class OneWorker:  # pylint: disable=too-few-public-methods
            offered = []

            def offer(self, ends):
                self.offered += ends.sends

        worker = OneWorker()
        engine_id = self.scheduler.connector._kv_transfer_config.engine_id
        with unittest.mock.patch.dict(troupe.vllm._WORKERS, {engine_id: worker}):
            request, params = self.prefilled(100)
        (send,) = worker.offered
        self.assertEqual((send.request_id, send.transfer), (request.request_id, HandOff.from_params(params).transfer))
        self.assertEqual(self.step()[0].sends, [])
        self.step(finished_sending={request.request_id})
        self.check_empty()

    def test_what_is_told_twice_is_dropped(self):
        request, _ = self.prefilled(40)
        self.step(finished_sending={request.request_id})
        with self.assertLogs("vllm.troupe.vllm.scheduler", "ERROR"):
            self.step(finished_sending={request.request_id})
        self.check_empty()

    def test_what_other_connectors_tell_is_left_alone(self):
        """The metadata of MultiConnector, which gives all connectors the same."""
        output = KVConnectorOutput(finished_sending={"theirs"}, finished_recving={"theirs too"})
        self.scheduler.connector.update_connector_output(output)
        self.assertEqual((output.finished_sending, output.finished_recving), ({"theirs"}, {"theirs too"}))

    def test_what_ended_may_be_told_as_a_list(self):
        """As vLLM's own tests do; its scheduler accepts one."""
        request, _ = self.prefilled(40)
        self.step(finished_sending=[request.request_id])
        self.check_empty()

    def test_a_prefill_that_is_aborted_frees_at_once(self):
        request = self.add(1000, TO_DECODE_ELSEWHERE, out=1)
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.assertEqual(self.step()[0].sends, [])
        self.check_empty()

    def test_an_engine_that_writes_texts_too_keeps_half_of_its_blocks_for_others(self):
        """Whatever is kept, there is room for requests that wait here to load from engines that do the same."""
        names = []
        for _ in range(2):
            request, params = self.prefilled(14 * BLOCK)
            self.assertIsNotNone(params)
            names.append(request.request_id)
        request, params = self.prefilled(14 * BLOCK)
        self.assertIsNone(params)
        self.assertEqual(self.step()[0].sends, [])
        self.assertEqual(self.free(), self.free_at_first - 2 * 14)
        self.step(finished_sending={names[0]})
        request, params = self.prefilled(14 * BLOCK)
        self.assertIsNotNone(params)
        self.step(finished_sending={names[1], request.request_id})
        self.check_empty()

    def test_who_waits_for_a_prompt_that_is_not_kept_is_told(self):
        self.add(33 * BLOCK, {**TO_DECODE_ELSEWHERE, "transfer_id": TX}, out=1)
        _, (answer,) = self.step()
        self.assertIsNone(answer.kv_transfer_params)
        self.assertEqual(self.step()[0].drops, [Drop("", TX)])
        self.check_empty()

    def test_an_engine_that_only_computes_prompts_may_keep_all_its_blocks(self):
        self.scheduler = make_scheduler(role="kv_producer")
        names = []
        for _ in range(4):
            request, params = self.prefilled(14 * BLOCK)
            self.assertIsNotNone(params)
            names.append(request.request_id)
        self.step(finished_sending=set(names))
        self.check_empty()

    def test_an_engine_that_only_computes_prompts_loads_none(self):
        self.scheduler = make_scheduler(role="kv_producer")
        request, receive = self.loading(100)
        self.assertIn("kv_role kv_producer and loads no caches", receive.refused)
        self.step(finished_recving={request.request_id}, failed_recving={request.request_id})
        self.check_empty()

    # -- decode

    def test_a_decode_computes_only_the_last_token(self):
        request, receive = self.loading(100)
        self.assertEqual((receive.refused, receive.tokens, receive.prefix_tokens, len(receive.blocks[0])), ("", 100, 0, 4))
        self.assertEqual(receive.source.tokens, 100)
        self.step(finished_recving={request.request_id})
        output = self.scheduler.schedule()
        self.assertEqual(output.num_scheduled_tokens, {request.request_id: 1})
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.check_empty()

    def test_a_prompt_of_one_token_is_computed_here_and_its_source_released(self):
        _, params = self.prefilled(1)
        self.step(finished_sending={"request-1"})
        self.add(1, params, out=1)
        step, (answer,) = self.step()
        self.assertEqual((step.receives, [source.transfer for source in step.releases]),
                         ([], [params["troupe"]["request"]]))
        self.assertIsNotNone(answer.finish_reason)
        self.check_empty()

    def test_a_decode_that_is_aborted_before_its_load_releases_the_source(self):
        _, params = self.prefilled(100)
        self.step(finished_sending={"request-1"})
        request = self.add(100, params)
        self.scheduler.finish_requests(request.request_id, ABORTED)
        step, _ = self.step()
        self.assertEqual(([source.transfer for source in step.holds], [source.transfer for source in step.releases]),
                         ([params["troupe"]["request"]],) * 2)
        self.check_empty()

    def test_a_decode_that_is_aborted_while_it_loads_frees_when_the_load_has_ended(self):
        request, _ = self.loading()
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.assertLess(self.free(), self.free_at_first)
        self.assertEqual(self.step()[0].aborts, [request.request_id])
        self.assertLess(self.free(), self.free_at_first)
        self.step(finished_recving={request.request_id}, failed_recving={request.request_id})
        self.check_empty()

    def test_a_decode_that_is_aborted_when_its_load_has_ended_frees_at_once(self):
        request, _ = self.loading()
        self.step(finished_recving={request.request_id})
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.assertEqual(self.free(), self.free_at_first)
        self.assertEqual(self.step()[0].aborts, [])
        self.check_empty()

    def test_a_load_that_failed_ends_the_request_where_the_policy_says_so(self):
        request, _ = self.loading()
        _, said = self.step(finished_recving={request.request_id}, failed_recving={request.request_id})
        self.assertEqual([str(answer.finish_reason) for answer in said], ["error"])
        self.check_empty()

    def test_a_load_that_failed_is_computed_here_where_the_policy_says_so(self):
        self.scheduler = make_scheduler("recompute")
        request, _ = self.loading(100)
        self.step(finished_recving={request.request_id}, failed_recving={request.request_id})
        output = self.scheduler.schedule()
        self.assertEqual(output.num_scheduled_tokens, {request.request_id: 100})
        self.assertEqual(output.kv_connector_metadata.receives, [])
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.check_empty()

    def test_garbage_of_a_client_is_a_load_that_is_refused(self):
        for params in ({}, {"troupe": 3}, {"troupe": {"v": 2}}, {"troupe": {"v": 1, "nodes": ["../x"], "tokens": 1}}):
            request = self.add(100, {"do_remote_prefill": True, **params})
            (receive,) = self.step()[0].receives
            self.assertIsNone(receive.source)
            self.assertIn("kv_transfer_params", receive.refused)
            self.step(finished_recving={request.request_id}, failed_recving={request.request_id})
        self.check_empty()

    def test_the_cache_of_another_prompt_is_refused(self):
        _, params = self.prefilled(100)
        self.step(finished_sending={"request-1"})
        request = self.add(101, params)
        (receive,) = self.step()[0].receives
        self.assertIn("not the one to decode", receive.refused)
        self.step(finished_recving={request.request_id}, failed_recving={request.request_id})
        self.check_empty()

    def test_an_ordinary_request_is_left_alone(self):
        self.add(50, {}, out=1)
        step, _ = self.step()
        self.assertEqual((step.sends, step.receives, step.releases, step.aborts), ([], [], [], []))
        self.check_empty()


class NixlUnderScheduler(UnderScheduler):
    """Requests from routers that look at NIXL's keys, or pass on nothing else."""

    HEX = "0123456789abcdef" * 2

    def decode(self, **params):
        request = self.add(100, {"do_remote_prefill": True, "do_remote_decode": False, **params})
        (receive,) = self.step()[0].receives
        self.step(finished_recving={request.request_id}, failed_recving={request.request_id})
        self.check_empty()
        return receive

    def test_what_nixl_would_answer_is_answered(self):
        connector = self.scheduler.connector
        self.assertIsNone(connector.get_handshake_metadata())  # this is the worker's
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankIdentity("here-0", 2**64 - 2, "10.0.0.1", 7401)})
        _, params = self.prefilled(100)
        (send,) = self.step()[0].sends
        self.assertEqual(params["remote_block_ids"], send.blocks)
        self.assertEqual(len(send.blocks[0]), 4)
        self.assertEqual((params["remote_host"], params["remote_port"]), ("10.0.0.1", 7401))
        self.assertEqual((params["tp_size"], params["pp_size"], params["remote_request_id"]), (1, 1, send.transfer))
        self.assertEqual(params["remote_engine_id"], connector._kv_transfer_config.engine_id)
        self.assertEqual(params["troupe"]["lives"], ["fffffffffffffffe"])
        self.assertEqual(HandOff.from_params(params).lives, (2**64 - 2,))
        self.step(finished_sending={"request-1"})
        self.check_empty()

    def test_workers_of_another_connector_say_nothing_of_ours(self):
        self.scheduler.connector.set_xfer_handshake_metadata({0: object()})
        self.scheduler.connector.set_xfer_handshake_metadata({0: RankIdentity("there-0", 1, "h", 1)})
        _, params = self.prefilled(100)
        self.assertEqual((params["remote_host"], params["remote_port"], params["troupe"].get("lives")), ("", 0, None))
        self.step(finished_sending={"request-1"})
        self.check_empty()

    def test_a_decode_finds_its_source_by_the_keys_of_nixl_alone(self):
        _, params = self.prefilled(100)
        self.step(finished_sending={"request-1"})
        handed_on = {key: said for key, said in params.items() if key not in ("troupe", "transfer_id")}
        receive = self.decode(**handed_on)
        self.assertEqual(receive.source, HandOff(params["remote_request_id"], ("here-0",), computed=True))
        self.assertFalse(receive.source.is_early)
        self.assertEqual((receive.tokens, receive.digest), (100, prompt_digest(range(100))))

    def test_the_nodes_are_those_of_the_engine_that_has_named_the_transfer(self):
        for first, engine, sizes, nodes in (
                ("engines.e.0", "e", {"tp_size": 2, "pp_size": 1}, ("engines.e.0", "engines.e.1")),
                ("engines.e.0", "e", {"tp_size": 1, "pp_size": 2}, ("engines.e.0", "engines.e.1")),
                ("prefill-0", "e", {}, ("prefill-0",)),
                ("prefill-0-tp0", "e", {"tp_size": 2}, ("prefill-0-tp0", "prefill-0-tp1")),
                ("prefill-0-pp0", "e", {"tp_size": 1, "pp_size": 2}, ("prefill-0-pp0", "prefill-0-pp1"))):
            with self.subTest(first):
                said = {"remote_request_id": f"{first}-{self.HEX[self.count:] + self.HEX[:self.count]}",
                        "remote_engine_id": engine, **sizes}
                self.assertEqual(self.decode(**said).source.nodes, nodes)
        self.assertEqual(self.decode(remote_request_id="a-name-of-theirs", remote_engine_id="e").source.nodes,
                         ("engines.e.0",))

    def test_what_no_engine_of_ours_has_said_is_refused(self):
        answered = {"remote_request_id": "prefill-1", "remote_engine_id": "e"}
        for params, sentence in (
                ({**answered, "remote_request_id": "cmpl-A/b"}, "have no 'troupe', and .* 'remote_request_id'"),
                ({**answered, "remote_request_id": 7}, "have no 'troupe'"),
                ({**answered, "remote_engine_id": None}, "have no 'troupe'"),
                ({**answered, "tp_size": 10**9}, "'tp_size' and 'pp_size' of kv_transfer_params name no engine's nodes"),
                ({**answered, "tp_size": 0}, "name no engine's nodes"), ({**answered, "pp_size": "2"}, "name no engine's"),
                ({"troupe": {"v": 1, "request": "r", "nodes": ["x-0"], "lives": ["1"]}}, "'lives' .* an incarnation of each"),
                ({"troupe": {"v": 1, "request": "r", "nodes": ["x-0"], "lives": []}}, "an incarnation of each")):
            self.assertRegex(self.decode(**params).refused, sentence)


class SeveralOfOneSource(UnderScheduler):
    """Requests of one client whose caches come from one transfer, on engines with a prefix cache."""

    pushes = True
    TOKENS = 100

    def source(self, tokens=TOKENS, name="elsewhere-0-several"):
        return HandOff(name, ("elsewhere-0",), tokens, prompt_digest(range(tokens))).to_params(engine_id="e")

    def children(self, count=3):
        params = self.source()
        return [self.add(self.TOKENS, params, out=1, name=f"{number}_parent") for number in range(count)]

    def test_one_loads_and_the_others_find_what_it_has_loaded(self):
        self.children()
        step, _ = self.step()
        self.assertEqual([receive.request_id for receive in step.receives], ["0_parent"])
        for _ in range(3):
            step, said = self.step()
            self.assertEqual((step.receives, step.releases, said), ([], [], []))
        self.step(finished_recving={"0_parent"})
        output = self.scheduler.schedule()
        # 96 of 100 tokens are in whole blocks.
        self.assertEqual(output.num_scheduled_tokens, {"0_parent": 1, "1_parent": 4, "2_parent": 4})
        self.assertEqual(output.kv_connector_metadata.releases, [])
        for name in list(output.num_scheduled_tokens):
            self.scheduler.finish_requests(name, ABORTED)
        self.check_empty()

    def test_the_others_go_on_where_the_load_fails(self):
        self.scheduler = make_scheduler("recompute", pushes=True)
        self.children(2)
        self.step()
        self.step(finished_recving={"0_parent"}, failed_recving={"0_parent"})
        ended = set()
        for _ in range(6):
            step, said = self.step()
            self.assertEqual((step.receives, step.releases), ([], []))
            ended |= {answer.request_id for answer in said if answer.finish_reason is not None}
        self.assertEqual(ended, {"0_parent", "1_parent"})
        self.check_empty()

    def test_one_that_leaves_does_not_take_the_source_from_the_others(self):
        first, second, third = self.children()
        self.scheduler.finish_requests(second.request_id, ABORTED)
        step, _ = self.step()
        self.assertEqual(([receive.request_id for receive in step.receives], step.releases), (["0_parent"], []))
        self.scheduler.finish_requests(third.request_id, ABORTED)
        self.assertEqual(self.step()[0].releases, [])
        self.scheduler.finish_requests(first.request_id, ABORTED)
        self.assertEqual(self.step()[0].aborts, ["0_parent"])
        self.step(finished_recving={"0_parent"}, failed_recving={"0_parent"})
        self.check_empty()

    def test_the_last_one_that_leaves_the_queue_gives_it_back(self):
        requests = self.children()
        for request in requests:
            self.scheduler.finish_requests(request.request_id, ABORTED)
        self.assertEqual(len(self.step()[0].releases), 1)
        self.check_empty()

    def test_what_is_here_already_is_given_back_once(self):
        self.add(self.TOKENS, {}, out=1)
        self.step()
        self.step()
        params = self.source(97)
        for number in range(2):
            self.add(97, params, out=1, name=f"{number}_parent")  # 96 of its tokens are cached
        step, said = self.step()
        self.assertEqual((step.receives, len(step.releases), len(said)), ([], 1, 2))
        self.check_empty()

    def test_of_a_list_of_prompts_the_others_are_computed_here(self):
        """A router passes on what the first request was answered."""
        params = self.source()
        self.add(self.TOKENS, params, out=1, name="first")
        self.add(33, params, out=1, name="second")
        step, said = self.step()
        self.assertEqual([receive.request_id for receive in step.receives], ["first"])
        self.assertEqual([(answer.request_id, str(answer.finish_reason)) for answer in said], [("second", "length")])
        self.step(finished_recving={"first"})
        self.step()
        self.check_empty()

    def test_a_prefill_engine_hands_off_one_cache_for_several_texts(self):
        self.scheduler = make_scheduler()
        for number in range(3):
            self.add(self.TOKENS, TO_DECODE_ELSEWHERE, out=1, name=f"{number}_parent")
        self.add(self.TOKENS, TO_DECODE_ELSEWHERE, out=1, name="another")
        said, sends, _ = self.run_until_said(4)
        transfers = {name: HandOff.from_params(answer.kv_transfer_params).transfer for name, answer in said.items()}
        one = {transfers[f"{number}_parent"] for number in range(3)}
        self.assertEqual((len(one), transfers["another"] in one), (1, False))
        self.assertEqual({send.transfer for send in sends}, {*one, transfers["another"]})
        self.assertEqual(self.free(), self.free_at_first - 8)
        self.step(finished_sending={send.request_id for send in sends})
        self.check_empty()

    def test_another_hand_off_follows_one_that_has_ended(self):
        self.scheduler = make_scheduler()
        transfers = []
        for number in range(2):
            self.add(self.TOKENS, TO_DECODE_ELSEWHERE, out=1, name=f"{number}_parent")
            (answer,) = self.step()[1]
            (send,) = self.step()[0].sends
            transfers.append(send.transfer)
            self.assertEqual(HandOff.from_params(answer.kv_transfer_params).transfer, send.transfer)
            self.step(finished_sending={send.request_id})
        self.assertEqual(len(set(transfers)), 2)
        self.check_empty()

    def test_children_of_a_pushed_prompt_are_answered_as_the_one_that_is_pushed(self):
        for number in range(2):
            self.add(60, EARLY, out=1, name=f"{number}_parent")
        said, _, seals = self.run_until_said(2)
        self.assertEqual({HandOff.from_params(answer.kv_transfer_params).transfer for answer in said.values()}, {TRANSFER})
        self.assertEqual([seal.request_id for seal in seals], ["0_parent"])
        self.step(finished_sending={"0_parent"})
        self.check_empty()

    def run_until_said(self, count):
        """Returns (the answer of each request, the sends and the seals that a worker was told of)."""
        said, sends, seals = {}, [], []
        for _ in range(10):
            step, answers = self.step()
            said.update((answer.request_id, answer) for answer in answers)
            sends, seals = sends + step.sends, seals + step.seals
            if len(said) == count and (sends or seals):
                return said, sends, seals
        return self.fail(f"only {sorted(said)} were answered")


class HooksThatRaise(UnderScheduler):
    """Whatever raises inside a hook, every request ends and every block becomes free."""

    pushes = True
    INSIDES = (
        "scheduler.Scheduler.arrived", "scheduler.Scheduler.matched_tokens", "scheduler.Scheduler.allocated",
        "scheduler.Scheduler.take_metadata", "scheduler.Scheduler.finished",
        "scheduler.Scheduler.frees_soon", "scheduler.Scheduler.waits_for_pushes", "scheduler.Scheduler._offer_early",
        "scheduler.Scheduler._hand_off", "scheduler.Scheduler._source_of", "scheduler._digest_of", "scheduler._hand_off_of",
        "scheduler.new_transfer", "pushes.Pushes.begin", "pushes.Pushes.step", "pushes.Pushes.end", "pushes.Pushes.lost",
        "pushes.Pushes._take", "pushes.Pushes._go_on", "sources.Sources.waits", "sources.Sources.take",
        "sources.Sources.leaves", "params.HandOff.to_params")

    def test_every_request_ends(self):
        decodes = {}
        for name in ("decode", "decode that is aborted", "decode that leaves the queue"):
            source = HandOff(f"elsewhere-0-{len(decodes)}", ("elsewhere-0",), 40, prompt_digest(range(40)))
            decodes[name] = source.to_params(engine_id="e")
        for inside in self.INSIDES:
            with self.subTest(inside):
                self.scheduler = make_scheduler(pushes=True)
                broken = unittest.mock.Mock(side_effect=RuntimeError("broken on purpose"))
                with unittest.mock.patch(f"troupe.vllm.{inside}", broken):
                    ended = self.run_out(decodes)
                self.assertTrue(broken.called)
                if inside in ("scheduler._digest_of", "scheduler.Scheduler._source_of"):
                    self.assertTrue(self.scheduler.connector._scheduler._sources.is_empty(), "a source is kept")
                self.assertEqual(ended, {"decode", "sent", "pushed", "plain"})

    def run_out(self, decodes):
        """Requests of every kind, some of which are aborted. Returns those that ended by themselves."""
        for name, source in decodes.items():
            self.add(40, source, name=name)
        self.scheduler.finish_requests("decode that leaves the queue", ABORTED)
        self.add(33, TO_DECODE_ELSEWHERE, out=1, name="sent")
        self.add(150, EARLY, out=1, name="pushed")
        self.open = set()
        ended, ends = set(), {}
        for number in range(60):
            if number == 1:
                self.scheduler.finish_requests("decode that is aborted", ABORTED)
            elif number == 2:
                self.add(33, {}, out=1, name="plain")
                early = {**EARLY, "troupe": {"v": 1, "request": f"{TRANSFER}-too"}}
                self.add(1000, early, out=1, name="push that is aborted")  # some of it is cached by now
            elif number == 4:
                self.scheduler.finish_requests("push that is aborted", ABORTED)
            step, said = self.step(**ends)
            connector = self.scheduler.connector
            connector.has_pending_block_frees()
            connector.has_pending_push_work()
            ended |= {answer.request_id for answer in said if answer.finish_reason is not None}
            ends = self.ends_of(step)
            if number > 4 and not self.scheduler.requests and not any(ends.values()):
                break
        self.assertEqual((self.scheduler.requests, self.free()), ({}, self.free_at_first))
        return ended

    def ends_of(self, step):
        """Everything that a worker reports about these orders, at once."""
        self.open |= {push.transfer for push in step.pushes}
        sent = {send.request_id for send in step.sends}
        for end in (*step.seals, *step.drops):
            if end.transfer in self.open:
                self.open.discard(end.transfer)
                sent.add(end.request_id or end.transfer)
        loaded = {receive.request_id for receive in step.receives}
        failed = {receive.request_id for receive in step.receives if receive.refused}
        return {"finished_sending": sent, "finished_recving": loaded, "failed_recving": failed}


TX = "tx-5f0c1b0e3a7d4a6f8a1b2c3d4e5f6071"
PEERS = ("___prefill_addr_host:10.0.0.1,handshake:1,notify:2,engine:e_dp-0,ranks:2"
         "___decode_addr_host:10.0.0.2,handshake:1,notify:2,engine:f,ranks:1_5f0c1b0e3a7d4a6f8a1b2c3d4e5f6071")


class MoriioUnderScheduler(UnderScheduler):
    """The requests of proxies for MoRIIO's connector."""

    def decode(self, params, name=""):
        """The metadata for the worker of a decode request."""
        request = self.add(100, {"do_remote_decode": False, "do_remote_prefill": True, **params}, name=name)
        step, _ = self.step()
        (receive,) = step.receives
        self.step(finished_recving={request.request_id}, failed_recving={request.request_id})
        self.check_empty()
        self.assertEqual(step.holds, [] if receive.source is None else [receive.source])
        return receive

    def test_a_prefill_is_sent_by_the_name_that_the_proxy_gave(self):
        self.add(100, {**TO_DECODE_ELSEWHERE, "transfer_id": TX, "remote_dp_size": 1, "remote_tp_size": 1}, out=1)
        _, (answer,) = self.step()
        self.assertEqual([send.transfer for send in self.step()[0].sends], [TX])
        said = answer.kv_transfer_params
        self.assertEqual((said["transfer_id"], said["tp_size"], len(said["remote_block_ids"][0])), (TX, 1, 4))
        self.assertEqual(HandOff.from_params(said).transfer, TX)
        self.step(finished_sending={"request-1"})
        self.check_empty()

    def test_a_decode_finds_the_nodes_by_the_engine_that_has_answered(self):
        receive = self.decode({"transfer_id": TX, "remote_engine_id": "An engine", "remote_block_ids": [],
                               "remote_dp_size": 1, "remote_tp_size": 2}, name=f"cmpl-{PEERS}-0-abcdef01")
        self.assertEqual(receive.source, HandOff(TX, nodes_of("An engine", 2), computed=True))
        self.assertFalse(receive.source.is_early)
        self.assertEqual((receive.tokens, receive.digest != ""), (100, True))
        for divided, nodes in (({"tp_size": 1}, ("engines.e.0",)),
                               ({"tp_size": 1, "pp_size": 2}, ("engines.e.0", "engines.e.1"))):
            another = f"{TX}-of-{len(nodes)}"
            self.assertEqual(self.decode({"transfer_id": another, "remote_engine_id": "e", **divided}).source.nodes, nodes)

    def test_a_decode_that_is_asked_at_once_finds_them_by_its_id(self):
        receive = self.decode({"transfer_id": TX, "remote_engine_id": None, "remote_block_ids": None, "remote_tp_size": 1},
                              name=f"cmpl-{PEERS}-0-abcdef01")
        self.assertEqual(receive.source, HandOff(TX, ("engines.e_dp-0.0", "engines.e_dp-0.1")))
        self.assertTrue(receive.source.is_early)

    def test_what_names_no_nodes_is_refused(self):
        answered = {"transfer_id": TX, "remote_engine_id": "e"}
        for params, sentence in (
                ({**answered, "transfer_id": "tx-ABC", "tp_size": 1}, "'transfer_id' .* is not the id of a transfer"),
                ({**answered, "transfer_id": "x" * 201, "tp_size": 1}, "is not the id of a transfer"),
                ({**answered, "transfer_id": 7, "tp_size": 1}, "is not the id of a transfer"),
                (answered, "'remote_tp_size' .* name no engine's nodes"),
                *(({**answered, "remote_engine_id": bad, "tp_size": 1}, "name no engine's nodes")
                  for bad in (["e"], "", "\ud800")),
                ({**answered, "remote_tp_size": 10**9}, "is said to have 1000000000 ranks"),
                ({**answered, "remote_tp_size": -1}, "is said to have -1 ranks"),
                ({"transfer_id": TX}, "`troupe router`, or with 'read_mode' true")):
            self.assertRegex(self.decode(params).refused, sentence)
        for peers in ("___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:1_0",
                      PEERS.replace("ranks:2", "ranks:0"), PEERS.replace("engine:e_dp-0", "engine:../x")):
            self.assertIsNone(self.decode({"transfer_id": TX}, name=f"cmpl-{peers}-0-abcdef01").source)

    def test_a_proxy_is_told_of_the_engine_until_the_scheduler_ends(self):
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            self.scheduler = make_scheduler(role="kv_consumer", proxy_ip="127.0.0.1", proxy_ping_port=port, http_port=8001)
            self.assertTrue(router.poll(30_000), "nothing came")
            said = msgspec.msgpack.decode(router.recv_multipart()[1])
            self.assertEqual((said["type"], said["http_address"], said["dp_size"]), ("D", "127.0.0.1:8001", 1))
            self.scheduler.shutdown()
            self.assertFalse(self.scheduler.connector._heartbeat._thread.is_alive())


TRANSFER = "elsewhere-0-" + "a" * 32
EARLY = {**TO_DECODE_ELSEWHERE, "troupe": {"v": 1, "request": TRANSFER}}


class PushesUnderScheduler(UnderScheduler):
    pushes = True

    def begun(self, tokens=150):
        """A prompt whose first 64 tokens are computed."""
        request = self.add(tokens, EARLY, out=1)
        step, said = self.step()
        self.assertEqual([(push.transfer, len(push.blocks), push.tokens) for push in step.pushes], [(TRANSFER, 2, tokens)])
        self.assertEqual([(chunk.transfer, chunk.blocks, chunk.end) for chunk in step.chunks], [(TRANSFER, [], 64)])
        self.assertEqual(said, [])
        return request

    def test_a_prompt_is_offered_from_its_first_blocks_on(self):
        self.begun(150)
        step, _ = self.step()
        self.assertEqual([(len(chunk.blocks), chunk.end) for chunk in step.chunks], [(2, 128)])
        step, (answer,) = self.step()
        self.assertEqual([(len(chunk.blocks), chunk.end) for chunk in step.chunks], [(1, 150)])
        self.assertEqual(HandOff.from_params(answer.kv_transfer_params).transfer, TRANSFER)
        step, _ = self.step()
        self.assertEqual(step.seals, [Seal("request-1", TRANSFER, 150, prompt_digest(range(150)))])
        self.assertEqual((step.sends, step.drops, step.chunks), ([], [], []))
        self.assertEqual(self.free(), self.free_at_first - 5)
        self.step(finished_sending={"request-1"})
        self.check_empty()

    def test_what_is_cached_is_offered_with_the_rest(self):
        """Before a step nothing is said of the prompt: the engine that computes it may not have finished it."""
        self.add(150, {}, out=1)
        for _ in range(3):
            self.step()
        self.add(150, EARLY, out=1)
        step, (answer,) = self.step()
        self.assertEqual((len(step.pushes[0].blocks), [chunk.end for chunk in step.chunks]), (5, [150]))
        self.assertIsNotNone(answer.kv_transfer_params)
        self.step(finished_sending={"request-2"})
        self.check_empty()

    def test_blocks_of_a_prompt_that_is_given_up_stay_until_the_transfer_has_ended(self):
        request = self.begun()
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.assertEqual(self.step()[0].drops, [Drop(request.request_id, TRANSFER)])
        self.assertEqual(self.free(), self.free_at_first - 2)
        self.assertTrue(self.scheduler.has_finished_requests())
        self.step(finished_sending={request.request_id})
        self.check_empty()

    def test_who_waits_for_a_prompt_that_leaves_the_queue_is_told(self):
        request = self.add(150, EARLY, out=1)
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.assertEqual(self.free(), self.free_at_first)
        step, _ = self.step()
        self.assertEqual((step.drops, step.pushes, step.sends), ([Drop("", TRANSFER)], [], []))
        self.check_empty()

    def test_no_block_of_a_preempted_prompt_is_given_away_before_the_transfer_has_ended(self):
        request = self.begun()
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        self.assertEqual(self.free(), self.free_at_first - 2)
        step, _ = self.step()  # the request starts over, and finds its own blocks in the prefix cache
        self.assertEqual((step.drops, step.pushes, step.chunks), ([Drop("", TRANSFER)], [], []))
        step, (answer,) = self.step(finished_sending={TRANSFER})
        self.assertEqual((step.pushes, step.chunks, answer.kv_transfer_params), ([], [], None))
        self.assertEqual(self.step()[0].sends, [])
        self.check_empty()

    def test_no_other_prompt_is_preempted_for_blocks_that_are_still_read(self):
        request = self.begun()
        connector = self.scheduler.connector
        self.assertFalse(connector.has_pending_block_frees() or connector.has_pending_push_work())
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        self.assertTrue(connector.has_pending_block_frees())
        self.step()
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.assertTrue(connector.has_pending_block_frees() and connector.has_pending_push_work())
        self.step(finished_sending={TRANSFER})
        self.assertFalse(connector.has_pending_block_frees() or connector.has_pending_push_work())
        self.check_empty()

    def test_a_prompt_that_is_computed_again_is_pushed_no_further(self):
        """Another connector had loaded some of it in vain."""
        request = self.begun()
        request.num_computed_tokens = 32
        step, _ = self.step()
        self.assertEqual((step.chunks, step.drops), ([], [Drop("", TRANSFER)]))
        _, (answer,) = self.step(finished_sending={TRANSFER})
        self.assertIsNone(answer.kv_transfer_params)
        self.check_empty()

    def test_a_router_that_asks_in_turn_names_the_transfer_only(self):
        self.add(60, {**EARLY, "troupe": {**EARLY["troupe"], "in_turn": True}}, out=1)
        step, (answer,) = self.step()
        self.assertEqual((step.pushes, HandOff.from_params(answer.kv_transfer_params).transfer), ([], TRANSFER))
        self.assertEqual([send.transfer for send in self.step()[0].sends], [TRANSFER])
        self.step(finished_sending={"request-1"})
        self.check_empty()

    def test_a_name_that_comes_twice_is_the_first_ones(self):
        self.begun(150)
        self.add(30, EARLY, out=1)
        said = []
        for _ in range(4):
            step, more = self.step()
            self.assertEqual((step.pushes, step.drops, step.sends), ([], [], []))
            said += more
        self.assertEqual(len(said), 2)
        self.assertEqual(sum(answer.kv_transfer_params is not None for answer in said), 1)
        self.step(finished_sending={"request-1"})
        self.check_empty()

    def test_a_proxy_for_moriio_that_asks_both_at_once_names_the_transfer(self):
        self.add(30, {**TO_DECODE_ELSEWHERE, "transfer_id": TX, "remote_engine_id": None}, out=1)
        step, _ = self.step()
        self.assertEqual([push.transfer for push in step.pushes], [TX])
        self.step(finished_sending={"request-1"})
        self.check_empty()

    def test_a_decode_may_be_asked_before_its_prompt_is_computed(self):
        request = self.add(100, {"do_remote_prefill": True, "troupe": {"v": 1, "request": TRANSFER, "nodes": ["x-0"]}})
        step, _ = self.step()
        (receive,) = step.receives
        self.assertTrue(receive.source.is_early)
        self.assertEqual((receive.source.transfer, receive.tokens, receive.refused, len(step.holds)), (TRANSFER, 100, "", 1))
        self.step(finished_recving={request.request_id})
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.check_empty()

    def test_an_engine_that_does_not_push_keeps_the_name(self):
        self.scheduler = make_scheduler()
        self.add(100, EARLY, out=1)
        step, (answer,) = self.step()
        self.assertEqual((step.pushes, HandOff.from_params(answer.kv_transfer_params).transfer), ([], TRANSFER))
        self.assertEqual([send.transfer for send in self.step()[0].sends], [TRANSFER])
        self.step(finished_sending={"request-1"})
        self.check_empty()


def setUpModule():  # pylint: disable=invalid-name
    init_none_hash(sha256)
    model.main(FOLDER.name, "llama")
    unittest.addModuleCleanup(FOLDER.cleanup)


if __name__ == "__main__":
    unittest.main(verbosity=2)
