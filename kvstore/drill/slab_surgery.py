"""Damage to a slab file from outside; slots are found by the bytes of the block they hold."""

import os
import random
from pathlib import Path

import numpy as np

from kvstore.drill.blocks import Bytes, payload_of
from kvstore.keys import BlockKey
from kvstore.tier import ALIGNMENT_BYTES

_PROBE_BYTES = 32


class SlabFile:
    """The slab of one ssd folder. The store may have it open; it reads what was written here."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "slab"

    def find(self, keys: list[BlockKey], length_bytes: int) -> dict[BlockKey, int]:
        """Return the offsets of the slots that hold these blocks, of those that are in one place only."""
        places = self.find_all(keys, length_bytes)
        return {key: found[0] for key, found in places.items() if len(found) == 1}

    def find_all(self, keys: list[BlockKey], length_bytes: int) -> dict[BlockKey, list[int]]:
        """Return every offset where the bytes of these blocks lie, also in slots that are free by now."""
        content = np.frombuffer(self.path.read_bytes(), np.uint8)
        pages = content[: len(content) // ALIGNMENT_BYTES * ALIGNMENT_BYTES].reshape(-1, ALIGNMENT_BYTES)
        heads = pages[:, :_PROBE_BYTES]
        found: dict[BlockKey, list[int]] = {}
        for key in keys:
            places = np.flatnonzero((heads == payload_of(key, length_bytes)[:_PROBE_BYTES]).all(axis=1))
            if len(places):
                found[key] = [int(place) * ALIGNMENT_BYTES for place in places]
        return found

    def flip_bits(self, offset: int, length_bytes: int, *, count: int, rng: random.Random) -> None:
        """Flip random bits of a slot's payload."""
        for _ in range(count):
            place, bit = offset + rng.randrange(length_bytes), 1 << rng.randrange(8)
            (old,) = self._read(place, 1)
            self._write(place, bytes([old ^ bit]))

    def copy(self, source: int, target: int, length_bytes: int) -> None:
        """Copy one slot's payload over another's."""
        self._write(target, self._read(source, length_bytes))

    def swap(self, one: int, other: int, length_bytes: int) -> None:
        """Exchange two slots' payloads."""
        first, second = self._read(one, length_bytes), self._read(other, length_bytes)
        self._write(one, second)
        self._write(other, first)

    def truncate(self, size_bytes: int) -> None:
        """Cut the file."""
        os.truncate(self.path, size_bytes)

    def _read(self, offset: int, length_bytes: int) -> bytes:
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length_bytes, offset)

    def _write(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data, offset)
            os.fsync(file.fileno())


def flip_bits_in_used_pages(path: Path, *, count: int, rng: random.Random) -> None:
    """Flip random bits in those pages of a file that are not all zero."""
    content: Bytes = np.fromfile(path, np.uint8)
    pages = content[: len(content) // ALIGNMENT_BYTES * ALIGNMENT_BYTES].reshape(-1, ALIGNMENT_BYTES)
    used = np.flatnonzero(pages.any(axis=1))
    with path.open("r+b", buffering=0) as file:
        for _ in range(count):
            place = int(used[rng.randrange(len(used))]) * ALIGNMENT_BYTES + rng.randrange(ALIGNMENT_BYTES)
            os.pwrite(file.fileno(), bytes([int(content[place]) ^ 1 << rng.randrange(8)]), place)
        os.fsync(file.fileno())
