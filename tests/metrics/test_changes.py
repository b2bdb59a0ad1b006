"""What is noted of copies that come and go, how it is joined, and how it is packed."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.changes import CopyChanges
from kvstore.event_packing import _MAX_FRAMES, EventPacker
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.kv_events import ALL_CLEARED, MEDIUM_WORDS, EventForm, HashForm, KvEvent, events_of
from kvstore.tier import Medium

MEDIA = {"dram": Medium.DRAM, "ssd": Medium.SSD}
SPACES = [NamespaceDigest(bytes([number]) * 32) for number in (1, 2)]
KEYS = [BlockKey(bytes([number]) * 32) for number in range(256)]


def key_runs(start, count):
    return KEYS[start : start + count]


def change_steps():
    """Runs that become READY (tier, namespace, keys, parent), and blocks that go (tier, namespace, key)."""
    place = st.tuples(st.sampled_from(["dram", "ssd"]), st.sampled_from(SPACES))
    keys = st.builds(key_runs, st.integers(1, 20), st.integers(1, 5))
    parents = st.one_of(st.none(), st.sampled_from(KEYS[:26]))
    ready = st.tuples(place, keys, parents).map(lambda step: (*step[0], step[1], step[2]))
    gone = st.tuples(place, st.sampled_from(KEYS[:26])).map(lambda step: (*step[0], step[1]))
    return st.lists(st.one_of(ready, gone), max_size=40)


def noted(steps, changes):
    """Note steps; returns what that is block by block."""
    single = []
    for tier, namespace, *about in steps:
        if len(about) == 1:
            changes.note_gone(tier, namespace, about[0])
            single.append((False, tier, namespace, about[0], None))
            continue
        keys, parent = about
        changes.note_ready(tier, namespace, tuple(keys), parent)
        for key in keys:
            single.append((True, tier, namespace, key, parent))
            parent = key
    return single


def one_by_one(runs):
    """Return runs block by block, as ``noted`` does."""
    single = []
    for is_ready, tier, namespace, keys, parent in runs:
        for key in keys:
            single.append((is_ready, tier, namespace, key, parent))
            parent = key if is_ready else None
    return single


def joined(single):
    """Join single blocks into events, in the plainest way."""
    events = []
    for is_ready, tier, namespace, key, parent in single:
        medium = MEDIUM_WORDS[MEDIA[tier]]
        last = events[-1] if events else None
        same = last is not None and (last[0], last[1], last[2]) == (is_ready, medium, namespace)
        if same and (not is_ready or parent == last[3][-1]):
            last[3].append(key)
        else:
            events.append((is_ready, medium, namespace, [key], parent, 16))
    return events


@given(change_steps(), st.lists(st.integers(1, 9), min_size=1), st.integers(0, 40))
def test_changes_come_out_in_their_order_however_many_are_taken_at_a_time(steps, limits, num_early):
    changes = CopyChanges()
    expected = noted(steps[:num_early], changes)
    taken = changes.take(limits[0])  # what is noted from now on may go on with what was taken a part of
    expected += noted(steps[num_early:], changes)
    while len(changes):
        for limit in limits:
            run = changes.take(limit)
            assert sum(len(keys) for _, _, _, keys, _ in run) <= limit
            taken += run

    assert one_by_one(taken) == expected


@given(change_steps(), st.integers(1, 50))
def test_a_run_noted_at_once_is_told_as_if_its_blocks_were_noted_one_by_one(steps, limit):
    changes = CopyChanges()
    single = noted(steps, changes)
    events = []
    while len(changes):
        events.append(events_of(changes.take(limit), media=MEDIA, block_tokens=lambda _: 16))

    expected = [joined(single[start : start + limit]) for start in range(0, len(single), limit)]
    assert [[(*event[:3], list(event.keys), *event[4:]) for event in some] for some in events] == expected


@given(change_steps(), st.integers(0, 30))
def test_what_finds_no_room_is_counted_block_by_block(steps, limit):
    changes, whole = CopyChanges(limit), CopyChanges()
    noted(steps, changes)
    expected = noted(steps, whole)

    assert one_by_one(changes.take(1000)) == expected[:limit]
    lost = changes.take_lost()
    assert {space: count for space, count in lost.items() if count} == {
        space: count for space in SPACES if (count := [block[2] for block in expected[limit:]].count(space))
    }
    assert not changes.take_lost()


def test_what_was_taken_does_not_grow_when_more_blocks_leave():
    changes = CopyChanges()
    changes.note_gone("dram", SPACES[0], KEYS[0])
    (taken,) = changes.take(10)
    changes.note_gone("dram", SPACES[0], KEYS[1])

    assert taken[3] == [KEYS[0]]
    assert one_by_one(changes.take(10)) == [(False, "dram", SPACES[0], KEYS[1], None)]


def kv_events():
    keys = st.lists(st.binary(min_size=32, max_size=32).map(BlockKey), min_size=1, max_size=20)
    parents = st.one_of(st.none(), st.binary(min_size=32, max_size=32).map(BlockKey))
    media, tokens = st.sampled_from(["CPU", "STORAGE", "EXTERNAL"]), st.sampled_from([1, 16, 300])
    return st.builds(KvEvent, st.booleans(), media, st.sampled_from(SPACES), keys, parents, tokens)


@pytest.mark.parametrize("form", EventForm)
@pytest.mark.parametrize("hashes", HashForm)
@given(st.lists(kv_events(), max_size=4))
def test_packed_events_are_what_packing_their_maps_gives(form, hashes, events):
    packer = EventPacker(hashes, form, {"STORAGE": "DISK", "EXTERNAL": ""})
    batch = packer.batch(1.5, packer.events(events), 0)

    told = [event.as_map(hashes) for event in events if event.medium != "EXTERNAL"]
    for one in told:
        one["medium"] = "DISK" if one["medium"] == "STORAGE" else "CPU"
    assert msgpack.unpackb(batch) == [1.5, [form.of(one) for one in told], 0]


@pytest.mark.parametrize("form", EventForm)
def test_that_all_is_cleared_is_packed_in_either_form(form):
    packer = EventPacker(HashForm.INT, form, {})

    assert msgpack.unpackb(packer.cleared()) == form.of(ALL_CLEARED)


def test_lengths_of_blocks_without_end_leave_few_frames():
    packer = EventPacker(HashForm.INT, EventForm.MAP, {})
    for num_tokens in range(1, 3 * _MAX_FRAMES):
        event = KvEvent(True, "CPU", SPACES[0], KEYS[:2], None, num_tokens)
        (packed,) = packer.events([event])
        assert msgpack.unpackb(packed) == event.as_map(HashForm.INT)

    assert len(packer._frames) <= _MAX_FRAMES
