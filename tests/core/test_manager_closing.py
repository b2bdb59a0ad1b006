"""Closing a manager whose media hang: everything that waits for them waits at the same time."""

import asyncio

import pytest

from kvstore.manager import BlockManager
from kvstore.state import ManagerSettings
from kvstore_tiers.dram import DramTier
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, Harness
from tests.core.virtual_time import run_virtual

DRAIN_S = 5.0


class SlowlyClosingTier(GatedTier):
    """A tier that gives up what hangs after some seconds, as the ssd tier does."""

    close_s = 3.0

    async def close(self):
        if not self.gate.is_set():
            await asyncio.sleep(self.close_s)
        self.gate.set()
        self.closed = True


async def seconds_to_close(*tiers, reads=True, writes=True, heals_after_s=None):
    """Virtual seconds that a close takes while reads or writes hang, for good or for a while."""
    loop = asyncio.get_running_loop()
    dram = DramTier(capacity_bytes=64 * BLOCK_BYTES)
    manager = BlockManager(dram, tiers, settings=ManagerSettings(timeout_s=1.0), clock=loop.time)
    await manager.open()
    manager.open_namespace(SPACE)
    store = Harness(manager, dram, tiers)
    chain = SPACE.chain(range(16))
    await store.put(chain)
    await manager.flush(timeout_s=30)
    await manager.demote(chain)
    for tier in tiers:
        tier.gate.clear()
        if heals_after_s is not None:
            loop.call_later(heals_after_s, tier.gate.set)
    if reads:
        await manager.fetch(chain, owner=store.owner, timeout_s=0.1)
        assert manager.stats()["loads"] > 0
    if writes:
        await store.put(SPACE.chain(range(100, 116)))
    began_s = loop.time()
    await manager.close(drain_s=DRAIN_S)
    took_s = loop.time() - began_s
    await asyncio.sleep(max(tier.close_s for tier in tiers))  # what was left to itself ends
    return took_s


@pytest.mark.parametrize(("reads", "writes"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("num_tiers", [1, 3])
def test_a_close_over_media_that_hang_waits_for_all_of_them_at_once(num_tiers, reads, writes):
    """With a disk that hung it took up to 18 s: its queue, its loads and the disk were waited for in turn."""
    tiers = [SlowlyClosingTier(f"ssd{number}") for number in range(num_tiers)]

    took_s = run_virtual(seconds_to_close(*tiers, reads=reads, writes=writes))

    assert took_s <= DRAIN_S + 1.0 + SlowlyClosingTier.close_s + 0.5


def test_a_tier_that_does_not_close_in_time_is_left_to_itself(caplog):
    tiers = [SlowlyClosingTier("ssd0"), SlowlyClosingTier("ssd1")]
    tiers[0].close_s = 1000.0

    assert run_virtual(seconds_to_close(*tiers)) <= DRAIN_S + 1.0 + 5.0 + 0.5
    assert [record.message for record in caplog.records if "abandoned" in record.message][-1:] == [
        "ssd0: has not closed after 5 s: abandoned"
    ]


def test_a_close_over_media_that_answer_again_loses_nothing():
    tier = SlowlyClosingTier("ssd0")

    assert run_virtual(seconds_to_close(tier, heals_after_s=2.0)) < 3.0
    assert len(tier.stored) == 8
