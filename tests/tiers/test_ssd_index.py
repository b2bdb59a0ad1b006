"""SsdIndex: what a failed write leaves behind."""

import fcntl
import os
import sys
import time
from pathlib import Path

import lmdb
import pytest

from kvstore.errors import TierUnavailable
from kvstore.tier import WriteStatus
from kvstore_tiers import ssd_check
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_index import Change, IndexRecord, SsdIndex
from tests.tiers.blocks import block_id, header, to_write

CAPACITY = 1 << 20


def break_meta_writes(folder: Path) -> None:
    """Exchange the descriptor that LMDB writes meta pages through (O_DSYNC) for one that cannot write."""
    data = folder / "data.mdb"
    for link in list(Path("/proc/self/fd").iterdir()):
        fd = int(link.name)
        if link.is_symlink() and link.readlink() == data and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC:
            read_only = os.open(data, os.O_RDONLY)
            os.dup2(read_only, fd, inheritable=False)
            os.close(read_only)


def test_an_index_whose_meta_page_could_not_be_written_works_again_once_the_disk_does(tmp_path: Path) -> None:
    index = SsdIndex.open(tmp_path / "index", capacity_bytes=CAPACITY)
    index.load()
    record = IndexRecord(header(1, bytes(4096)), offset=0, slot_bytes=4096, generation=1, recency=1)
    break_meta_writes(tmp_path / "index")
    with pytest.raises(lmdb.Error):
        index.commit([Change.store(record)])
    with pytest.raises(lmdb.PanicError):
        index.commit([Change.store(record)])

    index.commit([Change.store(record)])

    records, damaged = index.load()
    assert (list(records), damaged) == ([record], [])
    index.close()


def test_examining_an_index_for_a_larger_capacity_takes_no_space(tmp_path: Path) -> None:
    SsdIndex.open(tmp_path / "index", capacity_bytes=CAPACITY).close()
    had_bytes = (tmp_path / "index" / "data.mdb").stat().st_size

    assert ssd_check.main([str(tmp_path / "index"), str(1000 * CAPACITY)]) == 0

    assert (tmp_path / "index" / "data.mdb").stat().st_size == had_bytes


async def test_an_index_that_cannot_be_examined_after_a_kill_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ssd"
    first = SsdTier(folder, capacity_bytes=CAPACITY)
    await first.open()
    assert await first.write([to_write(1, 4096)], deadline_s=time.monotonic() + 30) == [WriteStatus.OK]
    await first.close()
    (folder / "dirty").touch()

    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(TierUnavailable, match="could not be examined"):
            await SsdTier(folder, capacity_bytes=CAPACITY).open()

    again = SsdTier(folder, capacity_bytes=CAPACITY)
    await again.open()
    assert [found.block for found in await again.scan()] == [block_id(1)]
    await again.close()
