"""vLLM's own classes for the events of what the connector has stored. It needs vLLM."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvstore.keys import BlockKey
from kvstore_engine_adapter.vllm.block_events import RemovedBlocks, StoredBlocks
from kvstore_engine_adapter.vllm.interface import (
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVConnectorWorkerMetadata,
    maybe_convert_block_hash,
)

_OWNER = "kvstore"


class BlockReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there for mypy
    """Since the step before: how many ranks have stored their part of which blocks, and which are gone."""

    def __init__(self, stored: Iterable[BlockKey], gone: Iterable[BlockKey] = ()) -> None:
        self.num_parts: Counter[BlockKey] = Counter(stored)
        self.gone: set[BlockKey] = set(gone)

    def aggregate(self, other: "BlockReport") -> "BlockReport":
        """Add another rank's."""
        self.num_parts.update(other.num_parts)
        self.gone |= other.gone
        return self


def as_vllm_events(events: Sequence[StoredBlocks | RemovedBlocks], block_tokens: int) -> list[Any]:
    """Return events as vLLM publishes them; hashes are 64-bit numbers or bytes, as vLLM is set."""
    return [_stored(one, block_tokens) if isinstance(one, StoredBlocks) else _removed(one) for one in events]


def _stored(event: StoredBlocks, block_tokens: int) -> Any:
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(one) for one in event.hashes],
        parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
        token_ids=list(event.tokens),
        block_size=block_tokens,
        lora_id=event.lora_id,
        medium=MEDIUM_STORAGE,
        lora_name=event.lora_name,
        group_idx=event.group,
        ownership=_OWNER,
        session_id=event.session,
    )


def _removed(event: RemovedBlocks) -> Any:
    return BlockRemoved(
        block_hashes=[maybe_convert_block_hash(one) for one in event.hashes],
        medium=MEDIUM_STORAGE,
        group_idx=event.group,
        ownership=_OWNER,
    )
