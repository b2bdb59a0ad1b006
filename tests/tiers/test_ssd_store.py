"""The files below SsdTier: slab without O_DIRECT, full index, damaged index, the check in a child."""

import errno
import os
import time
from pathlib import Path

import lmdb
import pytest

from kvstore.errors import CorruptBlock
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers import ssd_check
from kvstore_tiers.slab import Slab
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_index import Change, IndexRecord, SsdIndex
from kvstore_tiers.ssd_store import SsdStore
from tests.tiers.blocks import block_id, header, payload, to_read, to_write
from tests.tiers.faulty_io import BrokenIO

CAPACITY = 1 << 20


@pytest.fixture
def store(tmp_path: Path):
    made, _ = SsdStore.open(tmp_path / "a", capacity_bytes=CAPACITY, name="ssd", check_timeout_s=30)
    yield made
    made.close([])


def record(number: int, generation: int) -> IndexRecord:
    return IndexRecord(header(number, payload(number, 100)), 4096 * number, 4096, generation, generation)


class FullIndex:
    """An index that refuses the first ``refusals`` transactions that store something."""

    def __init__(self, inner: SsdIndex, refusals: int) -> None:
        self.inner = inner
        self.refusals = refusals

    def commit(self, changes: list[Change]) -> None:
        if self.refusals and any(change.kind == "store" for change in changes):
            self.refusals -= 1
            raise lmdb.MapFullError("full")
        self.inner.commit(changes)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.parametrize(("refusals", "expected"), [(1, WriteStatus.OK), (2, WriteStatus.FULL)])
def test_a_full_index_frees_pages_before_it_gives_up(
    store: SsdStore, refusals: int, expected: WriteStatus
) -> None:
    store.commit([Change.store(record(1, 1))])
    store._index = FullIndex(store._index, refusals)  # type: ignore[assignment]
    outcomes = store.commit([Change.store(record(2, 2)), Change.delete(record(1, 1))])
    assert [outcome.status for outcome in outcomes] == [expected, WriteStatus.OK]
    records, _ = store._index.load()
    assert [found.generation for found in records] == ([2] if expected is WriteStatus.OK else [])


def test_deleting_an_old_copy_leaves_a_newer_record_of_the_block(store: SsdStore) -> None:
    store.commit([Change.store(record(1, 7))])
    store.commit([Change.delete(record(1, 6)), Change.renew(record(1, 6))])
    records, _ = store._index.load()
    assert list(records) == [record(1, 7)]


def test_a_slab_without_direct_io_reads_and_writes_the_same(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "slab", os.O_RDWR | os.O_CREAT)
    slab = Slab(fd, is_direct=False)
    data = memoryview(bytearray(payload(1, 5000)))
    slab.write(4096, data, 5000)
    slab.sync()
    found = memoryview(bytearray(5000))
    slab.read(4096, found, 5000)
    assert found == data
    with pytest.raises(CorruptBlock, match="ends before"):
        slab.read(8192, found, 5000)
    slab.close()


def test_the_check_tells_a_sound_index_from_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SsdIndex.open(tmp_path / "index", capacity_bytes=CAPACITY).close()
    assert ssd_check.main([str(tmp_path / "index"), str(CAPACITY)]) == 0
    (tmp_path / "index" / "data.mdb").write_bytes(b"\xa5" * 65536)
    assert ssd_check.main([str(tmp_path / "index"), str(CAPACITY)]) == ssd_check.EXIT_UNUSABLE
    assert "MDB_INVALID" in capsys.readouterr().err


@pytest.mark.parametrize("is_clean", [True, False])
async def test_an_index_that_is_no_database_is_set_aside(tmp_path: Path, is_clean: bool) -> None:
    (tmp_path / "a" / "index").mkdir(mode=0o700, parents=True)
    (tmp_path / "a").chmod(0o700)
    (tmp_path / "a" / "index" / "data.mdb").write_bytes(b"\xa5" * 65536)
    if not is_clean:
        (tmp_path / "a" / "dirty").touch()
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY)
    await tier.open()
    deadline_s = time.monotonic() + 30
    assert await tier.write([to_write(1, 100)], deadline_s=deadline_s) == [WriteStatus.OK]
    await tier.close()
    assert not (tmp_path / "a" / "index.damaged").exists()
    assert not (tmp_path / "a" / "dirty").exists()


async def test_a_check_that_takes_too_long_counts_as_failed(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY)
    await tier.open()
    await tier.write([to_write(1, 100)], deadline_s=time.monotonic() + 30)
    await tier.close()
    (tmp_path / "a" / "dirty").touch()
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, check_timeout_s=0.001)
    await tier.open()
    (outcome,) = await tier.read([to_read(1, 100)], deadline_s=time.monotonic() + 30)
    assert outcome.status is ReadStatus.ABSENT
    await tier.close()


class DyingStore:
    def __init__(self, inner: SsdStore) -> None:
        self.inner = inner

    def commit(self, changes: list[Change]) -> None:
        raise RuntimeError("a mistake of our own")

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


async def test_a_file_system_that_runs_out_under_the_slab_is_full(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, io=BrokenIO(errno.ENOSPC))
    await tier.open()
    written = await tier.write([to_write(1, 100)], deadline_s=time.monotonic() + 30)
    assert written == [WriteStatus.FULL]
    assert tier.health().is_up
    assert tier.used_bytes == 0
    await tier.close()


async def test_a_commit_that_dies_fails_its_writers_and_not_the_next(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY)
    await tier.open()
    sound, tier._store = tier._store, DyingStore(tier._store)
    deadline_s = time.monotonic() + 30
    assert await tier.write([to_write(1, 100)], deadline_s=deadline_s) == [WriteStatus.UNAVAILABLE]
    tier._store = sound
    assert await tier.write([to_write(1, 100)], deadline_s=deadline_s) == [WriteStatus.OK]
    await tier.drop([block_id(1)])
    assert tier.used_bytes == 0
    await tier.close()
