"""Keys beside several ssd folders, of which one comes late."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from kvstore.assembly import assemble
from kvstore.config import Config
from kvstore.miss import MissReason
from kvstore_tiers.sealed import SealedTier
from kvstore_tiers.ssd_array import SsdArray
from tests.encryption.node import ANN, BOB, MASTER, Node, tenant


@contextlib.asynccontextmanager
async def two_disks(folder: Path) -> AsyncIterator[Node]:
    """Run a node over two folders; one that cannot be opened is tried again soon."""
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    (folder / "master").write_text(MASTER)
    tree = {
        "tiers": {
            "dram": {"capacity_bytes": "2MiB", "staging_bytes": 0},
            "ssd": {"path": [str(folder / name) for name in "ab"], "capacity_bytes": "4MiB"},
        },
        "encryption": {"keys": f"file:{folder / 'master'}"},
    }
    store = assemble(Config.from_dict(tree))
    (sealed,) = store.manager._state.lower
    assert isinstance(sealed, SealedTier)
    assert isinstance(sealed.inner, SsdArray)
    sealed.inner._retry_interval_s = 0.05
    await store.manager.open()
    try:
        await store.records.open()
        yield Node(store.manager, store.dram)
        assert await store.manager.check() == []
    finally:
        await store.records.close()
        await store.manager.close()


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold a folder's lock, until told to let go."""
    fd = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield lambda: fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never happened")


def keys_in(folder: Path) -> bytes:
    return (folder / "keys").read_bytes()


async def test_the_keys_are_beside_each_folder(tmp_path: Path) -> None:
    async with two_disks(tmp_path / "n") as one:
        await one.store(ANN, ANN.chain(range(32)))
        assert keys_in(tmp_path / "n" / "a") == keys_in(tmp_path / "n" / "b")


async def test_blocks_of_a_disk_that_comes_late_are_decrypted(tmp_path: Path) -> None:
    chains = [ANN.chain(range(start, start + 4)) for start in range(0, 128, 4)]
    async with two_disks(tmp_path / "n") as one:
        for chain in chains:
            await one.store(ANN, chain)
        assert min(disk.used_bytes for disk in one.disks) > 0
    with in_use(tmp_path / "n" / "b") as let_go:
        async with two_disks(tmp_path / "n") as one:
            assert sum([len(await one.origins(ANN, chain)) for chain in chains]) < len(chains)
            let_go()
            await until(lambda: len(one.disks) == 2)
            await until(lambda: one.lower[0].used_bytes == 8192 * len(chains))
            for chain in chains:
                await until_fetched(one, chain)


async def until_fetched(one: Node, chain: object) -> None:
    for _ in range(200):
        if await one.origins(ANN, chain):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a block of the late disk is not served")


async def test_a_disk_that_missed_an_erasure_forgets_when_it_comes(tmp_path: Path) -> None:
    chains = [ANN.chain(range(start, start + 4)) for start in range(0, 128, 4)]
    async with two_disks(tmp_path / "n") as one:
        for chain in chains:
            await one.store(ANN, chain)
        await one.store(BOB, BOB.chain(range(32)))
    before = keys_in(tmp_path / "n" / "b")
    with in_use(tmp_path / "n" / "b") as let_go:
        async with two_disks(tmp_path / "n") as one:
            report = await one.manager.erase(tenant(ANN))
            assert report.problems == (
                f"{tmp_path / 'n' / 'b' / 'keys'}: its folder is not in use by this store now",
            )
            assert keys_in(tmp_path / "n" / "b") == before
            let_go()
            await until(lambda: len(one.disks) == 2)
            await until(lambda: keys_in(tmp_path / "n" / "b") != before)
            await until(lambda: one.lower[0].used_bytes == 8 * 8192)
            for chain in chains:
                assert (await one.fetch(ANN, chain))[0] == []


async def test_an_erasure_that_only_a_late_disk_knows_of_holds(tmp_path: Path) -> None:
    chain = ANN.chain(range(32))
    async with two_disks(tmp_path / "n") as one:
        await one.store(ANN, chain)
        before = keys_in(tmp_path / "n" / "a")
        await one.manager.erase(tenant(ANN))
    (tmp_path / "n" / "a" / "keys").write_bytes(before)
    with in_use(tmp_path / "n" / "b") as let_go:
        async with two_disks(tmp_path / "n") as one:
            await one.put(ANN, chain)
            assert await one.origins(ANN, chain) == ["dram"] * 8
            let_go()
            await until(lambda: len(one.disks) == 2)
            await until(lambda: one.vault.is_erased(ANN.digest))
            await until(lambda: one.dram.used_bytes == 0)
            await until(lambda: not one.is_clearing)
            assert await one.fetch(ANN, chain) == ([], MissReason.ERASED)
