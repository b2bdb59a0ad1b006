"""EngineAdapter: what an engine must offer so that its blocks are kept, moved and shared."""

import math
from collections.abc import Sequence
from typing import Protocol

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
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


def manager_over(
    engine: EngineAdapter,
    lower: Sequence[Tier] = (),
    *,
    top: VramTier | None = None,
    settings: ManagerSettings | None = None,
) -> BlockManager:
    """Return a manager whose top tier is the engine's pages (``top``, if they need one of another kind).

    It is not opened.

    Leases never end by time unless ``settings`` say so: the engine lives in the same process and ends its
    owners itself, however long a request runs.
    """
    top = top or VramTier(engine.pages, engine.num_page_slots)
    manager = BlockManager(top, lower, settings=settings or ManagerSettings(lease_s=math.inf))
    manager.open_namespace(engine.namespace)
    return manager
