"""The table of READY blocks: nothing but a whole entry of this table and this era is ever found."""

import errno
import fcntl
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.arena_view import SEALS, open_read_only
from kvstore.errors import ProtocolMismatch
from kvstore.keys import BlockKey
from kvstore.ready_table import (
    BUCKET_BYTES,
    ENTRY_BYTES,
    IN_USE_OFFSET,
    SEALED_BYTES,
    TABLE_SEALS,
    ReadyTable,
    TableFormat,
    bucket_mask,
    entries_at_first,
    places,
    table_bytes,
)
from kvstore.tier import Slot, StorageKey
from kvstore_tiers.dram import DramTier
from kvstore_tiers.ready_listing import ReadyListing

INSTANCE, OTHER = bytes(range(16)), bytes(range(1, 17))
NAME_END = bytes(range(40))
LENGTH = 4096
MASK = bucket_mask(entries_at_first(0))


def key(number: int, bucket: int = 5) -> BlockKey:
    """A key in a bucket of its own choice, as far as keys are made up."""
    at, first = places(bytes(8), NAME_END, MASK)
    # All are looked for first in the first entry of their bucket.
    aim = (at - 4096) // BUCKET_BYTES ^ bucket | (first - at) // ENTRY_BYTES << 61
    return BlockKey(aim.to_bytes(8, "little") + number.to_bytes(24, "little"))


class Table:
    """A listing, and a client's mapping of it."""

    def __init__(self, instance: bytes = INSTANCE) -> None:
        self.now_ns = time.monotonic_ns()
        self.listing = ReadyListing(clock_ns=lambda: self.now_ns)
        self.listing.open(TableFormat.for_arena(0, instance), entries_at_first(0))
        self.reader = ReadyTable.map(self.listing.fd, instance)

    def add(self, number: int, slot: int = 8192, *, bucket: int = 5, payload_sum: int = 7) -> None:
        name = StorageKey(key(number, bucket) + NAME_END)
        self.listing.add_all([(name, Slot(slot), payload_sum, 3)], NAME_END, LENGTH)

    def remove(self, number: int) -> None:
        self.listing.remove(StorageKey(key(number) + NAME_END))

    @property
    def era(self) -> int:
        return self.reader.era(self.now_ns / 1e9)

    def find(
        self, *numbers: int, bucket: int = 5, length_bytes: int = LENGTH
    ) -> list[tuple[int, int, int]] | None:
        keys = [key(number, bucket) for number in numbers]
        return self.reader.find(keys, NAME_END, length_bytes, self.era)

    def scribble(self, data: bytes, offset: int) -> None:
        """Write into the table as only its server can."""
        mapping = self.listing._map
        assert mapping is not None
        mapping[offset : offset + len(data)] = data

    def at(self, *, entry: int = 0, bucket: int = 5) -> int:
        """Where an entry of a bucket is in the file."""
        return 4096 + bucket * BUCKET_BYTES + entry * ENTRY_BYTES


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.listing.close()


def test_a_listed_block_is_found_with_all_that_is_said_of_it(table: Table) -> None:
    table.add(1, slot=12288, payload_sum=2**64 - 1)
    table.add(2, bucket=6)

    assert table.find(1) == [(12288, 3, 2**64 - 1)]
    assert table.find(2, bucket=6) == [(8192, 3, 7)]


def test_a_chain_is_found_as_a_whole_or_not_at_all(table: Table) -> None:
    table.add(1)
    table.add(2)

    assert table.find(1, 2) == [(8192, 3, 7)] * 2
    assert table.find(1, 2, 3) is None


def test_all_blocks_of_a_full_bucket_are_found_and_one_more_takes_a_place(table: Table) -> None:
    eight = range(1, 9)
    for number in eight:
        table.add(number, slot=4096 * number)
    assert [table.find(number) for number in eight] == [[(4096 * number, 3, 7)] for number in eight]

    table.add(9)
    assert table.find(9) is not None
    assert [number for number in eight if table.find(number) is None] == [1]


