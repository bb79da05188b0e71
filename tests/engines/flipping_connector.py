"""Troupe's connector, except that it flips one bit of each arriving prompt while the file TROUPE_TEST_FLIP exists."""
import os

import torch

import vllm.distributed.utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import troupe.vllm

# Readers of vLLM's queues yield their core by sched_yield() over and over. Linux 6.18 counts each yield as a used
# slice, so a thread that wakes on that core meanwhile may wait for seconds.
vllm.distributed.utils.USE_SCHED_YIELD = False


class FlippingConnector(troupe.vllm.TroupeConnector):
    """Without the file the connector is unchanged."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        kinds = [type(group.kv_cache_spec).__name__ for group in self._kv_cache_config.kv_cache_groups]
        # A window may have dropped the first block.
        self._group = next(place for place, kind in enumerate(kinds) if kind != "SlidingWindowSpec")
        self._first_layer = kv_caches[self._kv_cache_config.kv_cache_groups[self._group].layer_names[0]]
        self._first_blocks = {}

    def bind_connector_metadata(self, connector_metadata):
        self._first_blocks.update((receive.request_id, receive.blocks[self._group][0])
                                  for receive in connector_metadata.receives)
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            block = self._first_blocks.pop(request_id)
            if os.path.exists(os.environ["TROUPE_TEST_FLIP"]):
                _flip(self._first_layer[block])
        return results

    @classmethod
    def build_prom_metrics(cls, *arguments):
        if cls.__name__ not in KVConnectorFactory._registry:  # MultiConnector looks for statistics here
            KVConnectorFactory.register_connector(cls.__name__, __name__, cls.__name__)
        return super().build_prom_metrics(*arguments)


def _flip(block):
    """Sets the second bit of the exponent of an element of V that is 2 or more and does not have the bit set yet,
    which multiplies the element by 2^64. This shows even through a small weight of attention, and the square is
    still finite, so a norm does not turn it into zero. The second half of each head of a block is V."""
    values = block[0].flatten().view(torch.int16)
    if block.dtype == torch.float32:
        values = values[1::2]  # sign, exponent and the first bits, which are all of bfloat16
    v = values[values.numel() // 2 :]
    v[torch.nonzero((v & 0x6000) == 0x4000)[0]] ^= 0x2000
