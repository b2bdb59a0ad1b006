"""Moving payload bytes between arena slots and a caller's buffers, checksum in the same pass.

Everything here blocks for the time of the copies and, but for small blocks, releases the GIL while it copies;
it may run on any thread. ``should_stop`` is asked before each block that is read and each MiB that is
written, so that an abandoned transfer ends soon: one whose connection is lost writes into slots that are not
its own any more.
"""

import enum
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.checksum import (
    SMALL_BYTES,
    SOURCE_STEP_BYTES,
    RunningChecksum,
    as_bytes_array,
    checksum,
    copy_array_with_checksum,
    copy_array_with_source_checksum,
    copy_arrays_in,
    copy_bytes,
    copy_small_in,
    copy_small_out,
)
from kvstore.errors import InvalidRequest, ProtocolMismatch
from kvstore.messages import FilledSlots, LentSlot, ReadySlot, WrittenSlot

Buffer: TypeAlias = Any
"""Contiguous memory of a block: bytes, bytearray, memoryview, a NumPy array, a torch CPU tensor, or anything
else with the buffer protocol. Any: Python 3.11 has no type for the buffer protocol, torch is not imported."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Flat view of a buffer, ``[length_bytes]``, uint8, on the CPU."""


class SlotReader(Protocol):
    """An arena as readers see it."""

    def slot(self, offset: int, length_bytes: int) -> memoryview:
        """Return the slot's bytes in place."""

    def slot_array(self, offset: int, length_bytes: int) -> Bytes:
        """Return the slot's bytes in place, as an array."""

    def slot_arrays(self, offsets: Sequence[int], length_bytes: int) -> list[Bytes]:
        """As ``slot_array``, of several slots."""

    def memory(self, offsets: Sequence[int], length_bytes: int) -> memoryview:
        """Return memory in which several slots lie at their offsets."""

    def generation(self, offset: int) -> int:
        """Return the slot's generation."""

    def generations(self, offsets: Sequence[int]) -> list[int]:
        """Return the generation of each of several slots, which lie in the arena."""


GROUP_BYTES = 256 << 10
"""Small blocks are copied so many bytes at a time, between looks at their generations and at the time."""

_U8 = np.dtype(np.uint8)


def byte_view(buffer: Buffer, what: str, index: int | None = None) -> Bytes:
    """Return a flat uint8 array over a buffer's memory, read-only if the buffer is.

    Raises:
        InvalidRequest: no buffer, not contiguous, or not on the CPU: named ``what``, or ``what[index]``.
    """
    try:
        return _byte_view(buffer)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:  # the last is torch's
        name = what if index is None else f"{what}[{index}]"
        raise InvalidRequest(f"{name}: {type(buffer).__name__} is no contiguous buffer: {error}") from error


def _byte_view(buffer: Buffer) -> Bytes:
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("it is not C-contiguous: pass numpy.ascontiguousarray()")
        return as_bytes_array(buffer)
    if hasattr(buffer, "untyped_storage"):
        return _tensor_view(buffer)
    return np.frombuffer(buffer, dtype=np.uint8)


def split_buffers(buffers: Buffer, *, length_bytes: int, count: int, what: str) -> list[Bytes]:
    """Return one flat view of ``length_bytes`` per block, for ``count`` blocks.

    ``buffers`` is a sequence with one buffer per block, or one buffer that holds all blocks back to back.

    Raises:
        InvalidRequest: the number or the size of the buffers is not what the chain needs.
    """
    if isinstance(buffers, (list, tuple)):
        if len(buffers) != count:
            raise InvalidRequest(f"{what}: {len(buffers)} buffers for {count} blocks")
        # Most are arrays of flat bytes, and nothing else needs to be known of them: 0.14 us each.
        is_flat = [
            type(buffer) is np.ndarray
            and buffer.dtype is _U8
            and buffer.strides == (1,)
            and len(buffer) == length_bytes
            for buffer in buffers
        ]
        if False not in is_flat:
            return list(buffers)
        return [_block_view(buffer, length_bytes, what, index) for index, buffer in enumerate(buffers)]
    whole = byte_view(buffers, what)
    if len(whole) != count * length_bytes:
        raise InvalidRequest(
            f"{what}: {len(whole)} bytes, expected {count} blocks of {length_bytes} bytes back to back"
        )
    return [whole[start : start + length_bytes] for start in range(0, len(whole), length_bytes)]


