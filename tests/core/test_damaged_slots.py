"""A damaged copy in dram that a reader still leases."""

import numpy as np

from kvstore.miss import MissReason
from tests.core.gated_tier import GatedTier
from tests.core.test_manager import BLOCK_BYTES, SPACE, running


async def test_a_damaged_slot_that_is_leased_is_neither_served_nor_lost_while_the_lease_lasts():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(4))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
        reader = store.manager.new_owner()
        fetched = await store.manager.fetch(chain, owner=reader)
        async with store.dram.writing([fetched.blocks[0].slot], BLOCK_BYTES) as (buffer,):
            np.asarray(buffer)[17] ^= 1
        await store.manager.report_damage(chain)

        assert await store.fetch(chain) == ([], MissReason.CORRUPT)
        store.manager.release_owner(reader)

        assert await store.fetch(chain) == (["ssd"], None)
        assert store.dram.used_bytes == BLOCK_BYTES
