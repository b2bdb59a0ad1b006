"""Loading models: GGUF and Hugging Face folders agree, and bad files end in one clear line."""

import contextlib
import json

import pytest
import torch

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter.model import load_model
from tests.engine.conftest import CPU
from tests.engine.tiny_model import TinyModel


def load(path):
    return load_model(path, dtype=torch.float32, device=CPU)


def tensors_of(model):
    weights = model.weights
    flat = [weights.embedding, weights.head, weights.final_norm]
    for layer in weights.layers:
        flat += [layer.qkv, layer.output, layer.gate_up, layer.down, layer.attention_norm, layer.ffn_norm]
        flat += [t for t in (layer.qkv_bias, layer.q_norm, layer.k_norm) if t is not None]
    return flat


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_and_a_folder_of_one_model_hold_the_same_weights(tmp_path, architecture, is_tied):
    tiny = TinyModel(architecture, is_tied=is_tied)
    from_gguf = load(tiny.write_gguf(tmp_path / "m.gguf"))
    from_folder = load(tiny.write_folder(tmp_path / "m", shards=2))
    pairs = zip(tensors_of(from_gguf), tensors_of(from_folder), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert (from_gguf.weights.head is from_gguf.weights.embedding) == is_tied


def test_both_formats_give_the_same_tokenizer(tiny_gguf, tiny_folder):
    text = "The harbour master in 1847: Grüße 🚢"
    left, right = load(tiny_gguf).tokenizer, load(tiny_folder).tokenizer
    assert left.encode(text) == right.encode(text)
    assert left.end_tokens == right.end_tokens


def test_the_digest_tells_files_apart_and_not_names(tiny, tmp_path):
    first, second = tiny.write_gguf(tmp_path / "a.gguf"), tiny.write_gguf(tmp_path / "b.gguf")
    other = TinyModel(is_tied=False).write_gguf(tmp_path / "c.gguf")
    assert load(first).digest == load(second).digest
    assert load(first).digest != load(other).digest


@pytest.mark.parametrize("kept", [0, 3, 4, 23, 24, 100, 4000, 9000, 20000, 60000, -4096, -1])
def test_a_gguf_cut_short_anywhere_is_refused(tiny_gguf, tmp_path, kept):
    data = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:kept])
    with pytest.raises(UnsupportedModel, match=r"cut\.gguf"):
        load(cut)


def test_a_gguf_with_an_absurd_length_is_refused_at_once(tiny_gguf, tmp_path):
    data = bytearray(tiny_gguf.read_bytes())
    data[24:32] = (1 << 62).to_bytes(8, "little")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(UnsupportedModel, match="cut short"):
        load(bad)


def test_random_damage_to_a_gguf_header_never_ends_in_another_error(tiny_gguf, tmp_path):
    data = tiny_gguf.read_bytes()
    generator = torch.Generator().manual_seed(3)
    bad = tmp_path / "bad.gguf"
    for _ in range(60):
        damaged = bytearray(data)
        at = int(torch.randint(0, 12000, (1,), generator=generator))
        damaged[at] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
        bad.write_bytes(damaged)
        with contextlib.suppress(UnsupportedModel):
            load(bad)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_bytes(b"GIF89a" * 100)
    with pytest.raises(UnsupportedModel, match="no GGUF file"):
        load(path)


def test_an_unknown_architecture_is_named_with_those_that_work(tiny, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModel, match=r"'mamba' is unknown.*llama, qwen2, qwen3"):
        load(path)


def test_a_missing_tensor_is_named(tiny, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(UnsupportedModel, match=r"blk\.1\.ffn_up\.weight is missing"):
        load(path)


def test_a_tensor_without_elements_is_refused(tiny, tmp_path):
    path = tmp_path / "m.gguf"
    tiny.write_gguf(path)
    data = bytearray(path.read_bytes())
    row = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4
    data[row : row + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.weight of shape \[64, 0\]"):
        load(path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    tiny = TinyModel()
    tiny.tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers"):
        load(tiny.write_folder(tmp_path / "m"))


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="no such file or folder"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 4096 * 6.283185307179586,
                }
            },
            "original_max_position_embeddings",
        ),
        ({"rope_theta": float("inf")}, "rope"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 128}, "shape"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3"),
        ({"vocab_size": 100}, "shape"),
    ],
)
def test_a_folder_with_a_bad_config_is_refused(tiny, tmp_path, changes, message):
    folder = tiny.write_folder(tmp_path / "m", **changes)
    with pytest.raises(UnsupportedModel, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_folder_with_a_bad_file_is_refused(tiny, tmp_path, name, damage):
    folder = tiny.write_folder(tmp_path / "m")
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "cut short":
        (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(UnsupportedModel, match=str(tmp_path)):
        load(folder)


def test_an_index_may_not_point_outside_its_folder(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path / "m", shards=2)
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="outside the folder"):
        load(folder)


def test_a_qwen2_without_its_biases_is_refused(tmp_path):
    tiny = TinyModel("qwen2")
    tiny.tensors = {name: t for name, t in tiny.tensors.items() if not name.endswith("bias")}
    with pytest.raises(UnsupportedModel, match="bias is missing"):
        load(tiny.write_folder(tmp_path / "m"))
