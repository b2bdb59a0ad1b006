"""The arena, seen from the server and from a client."""

import fcntl
import mmap
import os
import resource
import socket
from pathlib import Path

import numpy as np
import pytest

from kvstore.arena_view import ArenaView
from kvstore.errors import InvalidRequest, ProtocolMismatch, TierFull, TierUnavailable
from kvstore_tiers.arena import Arena
from kvstore_tiers.dram import DramTier

MIB = 1 << 20


@pytest.fixture
def arena():
    made = Arena.create(MIB)
    yield made
    made.close()


def test_a_client_reads_what_the_server_wrote_through_a_descriptor_sent_over_a_socket(arena: Arena) -> None:
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(here, [b"x"], [arena.fd])
        _, (fd,), _, _ = socket.recv_fds(there, 1, 1)
    client = ArenaView.map(fd)
    os.close(fd)
    offset = arena.view.format.slots_offset + 8192
    arena.view.slot(offset, 4)[:] = b"kvkv"
    assert bytes(client.slot(offset, 4)) == b"kvkv"
    assert client.slot(offset, 4).readonly
    assert client.instance == arena.instance
    assert arena.view.advance_generation(offset) == 1
    assert client.generation(offset) == 1
    client.close()


def test_a_read_only_descriptor_cannot_be_mapped_for_writing(arena: Arena) -> None:
    fd = arena.open_read_only()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    ArenaView.map(fd).close()
    os.close(fd)


def test_the_size_of_an_arena_is_final(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 10), (4096, 4096), (8192, MIB + 1), (MIB + 8192, 1), (-1, 1), (8192, -1)]
)
def test_no_slot_outside_the_slot_space_is_lent(arena: Arena, offset: int, length: int) -> None:
    assert arena.view.format.slots_offset == 8192
    with pytest.raises(InvalidRequest):
        arena.view.slot(offset, length)
    with pytest.raises(InvalidRequest):
        arena.view.memory([8192, offset], length)


@pytest.mark.parametrize("offset", [0, 4096, 8193, MIB + 8192, -4096])
def test_no_generation_outside_the_slot_space_is_read(arena: Arena, offset: int) -> None:
    with pytest.raises(InvalidRequest):
        arena.view.generation(offset)


@pytest.mark.parametrize("count", [1, 63, 64, 200])
def test_generations_of_however_many_slots_rise_by_one_and_begin_anew(arena: Arena, count: int) -> None:
    view = arena.view
    offsets = [view.format.slots_offset + 4096 * (at * 37 % 256) for at in range(count)]
    table = np.frombuffer(view._generations, np.uint32)
    table[:] = 2**32 - 2

    view.advance_generations(offsets)
    assert view.generations(offsets) == [2**32 - 1] * count
    view.advance_generations(offsets)

    assert view.generations(offsets) == [view.generation(offset) for offset in offsets] == [0] * count
    assert (table == 2**32 - 2).sum() == len(table) - count
    reader = ArenaView.map(arena.fd)
    assert reader.generations(tuple(offsets)) == [0] * count
    reader.close()
    with pytest.raises(InvalidRequest, match="closed"):
        reader.generations(offsets)


def test_views_outlive_a_close(arena: Arena) -> None:
    view = ArenaView.map(arena.fd)
    kept = np.frombuffer(view.slot(8192, 4096), dtype=np.uint8)
    memory = view.memory([8192], 4096)
    view.close()
    view.close()
    assert kept.sum() == 0
    assert not any(memory[8192:12288])
    with pytest.raises(InvalidRequest, match="closed"):
        view.slot(8192, 1)


def test_what_is_no_arena_is_refused() -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(ProtocolMismatch, match="not sealed"):
        ArenaView.map(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(ProtocolMismatch, match="no arena"):
        ArenaView.map(fd)
    os.close(fd)


def test_a_header_that_does_not_fit_its_file_is_refused(arena: Arena) -> None:
    os.pwrite(arena.fd, b"\xff", 20)
    with pytest.raises(ProtocolMismatch, match="does not fit"):
        ArenaView.map(arena.fd)


def test_more_than_the_machine_has_is_refused_with_amount_limit_and_remedy() -> None:
    with pytest.raises(TierUnavailable, match=r"arena of \d+ MiB is wanted, \d+ MiB .*: lower the capacity"):
        Arena.create(1 << 45)


def test_more_than_a_process_limit_is_refused_by_its_name() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(TierUnavailable, match="file size limit"):
            Arena.create(4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_arena_may_be_locked_in_memory() -> None:
    arena = Arena.create(65536, is_locked=True)
    locked = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmLck" in line]
    arena.close()
    assert int(locked[0].split()[1]) >= 64


def test_more_than_may_be_locked_is_refused_by_its_name() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        with pytest.raises(TierUnavailable, match=r"may be locked: raise it \(ulimit -l\)"):
            Arena.create(MIB, is_locked=True)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


async def test_loads_find_room_in_staging_when_the_rest_is_taken() -> None:
    tier = DramTier(capacity_bytes=6 * 65536, staging_bytes=2 * 65536)
    await tier.open()
    assert tier.capacity_bytes == 6 * 65536
    taken = tier.allocate(65536, 6)
    with pytest.raises(TierFull, match="are kept for staging"):
        tier.allocate(65536)
    assert tier.has_staging_room(65536, 2)
    staged = tier.allocate_staging(65536, 2)
    assert not tier.has_staging_room(65536)
    with pytest.raises(TierFull):
        tier.allocate_staging(65536)
    tier.free(taken[:2])
    assert not tier.has_room(65536)
    tier.free(staged)
    assert tier.has_room(65536, 2)
    await tier.close()


async def test_a_slot_cannot_be_lent_with_more_bytes_than_it_has() -> None:
    tier = DramTier(capacity_bytes=MIB)
    await tier.open()
    slots = tier.allocate(4096)
    with pytest.raises(AssertionError, match="has 4096 bytes"):
        async with tier.writing(slots, 4097):
            pass
    await tier.close()
