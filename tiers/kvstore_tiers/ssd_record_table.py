"""RecordTable: the records of an index at a start, checked all at once and unpacked one by one when needed.

A hundred thousand records are read, checked and filed while a store starts. So the checks run over columns
(NumPy), and what passes them stays in its stored form until somebody asks for the record. An index holds
copies in the clear or encrypted ones, never both.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidLayout
from kvstore.layout import Part
from kvstore.tier import ALIGNMENT_BYTES
from kvstore_tiers.ssd_record import (
    NAME_IN_RECORD,
    PLAIN_FORM,
    RECORD_KEY_BYTES,
    RECORD_PREFIX,
    SEALED_FORM,
    IndexRecord,
    RecordForm,
    name_in,
    unpack_sound,
)

_FIELDS_OF_HEADER = [
    ("start", "<u8"),
    ("length_bytes", "<u4"),
    ("key", "V32"),
    ("part", "<u8"),
    ("namespace", "V32"),
    ("parent", "V32"),
    ("layout", "V32"),
    ("depth", "<u4"),
    ("payload_sum", "<u8"),
]
_PLACE = [
    ("offset", "<u8"),
    ("slot_bytes", "<u4"),
    ("generation", "<u8"),
    ("recency", "<u8"),
    ("sum", "<u8"),
]


def _row(form: RecordForm) -> np.dtype[np.void]:
    rest = form.header_bytes - np.dtype(_FIELDS_OF_HEADER).itemsize
    return np.dtype([*_FIELDS_OF_HEADER, ("rest_of_header", f"V{rest}"), *_PLACE])


_ROWS = {form: _row(form) for form in (PLAIN_FORM, SEALED_FORM)}

Rows = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]


class RecordTable(Sequence[IndexRecord]):
    """Sound records, least recently used first.

    ``values`` are their stored forms, all of one ``form``; ``rows`` is the same as a structured array of
    shape ``[records]``.
    """

    def __init__(self, values: list[bytes], rows: Rows, form: RecordForm = PLAIN_FORM) -> None:
        self.values = values
        self._rows = rows
        self._form = form

    @classmethod
    def of(cls, stored: Mapping[bytes, bytes]) -> tuple["RecordTable", list[bytes]]:
        """Return the sound ones among records stored by key, and the keys of damaged ones.

        The record's checksum covers the header with its own, which need not be taken again.
        """
        whole: Mapping[bytes, bytes] = stored
        sizes = set(map(len, stored.values()))
        form = SEALED_FORM if SEALED_FORM.record_bytes in sizes else PLAIN_FORM
        if sizes - {form.record_bytes} or set(map(len, stored)) - {RECORD_KEY_BYTES}:
            whole = {
                key: value
                for key, value in stored.items()
                if len(value) == form.record_bytes and len(key) == RECORD_KEY_BYTES
            }
        keys, values = list(whole), list(whole.values())
        rows = np.frombuffer(b"".join(values), dtype=_ROWS[form])
        sound = _sound(keys, values, rows, form)
        damaged = [key for key in stored if key not in whole] if whole is not stored else []
        damaged += [keys[index] for index in np.flatnonzero(~sound)]
        return cls(values, rows, form)._take(_by_recency(rows, np.flatnonzero(sound))), damaged

    @overload
    def __getitem__(self, index: int) -> IndexRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[IndexRecord]: ...

    def __getitem__(self, index: int | slice) -> IndexRecord | list[IndexRecord]:
        if isinstance(index, slice):
            return [unpack_sound(value) for value in self.values[index]]
        return unpack_sound(self.values[index])

    def __len__(self) -> int:
        return len(self.values)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where the slots begin, ``[records]``."""
        return self._rows["offset"].astype(np.int64)

    @property
    def slot_bytes(self) -> npt.NDArray[np.int64]:
        """Sizes of the slots, ``[records]``."""
        return self._rows["slot_bytes"].astype(np.int64)

    @property
    def highest_number(self) -> int:
        """The highest recency or generation; 0 without records."""
        if not self.values:
            return 0
        return max(int(self._rows["recency"].max()), int(self._rows["generation"].max()))

    def without_overlaps(self, limit_bytes: int) -> tuple["RecordTable", list[bytes]]:
        """Return the records that can all be true, and the keys of the rest.

        Slots beyond ``limit_bytes`` have no bytes, and of two that overlap the older goes.
        """
        starts = self._rows["offset"]
        # In two steps: a sum with an offset near the end of its range would begin anew at zero.
        fits = starts <= limit_bytes
        fits[fits] = (starts[fits] + self._rows["slot_bytes"][fits]) <= limit_bytes
        order = np.flatnonzero(fits)
        order = order[np.argsort(starts[order], kind="stable")]
        begins, ends = starts[order], starts[order] + self._rows["slot_bytes"][order]
        if (ends[:-1] > begins[1:]).any():
            order = _newest_of_overlapping(order, begins, ends, self._rows["generation"][order])
        elif len(order) == len(self):
            return self, []
        lost = np.ones(len(self), dtype=np.bool_)
        lost[order] = False
        lost_keys = [RECORD_PREFIX + name_in(self.values[index]) for index in np.flatnonzero(lost)]
        return self._take(_by_recency(self._rows, order)), lost_keys

    def _take(self, indexes: npt.NDArray[np.intp]) -> "RecordTable":
        size = self._form.record_bytes
        rows = self._rows.view(np.uint8).reshape(-1, size).take(indexes, axis=0)
        # Cut from one piece of memory in their order: who walks them later does not jump about in it.
        data = rows.tobytes()
        values = [data[start : start + size] for start in range(0, len(data), size)]
        return RecordTable(values, rows.reshape(-1).view(_ROWS[self._form]), self._form)


