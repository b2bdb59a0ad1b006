"""A pytest plugin that puts this connector in the place of those that vLLM's own tests are written with.

It is loaded in the engines' Python beside a copy of vLLM's folder of tests. Where a test takes a connector
from vLLM's factory, it gets this one; where it takes a ``Mock``, it gets a mock that passes on to this one
whatever the test does not answer itself. What a test has the connector find stays the test's.
``KVSTORE_OWN_TESTS_STORE`` is the address of a store, ``KVSTORE_OWN_TESTS_FOUND`` a file for a JSON object of
what came of it.
"""

import copy
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import vllm.distributed
from tests.v1.kv_connector.unit import utils
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstore_engine_adapter.vllm.connector import KVStoreConnector

_PLACES = ("ExampleConnector", "NixlConnector", "MockKVConnector")
_found: dict[str, Any] = {"passed": [], "failed": {}, "skipped": {}}
_counts: Counter[str] = Counter()
_schedulers: list[Any] = []
_made: list["Substitute"] = []
# A worker's rank is asked of vLLM's groups of ranks, which these tests do not set up.
patch.object(vllm.distributed, "get_tensor_model_parallel_rank", return_value=0).start()


class Substitute(KVStoreConnector):
    """The connector, made from the configuration of a test for another one."""

    def __init__(self, config: Any, role: KVConnectorRole, cache: Any) -> None:
        config = copy.copy(config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore_engine_adapter.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "store": os.environ["KVSTORE_OWN_TESTS_STORE"],
                "weights": "none",
            },
        )
        if not getattr(cache, "kv_cache_layout", None):
            # Schedulers that tests put together by hand are not told of a layout.
            cache = copy.copy(cache)
            object.__setattr__(cache, "kv_cache_layout", "LBHNC")
        super().__init__(config, role, cache)
        _made.append(self)
        _counts["made"] += 1
        _counts["active"] += self._identity is not None


class Answering(Substitute):
    """The same in the place of vLLM's ``MockKVConnector``, of which tests say how many tokens it finds."""

    def __init__(self, config: Any, role: KVConnectorRole, cache: Any) -> None:
        super().__init__(config, role, cache)
        self._test = utils.MockKVConnector(config, role, cache)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Ask the store, and answer what the test says."""
        super().get_num_new_matched_tokens(request, num_computed_tokens)
        return self._test.get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Plan the step, and return what the test looks at."""
        super().build_connector_meta(scheduler_output)
        return self._test.build_connector_meta(scheduler_output)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """What the test says."""
        return self._test.supports_divergent_local_hybrid_hits


def _mock() -> Mock:
    """Return a mock in front of the connector of the scheduler that was made last."""
    scheduler = _schedulers[-1]
    connector = Substitute(scheduler.vllm_config, KVConnectorRole.SCHEDULER, scheduler.kv_cache_config)
    made = Mock(wraps=connector)
    made.get_external_cache_hit_sources.side_effect = (
        _create_mock().get_external_cache_hit_sources.side_effect
    )
    return made


def _remembering(create_scheduler: Any) -> Any:
    def create(*given: Any, **named: Any) -> Any:
        scheduler = create_scheduler(*given, **named)
        _schedulers.append(scheduler)
        return scheduler

    return create


_create_mock = utils.create_mock_connector
utils.create_mock_connector = _mock
utils.create_scheduler = _remembering(utils.create_scheduler)
utils.ExampleConnector = Substitute
for _place in _PLACES:
    KVConnectorFactory._registry[_place] = lambda place=_place: (
        Answering if place == "MockKVConnector" else Substitute
    )


class _Reasons(logging.Handler):
    """Counts why blocks of a test's engine cannot be named."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            _counts[record.getMessage()] += 1


logging.getLogger("vllm.kvstore").addHandler(_Reasons())


def _count_calls() -> None:
    for name in (
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
    ):
        call = getattr(KVStoreConnector, name)

        def counted(self: Any, *given: Any, _name: str = name, _call: Any = call) -> Any:
            _counts[_name] += 1
            return _call(self, *given)

        setattr(KVStoreConnector, name, counted)


_count_calls()


@pytest.hookimpl
def pytest_runtest_logreport(report: Any) -> None:
    """Note what came of a test."""
    if report.skipped:
        _found["skipped"][report.nodeid] = str(report.longrepr)[-200:]
    elif report.failed:
        _found["failed"][report.nodeid] = str(report.longrepr)[-1500:]
    elif report.when == "call":
        _found["passed"].append(report.nodeid)


@pytest.hookimpl
def pytest_runtest_teardown(item: Any) -> None:
    """End the connectors of a test."""
    _schedulers.clear()
    while _made:
        _made.pop().shutdown()


@pytest.hookimpl
def pytest_sessionfinish() -> None:
    """Write what came of all."""
    Path(os.environ["KVSTORE_OWN_TESTS_FOUND"]).write_text(json.dumps(_found | {"counts": _counts}))