def _block_view(buffer: Buffer, length_bytes: int, what: str, index: int) -> Bytes:
    view = byte_view(buffer, what, index)
    if len(view) != length_bytes:
        raise InvalidRequest(
            f"{what}[{index}]: {len(view)} bytes, expected {length_bytes} (one block or part)"
        )
    return view


def require_writable(views: Sequence[Bytes], what: str) -> None:
    """Raise InvalidRequest if one of the buffers is read-only."""
    for index, view in enumerate(views):
        if not view.flags.writeable:
            raise InvalidRequest(f"{what}[{index}]: the buffer is read-only, blocks are written into it")


class ReadEnd(enum.Enum):
    """How reading slots ended."""

    ALL = "all"
    STOPPED = "stopped"
    STALE = "stale"
    DAMAGED = "damaged"


def read_slots(
    arena: SlotReader, slots: Sequence[ReadySlot], buffers: Sequence[Bytes], should_stop: Callable[[], bool]
) -> tuple[int, ReadEnd]:
    """Copy leased slots into buffers; returns how many leading blocks arrived whole, and why not more.

    A block arrived whole if the slot's generation is still the leased one after the copy (else STALE: a
    lease that ended meanwhile may have let another block's bytes in) and its checksum is right (else
    DAMAGED).

    Raises:
        ProtocolMismatch: the server named a slot that is none; blocks before it may have been copied.
    """
    try:
        return _read_slots(arena, slots, buffers, should_stop)
    except InvalidRequest as error:
        raise ProtocolMismatch(f"answer: {error}") from error


def _read_slots(
    arena: SlotReader, slots: Sequence[ReadySlot], buffers: Sequence[Bytes], should_stop: Callable[[], bool]
) -> tuple[int, ReadEnd]:
    assert len(slots) == len(buffers), "one buffer per slot"
    length_bytes = len(buffers[0]) if slots else 0
    step = _group_blocks(length_bytes)
    for start in range(0, len(slots), step):
        if should_stop():
            return start, ReadEnd.STOPPED
        offsets, leased, expected = zip(*slots[start : start + step], strict=True)
        targets = buffers[start : start + step]
        if length_bytes <= SMALL_BYTES:
            found = copy_small_out(targets, arena.memory(offsets, length_bytes), offsets, length_bytes)
        else:
            found = list(map(copy_array_with_checksum, targets, arena.slot_arrays(offsets, length_bytes)))
        num_current = _num_equal(arena.generations(offsets), leased)
        num_right = _num_equal(found, expected)
        if min(num_current, num_right) < len(offsets):
            end = ReadEnd.DAMAGED if num_right < num_current else ReadEnd.STALE
            return start + min(num_current, num_right), end
    return len(slots), ReadEnd.ALL


