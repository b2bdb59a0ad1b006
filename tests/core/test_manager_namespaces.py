"""Namespaces against a model of a few lines: a store over real tiers is a dictionary by namespace and key.

Anybody may name blocks as they like, so the namespaces here name theirs by the same raw keys. There is room
for all, so what was put is there until it is dropped, and what was not put never is.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvstore.assembly import assemble
from kvstore.checksum import checksum
from kvstore.config import Config
from kvstore.keys import BlockKey, PrefixChain
from kvstore.miss import MissReason
from tests.encryption.node import BLOCK_BYTES, MASTER, space_of, tree
from tests.example_counts import examples
from tests.redis_server import RedisServer

KEYS = tuple(BlockKey(bytes([number]) * 32) for number in range(1, 5))
SPACES = [space_of(b""), space_of(b"", model="other"), space_of(b"salt of ann")]
spaces = st.sampled_from(SPACES)
keys = st.sets(st.sampled_from(range(len(KEYS))), min_size=1)
lengths = st.integers(1, len(KEYS))


@pytest.fixture(scope="module", autouse=True)
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    NamespacesMachine.redis = server
    yield server
    server.stop()


def chain(space, start=0, stop=None):
    """The blocks of one sequence in a namespace, under the keys that all use."""
    return PrefixChain(space.digest, KEYS, space.block_tokens)[start:stop]


def payload(space, key):
    return np.frombuffer(bytes(a ^ b for a, b in zip(space.digest, key, strict=True)) * 256, dtype=np.uint8)


class NamespacesMachine(RuleBasedStateMachine):
    redis: RedisServer
    master = None

    @initialize()
    def start(self):
        self.redis.ask(b"FLUSHALL")
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-namespaces-"))
        self.stored = {space: set() for space in SPACES}
        self.dropped = {space: set() for space in SPACES}
        self.open()

    def open(self):
        config = Config.from_dict(tree(self.folder, redis=self.redis, master=self.master))
        store = assemble(config)
        self.manager, self.dram = store.manager, store.dram
        self.run(self.manager.open())
        for space in SPACES:
            self.manager.open_namespace(space)
        self.owner = self.manager.new_owner()

    def run(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def flush(self):
        assert self.run(self.manager.flush(timeout_s=30))

    def leading(self, space):
        return next((at for at in range(len(KEYS)) if at not in self.stored[space]), len(KEYS))

    @rule(space=spaces, stop=lengths)
    def put(self, space, stop):
        new = self.run(self._put(space, chain(space, 0, stop)))
        assert new == set(range(stop)) - self.stored[space]
        self.stored[space] |= new
        self.dropped[space] -= new

    async def _put(self, space, blocks):
        reserved = await self.manager.reserve(blocks, owner=self.owner, timeout_s=5)
        for at in reserved.slots:
            data = payload(space, blocks.keys[at.position])
            async with self.dram.writing([at.slot], BLOCK_BYTES) as (buffer,):
                np.asarray(buffer)[:BLOCK_BYTES] = data
            block = blocks[at.position : at.position + 1]
            assert self.manager.commit(block, [at.slot], owner=self.owner, checksums=[checksum(data)]) == [
                True
            ]
        self.manager.return_slots([at.slot for at in reserved.slots], owner=self.owner)
        # What only the remote tier has is put again: nobody asks it before a put.
        return {at.position for at in reserved.slots} - self.stored[space]

    @rule(space=spaces, stop=lengths)
    def fetch(self, space, stop):
        self.run(self._fetch(space, chain(space, 0, stop)))

    async def _fetch(self, space, blocks):
        fetched = await self.manager.fetch(blocks, owner=self.owner, timeout_s=5)
        assert len(fetched.blocks) == min(len(blocks), self.leading(space))
        for key, block in zip(blocks.keys, fetched.blocks, strict=False):
            assert bytes(self.dram.arena.view.slot(block.slot, BLOCK_BYTES)) == payload(space, key).tobytes()
        if fetched.lease is not None:
            self.manager.release(fetched.lease, owner=self.owner)

    @rule(space=spaces)
    def match(self, space):
        assert self.run(self.manager.match(chain(space), timeout_s=5)).blocks == self.leading(space)

    @rule(space=spaces)
    def exists(self, space):
        found = self.run(self.manager.exists(space.digest, KEYS, timeout_s=5))
        assert {at for at, is_here in enumerate(found) if is_here} == self.stored[space]

    @rule(space=spaces)
    def why(self, space):
        first = self.leading(space)
        reports = self.run(self.manager.why(chain(space), timeout_s=5))[: first + 1]
        assert [bool(report.tiers) for report in reports] == [True] * first + [False] * (len(reports) - first)
        for report in reports[first:]:
            # One that only the remote tier had was never seen here, dropped or not.
            was_dropped = report.index in self.dropped[space]
            reasons = {MissReason.NEVER_SEEN} | ({MissReason.DROPPED} if was_dropped else set())
            assert report.reason in reasons

    @rule(space=spaces, which=keys)
    def drop(self, space, which):
        self.flush()  # a block on its way to a tier is kept
        for at in which:
            self.run(self.manager.drop(chain(space, at, at + 1)))
        self.dropped[space] |= which & self.stored[space]
        self.stored[space] -= which

    @rule(space=spaces, stop=lengths)
    def demote(self, space, stop):
        self.flush()
        self.run(self.manager.demote(chain(space, 0, stop), timeout_s=30))

    @rule(loses_disk=st.booleans())
    def restart(self, loses_disk):
        self.flush()
        self.run(self.manager.close())
        if loses_disk:
            shutil.rmtree(self.folder / "ssd")
        self.dropped = {space: set() for space in SPACES}
        self.open()

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for space in SPACES:
            self.exists(space)
            self.fetch(space, len(KEYS))
        self.flush()
        assert self.run(self.manager.check(sample_blocks=64)) == []
        assert self.manager.stats()["corrupt_blocks"] == {}
        self.run(self.manager.close())
        self.loop.close()
        shutil.rmtree(self.folder)


class SealedNamespacesMachine(NamespacesMachine):
    master = MASTER


TestNamespaces = NamespacesMachine.TestCase
TestNamespaces.settings = settings(max_examples=examples(40), stateful_step_count=30)
TestSealedNamespaces = SealedNamespacesMachine.TestCase
TestSealedNamespaces.settings = settings(max_examples=examples(20), stateful_step_count=30)
