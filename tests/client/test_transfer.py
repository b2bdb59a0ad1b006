"""Copies between arena and caller: what is checked after the copy, and when copying stops."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvstore import checksum as checksum_module
from kvstore.checksum import (
    SOURCE_STEP_BYTES,
    checksum,
    copy_bytes,
    copy_with_checksum,
    copy_with_source_checksum,
)
from kvstore.errors import InvalidRequest
from kvstore.messages import FilledSlots, LentSlot, ReadySlot, UnusedSlot
from kvstore.transfer import ReadEnd, SumsAhead, byte_view, fill_slots, read_slots, write_slots


class FakeArena:
    """Slots of 8 bytes at multiples of 8; the generation is what a test says."""

    def __init__(self) -> None:
        self.content = bytearray(range(64))
        self.generation_at = dict.fromkeys(range(0, 64, 8), 1)

    def slot(self, offset: int, length_bytes: int) -> memoryview:
        return memoryview(self.content)[offset : offset + length_bytes]

    def slot_array(self, offset: int, length_bytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.content, np.uint8)[offset : offset + length_bytes]

    def slot_arrays(self, offsets: Sequence[int], length_bytes: int) -> list[npt.NDArray[np.uint8]]:
        return [self.slot_array(offset, length_bytes) for offset in offsets]

    def memory(self, offsets: Sequence[int], length_bytes: int) -> memoryview:
        return memoryview(self.content)

    def generation(self, offset: int) -> int:
        return self.generation_at[offset]

    def generations(self, offsets: Sequence[int]) -> list[int]:
        return [self.generation(offset) for offset in offsets]


def _ready(arena: FakeArena, *offsets: int) -> list[ReadySlot]:
    return [ReadySlot(offset, 1, checksum(arena.slot_array(offset, 8))) for offset in offsets]


def _never() -> bool:
    return False


def test_a_slot_that_changed_hands_during_the_copy_is_stale() -> None:
    arena = FakeArena()
    slots = _ready(arena, 0, 8, 16)
    arena.generation_at[8] = 2

    assert read_slots(arena, slots, [np.zeros(8, np.uint8)] * 3, _never) == (1, ReadEnd.STALE)


def test_what_came_whole_before_a_stale_slot_of_its_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.transfer.GROUP_BYTES", 32)
    arena = FakeArena()
    slots = _ready(arena, 0, 8, 16, 24, 32, 40, 48)
    arena.generation_at[48] = 2
    buffers = [np.zeros(8, np.uint8) for _ in slots]

    assert read_slots(arena, slots, buffers, _never) == (6, ReadEnd.STALE)
    assert bytes(b"".join(buffers[:6])) == arena.content[:48]


def test_writing_goes_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.transfer.GROUP_BYTES", 16)
    arena = FakeArena()
    slots = [LentSlot(at, 8 * at, 1) for at in range(5)]
    payloads = [np.full(8, 100 + at, np.uint8) for at in range(5)]

    written = write_slots(arena, slots, payloads, _never)

    assert [(slot.position, slot.offset) for slot in written] == [(at, 8 * at) for at in range(5)]
    assert [slot.checksum for slot in written] == [checksum(payload) for payload in payloads]
    assert arena.content[:40] == b"".join(payloads)


def test_a_slot_with_other_bytes_is_damaged() -> None:
    arena = FakeArena()
    slots = _ready(arena, 0, 8)
    arena.content[8] ^= 1

    assert read_slots(arena, slots, [np.zeros(8, np.uint8)] * 2, _never) == (1, ReadEnd.DAMAGED)


def test_reading_stops_before_the_next_group_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.transfer.GROUP_BYTES", 8)
    arena = FakeArena()
    asked = count()

    end = read_slots(arena, _ready(arena, 0, 8, 16), [np.zeros(8, np.uint8)] * 3, lambda: next(asked) == 2)

    assert end == (2, ReadEnd.STOPPED)


def test_a_lent_slot_in_another_generation_is_not_written() -> None:
    arena = FakeArena()
    arena.generation_at[8] = 2
    before = bytes(arena.content[8:])

    written = write_slots(
        arena, [LentSlot(0, 0, 1), LentSlot(1, 8, 1)], [np.full(8, 9, np.uint8)] * 2, _never
    )

    assert [slot.position for slot in written] == [0]
    assert arena.content[:8] == b"\x09" * 8
    assert arena.content[8:] == before


def test_writing_stops_before_the_next_block_when_told() -> None:
    arena = FakeArena()

    assert write_slots(arena, [LentSlot(0, 0, 1)], [np.zeros(8, np.uint8)], lambda: True) == []


def test_a_stale_writers_late_store_gets_no_valid_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = FakeArena()
    take_sum = checksum_module.xxhash.xxh3_64_intdigest

    def be_overwritten_and_take_sum(payload):
        arena.content[:4] = b"\xaa" * 4
        return take_sum(payload)

    with monkeypatch.context() as patch:
        patch.setattr(checksum_module.xxhash, "xxh3_64_intdigest", be_overwritten_and_take_sum)
        (written,) = write_slots(arena, [LentSlot(0, 0, 1)], [np.full(8, 9, np.uint8)], _never)
    stored = ReadySlot(0, 1, written.checksum)

    assert written.checksum == checksum(np.full(8, 9, np.uint8))
    assert read_slots(arena, [stored], [np.zeros(8, np.uint8)], _never) == (0, ReadEnd.DAMAGED)


def test_slots_lent_ahead_are_filled_in_order_up_to_the_first_that_changed_hands() -> None:
    arena = FakeArena()
    arena.generation_at[16] = 2
    before = bytes(arena.content[16:])
    payloads = [np.full(8, at, np.uint8) for at in range(4)]
    slots = [UnusedSlot(offset, 1) for offset in (8, 0, 16, 24)]

    filled = fill_slots(arena, slots, payloads, _never)

    assert filled == FilledSlots((8, 0), (1, 1), (checksum(payloads[0]), checksum(payloads[1])))
    assert bytes(arena.content[:16]) == bytes(payloads[1]) + bytes(payloads[0])
    assert arena.content[16:] == before


def test_slots_lent_ahead_are_not_stored_from_the_first_payload_on_that_is_not_as_expected() -> None:
    arena = FakeArena()
    payloads = [np.full(8, at, np.uint8) for at in range(3)]
    expected = [checksum(payload) for payload in payloads]
    expected[1] ^= 1

    filled = fill_slots(
        arena, [UnusedSlot(offset, 1) for offset in (0, 8, 16)], payloads, _never, expected=expected
    )

    assert filled == FilledSlots((0,), (1,), (expected[0],))
    assert fill_slots(arena, [], [], _never) == FilledSlots()


class WideArena(FakeArena):
    """One slot of 4 MiB; it changes hands when its generation is looked at for the fourth time."""

    def __init__(self) -> None:
        self.content = bytearray(4 << 20)
        self.looked = count(1)

    def generation(self, offset: int) -> int:
        return 1 if next(self.looked) < 4 else 2


def test_writing_stops_inside_a_block_that_changes_hands() -> None:
    arena = WideArena()

    assert write_slots(arena, [LentSlot(0, 0, 1)], [np.full(4 << 20, 9, np.uint8)], _never) == []
    assert arena.content.count(9) == 2 * SOURCE_STEP_BYTES


def test_writing_stops_inside_a_block_when_told() -> None:
    asked = count()
    arena = WideArena()

    assert (
        write_slots(arena, [LentSlot(0, 0, 1)], [np.full(4 << 20, 9, np.uint8)], lambda: next(asked) == 2)
        == []
    )
    assert arena.content.count(9) == SOURCE_STEP_BYTES


def test_sums_taken_ahead_are_those_of_the_payloads_that_the_positions_name() -> None:
    arena = FakeArena()
    payloads = [np.full(8, 100 + at, np.uint8) for at in range(4)]
    ahead = SumsAhead(payloads)
    ahead.begin()
    slots = [LentSlot(1, 8, 1), LentSlot(3, 24, 1)]

    written = write_slots(arena, slots, [payloads[1], payloads[3]], _never, ahead=ahead)

    assert [slot.checksum for slot in written] == [checksum(payloads[1]), checksum(payloads[3])]
    assert bytes(arena.content[24:32]) == bytes(payloads[3])


@pytest.mark.parametrize("position", [0, 1])
def test_the_sum_of_a_long_payload_goes_on_from_what_was_begun_of_it(position: int) -> None:
    arena = WideArena()
    arena.looked = count(-100)
    payload = np.arange(3 * SOURCE_STEP_BYTES + 7, dtype=np.uint32).view(np.uint8)[
        : 3 * SOURCE_STEP_BYTES + 7
    ]
    others = np.full(len(payload), 5, np.uint8)
    ahead = SumsAhead([payload, others])
    ahead.begin()
    chosen = [payload, others][position]

    (written,) = write_slots(arena, [LentSlot(position, 0, 1)], [chosen], _never, ahead=ahead)

    assert written.checksum == checksum(chosen)
    assert bytes(arena.content[: len(chosen)]) == bytes(chosen)


def test_sums_are_taken_ahead_of_as_many_payloads_as_a_step_has() -> None:
    ahead = SumsAhead([np.zeros(SOURCE_STEP_BYTES // 2, np.uint8)] * 3)
    ahead.begin()
    assert set(ahead.whole) == {0, 1}
    assert ahead.begun is None


@pytest.mark.parametrize("buffer", [3, None, "text", np.zeros((4, 4), np.uint8).T, [1, 2]])
def test_what_is_no_contiguous_buffer_is_refused(buffer: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^buffers"):
        byte_view(buffer, "buffers")


def test_a_tensor_that_torch_gives_no_bytes_of_is_refused() -> None:
    """It was torch's own error, a RuntimeError, without a word of which buffer it was about."""
    tensor = torch.zeros(8, dtype=torch.complex64).conj()
    with pytest.raises(InvalidRequest, match=r"^payloads\[2\]: Tensor is no contiguous buffer"):
        byte_view(tensor, "payloads", 2)