def test_a_place_that_became_free_is_taken_and_no_block_stands_twice(table: Table) -> None:
    for number in range(1, 9):
        table.add(number)
    table.remove(1)
    table.add(8, slot=12288)
    table.add(9)
    assert table.find(8) == [(12288, 3, 7)]
    assert all(table.find(number) for number in range(2, 10))
    table.remove(8)
    assert table.find(8) is None


def test_entries_of_an_earlier_era_make_room(table: Table) -> None:
    for number in range(1, 9):
        table.add(number)
    table.listing.begin_era()
    for number in range(11, 19):
        table.add(number)
    assert all(table.find(number) for number in range(11, 19))


def test_a_name_that_stands_between_two_entries_is_not_found(table: Table) -> None:
    table.add(1)
    table.scribble(key(2) + NAME_END, table.at(entry=3) + 8)

    assert table.find(2) is None


def test_a_block_that_is_removed_is_not_found_and_the_others_are(table: Table) -> None:
    table.add(1)
    table.add(2)
    table.remove(1)
    table.remove(3)

    assert table.find(1) is None
    assert table.find(2) is not None


def test_a_block_listed_again_stands_in_one_place(table: Table) -> None:
    table.add(1)
    table.add(2)
    table.remove(1)
    table.add(2, slot=4096)
    table.remove(2)

    assert table.find(2) is None


def test_a_block_of_another_length_is_not_found(table: Table) -> None:
    table.add(1)

    assert table.find(1, length_bytes=LENGTH + 1) is None


def test_another_part_of_the_block_is_not_found(table: Table) -> None:
    table.add(1)
    ends = (NAME_END[:7] + bytes([number]) + NAME_END[8:] for number in range(256) if number != NAME_END[7])

    assert not any(table.reader.find([key(1)], end, LENGTH, table.era) for end in ends)


def test_an_earlier_era_is_over_for_whoever_looks_and_whoever_has_looked(table: Table) -> None:
    table.add(1)
    before = table.era
    table.listing.begin_era()

    assert table.find(1) is None
    assert not table.reader.is_of_era(before)
    assert table.reader.is_of_era(table.era)


def test_an_entry_of_an_earlier_era_is_not_found_in_a_later_one(table: Table) -> None:
    table.add(1)
    entry = os.pread(table.listing.fd, ENTRY_BYTES, table.at())
    table.listing.begin_era()
    table.scribble(entry, table.at())

    assert table.find(1) is None


def test_an_entry_of_another_arena_is_not_found(table: Table) -> None:
    other = Table(OTHER)
    other.add(1)
    table.scribble(os.pread(other.listing.fd, ENTRY_BYTES, other.at()), table.at())
    other.listing.close()

    assert table.find(1) is None


def test_a_key_that_stands_before_what_belongs_to_another_is_not_found(table: Table) -> None:
    table.add(1)
    table.scribble(key(2), table.at())

    assert table.find(2) is None


@given(bit=st.integers(0, SEALED_BYTES * 8 - 1))
def test_an_entry_with_a_flipped_bit_is_not_found(bit: int) -> None:
    table = Table()
    table.add(1)
    at = table.at() + bit // 8
    (byte,) = os.pread(table.listing.fd, 1, at)
    table.scribble(bytes([byte ^ 1 << bit % 8]), at)

    assert table.find(1) is None
    table.listing.close()


@given(cut=st.integers(1, SEALED_BYTES - 1))
def test_an_entry_that_is_half_written_is_not_found(cut: int) -> None:
    table = Table()
    table.add(1, slot=4096, payload_sum=1)
    old = os.pread(table.listing.fd, SEALED_BYTES, table.at())
    table.add(1, slot=2**40 - 1, payload_sum=2**64 - 1)
    new = os.pread(table.listing.fd, SEALED_BYTES, table.at())
    mixed = new[:cut] + old[cut:]
    table.scribble(mixed, table.at())

    whole = {old: [(4096, 3, 1)], new: [(2**40 - 1, 3, 2**64 - 1)]}
    assert table.find(1) == whole.get(mixed)
    table.listing.close()


