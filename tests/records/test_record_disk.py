"""Records on a disk that is killed, full, damaged, slow or taken away: none is lost, and none is wrong."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore import KVStore
from kvstore.drill.mounted_disk import MountedDisk, mount_obstacle
from kvstore.drill.store_process import StoreProcess, StoreSettings
from kvstore.errors import TierUnavailable
from kvstore.records import RecordAbsence, RecordOutcome
from kvstore_tiers.record_change import Change, DiskFault, DiskFull
from kvstore_tiers.record_disk import RecordDisk, map_size_bytes
from tests.record_kit import ANN, BOB, MIB, Kit, Store

NUMBERS = range(12)


def value_of(number: int, version: int) -> bytes:
    return random.Random(number * 1000 + version).randbytes(3000 + 97 * version)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def data_file(kit: Kit) -> Path:
    assert kit.folder is not None
    return kit.folder / "a" / "index" / "data.mdb"


MayHold = dict[int, set[int | None]]
"""Versions that a record may have; None: there may be none."""


def write_and_kill(folder: Path, round_: int, lines: int, may_hold: MayHold) -> None:
    """Have a process put records until it has said so many lines, and kill it."""
    words = [sys.executable, "-m", "tests.records.record_writer", str(folder), str(round_)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for count, line in enumerate(writer.stdout):
            word, number, version = line.split()
            if word == "ack":
                may_hold[int(number)] = {int(version)}
            else:
                may_hold[int(number)].add(int(version))
            if count >= lines:
                writer.kill()
    assert writer.returncode == -signal.SIGKILL


async def test_what_was_acknowledged_survives_kills_in_the_middle_of_writes(tmp_path: Path) -> None:
    may_hold: MayHold = {number: {None} for number in NUMBERS}
    dice = random.Random(5)
    for round_ in range(12):
        write_and_kill(tmp_path / "a", round_, dice.randrange(1, 60), may_hold)
        async with Kit(tmp_path).store() as store:
            for number, versions in may_hold.items():
                allowed = [None if version is None else value_of(number, version) for version in versions]
                assert await store.value(f"n{number}") in allowed
            assert store.events["corrupt"] == 0


async def test_a_restart_finds_every_record(kit: Kit) -> None:
    async with kit.store() as store:
        for number in NUMBERS:
            await store.set(f"n{number}", value_of(number, 1))
        await store.remove("n3")
        used_bytes = store.stats()["used_bytes"]

    async with kit.store() as store:
        assert [await store.value(f"n{number}") for number in NUMBERS] == [
            None if number == 3 else value_of(number, 1) for number in NUMBERS
        ]
        assert store.stats()["used_bytes"] == used_bytes


async def test_writers_who_wait_share_a_commit(kit: Kit) -> None:
    async with kit.store() as store:
        await asyncio.gather(*(store.set(f"n{number}", b"x") for number in range(200)))

        assert store.events["commits"] < 50


async def test_values_that_grow_and_shrink_never_fill_the_file(kit: Kit) -> None:
    kit.capacity_bytes = kit.quota_bytes = 4 * MIB
    dice = random.Random(3)
    async with kit.store() as store:
        for _ in range(1500):
            name, size = f"n{dice.randrange(40)}", dice.choice([10, 5_000, 60_000, 300_000])
            write = await store.set(name, bytes(size))
            assert write.outcome in (RecordOutcome.STORED, RecordOutcome.QUOTA), write

        assert data_file(kit).stat().st_size <= map_size_bytes(4 * MIB)


@pytest.mark.parametrize("seed", range(6))
async def test_flipped_bits_make_records_absent_and_never_wrong(kit: Kit, seed: int) -> None:
    dice = random.Random(seed)
    async with kit.store() as store:
        for number in NUMBERS:
            await store.set(f"n{number}", value_of(number, 1))
    sound = data_file(kit).read_bytes()
    used = sound.rstrip(b"\0")
    for _ in range(8):
        damaged = bytearray(sound)
        for _ in range(4):
            damaged[dice.randrange(len(used))] ^= 1 << dice.randrange(8)
        data_file(kit).write_bytes(damaged)
        (data_file(kit).parents[1] / "dirty").touch()
        async with kit.store() as store:
            for number in NUMBERS:
                found = await store.value(f"n{number}")
                assert found in (value_of(number, 1), None)
            assert (await store.set("new", b"x")).is_stored
        shutil.rmtree(data_file(kit).parent)
        data_file(kit).parent.mkdir()


async def test_a_record_whose_bytes_are_damaged_is_counted_and_makes_room(kit: Kit) -> None:
    value = b"\xa5" * 9000
    async with kit.store() as store:
        await store.set("n", value, 0)
        data = bytearray(data_file(kit).read_bytes())
        at = data.index(value[:5000])
        data[at + 4000] ^= 1
        with data_file(kit).open("r+b") as file:
            file.seek(at)
            file.write(data[at : at + 8192])

        assert (await store.look("n")).reason is RecordAbsence.CORRUPT
        assert (await store.look("n")).reason is RecordAbsence.CORRUPT
        assert store.events["corrupt"] == 1
        assert (await store.set("n", b"anew", 0)).is_stored


@pytest.mark.parametrize("how", ["garbage", "truncated", "empty"])
async def test_a_file_that_cannot_be_read_is_set_aside_and_kept(kit: Kit, how: str) -> None:
    async with kit.store() as store:
        for number in NUMBERS:
            await store.set(f"n{number}", value_of(number, 1))
    data = data_file(kit).read_bytes()
    data_file(kit).write_bytes(
        {"garbage": os.urandom(len(data)), "truncated": data[:20_000], "empty": b""}[how]
    )
    folder = data_file(kit).parents[1]
    (folder / "dirty").touch()

    async with kit.store() as store:
        found = [await store.value(f"n{number}") for number in NUMBERS]
        assert set(found) <= {None}
        assert (await store.set("n", b"x")).is_stored
    assert how == "empty" or (folder / "index.damaged" / "data.mdb").exists()


class Troubled:
    """A disk whose commits do as a test says."""

    def __init__(self, inner: RecordDisk) -> None:
        self.inner = inner
        self.before: Exception | None = None
        self.after: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.has_committed = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()

    def read(self, key: bytes) -> bytes | None:
        return self.inner.read(key)

    def commit(self, changes: Sequence[Change]) -> None:
        self.gate.wait()
        if self.before is not None:
            raise self.before
        self.inner.commit(changes)
        self.has_committed.set()
        self.may_return.wait()
        if self.after is not None:
            raise self.after

    def close(self, *, is_clean: bool) -> None:
        self.inner.close(is_clean=is_clean)


def troubled(store: Store) -> Troubled:
    local = store.truth.local
    disk = Troubled(local._disk)
    local._disk = disk
    return disk


@pytest.mark.parametrize("when", ["before", "after"])
async def test_after_a_failed_commit_the_disk_says_what_holds(kit: Kit, when: str) -> None:
    async with kit.store() as store:
        first = await store.set("n", b"1")
        setattr(troubled(store), when, DiskFault("it failed"))

        write = await store.set("n", b"2", first.version)
        with pytest.raises(TierUnavailable):
            await store.look("n")
        kit.clock.moved_s += 1
        record = (await store.look("n")).record

        assert (write.outcome, write.is_doubtful) == (RecordOutcome.UNAVAILABLE, True)
        assert record is not None
        assert record.value == (b"1" if when == "before" else b"2")
        assert (await store.set("n", b"3", record.version)).is_stored
        assert store.events["faults"] == 1


async def test_a_read_while_a_put_is_on_disk_but_not_known_yet_forgets_no_record(kit: Kit) -> None:
    async with kit.store() as store:
        await store.set("n", b"1")
        disk = troubled(store)
        disk.may_return.clear()
        putting = asyncio.create_task(store.set("n", b"2"))
        await asyncio.to_thread(disk.has_committed.wait)

        looking = asyncio.create_task(store.value("n"))
        await store.truth.local._reads.run(lambda: None)  # it has read
        await asyncio.sleep(0)
        disk.may_return.set()

        assert (await putting).is_stored
        assert await looking == b"2"
        assert store.events["corrupt"] == 0
    async with kit.store() as store:
        assert await store.value("n") == b"2"


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_record_put_while_an_older_one_expires_stays(kit: Kit, is_first: bool) -> None:
    async with kit.store() as store:
        await store.set("n", b"1", ttl_s=60)
        kit.clock.moved_s += 100
        calls = [store.set("n", b"2"), store.truth.sweep()]

        await asyncio.gather(*(calls if is_first else reversed(calls)))

        assert await store.value("n") == b"2"
    async with kit.store() as store:
        assert await store.value("n") == b"2"


async def test_a_commit_without_room_changes_nothing_and_the_next_may_go(kit: Kit) -> None:
    async with kit.store() as store:
        await store.set("n", b"1")
        disk = troubled(store)
        disk.before = DiskFull("no room")

        write = await store.set("n", b"2")
        disk.before = None

        assert (write.outcome, write.is_doubtful) == (RecordOutcome.FULL, False)
        assert await store.value("n") == b"1"
        assert (await store.set("n", b"3")).is_stored


async def test_a_disk_that_hangs_holds_no_caller_and_no_close(kit: Kit) -> None:
    store = kit.store()
    await store.open()
    await store.set("n", b"1")
    disk = troubled(store)
    disk.gate.clear()

    write = await store.set("n", b"2", timeout_s=0.1)
    assert (write.outcome, write.is_doubtful) == (RecordOutcome.UNAVAILABLE, True)
    assert await store.value("n") == b"1"
    async with asyncio.timeout(60):
        await store.close()
    disk.gate.set()


async def test_a_folder_that_was_deleted_is_seen_at_the_next_put_and_made_anew(kit: Kit) -> None:
    async with kit.store() as store:
        await store.set("n", b"1")
        shutil.rmtree(data_file(kit).parents[1])

        write = await store.set("m", b"1")
        kit.clock.moved_s += 1

        assert write.outcome is RecordOutcome.UNAVAILABLE
        assert await store.value("n") is None
        assert (await store.set("m", b"2")).is_stored
        assert data_file(kit).exists()


async def test_a_folder_in_use_makes_records_unavailable_until_it_is_free(kit: Kit) -> None:
    async with kit.store() as first:
        await first.set("n", b"1")
        second = kit.store()
        await second.open()

        write = await second.set("n", b"2")
        assert write.outcome is RecordOutcome.UNAVAILABLE
        assert "in use by process" in write.problem
        with pytest.raises(TierUnavailable, match="in use by process"):
            await second.look("n")
    kit.clock.moved_s += 10

    assert await second.value("n") == b"1"
    await second.close()


async def test_records_in_the_clear_stay_when_encryption_is_switched_on_and_get_encrypted(kit: Kit) -> None:
    async with kit.store() as store:
        writes = [await store.set(f"name-{number}", b"a secret" * 100) for number in range(100)]
        await store.set("gone-name", b"a secret" * 100)
        await store.remove("gone-name")
    kit.is_sealed = True

    async with kit.store() as store:
        record = (await store.look("name-7")).record
        assert record is not None
        assert (record.value, record.version) == (b"a secret" * 100, writes[7].version)
        assert len(await store.listed()) == 100
        assert (await store.set("name-8", b"new", writes[8].version)).is_stored
        while store.stats()["sealed_records"] != 100 or not is_free_of(kit, b"a secret", b"name-"):
            await store.truth.sweep()
            kit.clock.moved_s += 20

        record = (await store.look("name-7")).record
        assert record is not None
        assert (record.value, record.version) == (b"a secret" * 100, writes[7].version)
        assert (await store.set("name-7", b"next", record.version)).is_stored
    async with kit.store() as store:
        assert await store.value("name-7") == b"next"
        assert await store.value("name-9") == b"a secret" * 100
        assert len(await store.listed()) == 100
        assert await store.check(sample_records=1000) == []


def is_free_of(kit: Kit, *texts: bytes) -> bool:
    files = [path for path in data_file(kit).parents[1].rglob("*") if path.is_file()]
    return not any(text in path.read_bytes() for path in files for text in texts)


async def test_encrypted_records_stay_when_encryption_is_switched_off_and_on_again(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    kit.is_sealed = True
    async with kit.store() as store:
        first = await store.set("n", b"a secret")
    kit.is_sealed = False
    async with kit.store() as store:
        assert (await store.look("n")).reason is RecordAbsence.UNREADABLE
        assert store.stats()["sealed_records"] == 1
        write = await store.set("n", b"x", 0)
        assert (write.outcome, write.version) == (RecordOutcome.CONFLICT, first.version)
        assert "encrypted" in write.problem
        assert (await store.set("m", b"in the clear")).is_stored
    assert "1 of 1 are encrypted" in caplog.text
    kit.is_sealed = True

    async with kit.store() as store:
        assert await store.value("n") == b"a secret"
        assert await store.value("m") == b"in the clear"


async def test_an_erasure_takes_records_from_before_encryption_with_it(kit: Kit) -> None:
    async with kit.store() as store:
        await store.set("n", b"a secret")
        await store.set("n", b"another's", salt=BOB)
    kit.is_sealed = True
    async with kit.store() as store:
        await store.set("m", b"sealed")
        tenant, key_ids = kit.keys.erase(ANN)

        assert await store.erase(tenant, key_ids) == (2, [])
        assert await store.value("n") is None
        assert await store.value("n", salt=BOB) == b"another's"


async def test_interrupted_scrubbing_loses_nothing_and_is_done_later(kit: Kit) -> None:
    async with kit.store() as store:
        await store.set("n", b"a secret")
    folder = data_file(kit).parents[1]
    (folder / "index.new").mkdir()
    (folder / "index.new" / "data.mdb").write_bytes(b"a secret")
    (folder / "index" / "data.old").write_bytes(b"a secret")
    kit.is_sealed = True

    async with kit.store() as store:
        while not is_free_of(kit, b"a secret"):
            await store.truth.sweep()
            kit.clock.moved_s += 20

        assert await store.value("n") == b"a secret"


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_lower_capacity_removes_no_record_and_takes_no_more(
    kit: Kit, is_clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kit.capacity_bytes = kit.quota_bytes = 64 * MIB
    async with kit.store() as store:
        for number in range(40):
            assert (await store.set(f"n{number}", bytes([number]) * MIB)).is_stored
    if not is_clean:
        (data_file(kit).parents[1] / "dirty").touch()
    kit.capacity_bytes = 2 * MIB

    async with kit.store() as store:
        assert "none is removed" in caplog.text
        assert store.stats()["over_bytes"] > 38 * MIB
        for number in range(40):
            assert await store.value(f"n{number}") == bytes([number]) * MIB
        assert (await store.set("new", b"x")).outcome is RecordOutcome.FULL
        assert (await store.set("n0", b"smaller")).is_stored
        for number in range(1, 40):
            assert await store.remove(f"n{number}")
        assert store.stats()["over_bytes"] == 0
        assert (await store.set("new", b"x")).is_stored


async def test_on_disk_nothing_of_an_encrypted_record_can_be_read(kit: Kit) -> None:
    kit.is_sealed = True
    async with kit.store() as store:
        await store.set("name-of-a-session", b"a secret" * 100)

        data = data_file(kit).read_bytes()

    assert b"a secret" not in data
    assert b"name-of-a" not in data


async def test_a_full_disk_refuses_puts_and_serves_what_is_there(tmp_path: Path) -> None:
    obstacle = mount_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    disk = MountedDisk(tmp_path / "disk", 48 * MIB)
    settings = StoreSettings(ssd_bytes=4 * MIB, ssd_folder=disk.folder / "ssd")
    store = StoreProcess(tmp_path, settings)
    try:
        store.start(prefix=disk.prefix)
        with KVStore.connect(store.socket_path, timeout_s=20) as client:
            for number in range(5):
                assert client.put_record("c", f"n{number}", value_of(number, 1)).is_stored
            disk.fill_up()
            writes = [client.put_record("c", f"x{number}", bytes(900_000)) for number in range(20)]
            outcomes = [write.outcome for write in writes]

            assert outcomes[-1] is RecordOutcome.FULL
            assert set(outcomes) <= {RecordOutcome.STORED, RecordOutcome.FULL}
            for number in range(5):
                record = client.get_record("c", f"n{number}")
                assert record is not None
                assert record.value == value_of(number, 1)
            assert client.drop_record("c", "n0")
            disk.empty()
            assert client.put_record("c", "after", bytes(900_000)).is_stored
        store.kill()
        store.start(prefix=disk.prefix)
        with KVStore.connect(store.socket_path, timeout_s=20) as client:
            kept = {info.name for info in client.list_records("c")}
            assert kept == {
                *(f"n{number}" for number in range(1, 5)),
                *(f"x{at}" for at, outcome in enumerate(outcomes) if outcome is RecordOutcome.STORED),
                "after",
            }
    finally:
        store.kill()
        disk.close()
