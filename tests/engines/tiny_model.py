"""Makes a small model with random weights, to be run with the engines' own Python.

``python tiny_model.py FOLDER SEED llama|hybrid``
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 512


def make(folder: Path, *, seed: int, is_hybrid: bool) -> None:
    """Write a model of 3 layers, or of 6 of which one attends to everything, and a tokenizer."""
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
    if is_hybrid:
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
    make(Path(sys.argv[1]), seed=int(sys.argv[2]), is_hybrid=sys.argv[3] == "hybrid")
