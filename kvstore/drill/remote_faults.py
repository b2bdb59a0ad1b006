"""Faults of the Redis-protocol server: damaged values, a stopped, killed or full server, a lying stream."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from kvstore.drill.fault import Fault
from kvstore.drill.load import Load
from kvstore.drill.redis_content import RedisContent
from kvstore.drill.redis_server import RedisServer
from kvstore.drill.reply_proxy import Mangle, ReplyProxy, pass_on
from kvstore.drill.stage import HEAL_S, Stage, pause
from kvstore.drill.store_process import wait_until
from kvstore.keys import BlockKey, PrefixChain

SHORT_CALL_S = 0.05
"""Time of a call that would have used the server while it does not answer."""

_KEEP_CHAINS = 12


class RemoteFault(Fault):
    """A store of dram and Redis. Chains that were written there must be served again after the fault."""

    needs_redis = True
    ssd_bytes = 0

    def __init__(self) -> None:
        self.written: list[PrefixChain] = []

    def setup(self, stage: Stage) -> None:
        """Start the store and have some chains written to Redis."""
        self.written = []
        stage.ensure_running()
        self.write(stage)
        stage.verify()

    def write(self, stage: Stage, count: int = 4, *, most_blocks: int = 6) -> list[PrefixChain]:
        """Have new chains written to Redis and pushed out of dram; the oldest others are dropped."""
        chains = [stage.new_chain(stage.rng.randint(1, most_blocks)) for _ in range(count)]
        for chain in chains:
            stage.put(chain, timeout_s=HEAL_S)
        if not stage.client.flush():
            stage.ledger.note_violation("a healthy server did not take what was written through")
        self.written += chains
        for chain in self.written[:-_KEEP_CHAINS]:
            stage.client.drop(chain)
        del self.written[:-_KEEP_CHAINS]
        stage.empty_dram()
        return chains

    def forget_missing(self, stage: Stage, ports: Sequence[int]) -> None:
        """Expect no more of chains that are not whole on these servers together."""
        keys = [key for chain in self.written for key in chain.keys]
        there: set[BlockKey] = set()
        for port in ports:
            with RedisContent(port) as content:
                there.update(content.find(keys, stage.block_bytes))
        self.written = [chain for chain in self.written if there.issuperset(chain.keys)]

    def verify(self, stage: Stage) -> None:
        """Check every promise, and that what is in Redis is served again by itself."""
        stage.verify()
        for chain in self.written:
            if not wait_until(lambda: stage.get(chain).blocks == len(chain), HEAL_S, pause_s=0.02):  # noqa: B023
                stage.ledger.note_violation(f"{HEAL_S:.0f} s after the fault a block in Redis is not served")
                return

    def verify_is_used(self, stage: Stage) -> None:
        """Check that new blocks are written and read again soon."""
        chain = stage.new_chain(3)

        def comes_back() -> bool:
            stage.put(chain)
            stage.client.flush()
            stage.empty_dram()
            return "remote" in stage.get(chain).origins

        if not wait_until(comes_back, HEAL_S, pause_s=0.05):
            stage.ledger.note_violation(f"{HEAL_S:.0f} s after the fault Redis is not used")
        self.written.append(chain)


def server_of(stage: Stage) -> RedisServer:
    """Return the stage's Redis-protocol server."""
    assert stage.redis is not None, "this stage has no Redis-protocol server"
    return stage.redis


class _ValueDamage(RemoteFault):
    """Damage to stored values."""

    weight = 3.0
    effect = "blocks_refused"

    def inject(self, stage: Stage) -> None:
        """Damage values of blocks that are in Redis only, and ask for them."""
        chains = self.write(stage)
        keys = [key for chain in chains for key in chain.keys]
        with RedisContent(server_of(stage).port) as content:
            damaged = self.damage(content, content.find(keys, stage.block_bytes), stage.rng)
        for chain in chains:
            served = stage.get(chain).blocks
            if any(key in damaged for key in chain.keys):
                stage.ledger.note_effect(self.effect, served < len(chain))
                self.written.remove(chain)
                stage.client.drop(chain)

    def damage(
        self, content: RedisContent, names: dict[BlockKey, bytes], rng: random.Random
    ) -> list[BlockKey]:
        """Damage some values and return whose they are."""
        raise NotImplementedError


