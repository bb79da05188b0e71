"""Which of vLLM's connector tests run with Troupe's connector, and why the others do not.

Files are those of `v1/kv_connector/unit` in vLLM's tests. Every test there that is marked `cpu_test` stands in this table:
its file runs, or `EXCLUDED` says why it does not.
"""
import fnmatch

RELEASE = "0.32.0"

# By the first digits of their SHA-256 in the release. Files that the tests share:
SHARED = {
    "conftest.py": "1608eabf3bb97427",
    "utils.py": "7ec9051f3b04868c",
}
# The files that run.
RUN = {
    "test_cache_pollution_prevention.py": "baf9beb6b33b92dd",
    "test_config.py": "27e2eb147d74d99f",
    "test_error_propagation.py": "2c89bb065af00c34",
    "test_handshake_pp_aggregation.py": "7d40ed02ec83cf2d",
    "test_hma_auto_config.py": "92eac3e5034bdd8b",
    "test_invalid_blocks_correctness.py": "1873cd7b92681354",
    "test_kv_load_failure_recovery.py": "1a90d61c1436eda0",
    "test_remote_decode_lifecycle.py": "335aa4c4219df9d4",
    "test_remote_prefill_lifecycle.py": "a3f4b86a758b5ab8",
}

# Models that the connector does not serve: these tests have to end with its refusal, before anything is scheduled.
REFUSED = {
    "test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba":
        "layers with a state in place of tokens; NIXL's prefill also drops the prompt's last token for them",
    "test_remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_mamba_spec_blocks":
        "layers with a state in place of tokens",
}

_NO_CONNECTOR = "no connector for prefill and decode takes part in it"
_NIXL_PARTS = "makes parts of NIXL's scheduler or worker by themselves: regions, descriptors, strides, its metadata"
_BOTH_WAYS = ("a decode's cache goes back to the prefill engine of the next turn (`bidirectional_kv_xfer`), which Troupe's "
              "connector does not offer: it refuses the key at start")
_AS_DECODE = ("what test_remote_decode_lifecycle.py asks, in a file that needs Ray and fakes of NIXL's worker before it "
              "can be imported")
_NIXL_WORKER = "NIXL's worker with a fake of its library, and how NIXL's engines shake hands"
_PARTS_THEIRS = "the connector that it is about must not know the parts of a pipeline, which ours does"
_HMA_THEIRS = "the connector that it is about must lack `SupportsHMA`, which ours has"

# A test, with wildcards * and ?, or one value of a parameter, and why it does not run.
EXCLUDED = {
    "test_config.py::test_kv_connector": _NO_CONNECTOR,
    "test_config.py::test_no_kv_connector_ignores_expandable_segments": _NO_CONNECTOR,
    "test_config.py::test_kv_offloading_size_only_uses_native_default": _NO_CONNECTOR,
    "test_hma_auto_config.py::test_hma_auto_config[non_hma_connector]": _HMA_THEIRS,
    "test_hma_auto_config.py::test_explicit_hma_with_non_hma_connector_errors_at_factory": _HMA_THEIRS,
    "test_handshake_pp_aggregation.py::test_engine_unwraps_handshake_metadata_for_legacy_connector": _PARTS_THEIRS,
    "test_handshake_pp_aggregation.py::test_engine_rejects_pp_producer_for_legacy_connector": _PARTS_THEIRS,
    "test_output_aggregator.py::*": _NO_CONNECTOR,
    "test_transfer_topology_sharded.py::*": "a helper of NIXL's and Mooncake's handshakes",
    "offloading_connector/test_worker_metadata.py::*": "the metadata of the connector that offloads to the CPU",
    "test_moriio_write_done_routing.py::*": "MoRIIO's writer",
    "test_mooncake_connector_hma.py::*": "parts of Mooncake's scheduler and worker by themselves",
    "test_mooncake_connector_hybrid_mamba.py::*": "parts of Mooncake's scheduler by themselves",
    "test_nixl_desc_geometry.py::*": _NIXL_PARTS,
    "test_nixl_connector.py::TestPeerReplacement::*": _NIXL_WORKER,
    "test_nixl_connector_hma.py::test_failed_load_rezeroes_unwritten_skipped_blocks": _NO_CONNECTOR,
    "test_nixl_connector_hma.py::*": _NIXL_PARTS,
    "test_bidirectional_kv_transfer.py::test_first_turn_no_remote_blocks": _AS_DECODE,
    "test_bidirectional_kv_transfer.py::test_cache_miss_first_turn_no_remote_pull": _AS_DECODE,
    "test_bidirectional_kv_transfer.py::test_abort_p_side_during_send": _AS_DECODE,
    "test_bidirectional_kv_transfer.py::test_p_node_finished_holds_blocks_for_d": _AS_DECODE,
    "test_bidirectional_kv_transfer.py::test_abort_p_side_non_length_capped":
        "reads a table of NIXL's scheduler; scheduler_test.py asks the same of ours",
    "test_bidirectional_kv_transfer.py::test_add_new_req_to_recv_populates_remote_meta": _NIXL_PARTS,
    "test_bidirectional_kv_transfer.py::test_handshake_listener_appends_perf_counter_frame": _NIXL_WORKER,
    "test_bidirectional_kv_transfer.py::test_turn2_*": _NIXL_WORKER,
    "test_bidirectional_kv_transfer.py::test_p_node_pull_*": _NIXL_WORKER,
    "test_bidirectional_kv_transfer.py::test_p_node_deferred_pull_on_no_handshake": _NIXL_WORKER,
    "test_bidirectional_kv_transfer.py::*": _BOTH_WAYS,
}


def names_test(name, test):
    """Whether a name in this table matches a test, with or without the value of a parameter."""
    return name == test or ("[" not in name and fnmatch.fnmatchcase(test.partition("[")[0], name))


def why_not(test):
    """The reason why a test does not run; empty if it does."""
    return next((why for name, why in EXCLUDED.items() if names_test(name, test)), "")


def why_refused(test):
    return next((why for name, why in REFUSED.items() if names_test(name, test)), "")
