"""The real manager on virtual time, over tiers that stall, fail, forget and damage, under many clients.

Seeds take turns with the policies.

A seed decides everything, and a failure prints it: set KVSTORE_SIMULATION_SEED to run that one alone.
"""

import asyncio
import os
import random

import numpy as np
import pytest

from kvstore.checksum import checksum
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.policy import POLICIES
from kvstore.state import ManagerSettings
from kvstore.tier import Medium, Probe, ReadOutcome, ReadStatus, TierHealth, WriteStatus
from kvstore_tiers.dram import DramTier
from tests.core.virtual_time import run_virtual

BLOCK_BYTES = 4096
SPACE = Namespace(model="sim", layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=1))
SEEDS = [int(os.environ["KVSTORE_SIMULATION_SEED"])] if "KVSTORE_SIMULATION_SEED" in os.environ else range(60)
PROMPTLY_S = 1e-6


def payload(key):
    return np.frombuffer(key * (BLOCK_BYTES // len(key)), dtype=np.uint8)


class FaultyTier:
    """Keeps what it is given in a dictionary; every call may be slow, stuck, wrong or refused.

    What it hands out it verifies as every tier must, so damage shows up as CORRUPT.
    """

    def __init__(self, name, rng, *, is_shared, capacity_blocks, faults):
        self.name = name
        self.medium = Medium.REMOTE if is_shared else Medium.SSD
        self.is_shared = is_shared
        self.capacity_bytes = 0 if is_shared else capacity_blocks * BLOCK_BYTES
        self.stored = {}
        self._rng = rng
        self._capacity_blocks = capacity_blocks
        self._faults = faults

    @property
    def used_bytes(self):
        return len(self.stored) * BLOCK_BYTES

    def health(self):
        is_up = self._rng.random() > self._faults / 4
        return TierHealth(is_up, "" if is_up else "breaker open")

    async def open(self):
        await self._pause()

    async def close(self):
        await self._pause()

    async def scan(self):
        return [] if self.is_shared else [header for header, _ in self.stored.values()]

    async def probe(self, blocks, *, deadline_s):
        await self._pause()
        return Probe([self.name if block in self.stored else None for block in blocks])

    def open_namespace(self, namespace):
        pass

    async def read(self, requests, *, deadline_s):
        await self._pause()
        outcomes = []
        for request in requests:
            outcomes.append(self._read(request))
        return outcomes

    def _read(self, request):
        fault = self._rng.random()
        np.asarray(request.buffer)[:] = self._rng.randrange(256)
        if fault < self._faults:
            failed = self._rng.choice([ReadStatus.TIMED_OUT, ReadStatus.UNAVAILABLE, ReadStatus.CORRUPT])
            if failed is ReadStatus.CORRUPT:
                self.stored.pop(request.block, None)
            return ReadOutcome(failed)
        if request.block not in self.stored:
            return ReadOutcome(ReadStatus.ABSENT)
        header, stored = self.stored[request.block]
        np.asarray(request.buffer)[:] = stored
        if checksum(stored) != header.checksum:
            del self.stored[request.block]
            return ReadOutcome(ReadStatus.CORRUPT)
        return ReadOutcome(ReadStatus.OK, header, self.name)

    async def write(self, requests, *, deadline_s):
        await self._pause()
        return [self._write(request) for request in requests]

    def _write(self, request):
        if self._rng.random() < self._faults:
            return self._rng.choice([WriteStatus.FULL, WriteStatus.REFUSED, WriteStatus.UNAVAILABLE])
        if not self.is_shared and len(self.stored) >= self._capacity_blocks:
            return WriteStatus.FULL
        self.stored[request.header.block] = (request.header, np.array(request.buffer, copy=True))
        if self.is_shared and len(self.stored) > self._capacity_blocks:
            del self.stored[self._rng.choice(list(self.stored))]
        if self._rng.random() < self._faults / 4:
            self.stored[request.header.block][1][self._rng.randrange(BLOCK_BYTES)] ^= 1
        return WriteStatus.OK

    async def drop(self, blocks):
        await self._pause()
        return sum(self.stored.pop(block, None) is not None for block in blocks)

    async def touch(self, blocks):
        await self._pause()

    def has_room(self, length_bytes, count=1):
        return self.is_shared or len(self.stored) + count <= self._capacity_blocks

    async def _pause(self):
        pause_s = self._rng.expovariate(1000)
        if self._rng.random() < self._faults / 2:
            pause_s = self._rng.choice([0.1, 1.0, 30.0])
        await asyncio.sleep(pause_s)


class Simulation:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.new_policy = list(POLICIES.values())[seed % len(POLICIES)]
        self.faults = self.rng.choice([0.0, 0.02, 0.2])
        sizes = {"capacity_blocks": self.rng.randint(2, 24), "faults": self.faults}
        self.ssd = FaultyTier("ssd", self.rng, is_shared=False, **sizes)
        self.remote = FaultyTier("remote", self.rng, is_shared=True, **sizes)
        self.dram_blocks = self.rng.randint(2, 24)
        self.served = 0

    async def run(self):
        for _ in range(3):
            await self.open()
            clients = [asyncio.create_task(self.client()) for _ in range(self.rng.randint(1, 8))]
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.uniform(0, 5))
                for client in clients:
                    client.cancel()
            await asyncio.wait(clients)
            for client in clients:
                assert client.cancelled() or client.exception() is None, client.exception()
            await self.quiesce()

    async def open(self):
        loop = asyncio.get_running_loop()
        self.dram = DramTier(capacity_bytes=self.dram_blocks * BLOCK_BYTES)
        limits = ManagerSettings(
            timeout_s=0.05, lease_s=2.0, write_queue_blocks=8, write_batch_blocks=4, load_batch_blocks=4
        )
        self.manager = BlockManager(
            self.dram, [self.ssd, self.remote], settings=limits, new_policy=self.new_policy, clock=loop.time
        )
        await self.manager.open()
        self.manager.open_namespace(SPACE)

    async def quiesce(self):
        """Everything ends by itself: queues empty, leases expire, the books balance."""
        assert await self.manager.flush(timeout_s=3600)
        await asyncio.sleep(60)
        assert await self.manager.check(sample_blocks=0) == []
        stats = self.manager.stats()
        assert stats["live_leases"] == 0
        assert stats["loads"] == 0
        await self.manager.close()

    async def client(self):
        owner = self.manager.new_owner()
        try:
            for _ in range(self.rng.randint(1, 40)):
                await self.step(owner)
                await asyncio.sleep(self.rng.expovariate(100))
        finally:
            # A client that is killed leaves this to its connection's end.
            self.manager.release_owner(owner)

    async def step(self, owner):
        chain = SPACE.chain([self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 8))])
        action = self.rng.random()
        timeout_s = self.rng.choice([0.0, 0.01, 0.05, 1.0])
        started_s = asyncio.get_running_loop().time()
        if action < 0.4:
            await self.fetch(chain, owner, timeout_s)
        elif action < 0.5:
            await self.manager.match(chain, timeout_s=timeout_s)
        elif action < 0.9:
            await self.put(chain, owner, timeout_s)
        elif action < 0.95:
            await self.manager.prefetch(chain, timeout_s=timeout_s)
        else:
            await self.manager.drop(chain)
            return
        took_s = asyncio.get_running_loop().time() - started_s
        assert took_s <= timeout_s + PROMPTLY_S, f"a call with {timeout_s} s took {took_s} s"

    async def fetch(self, chain, owner, timeout_s):
        fetched = await self.manager.fetch(chain, owner=owner, timeout_s=timeout_s)
        assert (fetched.reason is None) == (len(fetched.blocks) == len(chain))
        for key, block in zip(chain.keys, fetched.blocks, strict=False):
            async with self.dram.reading([block.slot], BLOCK_BYTES) as (buffer,):
                assert np.array_equal(np.asarray(buffer), payload(key)), "a wrong byte was served"
            self.served += 1
        if fetched.lease is not None and self.rng.random() < 0.8:
            self.manager.release(fetched.lease, owner=owner)

    async def put(self, chain, owner, timeout_s):
        reserved = await self.manager.reserve(chain, owner=owner, timeout_s=timeout_s)
        for slot in reserved.slots:
            if self.rng.random() < 0.1:
                continue
            key = chain.keys[slot.position]
            async with self.dram.writing([slot.slot], BLOCK_BYTES) as (buffer,):
                np.asarray(buffer)[:] = payload(key)
            block = chain[slot.position : slot.position + 1]
            self.manager.commit(block, [slot.slot], owner=owner, checksums=[checksum(payload(key))])
        if self.rng.random() < 0.9:
            self.manager.return_slots([slot.slot for slot in reserved.slots], owner=owner)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_seed_makes_the_manager_wrong_late_or_leaky(seed):
    run_virtual(Simulation(seed).run())
