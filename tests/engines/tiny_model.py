"""Makes a small model with random weights, to be run with the engines' own Python.

``python tiny_model.py FOLDER SEED llama|hybrid|windows``
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 512


def make(folder: Path, *, seed: int, kind: str) -> None:
    """Write a model and a tokenizer.

    ``llama``: 3 layers. ``hybrid``: 6, of which one attends to all tokens, the others to a window.
    ``windows``: 4, every other one with a window, which SGLang keeps in a pool of their own.
    """
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "windows":
        sizes["tie_word_embeddings"] = True
        types = ["sliding_attention", "full_attention"] * 2
        config = Cohere2Config(
            **sizes,
            num_hidden_layers=4,
            sliding_window=64,
            layer_types=types,
            is_hybrid_swa=True,
            hybrid_layer_pattern=[1, 0, 1, 0],
        )
        model = Cohere2ForCausalLM(config)
    elif kind == "hybrid":
        config = Gemma3TextConfig(**sizes, num_hidden_layers=6, sliding_window=64)
        model = Gemma3ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3))
    model.save_pretrained(folder)
    words = {f"w{at}": at for at in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", bos_token="w1").save_pretrained(
        folder
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]), seed=int(sys.argv[2]), kind=sys.argv[3])
