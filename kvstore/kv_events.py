"""KvEvents: runs of copies of one tier that became READY, or are gone; and the form that vLLM gives them.

The form is that of vLLM's ``vllm.distributed.kv_events``: maps with a ``type``, in a batch that is an array
of the time, the events and the rank. Of a store without engine there are no tokens to tell, as of vLLM's own
offloading: ``token_ids`` is empty.
"""

import enum
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstore.changes import ChangedRun
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.tier import Medium

MEDIUM_WORDS: Mapping[Medium, str] = {
    Medium.VRAM: "GPU",
    Medium.DRAM: "CPU",
    Medium.SSD: "STORAGE",
    Medium.REMOTE: "EXTERNAL",
    Medium.STORE: "EXTERNAL",
}
"""What vLLM calls the media; the last word is SGLang's, for what other nodes reach too."""

HASH_INT_BYTES = 8
"""Bytes at the end of a key that are its hash as an integer, big-endian."""


class HashForm(enum.Enum):
    """How block keys are told: whole, or as vLLM does by default: their last 64 bits as an integer.

    ``SIGNED`` is that integer of 64 bits with a sign, which SGLang tells.
    """

    BYTES = "bytes"
    INT = "int"
    SIGNED = "signed"
    HEX = "hex"

    def of(self, key: BlockKey) -> bytes | int | str:
        """Return a key in this form."""
        if self is HashForm.BYTES:
            return bytes(key)
        if self is HashForm.HEX:
            return key.hex()
        return int.from_bytes(key[-HASH_INT_BYTES:], "big", signed=self is HashForm.SIGNED)

    def of_all(self, keys: Sequence[BlockKey]) -> list[bytes | int | str]:
        """Return keys in this form; of integers all at once, which takes a quarter of the time."""
        if self not in (HashForm.INT, HashForm.SIGNED):
            return [self.of(key) for key in keys]
        code = "Q" if self is HashForm.INT else "q"
        ends = b"".join([key[-HASH_INT_BYTES:] for key in keys])
        return list(struct.unpack(f">{len(keys)}{code}", ends))


class EventForm(enum.Enum):
    """How an event is told: as a map with a ``type``, which vLLM does, or as an array that begins with it,
    which vLLM did before, SGLang does, and llm-d reads.
    """

    MAP = "map"
    ARRAY = "array"

    def of(self, told: Mapping[str, object]) -> Mapping[str, object] | list[object]:
        """Return an event, whose members are in vLLM's order, in this form."""
        return told if self is EventForm.MAP else list(told.values())


class KvEvent(NamedTuple):
    """Blocks of one namespace whose copies in one medium became READY (in chain order), or are gone."""

    is_stored: bool
    medium: str
    namespace: NamespaceDigest
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    block_tokens: int

    def as_map(self, form: HashForm) -> dict[str, object]:
        """Return vLLM's BlockStored or BlockRemoved."""
        hashes = form.of_all(self.keys)
        if not self.is_stored:
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": self.medium}
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None if self.parent is None else form.of(self.parent),
            "token_ids": [],
            "block_size": self.block_tokens,
            "lora_id": None,
            "medium": self.medium,
            "lora_name": None,
        }


ALL_CLEARED: Mapping[str, object] = {"type": "AllBlocksCleared"}
"""vLLM's event that nothing told before holds any more."""


def events_of(
    changes: Iterable[ChangedRun],
    *,
    media: Mapping[str, Medium],
    block_tokens: Callable[[NamespaceDigest], int],
) -> list[KvEvent]:
    """Join changes that follow each other, of one tier and namespace, into events.

    Blocks that are stored are joined only where each is the child of the one before.
    """
    events: list[KvEvent] = []
    was_ready, last_tier, last_namespace = False, "", None
    last: Sequence[BlockKey] = []
    joined: list[BlockKey] | None = None  # the keys of the last event, once there are several runs in it
    medium, num_tokens = "", 0
    # Nothing is called that can be spared: puts of one block at a time bring a run for each.
    for is_ready, tier, namespace, keys, parent in changes:
        if namespace != last_namespace or tier != last_tier:
            medium, num_tokens = MEDIUM_WORDS[media[tier]], block_tokens(namespace)
            last_tier, last_namespace = tier, namespace
        elif is_ready == was_ready and (not is_ready or parent == last[-1]):
            if joined is None:
                joined = [*last]
                events[-1] = events[-1]._replace(keys=joined)
            joined += keys
            last = keys
            continue
        was_ready, last, joined = is_ready, keys, None
        events.append(KvEvent(is_ready, medium, namespace, keys, parent, num_tokens))
    return events