def _group_blocks(length_bytes: int) -> int:
    return max(1, GROUP_BYTES // max(1, length_bytes))


class SumsAhead:
    """Sums of a request's first payloads, taken while the server looks for slots: as many as a step has.

    The payloads are in a cache then, and copying them is the faster for it. ``whole`` has the sums of whole
    payloads by position, ``begun`` that of the first step of a longer first one. Used for one writing only.
    """

    def __init__(self, payloads: Sequence[Bytes]) -> None:
        self.whole: dict[int, int] = {}
        self.begun: RunningChecksum | None = None
        self._payloads = payloads

    def begin(self) -> None:
        """Take them. Releases the GIL for each."""
        left_bytes = SOURCE_STEP_BYTES
        for position, payload in enumerate(self._payloads):
            left_bytes -= len(payload)
            if left_bytes < 0:
                break
            self.whole[position] = checksum(payload)
        if self._payloads and not self.whole:
            self.begun = RunningChecksum()
            self.begun.add(self._payloads[0][:SOURCE_STEP_BYTES])


def write_slots(
    arena: SlotReader,
    slots: Sequence[LentSlot],
    payloads: Sequence[Bytes],
    should_stop: Callable[[], bool],
    *,
    expected: Sequence[int] | None = None,
    ahead: SumsAhead | None = None,
) -> list[WrittenSlot]:
    """Copy payloads into lent slots; returns the leading ones, which may be committed.

    A slot whose generation changed is left alone: it is no longer ours. The checksum is the payload's own,
    not that of the bytes in the slot, so what a stale writer stores there meanwhile is found by every reader.
    ``expected`` are the payloads' xxh3-64 as their owner knows them; one with another is not to be stored.
    ``ahead`` has summed what the slots' positions name, as far as it came.

    Raises:
        ProtocolMismatch: the server lent a slot that is none.
    """
    if not slots:
        return []
    positions, offsets, generations = zip(*slots, strict=True)
    places = _Places(positions, offsets, generations)
    digests = _write(arena, places, payloads, should_stop, expected, ahead or SumsAhead(()))
    return list(map(WrittenSlot._make, zip(positions, offsets, generations, digests, strict=False)))


def fill_slots(
    arena: SlotReader,
    slots: Sequence[tuple[int, int]],
    payloads: Sequence[Bytes],
    should_stop: Callable[[], bool],
    *,
    expected: Sequence[int] | None = None,
) -> FilledSlots:
    """As ``write_slots``, of slots that were lent before it was known for which blocks: one per payload."""
    if not slots:
        return FilledSlots()
    offsets, generations = zip(*slots, strict=True)
    places = _Places(range(len(slots)), offsets, generations)
    digests = _write(arena, places, payloads, should_stop, expected, SumsAhead(()))
    return FilledSlots(offsets[: len(digests)], generations[: len(digests)], tuple(digests))


class _Places(NamedTuple):
    """Lent slots: positions of their blocks, where they are, in which generation."""

    positions: Sequence[int]
    offsets: Sequence[int]
    generations: Sequence[int]


def _write(
    arena: SlotReader,
    places: _Places,
    payloads: Sequence[Bytes],
    should_stop: Callable[[], bool],
    expected: Sequence[int] | None,
    ahead: SumsAhead,
) -> list[int]:
    """Copy payloads; returns the sums of the leading ones that were copied whole, and are as expected."""
    assert len(places.offsets) == len(payloads), "one payload per slot"
    step = _group_blocks(len(payloads[0]))
    digests: list[int] = []
    try:
        for start in range(0, len(payloads), step):
            if should_stop():
                break
            group, sources = places, payloads
            if step < len(payloads):
                group = _Places._make([column[start : start + step] for column in places])
                sources = payloads[start : start + step]
            found = _write_group(arena, group, sources, should_stop, ahead)
            if expected is not None:
                found = found[: _num_equal(found, expected[start : start + len(found)])]
            digests += found
            if len(found) < len(group.offsets):
                break
    except InvalidRequest as error:
        raise ProtocolMismatch(f"answer: {error}") from error
    return digests


def _write_group(
    arena: SlotReader,
    places: _Places,
    payloads: Sequence[Bytes],
    should_stop: Callable[[], bool],
    ahead: SumsAhead,
) -> list[int]:
    """Copy payloads into those leading slots that are in their generation; returns the sums of the copied."""
    positions, offsets, generations = places
    length_bytes = len(payloads[0])
    is_summed = positions[0] in ahead.whole
    if length_bytes <= SMALL_BYTES and not is_summed:
        memory = arena.memory(offsets, length_bytes)
        good = _num_equal(arena.generations(offsets), generations)
        return copy_small_in(memory, offsets[:good], payloads[:good], length_bytes)
    targets = arena.slot_arrays(offsets, length_bytes)
    good = _num_equal(arena.generations(offsets), generations)
    if length_bytes <= SOURCE_STEP_BYTES and not is_summed:
        return copy_arrays_in(targets[:good], payloads[:good])
    digests: list[int] = []
    for at in range(good):
        digest = _write_slot(arena, places, at, targets[at], payloads[at], should_stop, ahead)
        if digest is None:
            break
        digests.append(digest)
    return digests


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading values are the same."""
    if tuple(first) == tuple(second):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _write_slot(
    arena: SlotReader,
    places: _Places,
    at: int,
    target: Bytes,
    payload: Bytes,
    should_stop: Callable[[], bool],
    ahead: SumsAhead,
) -> int | None:
    """Copy one payload; None if the slot changed hands, or it was told to stop, meanwhile."""
    position = places.positions[at]
    if len(payload) <= SOURCE_STEP_BYTES:
        copy_bytes(target, payload)
        digest = ahead.whole.get(position)
        return checksum(payload) if digest is None else digest
    offset, generation = places.offsets[at], places.generations[at]

    def may_go_on() -> bool:
        return not should_stop() and arena.generation(offset) == generation

    begun = ahead.begun if position == 0 else None
    return copy_array_with_source_checksum(target, payload, may_go_on=may_go_on, begun=begun)


def _tensor_view(tensor: Any) -> Bytes:  # Any: a torch.Tensor, seen without importing torch
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"the tensor must be contiguous and on the CPU, is on {tensor.device}")
    flat = tensor.detach().reshape(-1)
    view: Bytes = flat.view(sys.modules["torch"].uint8).numpy()
    return view
