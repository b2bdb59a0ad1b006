"""What is put into the namespace, and what is refused."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvstore_engine_adapter.vllm as package
from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.vllm.identity import EngineIdentity, NotNameable, identify
from kvstore_engine_adapter.vllm.options import ConnectorOptions
from tests.engine_adapter.vllm.engine_stand_in import FULL, PAGE_BYTES, hybrid_cache, plain_cache
from tests.engine_adapter.vllm.vllm_stand_in import FullAttentionSpec, kv_cache_config, vllm_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def identity(
    config: Any = None, cache: Any = None, *, version: str = "0.32.0", **more: Any
) -> EngineIdentity:
    config = config or vllm_config("unix:/kv.sock")
    options = ConnectorOptions.parse(config.kv_transfer_config.kv_connector_extra_config)
    environ = more.get("environ", {})
    commit = more.get("commit")
    return identify(
        config,
        cache or plain_cache(),
        options,
        version=version,
        none_hash=more.get("none_hash", b"seed"),
        resolve_revision=lambda model, revision: commit,
        environ=environ,
    )


def without_weights(**changes: Any) -> Any:
    config = vllm_config("unix:/kv.sock", **changes)
    del config.kv_transfer_config.kv_connector_extra_config["weights"]
    return config


def test_layers_are_stored_in_the_order_of_their_numbers() -> None:
    assert list(identity().groups[0].page_bytes) == [FULL[0], FULL[2], FULL[1]]


def test_the_groups_with_full_attention_come_first_and_have_no_window() -> None:
    groups = identity(cache=hybrid_cache(65)).groups
    assert [(group.index, group.window_blocks) for group in groups] == [(1, None), (0, 2)]
    assert groups[0].namespace != groups[1].namespace


@pytest.mark.parametrize("window", [1, 2, 33, 34, 64, 65, 66])
def test_a_window_needs_the_blocks_that_the_next_token_attends_to(window: int) -> None:
    needed = {position // 32 for position in range(320 - window + 1, 320)}
    assert identity(cache=hybrid_cache(window)).groups[1].window_blocks == len(needed)


def test_ranks_have_parts_of_one_block() -> None:
    two = identity(vllm_config("unix:/kv.sock", parallel_config__tensor_parallel_size=2))
    assert two.groups[0].namespace.layout.block_bytes == 2 * 3 * PAGE_BYTES
    assert [two.groups[0].namespace.layout.part_bytes(part) for part in two.parts] == [3 * PAGE_BYTES] * 2


def test_another_minor_version_or_seed_is_another_namespace_and_a_patch_is_not() -> None:
    namespace = identity().groups[0].namespace
    assert identity(version="0.32.1").groups[0].namespace == namespace
    assert identity(version="0.33.0").groups[0].namespace != namespace
    assert identity(none_hash=b"another").groups[0].namespace != namespace


def test_the_commit_of_a_cached_model_names_the_weights() -> None:
    assert identity(without_weights(), commit=COMMIT).groups[0].namespace.weights == f"commit:{COMMIT}"


def test_the_files_of_a_folder_name_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "some-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"one")
    first = identity(without_weights(model_config__model=str(model))).groups[0].namespace
    (model / "model.safetensors").write_bytes(b"two")
    second = identity(without_weights(model_config__model=str(model))).groups[0].namespace
    assert first.model == second.model == "some-model"
    assert first.weights != second.weights


def test_a_folder_of_the_hubs_cache_is_named_by_its_commit(tmp_path: Path) -> None:
    model = tmp_path / "snapshots" / COMMIT
    model.mkdir(parents=True)
    found = identity(without_weights(model_config__model=str(model))).groups[0].namespace
    assert found.weights == f"commit:{COMMIT}"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"cache_config__enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"cache_config__calculate_kv_scales": True}, "--calculate-kv-scales"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}, "PYTHONHASHSEED"),
    ],
)
def test_what_is_refused_says_what_to_set(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(NotNameable, match=remedy):
        identity(vllm_config("unix:/kv.sock", **changes))


def test_a_draft_model_is_refused_and_drafts_from_the_prompt_are_not() -> None:
    config = vllm_config("unix:/kv.sock")
    config.speculative_config = SimpleNamespace(method="eagle")
    with pytest.raises(NotNameable, match="ngram"):
        identity(config)
    config.speculative_config.method = "ngram"
    assert identity(config).groups


def test_a_seed_that_is_given_makes_any_hash_reproducible() -> None:
    config = vllm_config("unix:/kv.sock", cache_config__prefix_caching_hash_algo="xxhash")
    assert identity(config, environ={"PYTHONHASHSEED": "7"}).groups


@pytest.mark.parametrize(
    "config", [without_weights(), without_weights(load_config__load_format="dummy")], ids=["hub", "dummy"]
)
def test_weights_that_nothing_names_are_refused(config: Any) -> None:
    with pytest.raises(NotNameable, match='"weights"'):
        identity(config)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotNameable, match="no files of weights"):
        identity(without_weights(model_config__model=str(tmp_path)))


def test_layers_of_an_unknown_kind_are_refused() -> None:
    class MambaSpec(FullAttentionSpec):
        pass

    with pytest.raises(NotNameable, match="MambaSpec"):
        identity(cache=kv_cache_config((FULL, MambaSpec(32, PAGE_BYTES))))


def test_a_layout_that_is_not_told_is_refused() -> None:
    with pytest.raises(NotNameable, match="in which order"):
        identity(cache=kv_cache_config((FULL, FullAttentionSpec(32, PAGE_BYTES)), layout=""))


def test_blocks_above_the_stores_limit_are_refused() -> None:
    with pytest.raises(NotNameable, match="--block-size"):
        identity(cache=kv_cache_config((FULL, FullAttentionSpec(32, 16 << 20))))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "no store"),
        ({"store": "unix:/x", "stroe": 1}, "unknown key 'stroe'"),
        ({"store": "unix:/x", "min_blocks": True}, "min_blocks"),
        ({"store": "unix:/x", "lookup_deadline_ms": 0}, "lookup_deadline_ms"),
        ({"store": "unix:/x", "save_queue_bytes": -1}, "save_queue_bytes"),
        ({"store": "unix:/x", "min_blocks": 0}, "min_blocks"),
        ({"store": 5}, "store is 5"),
        ({"store": "https://far:8443"}, "its own node"),
    ],
)
def test_a_bad_option_stops_the_start(given: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidConfig, match=text):
        ConnectorOptions.parse(given)


def test_without_vllm_the_class_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "kvstore_engine_adapter.vllm.connector", raising=False)
    with pytest.raises(ImportError, match=r"tested: .*: install vllm=="):
        _ = package.KVStoreConnector
    with pytest.raises(AttributeError):
        _ = package.nothing_of_the_kind
