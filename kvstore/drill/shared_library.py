"""SharedLibrary: a library this process has loaded, whose calls to other libraries can be led elsewhere.

A library calls functions of others through a table of addresses that the loader fills in (the global offset
table of ELF; System V ABI, chapter 5). Whoever writes another address there is called instead, and no
compiler is needed for that.
"""

import ctypes
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from kvstore.drill.store_process import PartFailed

_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_ELF_HEADER_BYTES = 64
_SEGMENT_BYTES = 56
_SEGMENT_LOAD, _SEGMENT_DYNAMIC = 1, 2
_SYMBOL_BYTES = 24
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class SharedLibrary:
    """One library of this process, by the path it was loaded from."""

    def __init__(self, path: Path) -> None:
        """Find the library's table.

        Raises:
            PartFailed: it is not loaded, or not a 64-bit little-endian ELF file.
        """
        self._base = _base_address(path)
        head = ctypes.string_at(self._base, _ELF_HEADER_BYTES)
        if not head.startswith(_ELF_64_LITTLE):
            raise PartFailed(f"{path}: is not a 64-bit ELF library, its calls cannot be watched")
        segments = list(self._segments(head))
        starts = [address for kind, offset, address, _ in segments if kind == _SEGMENT_LOAD and not offset]
        self._bias = self._base - (starts[0] if starts else 0)
        self._places = self._find_places(self._dynamic(segments))

    def calls(self, name: str) -> bool:
        """Return whether the library calls a function of that name."""
        return name in self._places

    def lead(self, name: str, address: int) -> None:
        """Have the library's calls of a function go to ``address``, which must stay callable for good.

        Raises:
            PartFailed: the system does not let this process write there.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for place in self._places.get(name, ()):
            page = place & ~(mmap.PAGESIZE - 1)
            if libc.mprotect(page, mmap.PAGESIZE, _READ_WRITE):
                raise PartFailed(f"calls of {name} cannot be watched: errno {ctypes.get_errno()}")
            ctypes.c_uint64.from_address(place).value = address

    def _segments(self, head: bytes) -> Iterator[tuple[int, int, int, int]]:
        """Yield kind, offset in the file, address and length of each segment."""
        (table,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        for index in range(count):
            entry = ctypes.string_at(self._base + table + index * size, _SEGMENT_BYTES)
            kind, _, offset, address, _, _, length, _ = struct.unpack("<IIQQQQQQ", entry)
            yield kind, offset, address, length

    def _dynamic(self, segments: list[tuple[int, int, int, int]]) -> dict[int, int]:
        found: dict[int, int] = {}
        for kind, _, address, length in segments:
            if kind == _SEGMENT_DYNAMIC:
                entries = ctypes.string_at(self._bias + address, length)
                for tag, value in struct.iter_unpack("<qQ", entries):
                    found.setdefault(tag, value)
        return found

    def _find_places(self, dynamic: dict[int, int]) -> dict[str, list[int]]:
        symbols, names = self._address(dynamic[_DT_SYMTAB]), self._address(dynamic[_DT_STRTAB])
        places: dict[str, list[int]] = {}
        for table, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
            if table not in dynamic:
                continue
            entries = ctypes.string_at(self._address(dynamic[table]), dynamic[size])
            for offset, info, _ in struct.iter_unpack("<QQq", entries):
                symbol = info >> 32
                if symbol:
                    (at,) = struct.unpack("<I", ctypes.string_at(symbols + symbol * _SYMBOL_BYTES, 4))
                    places.setdefault(ctypes.string_at(names + at).decode(), []).append(self._bias + offset)
        return places

    def _address(self, value: int) -> int:
        """Return an address of the table; some loaders turn them into absolute ones, some do not."""
        return value if value >= self._base else value + self._bias


def _base_address(path: Path) -> int:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == str(path.resolve()) and not int(fields[2], 16):
            return int(fields[0].partition("-")[0], 16)
    raise PartFailed(f"{path}: is not loaded in this process")