@pytest.mark.parametrize(
    "length_bytes", [0, 1, 4096, (64 << 10) - 1, 64 << 10, (64 << 10) + 3, 192 << 10, 1 << 20]
)
@pytest.mark.parametrize(
    ("target_at", "origin_at"), [(0, 0), (16, 0), (0, 16), (8, 64), (1, 0), (0, 3), (5, 5)]
)
def test_bytes_are_copied_as_they_are_wherever_they_lie(
    length_bytes: int, target_at: int, origin_at: int
) -> None:
    room = length_bytes + 128
    target, origin = np.zeros(room, np.uint8), np.random.default_rng(7).integers(0, 256, room, np.uint8)
    origin[origin_at : origin_at + 8] = 0xFF  # as a number, one that has a sign
    copy_bytes(target[target_at:][:length_bytes], origin[origin_at:][:length_bytes])
    assert target[target_at:][:length_bytes].tobytes() == origin[origin_at:][:length_bytes].tobytes()
    assert not target[:target_at].any()
    assert not target[target_at + length_bytes :].any()


@pytest.mark.parametrize("length_bytes", [64 << 10, 1 << 20, (2 << 20) + 24])
def test_a_copy_and_its_sum_are_of_the_same_bytes_on_both_ways(length_bytes: int) -> None:
    origin = np.random.default_rng(8).integers(0, 256, length_bytes, np.uint8)
    inside, outside = np.zeros_like(origin), np.zeros_like(origin)
    assert copy_with_source_checksum(inside, origin) == checksum(origin) == checksum(inside)
    assert copy_with_checksum(outside, inside) == checksum(origin)
    assert outside.tobytes() == origin.tobytes()