def _by_recency(rows: Rows, indexes: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    return indexes[np.argsort(rows["recency"][indexes], kind="stable")]


def _sound(keys: Sequence[bytes], values: Sequence[bytes], rows: Rows, form: RecordForm) -> Mask:
    """Say of each record of the right size whether it is whole, possible, and under its own key."""
    sums = np.fromiter(
        map(xxhash.xxh3_64_intdigest, [value[: form.summed_bytes] for value in values]),
        np.uint64,
        len(values),
    )
    names = rows.view(np.uint8).reshape(-1, form.record_bytes)[:, NAME_IN_RECORD]
    filed = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, RECORD_KEY_BYTES)
    lengths, slots = rows["length_bytes"].astype(np.int64), rows["slot_bytes"].astype(np.int64)
    sound: Mask = (rows["sum"] == sums) & (rows["start"] == int.from_bytes(form.start, "little"))
    sound &= (filed[:, 0] == RECORD_PREFIX[0]) & (names == filed[:, 1:]).all(axis=1)
    sound &= (slots > 0) & (slots == -(-lengths // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    sound &= rows["offset"] % ALIGNMENT_BYTES == 0
    impossible = [part for part in set(rows["part"].tolist()) if not _is_part(part)]
    return sound & ~np.isin(rows["part"], np.array(impossible, dtype=np.uint64))


def _is_part(number: int) -> bool:
    try:
        Part.unpack(number.to_bytes(8, "little"))
    except InvalidLayout:
        return False
    return True


def _newest_of_overlapping(
    order: npt.NDArray[np.intp],
    begins: npt.NDArray[np.uint64],
    ends: npt.NDArray[np.uint64],
    generations: npt.NDArray[np.uint64],
) -> npt.NDArray[np.intp]:
    """Of slots in the order of their place keep those that no newer one overlaps."""
    kept: list[int] = []
    places: Iterable[tuple[int, int, int]] = zip(
        begins.tolist(), ends.tolist(), generations.tolist(), strict=True
    )
    slots = list(places)
    for index, (begin, _, generation) in enumerate(slots):
        while kept and slots[kept[-1]][1] > begin:
            if slots[kept[-1]][2] > generation:
                break
            kept.pop()
        else:
            kept.append(index)
    return order[kept]
