"""SmolLM2 from its GGUF file as a folder of safetensors, for engines that read no GGUF."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvstore_engine_adapter.gguf_file import GgufFile
from kvstore_engine_adapter.gguf_model import GgufTensors, read_config
from kvstore_engine_adapter.model_config import ModelConfig
from kvstore_engine_adapter.tokenizer import tokenizer_from_gguf

_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def find_model() -> Path | None:
    """Return the file of the demo's model if it was fetched before."""
    folder = Path.home() / ".cache" / "kvstore" / "models"
    return next(iter(sorted(folder.glob("SmolLM2-135M-Instruct*.gguf"))), None)


def write_folder(source: Path, folder: Path) -> None:
    """Write config.json and model.safetensors, in bfloat16."""
    folder.mkdir()
    with GgufFile(source) as file:
        config = read_config(file, where=str(source))
        tensors = GgufTensors(file, config, where=str(source))
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        names += [f"model.layers.{at}.{part}.weight" for at in range(config.num_layers) for part in _LAYER]
        is_tied = not tensors.has("lm_head.weight")
        names += [] if is_tied else ["lm_head.weight"]
        loaded = {name: tensors.load(name).to(torch.bfloat16).contiguous() for name in names}
        save_file(loaded, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(_config(config, is_tied=is_tied)))


def document_tokens(source: Path, count: int) -> list[int]:
    """Return the first tokens of the demo's document."""
    import kvstore_engine_adapter.demo as demo

    text = (Path(demo.__path__[0]) / "data" / "harbour.txt").read_text()
    with GgufFile(source) as file:
        tokenizer = tokenizer_from_gguf(file.metadata, where=str(source))
    return tokenizer.encode(re.sub(r"\s+", " ", text))[:count]


def _config(config: ModelConfig, *, is_tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
