"""WriteLog and power losses: what was synced stays, anything else may go, nothing else appears."""

import random
from pathlib import Path

import pytest

from kvstore.drill.write_log import WriteLog, lose_power, num_at_risk, read_log

PAGE = 4096
OLD, NEW = b"\xaa" * PAGE, b"\xbb" * PAGE


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    (folder / "index").mkdir(parents=True)
    (folder / "slab").write_bytes(OLD * 4)
    (folder / "index" / "data.mdb").write_bytes(OLD * 2)
    return folder


def after_losses(base: Path, log: Path, name: str, *, cut: int | None = None) -> set[bytes]:
    """Return every content that the first page of a file had after fifty power losses."""
    found = set()
    for seed in range(50):
        lose_power(base, base.parent / "after", read_log(log)[:cut], random.Random(seed))
        found.add((base.parent / "after" / name).read_bytes()[:PAGE])
    return found


def test_what_was_noted_is_read_back(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "log")
    log.note_write("slab", PAGE, [memoryview(b"ab"), memoryview(b"c")], is_durable=False)
    log.note_sync("slab", num_covered=1)
    log.close()

    write, sync = read_log(tmp_path / "log")

    assert (write.name, write.offset, write.data, write.is_sync) == ("slab", PAGE, b"abc", False)
    assert (sync.name, sync.is_sync, sync.num_covered) == ("slab", True, 1)
    assert sync.end_bytes == (tmp_path / "log").stat().st_size


def test_a_record_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "log")
    for _ in range(2):
        log.note_write("slab", 0, [memoryview(NEW)], is_durable=False)
    log.close()
    data = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(data[:-1])

    assert len(read_log(tmp_path / "log")) == 1


def test_a_synced_write_is_never_lost(tmp_path: Path, base: Path) -> None:
    log = WriteLog(tmp_path / "log")
    log.note_write("slab", 0, [memoryview(NEW)], is_durable=False)
    log.note_sync("slab", num_covered=1)

    assert after_losses(base, tmp_path / "log", "slab") == {NEW}


def test_a_write_through_a_descriptor_that_syncs_is_never_lost(tmp_path: Path, base: Path) -> None:
    log = WriteLog(tmp_path / "log")
    log.note_write("index/data.mdb", 0, [memoryview(NEW)], is_durable=True)

    assert after_losses(base, tmp_path / "log", "index/data.mdb") == {NEW}


def test_an_unsynced_write_may_be_there_lost_or_torn_at_sectors(tmp_path: Path, base: Path) -> None:
    log = WriteLog(tmp_path / "log")
    log.note_write("slab", 0, [memoryview(NEW)], is_durable=False)

    found = after_losses(base, tmp_path / "log", "slab")

    assert {OLD, NEW} < found
    assert all(page[at : at + 512] in (OLD[:512], NEW[:512]) for page in found for at in range(0, PAGE, 512))


@pytest.mark.parametrize(("name", "num_covered"), [("index/data.mdb", 1), ("slab", 0)])
def test_a_sync_covers_only_its_own_file_and_what_had_ended_before(
    tmp_path: Path, base: Path, name: str, num_covered: int
) -> None:
    log = WriteLog(tmp_path / "log")
    log.note_write("slab", 0, [memoryview(NEW)], is_durable=False)
    log.note_sync(name, num_covered=num_covered)

    assert OLD in after_losses(base, tmp_path / "log", "slab")


def test_nothing_is_there_of_writes_after_the_power_went(tmp_path: Path, base: Path) -> None:
    log = WriteLog(tmp_path / "log")
    log.note_sync("slab", num_covered=0)
    log.note_write("slab", 0, [memoryview(NEW)], is_durable=True)

    assert after_losses(base, tmp_path / "log", "slab", cut=1) == {OLD}


def test_at_risk_is_what_no_sync_covers(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "log")
    for _ in range(3):
        log.note_write("slab", 0, [memoryview(NEW)], is_durable=False)
    log.note_write("index/data.mdb", 0, [memoryview(NEW)], is_durable=True)
    log.note_sync("slab", num_covered=1)
    log.close()

    assert num_at_risk(read_log(tmp_path / "log")) == 2