def test_readers_beside_a_writer_find_what_was_written_as_a_whole(table: Table) -> None:
    is_done, wrong, num_found = threading.Event(), list[object](), count()

    def read() -> None:
        while not is_done.is_set():
            for slot, generation, payload_sum in table.find(1) or ():
                next(num_found)
                if generation != 3 or payload_sum != slot * 0x1_0001_0001 & 2**64 - 1:
                    wrong.append((slot, generation, payload_sum))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    slot = 0
    while next(num_found) < 2000:
        slot += 4096
        table.add(1, slot, payload_sum=slot * 0x1_0001_0001 & 2**64 - 1)
        if slot % 65536 == 0:
            table.remove(1)
        if slot % 1048576 == 0:
            table.listing.begin_era()
    is_done.set()
    for reader in readers:
        reader.join()

    assert wrong == []


def test_a_server_that_is_silent_for_a_second_is_not_relied_on(table: Table) -> None:
    table.add(1)
    table.now_ns += 999_000_000
    is_fresh = table.era > 0
    table.now_ns += 2_000_000

    assert is_fresh
    assert table.era == 0
    table.listing.beat()
    assert table.find(1) is not None


def test_a_clock_that_is_another_is_not_relied_on(table: Table) -> None:
    table.listing.beat()
    table.now_ns -= 5_000_000_000

    assert table.era == 0


def test_a_retired_table_is_never_used_again(table: Table) -> None:
    table.add(1)
    table.listing.retire()
    table.listing.beat()
    table.listing.begin_era()

    assert table.era == 0


def test_a_listing_without_memory_lists_nothing() -> None:
    listing = ReadyListing()
    listing.add_all([(StorageKey(key(1) + NAME_END), Slot(0), 1, 1)], NAME_END, 1)
    listing.begin_era()
    listing.close()

    assert listing.listed(StorageKey(key(1) + NAME_END)) is None


@pytest.mark.parametrize(
    ("capacity_bytes", "at_first", "at_most"),
    [
        (0, 1024, 1024),
        (64 << 20, 2048, 32_768),
        (65 << 20, 4096, 65_536),
        (32 << 30, 1 << 20, 1 << 24),
        (1 << 40, 1 << 21, 1 << 24),
    ],
)
def test_there_are_two_entries_for_64_kib_at_first_and_for_4_kib_at_most(
    capacity_bytes: int, at_first: int, at_most: int
) -> None:
    assert entries_at_first(capacity_bytes) == at_first
    assert TableFormat.for_arena(capacity_bytes, INSTANCE).num_entries == at_most
    assert TableFormat.for_arena(capacity_bytes, INSTANCE, may_grow=False).num_entries == at_first


class Growing:
    """A listing that may grow, and a client's mapping of it."""

    def __init__(self, *, room_bytes: int | None = None) -> None:
        self.format = TableFormat.for_arena(64 << 20, INSTANCE)
        self.listing = ReadyListing(room_bytes=lambda: room_bytes)
        self.listing.open(self.format, entries_at_first(64 << 20))
        self.reader = ReadyTable.map(self.listing.fd, INSTANCE)
        self.keys: list[BlockKey] = []

    def fill(self, num_blocks: int) -> bool:
        """List blocks; whether it would help to grow."""
        keys = [BlockKey(os.urandom(32)) for _ in range(num_blocks)]
        self.keys += keys
        self.add(keys)
        return self.listing.wants_to_grow

    def add(self, keys: list[BlockKey]) -> None:
        names = [StorageKey(key + NAME_END) for key in keys]
        self.listing.add_all([(name, Slot(4096), 7, 3) for name in names], NAME_END, LENGTH)

    def grow(self) -> None:
        while self.listing.wants_to_grow:
            self.listing.grow()

    @property
    def era(self) -> int:
        return self.reader.era(time.monotonic())

    def num_found(self) -> int:
        found = [self.reader.find([key], NAME_END, LENGTH, self.era) for key in self.keys]
        return sum(slots is not None for slots in found)

    @property
    def backed_bytes(self) -> int:
        return os.fstat(self.listing.fd).st_blocks * 512


