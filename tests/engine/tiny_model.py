"""A tiny random-weight Llama with a real byte-level BPE tokenizer, as a GGUF file and as a folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 3, 64, 4, 2, 16, 96, 1024
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = (
    "The harbour master keeps a log of every ship that comes and goes. In 1847 the old pier burned down, "
    "and the new one was built of stone. Grüße aus Köln: größer, schöner, weiter! 你好,世界。 Ελληνικά 🚢⚓"
)


def make_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


@dataclass
class TinyModel:
    """Tensors under Hugging Face's names; ``architecture`` is GGUF's word."""

    architecture: str = "llama"
    is_tied: bool = True
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    rope_scaling: dict[str, object] | None = None
    tokenizer: tokenizers.Tokenizer = field(default_factory=make_tokenizer)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int, scale: float | None = None) -> torch.Tensor:
            scale = shape[-1] ** -0.5 if scale is None else scale
            return torch.randn(shape, generator=generator) * scale

        vocab = self.tokenizer.get_vocab_size()
        self.tensors["model.embed_tokens.weight"] = random(vocab, HIDDEN, scale=1.0)
        self.tensors["model.norm.weight"] = 1 + random(HIDDEN, scale=0.1)
        if not self.is_tied:
            self.tensors["lm_head.weight"] = random(vocab, HIDDEN)
        for index in range(LAYERS):
            prefix = f"model.layers.{index}."
            kv_rows = self.kv_heads * HEAD_DIM
            rows = {"q": self.heads * HEAD_DIM, "k": kv_rows, "v": kv_rows}
            for name, count in rows.items():
                self.tensors[f"{prefix}self_attn.{name}_proj.weight"] = random(count, HIDDEN)
                if self.architecture == "qwen2":
                    self.tensors[f"{prefix}self_attn.{name}_proj.bias"] = random(count, scale=0.2)
            if self.architecture == "qwen3":
                for name in ("q", "k"):
                    self.tensors[f"{prefix}self_attn.{name}_norm.weight"] = 1 + random(HEAD_DIM, scale=0.1)
            self.tensors[f"{prefix}self_attn.o_proj.weight"] = random(HIDDEN, self.heads * HEAD_DIM)
            self.tensors[f"{prefix}mlp.gate_proj.weight"] = random(FFN, HIDDEN)
            self.tensors[f"{prefix}mlp.up_proj.weight"] = random(FFN, HIDDEN)
            self.tensors[f"{prefix}mlp.down_proj.weight"] = random(HIDDEN, FFN)
            self.tensors[f"{prefix}input_layernorm.weight"] = 1 + random(HIDDEN, scale=0.1)
            self.tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + random(HIDDEN, scale=0.1)

    def config(self) -> dict[str, object]:
        names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        return {
            "architectures": [names[self.architecture]],
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "intermediate_size": FFN,
            "vocab_size": self.tokenizer.get_vocab_size(),
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": self.rope_scaling,
            "hidden_act": "silu",
            "tie_word_embeddings": self.is_tied,
            "eos_token_id": self.tokenizer.token_to_id("<|im_end|>"),
        }

    def write_folder(self, folder: Path, *, shards: int = 1, **changes: object) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config() | changes))
        self.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "bos_token": None})
        )
        names = sorted(self.tensors)
        parts = [names[start::shards] for start in range(shards)]
        files = {
            f"model-{n + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors": part
            for n, part in enumerate(parts)
        }
        for file, part in files.items():
            save_file({name: self.tensors[name].contiguous() for name in part}, folder / file)
        if shards > 1:
            index = {"weight_map": {name: file for file, part in files.items() for name in part}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def write_gguf(self, path: Path, *, without: str = "", architecture: str | None = None) -> Path:
        writer = gguf.GGUFWriter(path, architecture or self.architecture)
        writer.add_name("tiny")
        writer.add_block_count(LAYERS)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        self._write_tokenizer(writer)
        for name, tensor in self.tensors.items():
            if gguf_name(name) != without:
                writer.add_tensor(gguf_name(name), self._stored(name, tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _stored(self, name: str, tensor: torch.Tensor) -> np.ndarray:
        heads = {"q_proj": self.heads, "k_proj": self.kv_heads}
        for part, count in heads.items():
            if part in name and self.architecture == "llama":
                # As llama.cpp's converter does: interleaved rotary pairs.
                tensor = tensor.reshape(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        return tensor.contiguous().numpy()

    def _write_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        model = json.loads(self.tokenizer.to_str())["model"]
        vocabulary = sorted(model["vocab"], key=model["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if text in SPECIALS else 1 for text in vocabulary])
        writer.add_token_merges(
            [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        )
        writer.add_eos_token_id(self.tokenizer.token_to_id("<|im_end|>"))
        writer.add_chat_template(CHAT_TEMPLATE)


def gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    for old, new in (
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        rest = rest.replace(old, new)
    return f"blk.{layer}.{rest}"


def reference_logits(model: TinyModel, tokens: list[int], inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Logits of every position ``[tokens, vocab]``: contiguous, float64, no pages, no cache."""
    weights = {name: tensor.double() for name, tensor in model.tensors.items()}
    count = len(tokens)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * inverse_frequencies
    cos, sin = torch.cat([angles, angles], -1).cos()[:, None], torch.cat([angles, angles], -1).sin()[:, None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    hidden = weights["model.embed_tokens.weight"][tokens]
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        x = norm(hidden, prefix + "input_layernorm.weight")
        projected = []
        for name, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
            y = x @ weights[f"{prefix}self_attn.{name}_proj.weight"].T
            bias = weights.get(f"{prefix}self_attn.{name}_proj.bias")
            y = (y if bias is None else y + bias).view(count, heads, HEAD_DIM)
            if f"{prefix}self_attn.{name}_norm.weight" in weights:
                y = norm(y, f"{prefix}self_attn.{name}_norm.weight")
            projected.append(y if name == "v" else rotate(y))
        q, k, v = projected
        k, v = (t.repeat_interleave(model.heads // model.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        hidden = hidden + mixed @ weights[prefix + "self_attn.o_proj.weight"].T
        x = norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(x @ weights[prefix + "mlp.gate_proj.weight"].T)
        up = x @ weights[prefix + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ weights[prefix + "mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(hidden, "model.norm.weight") @ head.T
