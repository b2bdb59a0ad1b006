"""Loading a model for one rank, or for several of which each loads its share at the same time."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.kv_dtype import TORCH_DTYPES
from kvstore_engine_adapter.model import LoadedModel, load_model
from kvstore_engine_adapter.tensor_parallel import messages
from kvstore_engine_adapter.tensor_parallel.rank_group import DEFAULT_PATIENCE_S, RankGroup, RankLost

logger = logging.getLogger(__name__)

_FAILED = 1


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """Which model to load, in what form, and for how many ranks; ``store`` is where they keep their parts.

    ``device`` is ``cpu`` or ``cuda``: rank r computes on CUDA device r then.
    """

    path: Path
    dtype: str
    device: str
    threads: int
    num_ranks: int = 1
    store: str | None = None
    cache_folder: Path | None = None
    patience_s: float = DEFAULT_PATIENCE_S

    def require_devices(self) -> None:
        """Raise InvalidConfig if this machine has not a device for each rank."""
        if self.device != "cuda":
            return
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not found:
            raise InvalidConfig("engine: --device cuda, but torch finds no CUDA device: use --device cpu")
        if found < self.num_ranks:
            raise InvalidConfig(
                f"engine: --tensor-parallel-size {self.num_ranks}, but torch finds {found} CUDA devices: "
                f"give at most {found}"
            )


@contextlib.asynccontextmanager
async def loaded(order: ModelOrder) -> AsyncIterator[tuple[LoadedModel, RankGroup | None]]:
    """Have a model: rank 0's share of it, and the group of ranks with the others; None if there is one rank.

    On leaving, the followers have ended.

    Raises:
        UnsupportedModel: the model cannot be loaded.
        InvalidConfig: the ranks cannot share it evenly, or there are not enough devices.
        RankLost: a follower has ended, cannot load it, or has found other files.
    """
    order.require_devices()
    if order.num_ranks == 1:
        yield await _load(order, torch.device(order.device), None), None
        return
    group = RankGroup(order.num_ranks, store=order.store, patience_s=order.patience_s)
    try:
        await group.start()
        yield await _load_on_all(order, group), group
    finally:
        await group.close()


async def _load_on_all(order: ModelOrder, group: RankGroup) -> LoadedModel:
    about = messages.Load(
        0,
        order.num_ranks,
        str(order.path),
        order.dtype,
        order.device,
        order.threads,
        "" if order.cache_folder is None else str(order.cache_folder),
    )
    loading = asyncio.ensure_future(group.load(about))
    try:
        device = torch.device(order.device, 0) if order.device == "cuda" else torch.device(order.device)
        # Rank 0's complaints come first: they are the same, and of a better class.
        model = await _load(order, device, group)
        digests = await loading
    finally:
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError, RankLost):
            await loading
    if set(digests) != {model.digest}:
        raise group.break_up("the ranks have loaded different files: the model changed meanwhile")
    return model


async def _load(order: ModelOrder, device: torch.device, group: RankGroup | None) -> LoadedModel:
    return await asyncio.to_thread(
        load_model,
        order.path,
        dtype=TORCH_DTYPES[order.dtype],
        device=device,
        cache_folder=order.cache_folder,
        shard=None if group is None else group.shard,
    )


def end_process_within(seconds: float, why: Exception) -> None:
    """End this process with status 1 after so long, should it not have ended by itself.

    For a thread that waits inside a device or a driver for a rank that is gone: nothing else ends it.
    """

    def end() -> None:
        logger.error("%s: a thread still waits for it %g s later: ending the process", why, seconds)
        os._exit(_FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