@pytest.fixture
def growing() -> Iterator[Growing]:
    made = Growing()
    yield made
    made.listing.close()


def test_a_table_has_memory_for_what_is_in_use_only(growing: Growing) -> None:
    assert growing.backed_bytes == table_bytes(2048)
    assert os.fstat(growing.listing.fd).st_size == table_bytes(32_768)


def test_where_blocks_lose_their_places_a_table_grows_and_lists_them_all(growing: Growing) -> None:
    assert growing.fill(2048)
    lost = len(growing.keys) - growing.num_found()
    before = growing.era
    growing.listing.grow()
    assert growing.era == before + (not growing.listing.wants_to_grow)
    growing.grow()
    in_new_era = growing.num_found()
    growing.add(growing.keys)

    assert lost > 100
    assert (growing.era, in_new_era) == (before + 1, 0)
    assert growing.num_found() > len(growing.keys) - lost // 2
    assert growing.backed_bytes == table_bytes(4096)


def test_what_a_reader_found_before_a_table_grew_is_of_an_era_that_is_over(growing: Growing) -> None:
    assert growing.fill(2048)
    era = growing.era
    key = next(key for key in growing.keys if growing.reader.find([key], NAME_END, LENGTH, era))
    growing.grow()
    growing.listing.remove(StorageKey(key + NAME_END))

    assert not growing.reader.is_of_era(era)
    assert growing.reader.find([key], NAME_END, LENGTH, growing.era) is None


def test_a_table_that_has_room_does_not_grow(growing: Growing) -> None:
    assert not growing.fill(256)
    growing.listing.grow()
    assert growing.backed_bytes == table_bytes(2048)


def test_a_table_grows_up_to_its_largest_size_and_not_beyond(growing: Growing) -> None:
    while growing.fill(1024) or growing.backed_bytes < table_bytes(32_768):
        growing.grow()

    assert growing.backed_bytes == table_bytes(32_768)
    assert not growing.fill(65_536)


@pytest.mark.parametrize(
    ("room_bytes", "grows"), [(1 << 30, True), ((1 << 20) - 1, False), (0, False), (None, True)]
)
def test_a_table_grows_only_where_there_is_memory_to_spare(room_bytes: int | None, grows: bool) -> None:
    made = Growing(room_bytes=room_bytes)

    assert made.fill(4096) is grows
    made.listing.close()


def test_a_table_for_which_there_is_no_memory_goes_on_as_it_is(
    growing: Growing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no")

    assert growing.fill(2048)
    found = growing.num_found()
    monkeypatch.setattr(os, "posix_fallocate", refuse)

    growing.listing.grow()

    assert not growing.listing.wants_to_grow
    assert growing.num_found() == found
    assert growing.backed_bytes == table_bytes(2048)


@pytest.mark.parametrize(("limit_bytes", "may_grow"), [(resource.RLIM_INFINITY, True), (1 << 40, False)])
async def test_where_address_space_is_limited_a_table_takes_no_more_of_it_than_it_uses(
    limit_bytes: int, may_grow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit_bytes, resource.RLIM_INFINITY))
    tier = DramTier(capacity_bytes=64 << 20)
    await tier.open()
    file_bytes = os.fstat(tier.listing.fd).st_size
    await tier.close()

    assert file_bytes == table_bytes(32_768 if may_grow else 2048)


def test_a_retired_table_does_not_grow(growing: Growing) -> None:
    assert growing.fill(2048)
    growing.listing.retire()
    growing.listing.grow()

    assert growing.backed_bytes == table_bytes(2048)
    assert growing.era == 0


