"""Troupe's connector under vLLM's own scheduler, without a worker: what would have come from one is told to it.

Run by ctest: engines.vllm_scheduler.
"""
import os
import tempfile
import unittest
import unittest.mock

import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
# pylint: disable=wrong-import-position
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import model
import troupe.vllm
from troupe.vllm.params import HandOff

FOLDER = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
BLOCK = 32
BLOCKS = 64
ABORTED = RequestStatus.FINISHED_ABORTED
TO_DECODE_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False}


def make_scheduler(policy="fail"):
    transfer = KVTransferConfig(
        kv_connector="TroupeConnector", kv_connector_module_path="troupe.vllm", kv_role="kv_both",
        kv_load_failure_policy=policy, kv_connector_extra_config={"deployment": "none.yaml", "node": "here-0"})
    config = EngineArgs(model=FOLDER.name, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=2048,
                        max_num_seqs=4, block_size=BLOCK, enable_prefix_caching=False,
                        kv_transfer_config=transfer).create_engine_config()
    page = 2 * BLOCK * 64 * 2 * 2
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    cache = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[KVCacheTensor(page * BLOCKS, ["layer"], page * BLOCKS, page)],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = BLOCKS
    with set_current_vllm_config(config):
        return Scheduler(config, cache, StructuredOutputManager(config), BLOCK)


class ConnectorUnderScheduler(unittest.TestCase):
    def setUp(self):
        self.scheduler = make_scheduler()
        self.free_at_first = self.free()
        self.count = 0

    def free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, tokens, params, out=4):
        self.count += 1
        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True,
                                  extra_args={"kv_transfer_params": dict(params)})
        sampling.update_from_generation_config({}, 1)
        request = Request(f"request-{self.count}", list(range(tokens)), sampling, None)
        self.scheduler.add_request(request)
        return request

    def step(self, **told):
        """One step of the engine, whose worker says what is `told`; (what the connector's worker is told, answers)."""
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        # A request whose prompt is computed by this step gets a token.
        sampled = [[7] if self.scheduler.requests[name].num_computed_tokens >= self.scheduler.requests[name].num_tokens
                   else [] for name in ids]
        ran = ModelRunnerOutput(ids, {name: place for place, name in enumerate(ids)}, sampled,
                                kv_connector_output=KVConnectorOutput(**told))
        answers = self.scheduler.update_from_output(output, ran)
        said = [answer for one in answers.values() for answer in one.outputs]
        return output.kv_connector_metadata, said

    def prefilled(self, tokens):
        """A prompt that was computed: its request, and what the router is told."""
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
        self.assertEqual((own._sending, own._loading, own._used), (set(), set(), set()))

    # -- prefill

    def test_a_prefill_keeps_its_blocks_until_they_are_sent(self):
        request, params = self.prefilled(100)
        self.assertEqual(self.free(), self.free_at_first - 4)
        (send,) = self.step()[0].sends
        self.assertEqual((send.request_id, send.tokens, len(send.blocks[0])), (request.request_id, 100, 4))
        self.assertEqual(HandOff.from_params(params).transfer, send.transfer)
        self.assertEqual(self.step()[0].sends, [])
        self.assertTrue(self.scheduler.has_finished_requests())  # vLLM goes on stepping
        self.step(finished_sending={request.request_id})
        self.check_empty()

    def test_a_worker_of_this_process_is_told_at_once(self):
        """An engine without a core of its own makes no step behind its last request."""
        class OneWorker:  # pylint: disable=too-few-public-methods
            offered = []

            def offer(self, sends):
                self.offered += sends

        worker = OneWorker()
        engine_id = self.scheduler.connector._kv_transfer_config.engine_id
        with unittest.mock.patch.dict(troupe.vllm._WORKERS, {engine_id: worker}):
            request, params = self.prefilled(100)
        (send,) = worker.offered
        self.assertEqual((send.request_id, send.transfer), (request.request_id, HandOff.from_params(params).transfer))
        self.assertEqual(self.step()[0].sends, [])
        self.step(finished_sending={request.request_id})
        self.check_empty()

    def test_what_is_told_twice_or_of_nobody_is_dropped(self):
        request, _ = self.prefilled(40)
        self.step(finished_sending={request.request_id, "nobody"}, finished_recving={"nobody", request.request_id})
        self.step(finished_sending={request.request_id})
        self.check_empty()

    def test_what_ended_may_be_told_as_a_list(self):
        """As vLLM's own tests do; its scheduler takes one."""
        request, _ = self.prefilled(40)
        self.step(finished_sending=[request.request_id])
        self.check_empty()

    def test_a_prefill_that_is_aborted_frees_at_once(self):
        request = self.add(1000, TO_DECODE_ELSEWHERE, out=1)
        self.scheduler.finish_requests(request.request_id, ABORTED)
        self.assertEqual(self.step()[0].sends, [])
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


def setUpModule():  # pylint: disable=invalid-name
    model.main(FOLDER.name, "llama")
    unittest.addModuleCleanup(FOLDER.cleanup)


if __name__ == "__main__":
    unittest.main(verbosity=2)
