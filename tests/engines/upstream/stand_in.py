"""A plugin of pytest that puts Troupe's connector where vLLM's tests have NIXL's, or a mock.

- A test configures NIXL's connector: the scheduler makes `StandIn`, which is Troupe's, without a worker.
- A test replaces the scheduler's connector by a mock: `StandIn` stays, and only the methods that the test steers or
  counts are mocked (`let_test_steer`). A request that the test lets load then says that it was prefilled elsewhere.
- A test derives a connector from vLLM's base class: it derives one from `StandIn`.

A test also fails when a hook raises, when the connector hears of requests that it does not know, or when it refuses
a load. The tests of remote prefill run a second time with requests that have only NIXL's keys.
"""
import importlib
import tempfile
from unittest.mock import Mock

import pytest
from vllm.config import KVTransferConfig

import model
import table
import troupe.vllm
import troupe.vllm.scheduler
from troupe.vllm.params import KEY, HandOff, prompt_digest

OURS = {"kv_connector": "StandIn", "kv_connector_module_path": __name__}
NIXL, TROUPE = "nixl", "troupe"  # whose keys the requests decoded here have

MADE = []  # the connectors of a test's schedulers


def prefilled_elsewhere(request):
    """What a router passes on for a prompt that another engine computed."""
    source = HandOff(transfer=f"prefill-{request.request_id}", nodes=("elsewhere-0",), tokens=request.num_prompt_tokens,
                     digest=prompt_digest(request.prompt_token_ids))
    return source.to_params(engine_id="my-engine-id")


class Lookup(Mock):
    """`get_num_new_matched_tokens` as a test wants it."""

    def __call__(self, request, num_computed_tokens):
        tokens, later = super().__call__(request, num_computed_tokens)
        if tokens and later:
            request.kv_transfer_params = prefilled_elsewhere(request)
        return tokens, later


class StandIn(troupe.vllm.TroupeConnector):
    """Troupe's connector, as the tests address it."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.receives = []
        MADE.append(self)

    def build_connector_meta(self, scheduler_output):
        metadata = super().build_connector_meta(scheduler_output)
        self.receives += metadata.receives
        return metadata

    def let_test_steer(self):
        """Every method but the lookup answers by itself, whatever a test wants returned."""
        self.get_num_new_matched_tokens = Lookup()
        self.request_finished = self.request_finished_all_groups = Mock(side_effect=self.request_finished_all_groups)
        self.get_loaded_kv_cache_group_ids = Mock(side_effect=self.get_loaded_kv_cache_group_ids)
        self.take_events = Mock(side_effect=self.take_events)
        return self

    @property
    def is_empty(self):
        own = self._scheduler
        return not (own._sending or own._loading or own._used)


# -- of pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu_test: needs no GPU")
    folder = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
    config.add_cleanup(folder.cleanup)
    model.main(folder.name, "llama")
    adapt_helpers(importlib.import_module("tests.v1.kv_connector.unit.utils"), folder.name)


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.endswith(".test_remote_prefill_lifecycle"):
        metafunc.parametrize("keys_of", [NIXL, TROUPE], indirect=True)


def pytest_collection_modifyitems(config, items):
    for module in {item.module for item in items}:
        ADAPT.get(module.__name__.rpartition(".")[2], lambda module: None)(module)
    running, others = [], []
    for item in items:
        name = f"{item.path.name}::{item.name}"
        (others if table.why_not(name) else running).append(item)
        if why := table.why_refused(name):
            refusal = pytest.RaisesExc(ValueError, match="Troupe's connector serves models whose layers keep every token")
            item.add_marker(pytest.mark.xfail(raises=refusal, strict=True, reason=why))
    config.hook.pytest_deselected(items=others)
    items[:] = running


@pytest.fixture(autouse=True)
def keys_of(request, monkeypatch):
    """Whose keys the requests decoded here have."""
    keys = getattr(request, "param", TROUPE)
    monkeypatch.setattr(Keys, "now", keys)
    monkeypatch.setattr(troupe.vllm.logger, "exception", lambda said, *of: pytest.fail(said % of))
    monkeypatch.setattr(troupe.vllm.scheduler.logger, "error", lambda said, *of: pytest.fail(said % of))
    MADE.clear()
    yield keys
    refused = [receive.refused for connector in MADE for receive in connector.receives]
    assert not any(refused), refused


class Keys:
    """The value of `keys_of`, for functions that are no fixtures."""

    now = TROUPE


# -- of vLLM's tests


def adapt_helpers(utils, folder):
    """Runs before the tests import these by name."""
    theirs = {name: getattr(utils, name) for name in ("create_vllm_config", "create_request", "assert_scheduler_empty")}

    def create_vllm_config(**named):
        config = theirs["create_vllm_config"](model=folder, **OURS, **named)
        config.model_config.skip_tokenizer_init = True  # the model has none
        return config

    def create_request(*arguments, **named):
        request = theirs["create_request"](*arguments, **named)
        if named.get("do_remote_prefill") and Keys.now == TROUPE:
            request.kv_transfer_params[KEY] = prefilled_elsewhere(request)[KEY]
        return request

    def assert_scheduler_empty(scheduler):
        theirs["assert_scheduler_empty"](scheduler)
        assert scheduler.connector.is_empty

    utils.create_vllm_config = create_vllm_config
    utils.create_mock_connector = lambda: MADE[-1].let_test_steer()
    utils.create_request = create_request
    utils.assert_scheduler_empty = assert_scheduler_empty


def adapt_config(module):
    def configuration(kv_connector=None, **named):
        of_it = OURS if kv_connector == "NixlConnector" else {"kv_connector": kv_connector}
        return KVTransferConfig(**named, **of_it)

    module.KVTransferConfig = configuration


def adapt_handshake(module):
    module._LegacyConnector.__bases__ = (StandIn,)


def adapt_hma(module):
    """The offloading connector represents any connector that supports groups of layers."""
    [values] = [mark.args[1] for mark in module.test_hma_auto_config.pytestmark if mark.name == "parametrize"]
    for config, _ in values:
        if config.kv_connector == "SimpleCPUOffloadConnector":
            config.kv_connector, config.kv_connector_module_path = OURS.values()
        for child in config.kv_connector_extra_config.get("connectors", []):
            if child["kv_connector"] == "SimpleCPUOffloadConnector":
                child.update(OURS, kv_connector_extra_config={})


ADAPT = {"test_config": adapt_config, "test_handshake_pp_aggregation": adapt_handshake, "test_hma_auto_config": adapt_hma}
