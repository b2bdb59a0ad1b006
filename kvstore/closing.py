"""Closing tiers: together, and without waiting for ever for a medium that hangs."""

import asyncio
import logging
from collections.abc import Sequence

from kvstore.tier import SlotTier, Tier

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""How long a tier may take to close before it is left to itself."""


async def close_tiers(tiers: Sequence[SlotTier | Tier]) -> None:
    """Close tiers at the same time, and leave those to themselves that take too long."""
    closing = {asyncio.ensure_future(tier.close()): tier for tier in tiers}
    if not closing:
        return
    _, late = await asyncio.wait(closing, timeout=_CLOSE_S)
    for task in late:
        logger.warning("%s: has not closed after %g s: abandoned", closing[task].name, _CLOSE_S)
