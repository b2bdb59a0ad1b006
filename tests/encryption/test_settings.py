"""A store with the wrong master key, with none, and with one that is new."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.assembly import assemble
from kvstore.config import Config
from kvstore.errors import InvalidConfig
from kvstore.miss import MissReason
from tests.encryption.node import (
    ANN,
    BOB,
    MASTER,
    OTHER_MASTER,
    files_in,
    node,
    plaintext_windows,
    tenant,
    tree,
    values_in,
)
from tests.redis_server import RedisServer


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.stop()


async def test_with_the_wrong_master_key_all_misses_and_nothing_is_destroyed(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    stored = [ANN.chain(range(start, start + 128)) for start in range(0, 2048, 128)]
    async with node(tmp_path / "a", redis=redis) as one:
        for chain in stored:
            await one.store(ANN, chain)
            await one.empty_dram(chain)
    before, in_redis = files_in(tmp_path / "a" / "ssd"), values_in(redis)

    async with node(tmp_path / "a", redis=redis, master=OTHER_MASTER) as one:
        assert await one.fetch(ANN, stored[0]) == ([], MissReason.UNAVAILABLE)
        for start in range(0, 512, 64):
            assert await one.put(BOB, BOB.chain(range(start, start + 64))) == 16
        assert await one.manager.flush(timeout_s=30)
        state = one.manager.stats()["tiers"]
        assert isinstance(state, dict)
        assert [state[name]["is_up"] for name in ("ssd", "remote")] == [False, False]
        assert "another master key" in state["ssd"]["reason"]
    assert len([at for at in caplog.records if "another master key" in at.getMessage()]) == 1
    assert len(files_in(tmp_path / "a" / "ssd")) == len(before)
    assert values_in(redis) == in_redis

    async with node(tmp_path / "a", redis=redis) as one:
        for chain in stored:
            assert await one.fetch(ANN, chain) == (["ssd"] * 32, None)
            await one.empty_dram(chain)


async def test_encrypted_blocks_are_misses_where_encryption_is_off(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a", redis=redis) as one:
        await one.store(ANN, chain)
    async with node(tmp_path / "a", redis=redis, master=None) as one:
        assert (await one.fetch(ANN, chain))[0] == []
        assert one.lower[0].used_bytes == 0
        assert "its blocks are encrypted" in caplog.text
        await one.store(ANN, chain)
        await one.empty_dram(chain)
        assert await one.fetch(ANN, chain) == (["ssd"] * 8, None)


async def test_blocks_in_the_clear_are_misses_where_encryption_is_on(
    tmp_path: Path, redis: RedisServer
) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a", redis=redis, master=None) as one:
        await one.store(ANN, chain)
    async with node(tmp_path / "a", redis=redis) as one:
        assert await one.fetch(ANN, chain) == ([], MissReason.CORRUPT)
        assert plaintext_windows(files_in(tmp_path / "a" / "ssd"), chain.keys) == 0
        await one.store(ANN, chain)
        assert plaintext_windows(b"".join(values_in(redis).values()), chain.keys) == 0
        await one.empty_dram(chain)
        assert await one.fetch(ANN, chain) == (["ssd"] * 8, None)


async def test_a_new_master_key_is_taken_up_by_nodes_one_after_the_other(
    tmp_path: Path, redis: RedisServer
) -> None:
    chains = [ANN.chain(range(start, start + 16)) for start in range(0, 96, 16)]
    steps = [
        (MASTER, MASTER),
        (f"{MASTER}\n{OTHER_MASTER}", MASTER),
        (f"{MASTER}\n{OTHER_MASTER}", f"{MASTER}\n{OTHER_MASTER}"),
        (f"{OTHER_MASTER}\n{MASTER}", f"{MASTER}\n{OTHER_MASTER}"),
        (f"{OTHER_MASTER}\n{MASTER}", f"{OTHER_MASTER}\n{MASTER}"),
        (OTHER_MASTER, OTHER_MASTER),
    ]
    for chain, (ours, theirs) in zip(chains, steps, strict=True):
        async with node(tmp_path / "a", redis=redis, master=ours) as one:
            await one.store(ANN, chain)
            async with node(tmp_path / "b", redis=redis, master=theirs) as other:
                assert (await other.fetch(ANN, chain))[1] is None
                assert (await other.fetch(ANN, chains[0]))[1] is None


async def test_a_tenant_whose_first_block_never_came_has_its_key_all_the_same(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as one:
        one.manager.open_namespace(ANN)
        key = await one.vault.sealing_key(ANN.digest, deadline_s=asyncio.get_running_loop().time() + 30)
        assert key is not None
    async with node(tmp_path / "a") as one:
        assert one.vault.is_known(key.id)
        chain = ANN.chain(range(32))
        await one.store(ANN, chain)
        await one.empty_dram(chain)
        assert await one.fetch(ANN, chain) == (["ssd"] * 8, None)


def test_a_store_without_a_usable_master_key_does_not_start(tmp_path: Path) -> None:
    config = Config.from_dict(tree(tmp_path / "a", master="not a key"))
    with pytest.raises(InvalidConfig, match=r"^\[encryption\] keys: expected keys of 64 hex digits"):
        assemble(config)
    (tmp_path / "a" / "master").unlink()
    with pytest.raises(InvalidConfig, match=r"\[encryption\] keys: .* cannot be read"):
        assemble(config)


async def test_memory_alone_can_be_erased_too(tmp_path: Path) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a", ssd=False) as one:
        assert await one.put(ANN, chain) == 8
        report = await one.manager.erase(tenant(ANN))
        assert (report.is_complete, dict(report.blocks)) == (True, {"dram": 8})
        assert plaintext_windows(one.arena_bytes(), chain.keys) == 0
        assert await one.fetch(ANN, chain) == ([], MissReason.ERASED)