@pytest.mark.parametrize("num_in_use", [0, 1, 7, 1000, 65_536, 1 << 63, 2**64 - 1])
def test_a_number_of_entries_that_cannot_be_has_nothing_found(growing: Growing, num_in_use: int) -> None:
    growing.fill(10)
    mapping = growing.listing._map
    assert mapping is not None
    mapping[IN_USE_OFFSET : IN_USE_OFFSET + 8] = num_in_use.to_bytes(8, "little")

    assert growing.num_found() == 0


def _memfd(data: bytes, *, seals: int = TABLE_SEALS) -> int:
    fd = os.memfd_create("no-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


FORMAT = TableFormat.for_arena(0, INSTANCE)
WHOLE = FORMAT.pack().ljust(FORMAT.total_bytes, b"\0")


@pytest.mark.parametrize(
    ("data", "seals", "message"),
    [
        pytest.param(b"", TABLE_SEALS, "none", id="empty"),
        pytest.param(os.urandom(1 << 16), TABLE_SEALS, "none", id="garbage"),
        pytest.param(WHOLE[:-1], TABLE_SEALS, "does not fit", id="truncated"),
        pytest.param(WHOLE + bytes(ENTRY_BYTES), TABLE_SEALS, "does not fit", id="longer"),
        pytest.param(WHOLE[:8] + b"\1" + WHOLE[9:], TABLE_SEALS, "version 1", id="version"),
        pytest.param(WHOLE[:30] + b"\xff" + WHOLE[31:], TABLE_SEALS, "does not fit", id="damaged"),
        pytest.param(WHOLE, 0, "change its size", id="unsealed"),
        pytest.param(WHOLE, SEALS, "be written", id="writable"),
        pytest.param(
            replace(FORMAT, instance=OTHER).pack().ljust(FORMAT.total_bytes, b"\0"),
            TABLE_SEALS,
            "another arena",
            id="another",
        ),
    ],
)
def test_another_file_is_no_table(data: bytes, seals: int, message: str) -> None:
    fd = _memfd(data, seals=seals)
    try:
        with pytest.raises(ProtocolMismatch, match=message):
            ReadyTable.map(fd, INSTANCE)
    finally:
        os.close(fd)


def test_what_is_no_memfd_is_no_table(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "table").write_bytes(WHOLE)
    with (tmp_path / "table").open("rb") as file, pytest.raises(ProtocolMismatch):
        ReadyTable.map(file.fileno(), INSTANCE)


def test_neither_side_lets_the_table_into_a_core_dump(table: Table) -> None:
    with open("/proc/self/smaps", encoding="ascii") as told:  # noqa: PTH123
        areas = told.read().split("VmFlags:")
    flags = [after.split("\n", 1)[0].split() for at, after in pairwise(areas) if "kvstore-ready" in at]

    assert flags
    assert all("dd" in each for each in flags)


def test_nobody_who_was_sent_the_table_can_write_it(table: Table) -> None:
    sent = open_read_only(table.listing.fd)
    again = os.open(f"/proc/self/fd/{sent}", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(again, b"x", table.at())
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096, flags=mmap.MAP_SHARED)
    finally:
        os.close(again)
        os.close(sent)


def test_entries_of_an_earlier_era_make_room_for_new_ones(table: Table) -> None:
    table.add(1)
    table.add(2)
    table.listing.begin_era()
    table.add(3)
    table.add(4)

    assert table.find(3, 4) is not None
    assert table.listing.listed(StorageKey(key(1) + NAME_END)) is None


def test_a_block_of_an_earlier_era_is_listed_again_in_its_place(table: Table) -> None:
    table.add(1)
    table.listing.begin_era()

    assert table.listing.listed(StorageKey(key(1) + NAME_END)) is None

    table.add(1, slot=12288)

    found = table.listing.listed(StorageKey(key(1) + NAME_END))
    assert found is not None
    assert found[0] == 12288
