"""Erasing a tenant: nothing of it can be read again, on any medium, on any node."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.keys import PrefixChain
from kvstore.miss import MissReason
from tests.encryption.node import (
    ANN,
    BOB,
    Node,
    files_in,
    node,
    plaintext_windows,
    space_of,
    tenant,
    values_in,
)
from tests.redis_server import RedisServer


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.stop()


async def test_nothing_on_ssd_or_in_redis_is_in_the_clear(tmp_path: Path, redis: RedisServer) -> None:
    chain = ANN.chain(range(64))
    async with node(tmp_path / "a", redis=redis) as one:
        await one.store(ANN, chain)
        on_media = files_in(tmp_path / "a" / "ssd") + b"".join(values_in(redis).values())

        assert plaintext_windows(one.arena_bytes(), chain.keys) > 0
        assert plaintext_windows(on_media, chain.keys) == 0
        assert len(values_in(redis)) == 16 + 1


async def test_records_that_nodes_share_are_told_from_old_blocks_by_name_and_size(
    tmp_path: Path, redis: RedisServer
) -> None:
    """Their names begin as those of an earlier version's blocks do, which operators may delete by size."""
    async with node(tmp_path / "a", redis=redis) as one:
        await one.store(ANN, ANN.chain(range(16)))
        await one.store(BOB, BOB.chain(range(16)))
        await one.manager.advance_epoch("m")
        await one.manager.erase(tenant(ANN))
        values = values_in(redis)

    records = {name for name in values if name.startswith(b"kvstore:1:")}
    assert len(records) >= 4  # an epoch, an erasure, and a key of each
    assert all((len(values[name]) <= 360) == (name in records) for name in values)


async def test_without_encryption_the_same_scan_finds_plaintext(tmp_path: Path, redis: RedisServer) -> None:
    chain = ANN.chain(range(64))
    async with node(tmp_path / "a", redis=redis, master=None) as one:
        await one.store(ANN, chain)
        assert plaintext_windows(files_in(tmp_path / "a" / "ssd"), chain.keys) > 0
        assert plaintext_windows(b"".join(values_in(redis).values()), chain.keys) > 0


async def test_blocks_come_back_from_each_tier_after_a_restart_and_on_another_node(
    tmp_path: Path, redis: RedisServer
) -> None:
    chain = ANN.chain(range(64))
    async with node(tmp_path / "a", redis=redis) as one:
        await one.store(ANN, chain)
        await one.empty_dram(chain)
        assert await one.fetch(ANN, chain) == (["ssd"] * 16, None)
    async with node(tmp_path / "a", redis=redis) as one:
        assert await one.fetch(ANN, chain) == (["ssd"] * 16, None)
    async with node(tmp_path / "b", redis=redis) as other:
        assert await other.fetch(ANN, chain) == (["remote"] * 16, None)


async def test_an_erasure_takes_no_block_that_another_tenant_named_by_the_same_key(
    tmp_path: Path, redis: RedisServer
) -> None:
    ann = ANN.chain(range(32))
    bob = PrefixChain(BOB.digest, ann.keys, BOB.block_tokens)
    async with node(tmp_path / "a", redis=redis) as one, node(tmp_path / "b", redis=redis) as other:
        await one.store(ANN, ann)
        await one.store(BOB, bob)

        report = await one.manager.erase(tenant(ANN))
        await other.vault.poll()

        assert (report.keys, dict(report.blocks)) == (1, {"dram": 8, "ssd": 8, "remote": 8})
        assert await one.fetch(ANN, ann) == ([], MissReason.ERASED)
        assert await one.fetch(BOB, bob) == (["dram"] * 8, None)
        assert await other.fetch(BOB, bob) == (["remote"] * 8, None)
    async with node(tmp_path / "a", redis=redis) as again:
        assert await again.fetch(BOB, bob) == (["ssd"] * 8, None)


