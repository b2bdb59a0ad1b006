"""Shares of a model: they fit, they differ, and together they are the whole."""

import pytest
import torch

from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.model import load_model
from kvstore_engine_adapter.paged_engine import layout_of
from kvstore_engine_adapter.shard import Shard
from tests.engine.conftest import CPU
from tests.engine.tiny_model import FFN, HEAD_DIM, HEADS, KV_HEADS, TinyModel


def shares(path, size):
    return [load_model(path, dtype=torch.float32, device=CPU, shard=Shard(n, size)) for n in range(size)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_shares_of_a_model_are_together_the_whole(tmp_path, architecture):
    path = TinyModel(architecture, is_tied=False).write_folder(tmp_path / "m")
    whole = load_model(path, dtype=torch.float32, device=CPU).weights.layers[1]
    layers = [model.weights.layers[1] for model in shares(path, 2)]
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    fused = [torch.split(layer.qkv, [queries // 2, keys // 2, keys // 2]) for layer in layers]
    assert torch.equal(torch.cat([part[n] for n in range(3) for part in fused]), whole.qkv)
    gates = [layer.gate_up.split(FFN // 2) for layer in layers]
    assert torch.equal(torch.cat([part[n] for n in range(2) for part in gates]), whole.gate_up)
    assert torch.equal(torch.cat([layer.output for layer in layers], 1), whole.output)
    assert torch.equal(torch.cat([layer.down for layer in layers], 1), whole.down)
    if whole.qkv_bias is not None:
        biases = [layer.qkv_bias.split([queries // 2, keys // 2, keys // 2]) for layer in layers]
        assert torch.equal(torch.cat([part[n] for n in range(3) for part in biases]), whole.qkv_bias)


def test_a_bias_on_a_sum_is_added_once(tmp_path):
    tiny = TinyModel()
    tiny.tensors |= {f"model.layers.{n}.self_attn.o_proj.bias": torch.ones(64) for n in range(3)}
    first, second = shares(tiny.write_folder(tmp_path / "m"), 2)
    assert first.weights.layers[0].output_bias is not None
    assert second.weights.layers[0].output_bias is None


def test_the_parts_of_a_block_do_not_overlap_and_cover_it(tiny_f32):
    layout = layout_of(tiny_f32, 16)
    parts = [Shard(rank, 2).part_of(layout) for rank in range(2)]
    assert [part[2:] for part in parts] == [(0, 1), (1, 2)]
    assert sum(layout.part_bytes(part) for part in parts) == layout.block_bytes
    assert Shard(1, 2).pages_of(layout).block_bytes == layout.part_bytes(parts[1])
    assert Shard().part_of(layout) == layout.whole


def test_weights_in_shards_go_by_another_name():
    assert Shard().weights_name("d") == "d"
    assert Shard(0, 2).weights_name("d") == Shard(1, 2).weights_name("d")
    assert len({Shard(0, size).weights_name("d") for size in (1, 2, 3)}) == 3


def test_ranks_that_cannot_share_evenly_are_refused_with_the_sizes_that_can(tiny_f32):
    with pytest.raises(InvalidConfig, match=r"2 KV heads and 96 feed-forward rows.*give 1, 2$"):
        Shard(0, 4).config_of(tiny_f32.config)
