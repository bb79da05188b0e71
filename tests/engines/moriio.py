"""Proxies for MoRIIO's connector in front of two of our servers: vLLM's router, and a double of vLLM's toy proxy."""
import time
import uuid

from proxy import ask
from servers import Failed

FOUND_SECONDS = 60  # servers register every 3
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def configured(transfer, name, port, ping_port):
    """The kv-transfer-config of a server that listens at `port`, as users of MoRIIO write it."""
    extra = {"proxy_ip": "127.0.0.1", "proxy_ping_port": str(ping_port), "http_port": port, "handshake_port": "6301",
             "notify_port": "61005"}
    return {**transfer, "kv_role": ROLES[name],
            "kv_connector_extra_config": {**transfer.get("kv_connector_extra_config", {}), **extra}}


def wait_until_found(router):
    """Waits until both servers have registered."""
    limit = time.monotonic() + FOUND_SECONDS
    while True:
        try:
            router.complete([1, 2, 3], 1)
            return
        except Failed:
            if time.monotonic() > limit:
                raise
            time.sleep(0.5)


class Double:
    """Asks as vLLM's `moriio_toy_proxy_server.py` asks servers that read: it passes on three values of the prefill
    server's answer, and the number of ranks that the server registered with."""

    name = "a double of vLLM's toy proxy"

    def __init__(self, pair, ranks):
        self._pair, self._ranks = pair, ranks

    def complete(self, prompt, tokens):
        return self.ask({"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                         "return_token_ids": True, "detokenize": False})["choices"][0]["token_ids"]

    def ask(self, body):
        """The answer to a completion."""
        answer = ask(self._pair.prefill.url, {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {
            "remote_dp_size": 1, "remote_tp_size": 1, "transfer_id": f"tx-{uuid.uuid4()}", "do_remote_decode": True,
            "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}})["kv_transfer_params"]
        handed_on = {key: answer[key] for key in ("remote_engine_id", "remote_block_ids", "transfer_id")}
        return ask(self._pair.decode.url, {**body, "kv_transfer_params": {
            "do_remote_decode": False, "do_remote_prefill": True, **handed_on, "remote_dp_size": 1,
            "remote_tp_size": self._ranks}})

    def tail(self):
        return self._pair.decode.tail()
