"""SsdArray: a chain lies on one disk while the disks stay even, so that a lost disk leaves whole chains."""

import itertools
import random
import time
from pathlib import Path

import pytest

from kvstore.tier import WriteStatus
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_array import SsdArray
from kvstore_tiers.ssd_copies import Numbers
from tests.tiers.blocks import block_id, chain_writes

LENGTH = 4096
CAPACITY = 4 << 20
BATCH = 16


async def opened(folder: Path, num_disks: int, *, capacity_bytes: int = CAPACITY) -> SsdArray:
    numbers = Numbers()
    tier = SsdArray(
        [SsdTier(folder / str(n), capacity_bytes=capacity_bytes, numbers=numbers) for n in range(num_disks)]
    )
    await tier.open()
    return tier


async def put_chain(tier: SsdArray, first: int, blocks: int) -> list[WriteStatus]:
    written: list[WriteStatus] = []
    for start in range(0, blocks, BATCH):
        part = range(start, min(blocks, start + BATCH))
        written += await tier.write(chain_writes(first, part, LENGTH), deadline_s=time.monotonic() + 30)
    return written


def disks_of(tier: SsdArray, first: int, blocks: int) -> list[int]:
    """The disk of each block of a chain."""
    names = [block_id(first + depth).storage_key for depth in range(blocks)]
    return [next(n for n, disk in enumerate(tier.disks) if disk.holds(name)) for name in names]


def unevenness_bytes(tier: SsdArray) -> int:
    used = [disk.used_bytes for disk in tier.disks]
    return max(used) - min(used)


async def test_each_chain_lies_on_one_disk_and_the_disks_stay_even(tmp_path: Path) -> None:
    tier = await opened(tmp_path, 2)
    for chain in range(40):
        await put_chain(tier, 100 * chain, 20)
    places = [set(disks_of(tier, 100 * chain, 20)) for chain in range(40)]
    assert all(len(place) == 1 for place in places)
    assert unevenness_bytes(tier) <= CAPACITY // 16
    await tier.close()


@pytest.mark.parametrize("num_disks", [2, 3])
async def test_a_lost_disk_leaves_most_other_chains_whole(tmp_path: Path, num_disks: int) -> None:
    tier = await opened(tmp_path, num_disks)
    dice = random.Random(3)
    lengths = [dice.randrange(1, 40) for _ in range(60)]
    for chain, blocks in enumerate(lengths):
        await put_chain(tier, 100 * chain, blocks)
    whole = sum(0 not in disks_of(tier, 100 * chain, blocks) for chain, blocks in enumerate(lengths))
    assert whole >= 60 * (1 - 1 / num_disks) * 0.7
    await tier.close()


async def test_a_chain_that_grows_later_goes_on_where_it_is(tmp_path: Path) -> None:
    tier = await opened(tmp_path, 3)
    for chain in range(9):
        await put_chain(tier, 100 * chain, 5)
    for chain in range(9):
        await tier.write(chain_writes(100 * chain, range(5, 8), LENGTH), deadline_s=time.monotonic() + 30)
        assert len(set(disks_of(tier, 100 * chain, 8))) == 1
    await tier.close()


async def test_after_a_restart_a_chain_goes_on_where_it_is(tmp_path: Path) -> None:
    tier = await opened(tmp_path, 2)
    for chain in range(4):
        await put_chain(tier, 100 * chain, 5)
    await tier.close()
    tier = await opened(tmp_path, 2)
    for chain in range(4):
        await tier.write(chain_writes(100 * chain, range(5, 10), LENGTH), deadline_s=time.monotonic() + 30)
        assert len(set(disks_of(tier, 100 * chain, 10))) == 1
    await tier.close()


async def test_one_chain_that_outgrows_a_disks_share_is_spread(tmp_path: Path) -> None:
    tier = await opened(tmp_path, 2)
    await put_chain(tier, 0, 600)
    places = disks_of(tier, 0, 600)
    assert unevenness_bytes(tier) <= CAPACITY // 16 + LENGTH
    changes = sum(one != two for one, two in itertools.pairwise(places))
    assert 1 <= changes <= 600 * LENGTH // (CAPACITY // 16) + 1
    await tier.close()


async def test_many_chains_under_one_start_do_not_fill_one_disk_alone(tmp_path: Path) -> None:
    tier = await opened(tmp_path, 2)
    await put_chain(tier, 0, 10)
    for chain in range(1, 60):
        writes = chain_writes(100 * chain, range(1, 11), LENGTH)
        root = writes[0].header._replace(parent=block_id(9).key, depth=10)
        writes[0] = type(writes[0])(root, writes[0].buffer)
        await tier.write(writes, deadline_s=time.monotonic() + 30)
    assert unevenness_bytes(tier) <= CAPACITY // 16 + 10 * LENGTH
    await tier.close()


async def test_a_disk_that_is_full_hands_the_chain_on(tmp_path: Path) -> None:
    tier = await opened(tmp_path, 2, capacity_bytes=32 * LENGTH)
    written = await put_chain(tier, 0, 70)
    assert written == [WriteStatus.OK] * 64 + [WriteStatus.FULL] * 6
    await tier.close()
