"""Troupe's connector, which flips one bit of each prompt that arrives while the file TROUPE_TEST_FLIP exists."""
import os

import torch

import troupe.vllm


class FlippingConnector(troupe.vllm.TroupeConnector):
    """Without the file it is the connector as it is."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self._first_layer = next(iter(kv_caches.values()))
        self._first_blocks = {}

    def bind_connector_metadata(self, connector_metadata):
        self._first_blocks.update((receive.request_id, receive.blocks[0]) for receive in connector_metadata.receives)
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            block = self._first_blocks.pop(request_id)
            if os.path.exists(os.environ["TROUPE_TEST_FLIP"]):
                _flip(self._first_layer[block])
        return results


def _flip(block):
    """The highest bit of the exponent of an element of V that does not have it yet, so that it becomes huge: one that
    had it would become nearly nothing, which may not show. The second half of each head of a block is V."""
    values = block[0].view(torch.int16).flatten()
    v = values[values.numel() // 2 :]
    v[torch.nonzero((v & 0x4000) == 0)[0]] ^= 0x4000