async def test_after_an_erasure_nothing_is_served_anywhere_and_others_keep_theirs(
    tmp_path: Path, redis: RedisServer
) -> None:
    ann, bob = ANN.chain(range(32)), BOB.chain(range(32))
    async with node(tmp_path / "a", redis=redis) as one, node(tmp_path / "b", redis=redis) as other:
        await one.store(ANN, ann)
        await one.store(BOB, bob)
        assert await other.fetch(ANN, ann) == (["remote"] * 8, None)

        report = await one.manager.erase(tenant(ANN))
        await other.vault.poll()

        assert report.is_complete
        assert (report.keys, dict(report.blocks)) == (1, {"dram": 8, "ssd": 8, "remote": 8})
        assert await one.fetch(ANN, ann) == ([], MissReason.ERASED)
        assert await other.fetch(ANN, ann) == ([], MissReason.ERASED)
        assert await one.fetch(BOB, bob) == (["dram"] * 8, None)
        assert await other.fetch(BOB, bob) == (["remote"] * 8, None)
    async with node(tmp_path / "a", redis=redis) as one:
        assert await one.fetch(ANN, ann) == ([], MissReason.ERASED)
        assert await one.fetch(BOB, bob) == (["ssd"] * 8, None)
    async with node(tmp_path / "c", redis=redis) as third:
        assert await third.fetch(ANN, ann) == ([], MissReason.ERASED)


async def test_what_is_put_after_an_erasure_is_under_a_new_key(tmp_path: Path, redis: RedisServer) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a", redis=redis) as one:
        await one.store(ANN, chain)
        await one.manager.erase(tenant(ANN))

        await one.store(ANN, chain)
        await one.empty_dram(chain)

        assert await one.fetch(ANN, chain) == (["ssd"] * 8, None)
    async with node(tmp_path / "b", redis=redis) as other:
        assert await other.fetch(ANN, chain) == (["remote"] * 8, None)


async def test_memory_of_an_erased_tenant_is_overwritten_also_what_left_before(tmp_path: Path) -> None:
    early, late = ANN.chain(range(32)), ANN.chain(range(100, 132))
    async with node(tmp_path / "a") as one:
        for space, chain in ((ANN, early), (ANN, late), (BOB, BOB.chain(range(32)))):
            await one.store(space, chain)
        await one.empty_dram(early)
        assert plaintext_windows(one.arena_bytes(), early.keys) > 0

        await one.manager.erase(tenant(ANN))

        assert plaintext_windows(one.arena_bytes(), [*early.keys, *late.keys]) == 0
        assert plaintext_windows(one.arena_bytes(), BOB.chain(range(32)).keys) > 0


async def test_a_leased_block_is_matched_no_more_and_overwritten_when_its_lease_ends(tmp_path: Path) -> None:
    chain = ANN.chain(range(16))
    async with node(tmp_path / "a") as one:
        await one.store(ANN, chain)
        fetched = await one.manager.fetch(chain, owner=one.owner, timeout_s=5)

        report = await one.manager.erase(tenant(ANN))

        assert report.leased_blocks == 4
        assert plaintext_windows(one.bytes_in(fetched.blocks[0].slot), chain.keys[:1]) == 16
        assert (await one.manager.match(chain)).blocks == 0
        one.manager.release(fetched.lease, owner=one.owner)
        assert plaintext_windows(one.arena_bytes(), chain.keys) == 0


async def test_a_slot_that_was_lent_before_an_erasure_is_overwritten_when_it_comes_back(
    tmp_path: Path,
) -> None:
    chain = ANN.chain(range(4))
    async with node(tmp_path / "a") as one:
        one.manager.open_namespace(ANN)
        reserved = await one.manager.reserve(chain, owner=one.owner, timeout_s=5)
        slot = reserved.slots[0].slot
        one.dram.arena.view.slot(slot, 64)[:] = b"secret half-written block".ljust(64)

        await one.manager.erase(tenant(ANN))
        one.manager.return_slots([slot], owner=one.owner)

        assert b"secret half-written" not in one.arena_bytes()


async def test_blocks_of_a_namespace_that_nobody_opened_since_the_start_go_too(tmp_path: Path) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a") as one:
        await one.store(ANN, chain)
    async with node(tmp_path / "a") as one:
        report = await one.manager.erase(tenant(ANN))
        assert dict(report.blocks) == {"ssd": 8}
        assert one.lower[0].used_bytes == 0


async def test_all_namespaces_of_a_tenant_go(tmp_path: Path) -> None:
    spaces = [space_of(b"salt of ann", model) for model in ("m", "n")]
    async with node(tmp_path / "a") as one:
        for space in spaces:
            await one.store(space, space.chain(range(8)))
        await one.manager.erase(tenant(ANN))
        for space in spaces:
            assert await one.fetch(space, space.chain(range(8))) == ([], MissReason.ERASED)


