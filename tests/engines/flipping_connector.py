"""Troupe's connector, which flips one bit of each prompt that arrives while the file TROUPE_TEST_FLIP exists."""
import os

import torch

import vllm.distributed.utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import troupe.vllm

# Readers of vLLM's queues offer their core by sched_yield(), over and over. Linux 6.18 counts each offer as a slice that
# was used, and who wakes on that core between them may wait for seconds.
vllm.distributed.utils.USE_SCHED_YIELD = False


class FlippingConnector(troupe.vllm.TroupeConnector):
    """Without the file it is the connector as it is."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        kinds = [type(group.kv_cache_spec).__name__ for group in self._kv_cache_config.kv_cache_groups]
        # A window may have left the first block behind.
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
        if cls.__name__ not in KVConnectorFactory._registry:  # MultiConnector looks there for who has statistics
            KVConnectorFactory.register_connector(cls.__name__, __name__, cls.__name__)
        return super().build_prom_metrics(*arguments)


def _flip(block):
    """The second bit of the exponent of an element of V that is 2 or more and does not have it yet, which multiplies it by
    2^64: it shows through a small weight of attention, and its square is a number still, of which a norm does not make
    zero. The second half of each head of a block is V."""
    values = block[0].flatten().view(torch.int16)
    if block.dtype == torch.float32:
        values = values[1::2]  # sign, exponent and the first bits, as all of bfloat16
    v = values[values.numel() // 2 :]
    v[torch.nonzero((v & 0x6000) == 0x4000)[0]] ^= 0x2000