class RedisBitFlips(_ValueDamage):
    """See the description."""

    name = "redis_bit_flips"
    description = "one random bit flipped in up to four values, in their header or payload"

    def damage(
        self, content: RedisContent, names: dict[BlockKey, bytes], rng: random.Random
    ) -> list[BlockKey]:
        """Flip bits."""
        chosen = rng.sample(sorted(names), min(len(names), rng.randint(1, 4)))
        for key in chosen:
            content.flip_bit(names[key], rng)
        return chosen


class RedisForeignBlock(_ValueDamage):
    """See the description."""

    name = "redis_foreign_block"
    description = "a whole, valid value stored under another block's key"

    def damage(
        self, content: RedisContent, names: dict[BlockKey, bytes], rng: random.Random
    ) -> list[BlockKey]:
        """Copy one value over another."""
        if len(names) < 2:
            return []
        one, other = rng.sample(sorted(names), 2)
        content.copy(names[one], names[other])
        return [other]


class RedisCutValue(_ValueDamage):
    """See the description."""

    name = "redis_cut_value"
    description = "values cut, lengthened, emptied, or replaced by another type"

    def damage(
        self, content: RedisContent, names: dict[BlockKey, bytes], rng: random.Random
    ) -> list[BlockKey]:
        """Cut values."""
        chosen = rng.sample(sorted(names), min(len(names), rng.randint(1, 3)))
        for key in chosen:
            content.cut(names[key], rng)
        return chosen


class RedisStopped(RemoteFault):
    """See the description."""

    name = "redis_stopped"
    description = "SIGSTOP of Redis under load: calls end by their deadline as misses, then it is used again"

    def inject(self, stage: Stage) -> None:
        """Stop it for up to half a second, and ask for what only it has."""
        self.write(stage)
        with Load(stage, acknowledges=False):
            pause(stage.rng.uniform(0.0, 0.05))
            server_of(stage).pause()
            try:
                until_s = time.monotonic() + stage.rng.uniform(0.1, 0.5)
                while time.monotonic() < until_s:
                    stage.get(stage.rng.choice(self.written), timeout_s=SHORT_CALL_S)
                    stage.match(stage.new_chain(4), timeout_s=SHORT_CALL_S)
            finally:
                server_of(stage).resume()


class RedisRestartedEmpty(RemoteFault):
    """See the description."""

    name = "redis_restarted_empty"
    description = "Redis killed under load, and started again with nothing in it"

    def inject(self, stage: Stage) -> None:
        """Kill it, go on without it for a moment, and start it empty."""
        with Load(stage, acknowledges=False):
            pause(stage.rng.uniform(0.0, 0.1))
            server_of(stage).kill()
            for _ in range(4):
                stage.get(stage.rng.choice(self.written), timeout_s=SHORT_CALL_S)
            pause(stage.rng.uniform(0.0, 0.3))
            server_of(stage).start()
        self.written = []

    def verify(self, stage: Stage) -> None:
        """Check every promise, and that new blocks reach it and come back."""
        self.verify_is_used(stage)
        super().verify(stage)


class RedisOutOfMemory(RemoteFault):
    """See the description."""

    name = "redis_out_of_memory"
    description = "Redis at maxmemory with noeviction: writes are refused and counted, reads go on"
    weight = 3.0
    effect = "writes_refused"

    def inject(self, stage: Stage) -> None:
        """Leave it room for a few blocks, put many, and ask for older ones."""
        before = self._refused(stage)
        with RedisContent(server_of(stage).port) as content:
            content.limit_memory(stage.rng.randint(1, 4 * stage.block_bytes))
            try:
                with Load(stage, acknowledges=False):
                    for _ in range(4):
                        stage.put(stage.new_chain(6))
                        stage.get(stage.rng.choice(self.written))
                stage.client.flush()
            finally:
                content.limit_memory(0)
        stage.ledger.note_effect(self.effect, self._refused(stage) - before)

    def _refused(self, stage: Stage) -> int:
        drops: dict[str, int] = stage.stats()["write_drops_blocks"]
        return sum(count for what, count in drops.items() if what.startswith("remote/"))


