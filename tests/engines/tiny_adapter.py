"""Makes a LoRA adapter with random weights for the small Llama, to be run with the engines' own Python.

``python tiny_adapter.py FOLDER SEED``
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

_HIDDEN, _RANK, _LAYERS = 256, 4, 3
_SIZES = {"q_proj": 256, "v_proj": 128}


def make(folder: Path, *, seed: int) -> None:
    """Write an adapter of the queries' and values' projections, large enough to change what is answered."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer in range(_LAYERS):
        for name, size in _SIZES.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, _HIDDEN) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, _RANK) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": list(_SIZES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make(Path(sys.argv[1]), seed=int(sys.argv[2]))
