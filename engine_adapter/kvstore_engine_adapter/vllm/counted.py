"""What the connector and the tier count, by name; both show it as ``vllm:kvstore_<name>_total``."""

NAMES = {
    "lookups": "lookups that were made",
    "found_blocks": "blocks that lookups found",
    "failed_loads": "requests of which a block that was found could not be loaded",
    "loads": "loads, by ranks",
    "loaded_blocks": "blocks loaded, by ranks",
    "loaded_bytes": "bytes loaded, by ranks",
    "failed_blocks": "blocks that could not be loaded, and were computed",
    "saved_blocks": "blocks stored, by ranks",
    "saved_bytes": "bytes stored, by ranks",
    "present_blocks": "blocks that were stored already",
    "dropped_blocks": "blocks that were not stored: no room, no time, no store",
    "bad_params": "values in kv_transfer_params that were left out because they are wrong",
    "cheaper_computed_blocks": "blocks that were found and not loaded: computing them takes less time",
}
MISS = "miss_"
"""Counts whose names begin so are of lookups that found less than all, by reason."""