async def test_an_erasure_that_redis_does_not_take_says_so_and_is_told_later(
    tmp_path: Path, redis: RedisServer
) -> None:
    chain = ANN.chain(range(16))
    async with node(tmp_path / "a", redis=redis) as one, node(tmp_path / "b", redis=redis) as other:
        await one.store(ANN, chain)
        assert await other.fetch(ANN, chain) == (["remote"] * 4, None)
        redis.kill()

        report = await one.manager.erase(tenant(ANN))

        assert not report.is_complete
        assert report.problems[0] == "remote: does not take the erasure now"
        assert one.vault.stats()["untold_erasures"] == 1
        assert await one.fetch(ANN, chain) == ([], MissReason.ERASED)
        redis.start()
        await told(one)
        await other.vault.poll()
        assert await other.fetch(ANN, chain) == ([], MissReason.ERASED)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never happened")


async def told(one: Node) -> None:
    for _ in range(600):
        await one.vault.poll()
        if not one.vault.stats()["untold_erasures"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the erasure was never told")


# Blocks on their way


async def test_a_block_that_is_being_loaded_is_not_served(tmp_path: Path) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a") as one:
        await one.store(ANN, chain)
        await one.empty_dram(chain)
        gate = one.hold_tier(0)
        fetching = asyncio.create_task(one.manager.fetch(chain, owner=one.owner, timeout_s=20))
        await until(lambda: "read" in gate.calls)

        erasing = asyncio.create_task(one.manager.erase(tenant(ANN)))
        await asyncio.sleep(0.1)
        gate.let_go()

        assert (await fetching).blocks == ()
        assert (await erasing).is_complete
        assert plaintext_windows(one.arena_bytes(), chain.keys) == 0


async def test_a_check_takes_no_copy_for_damaged_whose_tenant_is_erased_meanwhile(tmp_path: Path) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a") as one:
        await one.store(ANN, chain)
        await one.empty_dram(chain)
        gate = one.hold_tier(0)
        checking = asyncio.create_task(one.manager.check())
        await until(lambda: "read" in gate.calls)

        erasing = asyncio.create_task(one.manager.erase(tenant(ANN)))
        await asyncio.sleep(0.1)
        gate.let_go()

        assert await checking == []
        assert (await erasing).is_complete
        assert one.lower[0].used_bytes == 0


@pytest.mark.parametrize("tier", [0, 1])
async def test_a_block_that_is_being_written_does_not_survive_under_the_next_key(
    tmp_path: Path, redis: RedisServer, tier: int
) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a", redis=redis) as one:
        gate = one.hold_tier(tier)
        assert await one.put(ANN, chain) == 8
        await until(lambda: "write" in gate.calls)

        erasing = asyncio.create_task(one.manager.erase(tenant(ANN)))
        await asyncio.sleep(0.1)
        gate.let_go()

        assert (await erasing).is_complete
        assert await one.manager.flush(timeout_s=30)
        assert await one.fetch(ANN, chain) == ([], MissReason.ERASED)
        assert one.lower[0].used_bytes == 0
    async with node(tmp_path / "b", redis=redis) as other:
        assert await other.fetch(ANN, chain) == ([], MissReason.ERASED)


async def test_blocks_that_wait_to_be_written_are_not(tmp_path: Path, redis: RedisServer) -> None:
    chains = [ANN.chain(range(start, start + 64)) for start in range(0, 640, 64)]
    async with node(tmp_path / "a", redis=redis) as one:
        for chain in chains:
            await one.put(ANN, chain)
        await one.manager.erase(tenant(ANN))
        assert await one.manager.flush(timeout_s=30)
        assert one.lower[0].used_bytes == 0
        assert plaintext_windows(one.arena_bytes(), chains[0].keys) == 0
    async with node(tmp_path / "b", redis=redis) as other:
        for chain in chains:
            assert (await other.fetch(ANN, chain))[0] == []


async def test_a_transfer_that_does_not_end_is_reported_and_cleared_when_it_does(tmp_path: Path) -> None:
    chain = ANN.chain(range(32))
    async with node(tmp_path / "a") as one:
        gate = one.hold_tier(0)
        await one.put(ANN, chain)
        await until(lambda: "write" in gate.calls)

        report = await one.manager.erase(tenant(ANN))

        assert not report.is_complete
        assert "on their way" in report.problems[0]
        gate.let_go()
        await until(lambda: not one.is_clearing)
        assert one.lower[0].used_bytes == 0
        assert plaintext_windows(one.arena_bytes(), chain.keys) == 0


async def test_an_erasure_needs_encryption(tmp_path: Path) -> None:
    async with node(tmp_path / "a", master=None) as one:
        with pytest.raises(InvalidRequest, match="not configured"):
            await one.manager.erase(tenant(ANN))
