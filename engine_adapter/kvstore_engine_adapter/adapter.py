"""EngineAdapter: what an engine must offer so that its blocks are kept, moved and shared."""

import math
from collections.abc import Sequence
from typing import Protocol

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.pacing import WritePace
from kvstore.state import ManagerSettings
from kvstore.tier import Tier
from kvstore_tiers.vram import PageMemory, VramTier


class EngineAdapter(Protocol):
    """An engine seen from the store.

    The engine computes in page slots that the manager's ``vram`` tier lends it (``reserve_unnamed``), names
    each block when it is full (``namespace.chain``, ``commit``), and reuses what ``fetch`` puts into slots.
    """

    @property
    def namespace(self) -> Namespace:
        """Everything that decides what its KV bytes mean."""

    @property
    def layout(self) -> KVLayout:
        """Shape of one block; the bytes of a page in C order."""

    @property
    def num_page_slots(self) -> int:
        """Pages it lends to the manager: slots ``0..num_page_slots``."""

    @property
    def pages(self) -> PageMemory:
        """Access to the pages' bytes."""


_WRITE_BATCH_BLOCKS = 64


def engine_manager_settings(pace: WritePace | None = None) -> ManagerSettings:
    """Return the settings of a manager in an engine's process; ``pace`` puts its writes off for a while.

    Leases never end by time: the engine lives in the same process and ends its owners itself, however long a
    request runs. Writes are made in large batches: what they cost beside the copies is per batch.
    """
    return ManagerSettings(lease_s=math.inf, write_batch_blocks=_WRITE_BATCH_BLOCKS, write_pace=pace)


def manager_over(
    engine: EngineAdapter,
    lower: Sequence[Tier] = (),
    *,
    top: VramTier | None = None,
    settings: ManagerSettings | None = None,
) -> BlockManager:
    """Return a manager whose top tier is the engine's pages (``top``, if they need one of another kind).

    It is not opened. Its settings are those of ``engine_manager_settings`` unless others are given.
    """
    top = top or VramTier(engine.pages, engine.num_page_slots)
    manager = BlockManager(top, lower, settings=settings or engine_manager_settings())
    manager.open_namespace(engine.namespace)
    return manager
