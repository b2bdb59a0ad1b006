"""WriteLog: what a store wrote to its disk, in order, and which folder a power loss would leave of it.

A disk keeps what a finished sync of that file covers, and what was written through a descriptor that syncs by
itself. Of anything else it may keep any sectors of 512 bytes, in any order: the model of Zheng et al.,
'Understanding the Robustness of SSDs under Power Fault' (FAST 2013), without dead disks. Names of files are
kept: none comes or goes while a store runs.
"""

import os
import random
import shutil
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = struct.Struct("<BBHQQQ")
_WRITE, _SYNC = 1, 2
_SECTOR_BYTES = 512
_WHOLE_CHANCE = 0.3
_SECTOR_CHANCES = (0.0, 0.5, 0.9)


class WriteLog:
    """Appends to a log file. A record is in it before the operation is told to have ended. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self.num_records = 0

    def note_write(self, name: str, offset: int, parts: Sequence[memoryview], *, is_durable: bool) -> None:
        """Note that these bytes were written to a file of that name."""
        length = sum(part.nbytes for part in parts)
        text = name.encode()
        self._append([_HEAD.pack(_WRITE, is_durable, len(text), offset, length, 0), text, *parts])

    def note_sync(self, name: str, *, num_covered: int) -> None:
        """Note that a file was synced; ``num_covered`` is ``num_records`` from when that began."""
        text = name.encode()
        self._append([_HEAD.pack(_SYNC, 0, len(text), 0, 0, num_covered), text])

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _append(self, parts: Sequence[bytes | memoryview]) -> None:
        with self._lock:
            os.writev(self._fd, parts)
            self.num_records += 1


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """One record. ``end_bytes`` is how long the log was with it; a sync has no ``data``."""

    name: str
    offset: int
    data: bytes
    end_bytes: int
    is_sync: bool
    is_durable: bool
    num_covered: int


def read_log(path: Path) -> list[WriteRecord]:
    """Return the records of a log; one that the writer's death cut off is left out."""
    data = path.read_bytes()
    records: list[WriteRecord] = []
    at = 0
    while at + _HEAD.size <= len(data):
        kind, is_durable, name_length, offset, length, covered = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size + name_length
        at = start + length
        if at > len(data):
            break
        name = data[start - name_length : start].decode()
        content = data[start:at]
        records.append(WriteRecord(name, offset, content, at, kind == _SYNC, bool(is_durable), covered))
    return records


def num_at_risk(records: Sequence[WriteRecord]) -> int:
    """Return how many of these writes a power loss after the last record may undo."""
    pairs = zip(records, _kept(records), strict=True)
    return sum(not (record.is_sync or is_kept) for record, is_kept in pairs)


def lose_power(base: Path, target: Path, records: Sequence[WriteRecord], rng: random.Random) -> int:
    """Make ``target`` what a power loss after these records may leave of the folder that was ``base``.

    Returns how many writes are lost, in whole or in part.
    """
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(base, target)
    is_kept = _kept(records)
    chance, num_lost = rng.choice(_SECTOR_CHANCES), 0
    for record, is_safe in zip(records, is_kept, strict=True):
        if record.is_sync:
            continue
        sectors = range(0, len(record.data), _SECTOR_BYTES)
        is_whole = is_safe or rng.random() < _WHOLE_CHANCE
        kept = [at for at in sectors if is_whole or rng.random() < chance]
        num_lost += len(kept) < len(sectors)
        _write(target / record.name, record, kept)
    return num_lost


def _kept(records: Sequence[WriteRecord]) -> list[bool]:
    """Return of each record whether no power loss after the last one can undo it."""
    kept = [record.is_durable for record in records]
    for record in records:
        if record.is_sync:
            for index in range(record.num_covered):
                kept[index] |= records[index].name == record.name
    return kept


def _write(path: Path, record: WriteRecord, places: Sequence[int]) -> None:
    with path.open("r+b", buffering=0) as file:
        for at in places:
            os.pwrite(file.fileno(), record.data[at : at + _SECTOR_BYTES], record.offset + at)
