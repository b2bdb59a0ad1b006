"""SlotAllocator against a model of a few lines."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import TierFull
from kvstore_tiers.slots import SlotAllocator
from tests.example_counts import examples

PAGE = 4096
CAPACITY = 96 * PAGE
LENGTHS = st.sampled_from([1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE - 7, 16 * PAGE, 40 * PAGE])


def pages(length_bytes: int) -> int:
    return -(-length_bytes // PAGE)


class AllocatorAgainstModel(RuleBasedStateMachine):
    """The model: which pages are taken by which slot."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(CAPACITY)
        self.lent: dict[int, int] = {}

    def longest_free_run(self) -> int:
        taken = [False] * (CAPACITY // PAGE)
        for offset, count in self.lent.items():
            for page in range(offset // PAGE, offset // PAGE + count):
                taken[page] = True
        runs = "".join("x" if page else "." for page in taken).split("x")
        return max(len(run) for run in runs)

    @rule(length=LENGTHS, count=st.integers(1, 5))
    def allocate(self, length: int, count: int) -> None:
        has_room = self.slots.has_room(length, count)
        try:
            offsets = self.slots.allocate(length, count)
        except TierFull:
            assert not has_room
            return
        assert has_room
        assert len(offsets) == count
        for offset in offsets:
            self.lent[offset] = pages(length)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.lent)))
        self.slots.free([offset])
        del self.lent[offset]

    @precondition(lambda self: not self.lent)
    @rule(length=LENGTHS)
    def an_empty_region_serves_any_size_to_the_last_page(self, length: int) -> None:
        count = CAPACITY // PAGE // pages(length)
        assert self.slots.has_room(length, count)
        assert not self.slots.has_room(length, count + 1)

    @rule()
    def restart(self) -> None:
        fresh = SlotAllocator(CAPACITY)
        offsets = np.array(list(self.lent), dtype=np.int64)
        fresh.restore(offsets, np.array(list(self.lent.values()), dtype=np.int64) * PAGE)
        self.slots = fresh
        run = self.longest_free_run()
        assert run == 0 or fresh.has_room(run * PAGE)
        assert not fresh.has_room((run + 1) * PAGE)

    @invariant()
    def no_two_slots_overlap(self) -> None:
        taken = [
            page for offset, count in self.lent.items() for page in range(offset, offset + count * PAGE, PAGE)
        ]
        assert len(taken) == len(set(taken))
        assert all(0 <= page < CAPACITY for page in taken)

    @invariant()
    def counts_balance(self) -> None:
        assert self.slots.used_bytes == sum(self.lent.values()) * PAGE
        assert self.slots.used_bytes + self.slots.free_bytes == CAPACITY
        assert self.slots.used_slots == len(self.lent)
        assert self.slots.check() == []


AllocatorAgainstModel.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestAllocatorAgainstModel = AllocatorAgainstModel.TestCase


def test_a_freed_size_makes_room_for_another_size() -> None:
    slots = SlotAllocator(64 << 20)
    small = slots.allocate(64 << 10, 1024)
    with pytest.raises(TierFull, match="67108864 of 67108864 bytes are in use"):
        slots.allocate(32 << 20)
    slots.free(small)
    assert len(slots.allocate(32 << 20, 2)) == 2


def test_all_or_nothing() -> None:
    slots = SlotAllocator(10 * PAGE)
    with pytest.raises(TierFull):
        slots.allocate(3 * PAGE, 4)
    assert slots.used_bytes == 0


def test_a_capacity_of_odd_blocks_holds_exactly_that_many() -> None:
    slots = SlotAllocator(10 * 368640)
    assert len(slots.allocate(368640, 10)) == 10
    assert not slots.has_room(1)


def test_freeing_what_is_not_allocated_is_a_mistake_of_our_own() -> None:
    slots = SlotAllocator(10 * PAGE)
    (offset,) = slots.allocate(PAGE)
    slots.free([offset])
    with pytest.raises(AssertionError, match="no slot is allocated at offset"):
        slots.free([offset])


def test_restoring_overlapping_slots_is_a_mistake_of_our_own() -> None:
    slots = SlotAllocator(10 * PAGE)
    with pytest.raises(AssertionError, match="overlaps"):
        slots.restore(np.array([0, PAGE]), np.array([2 * PAGE, PAGE]))


def test_sizes_from_64_kib_to_32_mib_come_and_go_at_95_percent_without_overlap() -> None:
    sizes = [64 << 10, 360 << 10, 1 << 20, 2 << 20, 5_000_000, 8 << 20, 32 << 20]
    region = 1 << 30
    slots = SlotAllocator(region)
    dice = random.Random(55)
    held: list[tuple[int, int]] = []
    refused_with_room = 0
    for _ in range(20_000):
        size = dice.choice(sizes)
        while held and slots.used_bytes + size > 0.95 * region:
            slots.free([held.pop(dice.randrange(len(held)))[0]])
        evicted = 0
        while not slots.has_room(size):
            evicted += 1
            slots.free([held.pop(dice.randrange(len(held)))[0]])
        refused_with_room += bool(evicted)
        (offset,) = slots.allocate(size)
        held.append((offset, size))
    ordered = sorted(held)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ordered))
    assert slots.check() == []
    assert slots.used_bytes == sum(-(-size // 4096) * 4096 for _, size in held)
    assert refused_with_room < 6000, "of 20 000: a large slot may need a few more to leave"
