"""A BlockManager with its tiers, and a few verbs that copy payloads as a client would."""

import contextlib

import numpy as np

from kvstore.checksum import checksum
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.state import ManagerSettings
from kvstore_tiers.dram import DramTier

BLOCK_BYTES = 8192
SPACE = Namespace(model="m", layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4))


def payload(key):
    return np.frombuffer(key * (BLOCK_BYTES // len(key)), dtype=np.uint8)


class Harness:
    """A manager with its tiers and a few verbs that copy payloads as a client would."""

    def __init__(self, manager, dram, lower):
        self.manager = manager
        self.dram = dram
        self.lower = lower
        self.owner = manager.new_owner()

    async def put(self, chain, *, timeout_s=1.0, hints=None):
        reserved = await self.manager.reserve(chain, owner=self.owner, timeout_s=timeout_s, hints=hints)
        for slot in reserved.slots:
            async with self.dram.writing([slot.slot], BLOCK_BYTES) as (buffer,):
                np.asarray(buffer)[:BLOCK_BYTES] = payload(chain.keys[slot.position])
        stored = 0
        for slot in reserved.slots:
            key = chain.keys[slot.position]
            block = chain[slot.position : slot.position + 1]
            sums = [checksum(payload(key))]
            stored += self.manager.commit(block, [slot.slot], owner=self.owner, checksums=sums)[0]
            self.manager.return_slots([slot.slot], owner=self.owner)
        return stored

    async def fetch(self, chain, *, timeout_s=1.0, hints=None):
        """Fetch, compare every payload, release; returns (origins, reason)."""
        fetched = await self.manager.fetch(chain, owner=self.owner, timeout_s=timeout_s, hints=hints)
        for key, block in zip(chain.keys, fetched.blocks, strict=False):
            async with self.dram.reading([block.slot], BLOCK_BYTES) as (buffer,):
                assert np.array_equal(np.asarray(buffer)[:BLOCK_BYTES], payload(key))
            assert block.checksum == checksum(payload(key))
        if fetched.lease is not None:
            self.manager.release(fetched.lease, owner=self.owner)
        return [block.origin for block in fetched.blocks], fetched.reason


@contextlib.asynccontextmanager
async def running(*lower, blocks=16, staging_blocks=0, epoch_file=None, policy_file=None, **settings):
    """Open a manager over an arena of ``blocks`` slots; check() runs before it is closed."""
    dram = DramTier(capacity_bytes=blocks * BLOCK_BYTES, staging_bytes=staging_blocks * BLOCK_BYTES)
    limits = ManagerSettings(timeout_s=1.0, **settings)
    manager = BlockManager(dram, lower, settings=limits, epoch_file=epoch_file, policy_file=policy_file)
    await manager.open()
    manager.open_namespace(SPACE)
    try:
        yield Harness(manager, dram, lower)
        for tier in lower:
            tier.gate.set()
        await manager.flush(timeout_s=5)
        assert await manager.check() == []
    finally:
        for tier in lower:
            tier.gate.set()
        await manager.close()
