"""What decides what the bytes of a host pool's pages mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore_engine_adapter.model_identity import NotNameable
from kvstore_engine_adapter.sglang.identity import PoolIdentity, identify
from kvstore_engine_adapter.sglang.options import BackendOptions
from kvstore_engine_adapter.sglang.pages import pages_of
from tests.engine_adapter.sglang.sglang_stand_in import (
    HostPool,
    PoolWithoutFlatPages,
    ServerArgs,
    StorageConfig,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def identity(
    pool: HostPool | None = None,
    *,
    server: ServerArgs | None = None,
    has_server: bool = True,
    options: dict[str, Any] | None = None,
    pool_name: str = "kv",
    version: str = "0.5.23",
    commit: str | None = COMMIT,
    **changes: Any,
) -> PoolIdentity:
    pool = pool or HostPool()
    return identify(
        pool,
        pages_of(pool),
        StorageConfig(None, **changes),
        (server or ServerArgs()) if has_server else None,
        BackendOptions(store="unix:/kv.sock", **(options or {})),
        pool_name=pool_name,
        version=version,
        resolve=lambda model, revision: commit,
    )


def test_equal_replicas_share() -> None:
    assert identity(HostPool(seed=1)) == identity(HostPool(seed=2))
    assert identity().namespace.weights == f"commit:{COMMIT}"


@pytest.mark.parametrize(
    "other",
    [
        lambda: identity(HostPool("layer_first")),
        lambda: identity(HostPool("page_first")),
        lambda: identity(HostPool(dtype=torch.bfloat16)),
        lambda: identity(HostPool(dtype=torch.int32)),
        lambda: identity(HostPool(page_size=16)),
        lambda: identity(PoolWithoutFlatPages()),
        lambda: identity(pool_name="swa"),
        lambda: identity(version="0.5.24"),
        lambda: identity(commit=COMMIT[::-1]),
        lambda: identity(options={"model": "another"}),
        lambda: identity(options={"weights": "w2"}),
        lambda: identity(options={"salt": "s"}),
        lambda: identity(server=ServerArgs(model_path="other/model")),
        lambda: identity(server=ServerArgs(quantization="fp8")),
        lambda: identity(server=ServerArgs(kv_cache_dtype="fp8_e4m3")),
        lambda: identity(server=ServerArgs(json_model_override_args='{"rope_theta": 1}')),
        lambda: identity(tp_size=2),
        lambda: identity(pp_size=2),
        lambda: identity(attn_cp_size=2),
        lambda: identity(is_mla_model=True),
    ],
)
def test_what_decides_what_bytes_mean_separates(other: Callable[[], PoolIdentity]) -> None:
    assert other().namespace.digest != identity().namespace.digest


def test_other_numbers_of_layers_and_heads_separate() -> None:
    for name in ("layer_num", "head_num", "head_dim", "start_layer"):
        pool = HostPool()
        setattr(pool, name, 77)
        assert identity(pool).namespace.digest != identity().namespace.digest


def test_stages_of_a_pipeline_separate_and_ranks_have_parts() -> None:
    stages = [identity(pp_size=2, pp_rank=rank) for rank in range(2)]
    assert stages[0].namespace != stages[1].namespace
    ranks = [identity(tp_size=2, tp_rank=rank) for rank in range(2)]
    assert ranks[0].namespace == ranks[1].namespace
    assert ranks[0].part != ranks[1].part
    layout = ranks[0].namespace.layout
    assert [layout.part_bytes(rank.part) for rank in ranks if rank.part] == [layout.block_bytes // 2] * 2


def test_ranks_of_latent_attention_share_whole_pages_but_not_states() -> None:
    ranks = [identity(tp_size=2, tp_rank=rank, is_mla_model=True) for rank in range(2)]
    assert ranks[0] == ranks[1]
    states = [
        identity(HostPool(page_size=1), tp_size=2, tp_rank=rank, is_mla_model=True, pool_name="mamba")
        for rank in range(2)
    ]
    assert states[0].part != states[1].part


def test_the_files_of_a_folder_name_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "some-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"one")
    server = ServerArgs(model_path=str(model))
    first = identity(server=server).namespace
    (model / "model.safetensors").write_bytes(b"two")
    second = identity(server=server).namespace
    assert first.model == second.model == "some-model"
    assert first.weights != second.weights
    given = identity(server=server, options={"weights": "w"}).namespace
    (model / "config.json").write_text('{"rope_theta": 1}')
    assert identity(server=server, options={"weights": "w"}).namespace != given


@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        (lambda: identity(dcp_size=2), "set dcp_size to 1"),
        (lambda: identity(server=ServerArgs(speculative_algorithm="EAGLE")), "use NGRAM"),
        (lambda: identity(server=ServerArgs(enable_lora=True)), "leave out --enable-lora"),
        (lambda: identity(server=ServerArgs(lora_paths=["a"])), "leave out --enable-lora"),
        (lambda: identity(server=ServerArgs(load_format="dummy")), 'set "weights"'),
        (lambda: identity(commit=None), 'set "weights"'),
        (lambda: identity(has_server=False), 'set "model" and "weights"'),
        (lambda: identity(HostPool(page_size=1 << 16, page_num=1)), "lower SGLang's --page-size"),
    ],
)
def test_what_cannot_be_named_is_refused_with_a_remedy(
    other: Callable[[], PoolIdentity], remedy: str
) -> None:
    with pytest.raises(NotNameable, match=remedy):
        other()


def test_without_server_arguments_given_weights_suffice() -> None:
    found = identity(has_server=False, options={"weights": "w1"})
    assert (found.namespace.model, found.namespace.weights) == ("model", "given:w1")


def test_speculation_without_a_draft_model_is_shared() -> None:
    assert identity(server=ServerArgs(speculative_algorithm="NGRAM")).namespace == identity().namespace
