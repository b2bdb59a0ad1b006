"""TierRows: vLLM's CPU cache as pages, one row for each chunk; and what the chunks are called."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidLayout
from kvstore.layout import KVLayout
from kvstore_engine_adapter.block_transfers import Payloads, Rows, Snapshot
from kvstore_engine_adapter.model_identity import NotNameable
from kvstore_engine_adapter.vllm.identity import EngineIdentity, GroupIdentity

Row = npt.NDArray[np.uint8]

Spec = Any
"""vLLM's ``OffloadingSpec`` of a CPU cache with tiers behind it: attributes only."""


class _InPlace:
    """Rows that vLLM leaves alone until it hears that they were stored."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def payloads(self) -> Rows:
        """Return them."""
        return self._rows


class TierRows:
    """The rows of vLLM's CPU cache, ``[chunks, chunk_bytes]``, all ranks' parts side by side in each."""

    def __init__(self, view: memoryview, chunk_bytes: int) -> None:
        """Take vLLM's view of its cache; of each row the first ``chunk_bytes`` are stored.

        Raises:
            InvalidLayout: it has no such rows.
        """
        whole = np.asarray(view)
        if whole.ndim != 2 or whole.dtype.itemsize != 1 or not 0 < chunk_bytes <= whole.shape[1]:
            raise InvalidLayout(
                f"tier: vLLM's CPU cache is {whole.dtype} of shape {whole.shape}, expected bytes, one row "
                f"of at least {chunk_bytes} for each chunk"
            )
        self._whole: Payloads | None = whole.view(np.uint8)
        self._chunk_bytes = chunk_bytes

    def block_bytes(self, group: int) -> int:
        """Bytes of a chunk, in all groups."""
        return self._chunk_bytes

    def in_place(self, group: int, pages: Sequence[int]) -> Sequence[Row]:
        """Return chunks in place."""
        whole = self._whole
        assert whole is not None, "the tier was shut down"
        return [whole[page, : self._chunk_bytes] for page in pages]

    def read(self, group: int, pages: Sequence[int]) -> Snapshot:
        """Return chunks in place: vLLM holds them until the job's end is told."""
        return _InPlace(self.in_place(group, pages))

    def write(self, group: int, pages: Sequence[int], payloads: Payloads) -> None:
        """Write chunks that nobody else uses."""
        for row, payload in zip(self.in_place(group, pages), payloads, strict=True):
            row[:] = payload

    def release(self) -> None:
        """Let go of vLLM's memory, which it can unmap only then."""
        self._whole = None


def chunk_bytes_of(spec: Spec) -> int:
    """Return the bytes of a chunk over all ranks, without the padding that vLLM puts behind them."""
    ranks = 1 if spec.replicated_layout else int(spec.config.parallel.world_size)
    return int(spec.cpu_page_size_per_worker) * ranks


def chunk_identity(engine: EngineIdentity, spec: Spec, *, version: str) -> EngineIdentity:
    """Return the groups of an engine as its CPU cache holds them: whole chunks, of all ranks.

    How a row is laid out is vLLM's affair, so blocks are shared within one version of it only, and never
    with those of the connector that reads the engine's own cache.

    Raises:
        NotNameable: chunks cannot be stored; the text says what to set.
    """
    size_bytes, config = chunk_bytes_of(spec), spec.config
    tokens = engine.block_tokens * int(config.cache.blocks_per_chunk)
    about = {
        "version": version,
        "blocks_per_chunk": int(config.cache.blocks_per_chunk),
        "tokens_per_hash": int(config.cache.tokens_per_hash),
        "rank_bytes": int(spec.cpu_page_size_per_worker),
        "is_replicated": bool(spec.replicated_layout),
        "is_canonical": bool(config.canonical_layout),
        "world_size": int(config.parallel.world_size),
        "groups": [[group.group_id, group.tokens_per_block, *group.layer_names] for group in config.groups],
    }
    try:
        layout = KVLayout.opaque(
            block_bytes=size_bytes, block_tokens=tokens, order=f"vllm-offload:{config.kv_cache_layout}"
        )
    except InvalidLayout as error:
        raise NotNameable(f"{error}: lower blocks_per_chunk or vLLM's --block-size") from error
    groups: list[GroupIdentity] = []
    for group in engine.groups:
        text = json.dumps({**about, "rope": group.namespace.rope}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        namespace = replace(group.namespace, layout=layout, rope=f"vllm-offload:{digest}")
        groups.append(replace(group, namespace=namespace, page_bytes={"row": size_bytes}))
    return EngineIdentity(tuple(groups), tokens, 1)
