"""The scenario of vLLM's own tests: those that can run with another connector in the place of theirs.

They are not part of this project. ``KVSTORE_VLLM_SOURCE`` names a folder with vLLM's source of the installed
version (an unpacked source distribution, or a checkout); of it the tests are copied aside and run by pytest
in the engines' Python, see ``vllm_own/``. Of the model that they name only the configuration is there.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.engines.replica_process import ROOT, engine_environ, engine_python
from tests.engines.scenario import Outcome, Workshop
from tests.engines.stored import address

ENGINE = "vllm"
_SOURCE = "KVSTORE_VLLM_SOURCE"
_UNIT, _CORE = "v1/kv_connector/unit", "v1/core"
_TESTS: Mapping[str, tuple[str, ...]] = {
    f"{_UNIT}/test_kv_connector_lifecycle.py": (),
    f"{_UNIT}/test_error_propagation.py": (),
    f"{_UNIT}/test_invalid_blocks_correctness.py": (),
    f"{_UNIT}/test_cache_pollution_prevention.py": (),
    f"{_UNIT}/test_kv_load_failure_recovery.py": (),
    f"{_CORE}/test_scheduler.py": (
        "test_prefix_cache_query_not_inflated_by_connector_defer",
        "test_pause_new_drains_async_kv_loads",
        "test_has_sync_kv_loads",
        "test_kv_connector_honors_skip_reading_prefix_cache",
        "test_kv_connector_records_external_cache_hit_sources",
        "test_kv_connector_basic",
        "test_external_prefix_cache_metrics",
        "test_kv_connector_unable_to_allocate",
        "test_kv_connector_handles_preemption",
        "test_prepend_skipped_requests_order",
        "test_abort_request_waiting_for_remote_kvs",
        "test_abort_request_finished_recving",
        "test_delayed_kv_connector_free_keeps_scheduler_active",
        "test_async_load_reservation_prevents_wedge_e2e",
    ),
}
"""Files, and the tests in them; none named: all. The rest is of other connectors, or needs weights."""
_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_COMMIT = "0" * 40


def vllm_own_tests(shop: Workshop) -> Outcome:
    """VLLM's own tests of connectors with this one in the place of theirs; skipped without vLLM's source."""
    outcome = Outcome(ENGINE, "vllm_own_tests")
    source = os.environ.get(_SOURCE)
    if not source:
        outcome.notes["skipped"] = f"{_SOURCE} names no folder with vLLM's source"
        return outcome
    folder = shop.folder / "own-tests"
    shutil.copytree(Path(source) / "tests", folder / "tests", symlinks=True)
    _write_hub(folder / "hub", shop.model())
    _lend_pytest(folder / "pytest")
    file = folder / "found.json"
    with shop.store("own-tests-store") as store, shop.log("own-tests").open("wb") as log:
        more = {
            "HF_HOME": str(folder / "hub"),
            "KVSTORE_OWN_TESTS_STORE": address(store),
            "KVSTORE_OWN_TESTS_FOUND": str(file),
        }
        environ = engine_environ(more=more)
        paths = [folder, Path(__file__).with_name("vllm_own"), ROOT, ROOT / "engine_adapter"]
        environ["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, folder / "pytest"]))
        subprocess.run(_command(), cwd=folder, env=environ, stdout=log, stderr=log, check=False, timeout=1800)
    if not file.exists():
        outcome.problems.append("vLLM's tests did not run to their end; see the log")
        return outcome
    found = json.loads(file.read_text())
    outcome.notes |= {"passed": len(found["passed"]), "skipped": found["skipped"], "counts": found["counts"]}
    outcome.problems += [f"{name}: {text.splitlines()[-1]}" for name, text in found["failed"].items()]
    outcome.demand(bool(found["passed"]), "no test has run")
    return outcome


def _command() -> list[str]:
    named = []
    for file, tests in _TESTS.items():
        named += [f"tests/{file}::{test}" for test in tests] or [f"tests/{file}"]
    # vLLM's conftest.py of all tests loads what only its models need.
    quiet = ["-p", "no:cacheprovider", "-q", "--noconftest", "-p", "tests.v1.kv_connector.unit.conftest"]
    return [str(engine_python()), "-m", "pytest", *quiet, "-p", "kvstore_in_vllm_tests", *named]


def _write_hub(folder: Path, tokenizer: Path) -> None:
    """Write the configuration of the model that the tests name, as the hub's cache has it."""
    model = folder / "hub" / "models--facebook--opt-125m"
    snapshot = model / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(_COMMIT)
    (snapshot / "config.json").write_text(json.dumps(_OPT))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, snapshot / name)


def _lend_pytest(folder: Path) -> None:
    """Put this project's pytest, and nothing else of its environment, where the engines' Python finds it."""
    import _pytest
    import iniconfig
    import pluggy
    import pytest

    folder.mkdir()
    for module in (pytest, _pytest, pluggy, iniconfig):
        place = Path(str(module.__file__)).parent
        (folder / place.name).symlink_to(place)
    (folder / "py.py").symlink_to(Path(str(pytest.__file__)).parents[1] / "py.py")
