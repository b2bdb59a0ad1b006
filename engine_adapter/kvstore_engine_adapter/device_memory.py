"""How many blocks a share of a GPU's memory holds, beside the model and what a pass works with."""

from dataclasses import dataclass

from kvstore_engine_adapter.kernel_page_ops import PARTIAL_BYTES
from kvstore_engine_adapter.model_config import ModelConfig
from kvstore_engine_adapter.page_moves import STAGING_BYTES

DEFAULT_RATIO = 0.9
"""Share of a GPU's memory that is taken if no size is given; the rest is for the driver and others."""

_SLACK = 2
"""What torch's allocator holds for what a pass has at a time, at most (a guess: no GPU was measured)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, and those of them that nothing takes, the model being there."""

    free_bytes: int
    total_bytes: int


def pass_bytes(config: ModelConfig, *, step_tokens: int, max_num_seqs: int) -> int:
    """Return what a pass works with: activations, logits, results of splits, and staging of moves."""
    heads = config.num_heads + 2 * config.num_kv_heads
    # Hidden rows and the sum in float32, their norm; gate, up, their product; queries, keys, values, twice.
    row_bytes = 10 * config.hidden_size + 6 * config.ffn_size + 8 * heads * config.head_dim
    logits_bytes = 3 * 4 * max_num_seqs * config.vocab_size
    return _SLACK * (step_tokens * row_bytes + logits_bytes) + PARTIAL_BYTES + 2 * STAGING_BYTES


def blocks_in(
    memory: DeviceMemory, ratio: float, *, block_bytes: int, working_bytes: int, spare_blocks: int
) -> int:
    """Return the size of a vram tier that, with ``spare_blocks`` beside it, fills a share of a device.

    Args:
        memory: as it is once the model is loaded.
        ratio: share of all memory that the engine, weights included, may take.
        block_bytes: bytes of one block.
        working_bytes: what is left for the passes.
        spare_blocks: pages that the engine takes beside the tier.
    """
    taken_bytes = memory.total_bytes - memory.free_bytes
    left_bytes = int(memory.total_bytes * ratio) - taken_bytes - working_bytes
    return max(0, left_bytes // block_bytes - spare_blocks)
