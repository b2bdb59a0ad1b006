"""ArenaView: a mapping of the shared arena, and the arena's format.

    page 0    header: magic, version, sizes, the instance that made it, xxh3-64 over the fields before it
    pages     generations: one u32 in this machine's order per 4096 bytes of slot space
    pages     slot space; a slot is named by its byte offset in the arena, its generation is that of its
              first 4096 bytes

The server creates the arena and is the only one that writes the header and the generations. A client maps
the file descriptor it was sent. The file is sealed against a change of size, so that a mapping stays valid.
"""

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.arena_mapping import map_file
from kvstore.checksum import checksum
from kvstore.errors import InvalidRequest, ProtocolMismatch
from kvstore.tier import ALIGNMENT_BYTES

GENERATION_BYTES = 4
"""Size of one entry of the generation table."""

INSTANCE_BYTES = 16
"""Size of the random id that tells one arena from its successor after a restart."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals every arena carries: its size is final."""

_MANY_SLOTS = 64
"""From so many on NumPy looks up their generations sooner than a loop does: measured, 2 cores."""

_MAGIC = b"KVARENA\0"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQQQ16s")
_HEADER_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ArenaFormat:
    """Where things lie in one arena. All offsets and sizes are multiples of 4096 bytes."""

    capacity_bytes: int
    instance: bytes

    @property
    def generations_offset(self) -> int:
        """Offset of the generation table."""
        return ALIGNMENT_BYTES

    @property
    def slots_offset(self) -> int:
        """Offset of the slot space."""
        table = self.capacity_bytes // ALIGNMENT_BYTES * GENERATION_BYTES
        return ALIGNMENT_BYTES + -(-table // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def total_bytes(self) -> int:
        """Size of the whole arena."""
        return self.slots_offset + self.capacity_bytes

    def pack(self) -> bytes:
        """Return the stored header."""
        fields = _HEADER.pack(
            _MAGIC,
            _VERSION,
            ALIGNMENT_BYTES,
            self.total_bytes,
            self.generations_offset,
            self.slots_offset,
            self.capacity_bytes,
            self.instance,
        )
        return fields + _HEADER_SUM.pack(checksum(fields))

    @classmethod
    def unpack(cls, data: bytes, *, file_bytes: int) -> "ArenaFormat":
        """Return the format stored in the first page of an arena of ``file_bytes``.

        Raises:
            ProtocolMismatch: not an arena, another version, or sizes that do not agree.
        """
        fields = data[: _HEADER.size]
        if len(data) < _HEADER.size + _HEADER_SUM.size or not fields.startswith(_MAGIC):
            raise ProtocolMismatch("arena: the file that was sent is no arena")
        _, version, page, total, generations, slots, capacity, instance = _HEADER.unpack(fields)
        if version != _VERSION or page != ALIGNMENT_BYTES:
            raise ProtocolMismatch(f"arena: format version {version}, expected {_VERSION}")
        (stored_sum,) = _HEADER_SUM.unpack_from(data, _HEADER.size)
        made = cls(capacity, instance)
        is_sound = capacity % ALIGNMENT_BYTES == 0 and stored_sum == checksum(fields)
        placed = (made.generations_offset, made.slots_offset, made.total_bytes)
        if not is_sound or (generations, slots, total) != placed or total != file_bytes:
            raise ProtocolMismatch(f"arena: the header does not fit its file of {file_bytes} bytes")
        return made


def open_read_only(fd: int) -> int:
    """Return a new descriptor of an arena that cannot be mapped for writing; the caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class ArenaView:
    """A mapping of an arena. Views it lends stay valid until dropped, also after ``close``."""

    def __init__(
        self, mapping: mmap.mmap, start: int, arena_format: ArenaFormat, *, is_writable: bool
    ) -> None:
        self.format = arena_format
        self._map = mapping
        total_bytes = arena_format.total_bytes
        self._bytes: memoryview | None = memoryview(mapping)[start : start + total_bytes]
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8, total_bytes, start)
        self._slots_offset = arena_format.slots_offset
        self._total_bytes = arena_format.total_bytes
        self._num_pages = arena_format.capacity_bytes // ALIGNMENT_BYTES
        first = arena_format.generations_offset
        table = self._bytes[first : first + self._num_pages * GENERATION_BYTES]
        self._generations: memoryview | None = table.cast("I")
        self._all_generations = np.frombuffer(self._generations, np.uint32)
        self._is_writable = is_writable

    @classmethod
    def map(cls, fd: int, *, is_writable: bool = False, is_prefaulted: bool = False) -> "ArenaView":
        """Map the arena behind a file descriptor; the descriptor stays the caller's.

        Raises:
            ProtocolMismatch: it is no arena of this version, or could change size under the mapping.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolMismatch(f"arena: the file that was sent is no memfd: {error.strerror}") from error
        if seals & SEALS != SEALS:
            raise ProtocolMismatch("arena: the file that was sent is not sealed against a change of size")
        file_bytes = os.fstat(fd).st_size
        arena_format = ArenaFormat.unpack(os.pread(fd, ALIGNMENT_BYTES, 0), file_bytes=file_bytes)
        try:
            mapping, start = map_file(fd, file_bytes, is_writable=is_writable, is_prefaulted=is_prefaulted)
            # Blocks are prompts: no core dump of server or client holds them.
            mapping.madvise(mmap.MADV_DONTDUMP)
        except OSError as error:
            raise ProtocolMismatch(
                f"arena: {file_bytes} bytes cannot be mapped: {error.strerror}: "
                "raise the limit on address space (ulimit -v)"
            ) from error
        return cls(mapping, start, arena_format, is_writable=is_writable)

    @property
    def instance(self) -> bytes:
        """Random id of this arena (16 bytes); another one after a restart of the server."""
        return self.format.instance

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slot space."""
        return self.format.capacity_bytes

    @property
    def is_writable(self) -> bool:
        """Whether it is mapped for writing too."""
        return self._is_writable

    @property
    def address(self) -> int:
        """Address of the arena's first byte in this process, for registration with a device."""
        assert self._bytes is not None, "arena: the view is closed"
        return int(np.frombuffer(self._bytes, dtype=np.uint8).ctypes.data)

    def slot(self, offset: int, length_bytes: int) -> memoryview:
        """Return the bytes of a slot in place; read-only unless the arena is mapped writable.

        Raises:
            InvalidRequest: the range does not lie in the slot space.
        """
        view = self._bytes
        if view is None:
            raise InvalidRequest("arena: the view is closed")
        self._check_range(offset, length_bytes)
        return view[offset : offset + length_bytes]

    def slot_array(self, offset: int, length_bytes: int) -> npt.NDArray[np.uint8]:
        """As ``slot``, as an array ``[length_bytes]`` of uint8.

        Raises:
            InvalidRequest: the range does not lie in the slot space.
        """
        array = self._array
        if array is None:
            raise InvalidRequest("arena: the view is closed")
        self._check_range(offset, length_bytes)
        return array[offset : offset + length_bytes]

    def slot_arrays(self, offsets: Sequence[int], length_bytes: int) -> list[npt.NDArray[np.uint8]]:
        """As ``slot_array``, of several slots.

        Raises:
            InvalidRequest: a range does not lie in the slot space.
        """
        array = self._array
        if array is None:
            raise InvalidRequest("arena: the view is closed")
        self._check_ranges(offsets, length_bytes)
        return [array[offset : offset + length_bytes] for offset in offsets]

    def memory(self, offsets: Sequence[int], length_bytes: int) -> memoryview:
        """Return the bytes of the whole arena, in which several slots lie at their offsets.

        Raises:
            InvalidRequest: a range does not lie in the slot space.
        """
        view = self._bytes
        if view is None:
            raise InvalidRequest("arena: the view is closed")
        self._check_ranges(offsets, length_bytes)
        return view[:]  # of its own, so that it outlives ``close``

    def generation(self, offset: int) -> int:
        """Return the generation of the slot at ``offset``: it grows when the slot is allocated or freed.

        Raises:
            InvalidRequest: the offset is not that of a slot.
        """
        table = self._generations
        if table is None:
            raise InvalidRequest("arena: the view is closed")
        generation: int = table[self._page(offset)]
        return generation

    def generations(self, offsets: Sequence[int]) -> list[int]:
        """Return the generation of the slot at each of several offsets, which are those of slots."""
        array, table, start = self._all_generations, self._generations, self._slots_offset
        if table is None:
            raise InvalidRequest("arena: the view is closed")
        if len(offsets) < _MANY_SLOTS:
            return [table[(offset - start) // ALIGNMENT_BYTES] for offset in offsets]
        found: list[int] = array[self._pages(offsets)].tolist()
        return found

    def advance_generation(self, offset: int) -> int:
        """Raise the generation of the slot at ``offset`` by one (modulo 2**32) and return it."""
        table = self._generations
        assert table is not None, "arena: the view is closed"
        assert self._is_writable, "arena: not mapped writable"
        page = self._page(offset)
        raised: int = (table[page] + 1) & 0xFFFF_FFFF
        table[page] = raised
        return raised

    def advance_generations(self, offsets: Sequence[int]) -> None:
        """As ``advance_generation``, of several slots, each once."""
        table, start = self._generations, self._slots_offset
        assert table is not None, "arena: the view is closed"
        assert self._is_writable, "arena: not mapped writable"
        if len(offsets) >= _MANY_SLOTS:
            self._all_generations[self._pages(offsets)] += 1
            return
        for offset in offsets:
            page = (offset - start) // ALIGNMENT_BYTES
            table[page] = (table[page] + 1) & 0xFFFF_FFFF

    def close(self) -> None:
        """Let go of the mapping; it goes when the last view that a caller kept is dropped. Idempotent."""
        self._array = self._generations = None
        self._all_generations = np.zeros(0, np.uint32)
        view, self._bytes = self._bytes, None
        if view is None:
            return
        with contextlib.suppress(BufferError):
            view.release()
            self._map.close()
        del self._map

    def _check_ranges(self, offsets: Sequence[int], length_bytes: int) -> None:
        if offsets:
            self._check_range(min(offsets), length_bytes)
            self._check_range(max(offsets), length_bytes)

    def _check_range(self, offset: int, length_bytes: int) -> None:
        if length_bytes < 0 or not self._slots_offset <= offset <= self._total_bytes - length_bytes:
            raise InvalidRequest(
                f"arena: slot at {offset} of {length_bytes} bytes lies outside "
                f"{self._slots_offset}..{self._total_bytes}"
            )

    def _pages(self, offsets: Sequence[int]) -> npt.NDArray[np.int64]:
        return (np.array(offsets, np.int64) - self._slots_offset) // ALIGNMENT_BYTES

    def _page(self, offset: int) -> int:
        page, rest = divmod(offset - self._slots_offset, ALIGNMENT_BYTES)
        if rest or not 0 <= page < self._num_pages:
            raise InvalidRequest(f"arena: {offset} is not the offset of a slot")
        return page
