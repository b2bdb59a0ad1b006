"""BlockManager over several ssd folders: one comes late, one is lost while the store runs."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.checksum import checksum
from kvstore.epoch_file import EpochFile
from kvstore.keys import Namespace, PrefixChain
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore_tiers.dram import DramTier
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_array import SsdArray
from kvstore_tiers.ssd_copies import Numbers

BLOCK_BYTES = 8192
SPACE = Namespace(model="m", layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=1))
CHAINS = [SPACE.chain([number] * 8) for number in range(12)]


@contextlib.asynccontextmanager
async def running(folder: Path, *, epochs: bool = False) -> AsyncIterator[BlockManager]:
    numbers = Numbers()
    names = ("a", "b")
    array = SsdArray(
        [
            SsdTier(folder / name, capacity_bytes=4 << 20, numbers=numbers, renew_interval_s=0.02)
            for name in names
        ],
        retry_interval_s=0.02,
    )
    file = EpochFile([folder / name / "epochs" for name in names]) if epochs else None
    manager = BlockManager(DramTier(capacity_bytes=4 << 20), [array], epoch_file=file)
    await manager.open()
    manager.open_namespace(SPACE)
    try:
        yield manager
        assert await manager.check() == []
    finally:
        await manager.close()


async def put(manager: BlockManager, chain: PrefixChain) -> None:
    owner = manager.new_owner()
    reserved = await manager.reserve(chain, owner=owner, timeout_s=10)
    top = manager._state.top
    for slot in reserved.slots:
        data = np.frombuffer(chain.keys[slot.position] * (BLOCK_BYTES // 32), np.uint8)
        async with top.writing([slot.slot], BLOCK_BYTES) as (buffer,):
            np.asarray(buffer)[:BLOCK_BYTES] = data
        one = chain[slot.position : slot.position + 1]
        assert manager.commit(one, [slot.slot], owner=owner, checksums=[checksum(data.tobytes())]) == [True]
    manager.release_owner(owner)


async def put_all(manager: BlockManager) -> None:
    for chain in CHAINS:
        await put(manager, chain)
    assert await manager.flush(timeout_s=30)


async def stored(manager: BlockManager) -> list[int]:
    """How many blocks of each chain are matched."""
    return [(await manager.match(chain)).blocks for chain in CHAINS]


async def fetched(manager: BlockManager) -> list[int]:
    """How many blocks of each chain are served, byte for byte."""
    counts = []
    for chain in CHAINS:
        owner = manager.new_owner()
        got = await manager.fetch(chain, owner=owner, timeout_s=10)
        for key, block in zip(chain.keys, got.blocks, strict=False):
            async with manager._state.top.reading([block.slot], BLOCK_BYTES) as (buffer,):
                assert bytes(buffer[:BLOCK_BYTES]) == key * (BLOCK_BYTES // 32)
        counts.append(len(got.blocks))
        manager.release_owner(owner)
    return counts


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # what is waited for happens in other tasks and threads
            await asyncio.sleep(0.01)


def disks(manager: BlockManager) -> tuple[SsdTier, ...]:
    array = manager._state.lower[0]
    assert isinstance(array, SsdArray)
    return array.disks


async def test_blocks_of_a_folder_that_comes_late_are_served(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        await put_all(manager)
    (tmp_path / "b").chmod(0o777)
    async with running(tmp_path) as manager:
        before = await stored(manager)
        assert sorted(before) == [0] * 6 + [8] * 6
        assert await fetched(manager) == before
        (tmp_path / "b").chmod(0o700)
        await until(lambda: manager.stats()["tiers"]["ssd"]["blocks"] == 96)  # type: ignore[index]
        assert await stored(manager) == [8] * 12
        assert await fetched(manager) == [8] * 12


async def test_what_was_stored_again_before_a_folder_came_is_filed_once(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        await put_all(manager)
    (tmp_path / "b").chmod(0o777)
    async with running(tmp_path) as manager:
        await put_all(manager)
        (tmp_path / "b").chmod(0o700)
        await until(lambda: len(disks(manager)) == 2)
        await until(lambda: len(disks(manager)[1].copies) == 0)
        assert await fetched(manager) == [8] * 12
        assert manager.stats()["tiers"]["ssd"]["blocks"] == 96  # type: ignore[index]


async def test_an_epoch_that_ended_without_a_folder_holds_for_what_it_brings(tmp_path: Path) -> None:
    async with running(tmp_path, epochs=True) as manager:
        await put_all(manager)
    (tmp_path / "b").rename(tmp_path / "b.saved")
    (tmp_path / "b").write_text("")
    async with running(tmp_path, epochs=True) as manager:
        await manager.advance_epoch("m")
        (tmp_path / "b").unlink()
        (tmp_path / "b.saved").rename(tmp_path / "b")
        await until(lambda: len(disks(manager)) == 2)
        await until(lambda: not disks(manager)[1].copies.names)
        assert await stored(manager) == [0] * 12
        assert (await manager.match(CHAINS[0])).reason is MissReason.OTHER_EPOCH


async def test_an_epoch_that_only_the_late_folder_knows_of_holds_from_then_on(tmp_path: Path) -> None:
    async with running(tmp_path, epochs=True) as manager:
        await put_all(manager)
    (tmp_path / "a").rename(tmp_path / "a.saved")
    (tmp_path / "a").write_text("")
    async with running(tmp_path, epochs=True) as manager:
        await manager.advance_epoch("m")
    (tmp_path / "a").unlink()
    (tmp_path / "a.saved").rename(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "b.saved")
    (tmp_path / "b").write_text("")
    async with running(tmp_path, epochs=True) as manager:
        (tmp_path / "b").unlink()
        (tmp_path / "b.saved").rename(tmp_path / "b")
        await put(manager, SPACE.chain([99]))
        await until(lambda: len(disks(manager)) == 2)
        newer = replace(SPACE, epoch=1)
        manager.open_namespace(newer)
        await put(manager, newer.chain([1]))
        await until(lambda: manager.epoch("m") == 1)
        assert await stored(manager) == [0] * 12


async def test_blocks_of_a_folder_that_is_lost_are_forgotten_and_explained(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        await put_all(manager)
    async with running(tmp_path) as manager:
        assert await stored(manager) == [8] * 12
        await asyncio.to_thread(shutil.rmtree, tmp_path / "b")
        await until(lambda: manager.stats()["tiers"]["ssd"]["blocks"] == 48)  # type: ignore[index]
        counts = await stored(manager)
        assert sorted(counts) == [0] * 6 + [8] * 6
        assert await fetched(manager) == counts
        lost = CHAINS[counts.index(0)]
        (first, *_) = await manager.why(lost)
        assert (first.tiers, first.reason, first.gone_tier) == ((), MissReason.UNAVAILABLE, "ssd")
        assert manager.stats()["evictions_blocks"]["ssd/lost"] == 48  # type: ignore[index]
        assert manager._state.directory.used_bytes("ssd", SPACE.digest) == 48 * BLOCK_BYTES
        await put_all(manager)
        assert await fetched(manager) == [8] * 12


@pytest.mark.parametrize("is_leased", [False, True])
async def test_a_lost_folder_takes_nothing_from_memory(tmp_path: Path, is_leased: bool) -> None:
    async with running(tmp_path) as manager:
        await put_all(manager)
        owner = manager.new_owner()
        if is_leased:
            await manager.fetch(CHAINS[0], owner=owner, timeout_s=10)
        await asyncio.to_thread(shutil.rmtree, tmp_path / "b")
        await until(lambda: manager.stats()["tiers"]["ssd"]["blocks"] == 48)  # type: ignore[index]
        assert await fetched(manager) == [8] * 12
        manager.release_owner(owner)


async def test_without_any_sound_epochs_what_a_late_folder_brings_is_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, epochs=True) as manager:
        await put_all(manager)
    (tmp_path / "b").chmod(0o777)
    async with running(tmp_path, epochs=True) as manager:
        for name in ("a", "b"):
            (tmp_path / name / "epochs").write_text("damaged")
        (tmp_path / "b").chmod(0o700)
        await until(lambda: len(disks(manager)) == 2)
        await until(lambda: not disks(manager)[1].copies.names)
        assert sorted(await stored(manager)) == [0] * 6 + [8] * 6
        await until(lambda: (tmp_path / "a" / "epochs").read_text() != "damaged")


async def test_blocks_of_a_late_folder_that_contradict_their_namespace_are_dropped(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        await put_all(manager)
    (tmp_path / "b").rename(tmp_path / "b.saved")
    (tmp_path / "b").write_text("")
    async with running(tmp_path) as manager:
        manager._state.directory.shelf(SPACE.digest, None).length_bytes = 4096
        (tmp_path / "b").unlink()
        (tmp_path / "b.saved").rename(tmp_path / "b")
        await until(lambda: len(disks(manager)) == 2)
        await until(lambda: not disks(manager)[1].copies.names)
        manager._state.directory.shelf(SPACE.digest, None).length_bytes = BLOCK_BYTES
        assert sorted(await stored(manager)) == [0] * 6 + [8] * 6
