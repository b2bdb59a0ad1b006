"""GgufFile: the header, metadata and tensor table of a GGUF file, checked before any tensor is read.

A strict reader of its own: every length is checked against the file's size first, so that a damaged file
ends in one clear line, never in a long loop or an out-of-range read. Format: ggml's docs/gguf.md, versions 2
and 3, little-endian.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore.errors import UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4

MetadataValue = int | float | bool | str | list["MetadataValue"]
"""A value of GGUF metadata."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. ``shape`` is in PyTorch's order (outermost first)."""

    name: str
    shape: tuple[int, ...]
    quant: int
    offset_bytes: int
    length_bytes: int


class GgufFile:
    """An open GGUF file: a context manager; closing it ends the mapping."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self.metadata: dict[str, MetadataValue] = {}
        self.tensors: dict[str, GgufTensor] = {}

    def __enter__(self) -> "GgufFile":
        """Map the file and read its header.

        Raises:
            UnsupportedModel: not readable, no GGUF, an unknown version, cut short or damaged.
        """
        try:
            with self._path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise UnsupportedModel(f"{self._path}: the file is empty: fetch it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{self._path}: cannot be read as a model: {error}") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the mapping. Idempotent."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def tensor_bytes(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return a copy of a tensor's stored bytes, ``[length_bytes]``."""
        assert self._map is not None, "the file is not open"
        stop = tensor.offset_bytes + tensor.length_bytes
        return np.frombuffer(self._map[tensor.offset_bytes : stop], dtype=np.uint8)

    def _read_header(self) -> None:
        assert self._map is not None
        cursor = _Cursor(self._map, self._path)
        if cursor.take(4) != _MAGIC:
            raise UnsupportedModel(f"{self._path}: no GGUF file (its first bytes are not 'GGUF')")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self._path}: GGUF version {version}, expected one of 2, 3 (little-endian)"
            )
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        for _ in range(num_fields):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("I"))
        table = [cursor.tensor_row() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise cursor.damaged(f"alignment {alignment!r}")
        data_start = -(-cursor.offset // alignment) * alignment
        for name, shape, quant, offset in table:
            self.tensors[name] = self._located(name, shape, quant, data_start + offset)

    def _located(self, name: str, shape: tuple[int, ...], quant: int, offset_bytes: int) -> GgufTensor:
        assert self._map is not None
        length = _stored_bytes(shape, quant, where=f"{self._path}: tensor {name}")
        if offset_bytes + length > len(self._map):
            raise UnsupportedModel(
                f"{self._path}: cut short: tensor {name} ends at byte {offset_bytes + length}, "
                f"the file has {len(self._map)}: fetch it again"
            )
        return GgufTensor(name, shape, quant, offset_bytes, length)


class _Cursor:
    """A read position in the header; refuses to pass the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.offset = 0

    def damaged(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path}: damaged: {what} at byte {self.offset}: fetch it again")

    def take(self, count: int) -> bytes:
        stop = self.offset + count
        if stop > len(self._data):
            raise UnsupportedModel(
                f"{self._path}: cut short: its header needs byte {stop}, the file has {len(self._data)}: "
                "fetch it again"
            )
        data = self._data[self.offset : stop]
        self.offset = stop
        return data

    def number(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize(code)))
        return int(value)

    def text(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged("text that is not UTF-8") from error

    def value(self, kind: int, *, is_nested: bool = False) -> MetadataValue:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            (scalar,) = struct.unpack("<" + code, self.take(struct.calcsize(code)))
            return scalar  # type: ignore[no-any-return]  # struct is untyped; the code fixes the type
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and not is_nested:
            return self._array()
        raise self.damaged(f"a metadata value of type {kind}")

    def _array(self) -> list[MetadataValue]:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            data = self.take(count * struct.calcsize(code))
            return list(struct.unpack(f"<{count}{code}", data))
        return [self.value(kind, is_nested=True) for _ in range(count)]

    def tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        dimensions = self.number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name} of {dimensions} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
        if 0 in shape:
            raise self.damaged(f"tensor {name} of shape {list(shape)}")
        return name, shape, self.number("I"), self.number("Q")


def _stored_bytes(shape: tuple[int, ...], quant: int, *, where: str) -> int:
    # gguf costs 0.2 s to import and only GGUF models need it.
    import gguf

    try:
        elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(quant)]
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"{where}: quantisation type {quant} is unknown: update the gguf package"
        ) from error
    if shape[-1] % elements:
        raise UnsupportedModel(f"{where}: damaged: rows of {shape[-1]} elements in blocks of {elements}")
    return math.prod(shape) // elements * int(block_bytes)
