"""Names that copies are filed under on ssd and in Redis: golden bytes, and what an earlier version left."""

import json
from pathlib import Path

import lmdb
import pytest

from kvstore.epochs import epoch_record_id
from kvstore.key_exchange import erased_record_id, key_record_id
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.manager import BlockManager
from kvstore.tenant import tenant_of
from kvstore.tier import BlockHeader, BlockId, ReadStatus, TierNews, WriteStatus
from kvstore_tiers.dram import DramTier
from kvstore_tiers.remote_session import KeyNames
from kvstore_tiers.sealed import SealedTier
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_array import SsdArray
from kvstore_tiers.ssd_index import SsdIndex, map_size_bytes
from kvstore_tiers.ssd_record import BudgetNote, IndexRecord
from tests.encryption.keys import OneKey
from tests.tiers.remote_calls import until
from tests.tiers.ssd_tiers import CAPACITY, LENGTH, SLOT, disk_bytes, opened, put, statuses

GOLDEN = json.loads((Path(__file__).parent / "golden_names.json").read_text())
BLOCK = BlockId(NamespaceDigest(b"n" * 32), Part(0, 2, 1, 3), BlockKey(b"k" * 32))
HEADER = BlockHeader(BLOCK, BlockKey(b"p" * 32), 7, b"l" * 32, 4096, 0x0123_4567_89AB_CDEF)
TENANT = tenant_of(b"salt")
NAMES = KeyNames("kvstore")


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("record in the clear", IndexRecord(HEADER, 8192, 4096, 5, 6)),
        (
            "record of an encrypted copy",
            IndexRecord(HEADER._replace(seal=bytes(range(56))), 8192, 4096, 5, 6),
        ),
        ("write budget", BudgetNote(1 << 40)),
    ],
)
def test_what_the_index_holds_has_the_golden_bytes(name: str, stored: IndexRecord | BudgetNote) -> None:
    assert [stored.key.hex(), stored.pack().hex()] == GOLDEN["version 2"]["index"][name]


def test_a_new_index_has_the_golden_superblock(tmp_path: Path) -> None:
    index = SsdIndex.open(tmp_path / "index", capacity_bytes=CAPACITY)
    index.load()
    with index._env.begin() as transaction:
        stored = [[key.hex(), value.hex()] for key, value in transaction.cursor()]
    index.close()
    assert stored == [GOLDEN["version 2"]["index"]["superblock"]]


def test_a_block_has_the_golden_name_on_a_server() -> None:
    assert NAMES.of(BLOCK).decode() == GOLDEN["version 2"]["redis name"]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("epoch of m", epoch_record_id("m")),
        ("erased keys of a tenant", erased_record_id(TENANT)),
        ("key 1 of a tenant", key_record_id(TENANT, 1)),
    ],
)
def test_records_that_nodes_share_keep_their_names(name: str, record: BlockId) -> None:
    """An upgraded node hears of epochs and erasures of those that are not, and overwrites their keys."""
    assert NAMES.of(record).decode() == GOLDEN["shared records"][name]


def test_no_block_has_the_name_of_a_shared_record() -> None:
    record = epoch_record_id("m")
    assert NAMES.of(record._replace(namespace=BLOCK.namespace)) != NAMES.of(record)
    assert NAMES.of(record._replace(namespace=BLOCK.namespace)).startswith(b"kvstore:2:")


def write_index_of_version_1(folder: Path, *, add_golden: bool = True) -> int:
    """Turn the index in a folder into one of the first version; returns how many records it holds then."""
    environment = lmdb.open(str(folder / "index"), map_size=map_size_bytes(CAPACITY))
    with environment.begin(write=True) as transaction:
        stored = {key: value for key, value in transaction.cursor() if key.startswith(b"b")}
        for key in stored:
            transaction.delete(key)
        first = {key[:41]: value for key, value in stored.items()}
        golden = GOLDEN["version 1"]["index"]
        pairs = [golden["superblock"], *([golden["record in the clear"]] if add_golden else [])]
        first |= {bytes.fromhex(key): bytes.fromhex(value) for key, value in pairs}
        for key, value in first.items():
            transaction.put(key, value)
    environment.close()
    return len(first) - 1


@pytest.mark.parametrize("is_clean", [True, False])
async def test_copies_of_the_first_version_are_let_go_of_and_counted(tmp_path: Path, is_clean: bool) -> None:
    folder = tmp_path / "a"
    async with opened(folder) as tier:
        await put(tier, *range(10))
    assert write_index_of_version_1(folder) == 11
    if not is_clean:
        (folder / "dirty").touch()

    async with opened(folder) as tier:
        assert tier.take_news() == TierNews(num_foreign=11)
        assert tier.take_news() == TierNews()
        assert await statuses(tier, *range(10)) == [ReadStatus.ABSENT] * 10
        assert (len(await tier.scan()), tier.used_bytes) == (0, 0)
        # All of the slab is there for new blocks, and the disk holds one index.
        whole = range(100, 100 + CAPACITY // SLOT)
        assert await put(tier, *whole) == [WriteStatus.OK] * len(whole)
        assert disk_bytes(folder) <= CAPACITY + map_size_bytes(CAPACITY) + 65536
    async with opened(folder) as tier:
        assert tier.take_news() == TierNews()
        assert await statuses(tier, *whole) == [ReadStatus.OK] * len(whole)


async def test_an_index_of_a_later_version_is_let_go_of_too(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    async with opened(folder) as tier:
        await put(tier, 1)
    environment = lmdb.open(str(folder / "index"), map_size=map_size_bytes(CAPACITY))
    with environment.begin(write=True) as transaction:
        transaction.put(b"s", b"KVSSD\0\0\0\3\0\0\0")
    environment.close()

    async with opened(folder) as tier:
        assert tier.take_news() == TierNews(num_foreign=1)
        assert await statuses(tier, 1) == [ReadStatus.ABSENT]


async def test_encrypted_copies_of_the_first_version_are_counted_on_each_disk(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]

    def tier() -> SealedTier:
        return SealedTier(
            SsdArray([SsdTier(path, capacity_bytes=CAPACITY, is_sealed=True) for path in folders]), OneKey()
        )

    first = tier()
    await first.open()
    await first.close()
    golden = GOLDEN["version 1"]["index"]
    for path in folders:
        environment = lmdb.open(str(path / "index"), map_size=map_size_bytes(CAPACITY))
        with environment.begin(write=True) as transaction:
            for key, value in (golden["superblock"], golden["record of an encrypted copy"]):
                transaction.put(bytes.fromhex(key), bytes.fromhex(value))
        environment.close()

    again = tier()
    await again.open()
    assert again.take_news().num_foreign == 2
    assert again.take_news().num_foreign == 0
    assert (await again.scan(), again.used_bytes) == ([], 0)
    await again.close()


async def test_stats_tell_of_what_was_let_go_of(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1, 2, length=LENGTH)
    write_index_of_version_1(tmp_path / "a", add_golden=False)
    disk = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY)
    manager = BlockManager(DramTier(capacity_bytes=1 << 20), [disk])
    await manager.open()
    try:
        await until(lambda: manager.stats()["evictions_blocks"] == {"ssd/format": 2})
    finally:
        await manager.close()
