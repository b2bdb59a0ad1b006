"""Mappings that huge pages fit into."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import arena_mapping
from kvstore.arena_mapping import HUGE_PAGE_BYTES, map_file, use_huge_pages

SIZE = 2 * HUGE_PAGE_BYTES + 4096


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("mapping", os.MFD_CLOEXEC)
    os.truncate(made, SIZE)
    yield made
    os.close(made)


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def test_a_large_file_is_mapped_where_a_huge_page_may_start(fd: int) -> None:
    mapping, start = map_file(fd, SIZE)
    assert (_address(mapping) + start) % HUGE_PAGE_BYTES == 0
    mapping.close()


def test_a_small_file_is_mapped_as_it_comes(fd: int) -> None:
    mapping, start = map_file(fd, 4096)
    assert (start, len(mapping)) == (0, 4096)
    mapping.close()


def test_two_mappings_are_of_the_same_memory(fd: int) -> None:
    writing, written_at = map_file(fd, SIZE, is_writable=True, is_prefaulted=True)
    reading, read_at = map_file(fd, SIZE)
    writing[written_at + SIZE - 4 : written_at + SIZE] = b"last"
    assert reading[read_at + SIZE - 4 : read_at + SIZE] == b"last"
    with pytest.raises(TypeError):
        reading[read_at] = 1
    writing.close()
    reading.close()


def test_a_file_is_mapped_all_the_same_where_its_place_cannot_be_chosen(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> object:
        raise OSError("no")

    monkeypatch.setattr(arena_mapping, "_map_aligned", refuse)
    mapping, start = map_file(fd, SIZE)
    assert (start, len(mapping)) == (0, SIZE)
    mapping.close()


def test_as_many_huge_pages_are_made_as_the_kernel_has(fd: int) -> None:
    huge_bytes = use_huge_pages(fd, SIZE)
    assert huge_bytes in {0, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES}
    assert use_huge_pages(fd, 4096) == 0
    assert os.pread(fd, 4, SIZE - 4) == bytes(4)


def test_a_kernel_that_makes_none_is_no_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_mapping, "_MADV_COLLAPSE", 12345)
    assert use_huge_pages(fd, SIZE) == 0


def test_a_file_that_cannot_be_mapped_gets_none() -> None:
    read_end, write_end = os.pipe()
    assert use_huge_pages(read_end, SIZE) == 0
    os.close(read_end)
    os.close(write_end)
