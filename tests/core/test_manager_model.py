"""The manager against a model of a few lines: exact bytes or a miss, and a clean check, come what may."""

import asyncio
import time

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.checksum import checksum
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.ready_table import ReadyTable
from kvstore.state import ManagerSettings
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.dram import DramTier
from tests.core.gated_tier import GatedTier
from tests.example_counts import examples

BLOCK_BYTES = 4096
SPACE = Namespace(model="m", layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=1))
# Chains that share prefixes: a path of branches, one token per block.
chains = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(SPACE.chain)
owners = st.integers(0, 2)
NAME_END = SPACE.layout.whole.pack() + SPACE.digest


def payload(key):
    return np.frombuffer(key * (BLOCK_BYTES // len(key)), dtype=np.uint8)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(ssd_blocks=st.integers(1, 12), dram_blocks=st.integers(1, 12))
    def start(self, ssd_blocks, dram_blocks):
        self.loop = asyncio.new_event_loop()
        self.ssd = GatedTier("ssd", capacity_blocks=ssd_blocks)
        self.ssd.capacity_bytes = ssd_blocks * BLOCK_BYTES
        self.remote = GatedTier("remote", is_shared=True)
        self.dram_blocks = dram_blocks
        self.put_keys = set()
        self.open()

    def open(self):
        self.dram = DramTier(capacity_bytes=self.dram_blocks * BLOCK_BYTES)
        limits = ManagerSettings(
            timeout_s=0.05, write_queue_blocks=4, write_batch_blocks=2, load_batch_blocks=2
        )
        self.manager = BlockManager(self.dram, [self.ssd, self.remote], settings=limits)
        self.run(self.manager.open())
        self.manager.open_namespace(SPACE)
        self.owners = [self.manager.new_owner() for _ in range(3)]
        self.leases = []

    def run(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def heal(self):
        for tier in (self.ssd, self.remote):
            tier.read_status, tier.write_status, tier.is_up = None, WriteStatus.OK, True

    @rule(chain=chains, owner=owners)
    def put(self, chain, owner):
        self.run(self._put(chain, self.owners[owner]))
        self.put_keys |= set(chain.keys)

    async def _put(self, chain, owner):
        reserved = await self.manager.reserve(chain, owner=owner, timeout_s=0.01)
        for slot in reserved.slots:
            key = chain.keys[slot.position]
            async with self.dram.writing([slot.slot], BLOCK_BYTES) as (buffer,):
                np.asarray(buffer)[:] = payload(key)
            block = chain[slot.position : slot.position + 1]
            self.manager.commit(block, [slot.slot], owner=owner, checksums=[checksum(payload(key))])
        self.manager.return_slots([slot.slot for slot in reserved.slots], owner=owner)

    @rule(chain=chains, owner=owners)
    def half_put(self, chain, owner):
        self.run(self.manager.reserve(chain, owner=self.owners[owner], timeout_s=0.01))

    @rule(chain=chains, owner=owners, is_kept=st.booleans())
    def fetch(self, chain, owner, is_kept):
        self.run(self._fetch(chain, self.owners[owner], is_kept=is_kept))

    async def _fetch(self, chain, owner, *, is_kept):
        fetched = await self.manager.fetch(chain, owner=owner, timeout_s=0.01)
        assert (len(fetched.blocks) == len(chain)) == (fetched.reason is None)
        assert set(chain.keys[: len(fetched.blocks)]) <= self.put_keys
        for key, block in zip(chain.keys, fetched.blocks, strict=False):
            async with self.dram.reading([block.slot], BLOCK_BYTES) as (buffer,):
                assert np.array_equal(np.asarray(buffer), payload(key))
        if fetched.lease is not None and is_kept:
            self.leases.append((fetched.lease, chain.keys[: len(fetched.blocks)]))
        elif fetched.lease is not None:
            self.manager.release(fetched.lease)

    @rule(chain=chains)
    def read_directly(self, chain):
        self.dram.listing.beat()
        table = ReadyTable.map(self.dram.listing.fd, self.dram.arena.instance)
        era = table.era(time.monotonic())
        for key in chain.keys:
            for slot, generation, payload_sum in table.find([key], NAME_END, BLOCK_BYTES, era) or ():
                assert key in self.put_keys
                assert (generation, payload_sum) == (self.dram.generation(slot), checksum(payload(key)))
                assert np.array_equal(np.asarray(self.dram.arena.view.slot(slot, BLOCK_BYTES)), payload(key))
        self.manager.note_reads(chain)

    @rule()
    def end_an_era(self):
        directory = self.manager._state.directory
        directory.raise_epoch("another", directory.epoch("another") + 1)

    @rule(chain=chains)
    def match(self, chain):
        match = self.run(self.manager.match(chain))
        assert set(chain.keys[: match.blocks]) <= self.put_keys

    @rule(chain=chains)
    def drop(self, chain):
        self.run(self.manager.drop(chain))

    @rule()
    def release_oldest(self):
        if self.leases:
            self.manager.release(self.leases.pop(0)[0])

    @rule(owner=owners)
    def end_owner(self, owner):
        self.manager.release_owner(self.owners[owner])
        self.owners[owner] = self.manager.new_owner()
        self.leases = []

    @rule(
        status=st.sampled_from([None, *ReadStatus]).filter(lambda s: s is not ReadStatus.OK),
        shared=st.booleans(),
    )
    def break_reads(self, status, shared):
        (self.remote if shared else self.ssd).read_status = status

    @rule(status=st.sampled_from(WriteStatus), shared=st.booleans())
    def break_writes(self, status, shared):
        (self.remote if shared else self.ssd).write_status = status

    @rule(is_up=st.booleans(), shared=st.booleans())
    def switch(self, is_up, shared):
        (self.remote if shared else self.ssd).is_up = is_up

    @rule(shared=st.booleans(), which=st.integers(0, 30))
    def damage(self, shared, which):
        stored = (self.remote if shared else self.ssd).stored
        if stored:
            block = sorted(stored)[which % len(stored)]
            stored[block][1][5] ^= 1

    @rule()
    def flush(self):
        self.run(self.manager.flush(timeout_s=5))

    @rule()
    def restart(self):
        self.run(self.manager.close())
        self.open()

    @invariant()
    def structure_is_sound(self):
        if hasattr(self, "manager"):
            assert self.run(self.manager.check(sample_blocks=0)) == []

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        self.heal()
        for owner in self.owners:
            self.manager.release_owner(owner)
        self.run(self.manager.flush(timeout_s=5))
        assert self.run(self.manager.check(sample_blocks=0)) == []
        self.run(self.manager.close())
        self.loop.close()


TestManagerModel = ManagerMachine.TestCase
TestManagerModel.settings = settings(max_examples=examples(150), stateful_step_count=40)