class _LyingStream(RemoteFault):
    """A relay between store and Redis that changes what Redis answers."""

    effect = "replies_changed"
    try_s = 1.5
    shares_stage = False
    chance: ClassVar[float] = 0.3

    def __init__(self) -> None:
        super().__init__()
        self._proxy: ReplyProxy | None = None
        self._num_changed = 0

    def setup(self, stage: Stage) -> None:
        """Start the relay, and the store behind it."""
        self._proxy = ReplyProxy(server_of(stage).port)
        stage.store.settings = replace(stage.store.settings, redis_url=self._proxy.url)
        super().setup(stage)

    def teardown(self, stage: Stage) -> None:
        """Stop the relay."""
        if self._proxy is not None:
            self._proxy.stop()
            self._proxy = None

    def inject(self, stage: Stage) -> None:
        """Change replies while blocks are put and asked for."""
        assert self._proxy is not None, "setup starts the relay"
        self.write(stage)
        self._num_changed = 0
        self._proxy.mangle = self._sometimes(random.Random(stage.rng.getrandbits(64)))  # noqa: S311 (a schedule)
        try:
            for _ in range(6):
                stage.get(stage.rng.choice(self.written), timeout_s=SHORT_CALL_S)
                stage.put(stage.new_chain(3))
                stage.match(stage.new_chain(3), timeout_s=SHORT_CALL_S)
                pause(stage.rng.uniform(0.0, 0.06))
        finally:
            self._proxy.mangle = pass_on
        stage.client.flush()
        stage.ledger.note_effect(self.effect, self._num_changed)

    def verify(self, stage: Stage) -> None:
        """Check every promise. A value that looked damaged on its way may have been deleted, no other."""
        self.forget_missing(stage, [server_of(stage).port])
        super().verify(stage)

    def change(self, data: bytes, rng: random.Random) -> bytes | None:
        """Return what goes on instead of a piece of a reply; None cuts the connection."""
        raise NotImplementedError

    def _sometimes(self, rng: random.Random) -> Mangle:
        def mangle(data: bytes) -> bytes | None:
            if rng.random() >= self.chance:
                return data
            self._num_changed += 1
            return self.change(data, rng)

        return mangle


class RepliesTruncated(_LyingStream):
    """See the description."""

    name = "replies_truncated"
    description = "pieces of Redis replies cut short: the rest is missing, or the connection ends there"

    def change(self, data: bytes, rng: random.Random) -> bytes | None:
        """Leave out the end of a piece, or cut the connection."""
        return None if rng.random() < 0.3 else data[: rng.randrange(len(data))]


class RepliesDuplicated(_LyingStream):
    """See the description."""

    name = "replies_duplicated"
    description = "pieces of Redis replies sent twice: the stream is out of step from there on"

    def change(self, data: bytes, rng: random.Random) -> bytes | None:
        """Send a piece, or the end of it, twice."""
        return data + data[rng.randrange(len(data)) if rng.random() < 0.5 else 0 :]


class RepliesDelayed(_LyingStream):
    """See the description."""

    name = "replies_delayed"
    description = "Redis replies held back by up to 0.3 s, so that they come when nobody waits any more"

    def change(self, data: bytes, rng: random.Random) -> bytes | None:
        """Hold a piece back."""
        pause(rng.uniform(0.0, 0.3))
        return data


class RepliesGarbled(_LyingStream):
    """See the description."""

    name = "replies_garbled"
    description = "bytes of Redis replies changed, in lengths, headers and payloads, or replaced by noise"

    def change(self, data: bytes, rng: random.Random) -> bytes | None:
        """Change some bytes, most often near the start, or send noise."""
        if rng.random() < 0.2:
            return rng.randbytes(rng.randint(1, 256))
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(min(len(changed), rng.choice((8, 256, len(changed)))))] ^= (
                1 << rng.randrange(8)
            )
        return bytes(changed)


def remote_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    kinds: tuple[Callable[[], Fault], ...] = (
        RedisBitFlips,
        RedisForeignBlock,
        RedisCutValue,
        RedisStopped,
        RedisRestartedEmpty,
        RedisOutOfMemory,
        RepliesTruncated,
        RepliesDuplicated,
        RepliesDelayed,
        RepliesGarbled,
    )
    return tuple(kind() for kind in kinds)
