"""SsdIndex: what a failed write leaves behind."""

import fcntl
import os
from pathlib import Path

import lmdb
import pytest

from kvstore_tiers.ssd_index import Change, IndexRecord, SsdIndex
from tests.tiers.blocks import header

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

    assert index.load() == ([record], [])
    index.close()
