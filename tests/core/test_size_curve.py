"""The sampled ghost: exact where all is sampled, near where little is, bounded, and off after a fault."""

import asyncio
import hashlib
import json
import logging
import operator
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import size_curve
from kvstore.directory import Shelf
from kvstore.keys import BlockKey, NamespaceDigest, PrefixChain
from kvstore.layout import KVLayout, Part
from kvstore.size_curve import MIN_SAMPLES, SizeCurve
from kvstore.testing import FakeClock

BLOCK = 4096
LAYOUT = KVLayout.opaque(block_bytes=BLOCK, block_tokens=4)
TRACES = Path(__file__).parents[3] / "shared" / "data"
UNPACED = 1 << 40


def shelf_of(name=b"one", *, length_bytes=BLOCK, part=LAYOUT.whole):
    return Shelf(NamespaceDigest(hashlib.sha256(name).digest()), part, b"", length_bytes)


SHELF = shelf_of()


def chain_of(names, start=0, shelf=SHELF):
    keys = tuple([BlockKey(hashlib.sha256(str(name).encode()).digest()) for name in names])
    parent = BlockKey(bytes(32)) if start else None
    return PrefixChain(shelf.namespace, keys, 4, start, parent)


def new_curve(seed=1, *, limit_blocks=100_000, **options):
    chosen = random.Random(seed)
    return SizeCurve(
        multipliers=[chosen.getrandbits(64) | 1 for _ in range(4)],
        limit_bytes=limit_blocks * BLOCK,
        clock=options.pop("clock", lambda: 0.0),
        **{"max_samples_per_s": UNPACED, **options},
    )


def replay(curve, requests):
    for names in requests:
        chain = chain_of(names)
        curve.note_match(SHELF, chain, num_hits=0)
        curve.note_put(SHELF, chain)
        curve.settle()


def lru_hits(requests, capacity_blocks):
    """Leading blocks of each request that are in an LRU cache, which is then touched tail first."""
    cache, hits = OrderedDict(), 0
    for names in requests:
        hits += next((at for at, name in enumerate(names) if name not in cache), len(names))
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hits


def conversations(seed, num_requests):
    """Chains of new and of continued conversations, each behind one of a few system prompts."""
    chosen, open_ones, requests = random.Random(seed), [], []
    for number in range(num_requests):
        if open_ones and chosen.random() < 0.6:
            at = min(len(open_ones) - 1, int(chosen.expovariate(1 / 120)))
            names = open_ones.pop(-1 - at)
        else:
            prompt = chosen.choice("abcd")
            names = [f"{prompt}{block}" for block in range(3)]
        names = [*names, *(f"{number}.{block}" for block in range(chosen.randint(2, 9)))]
        open_ones.append(names)
        requests.append(names)
    return requests


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(
    lambda path: [str(path[: depth + 1]) for depth in range(len(path))]
)


@given(st.lists(PATHS, min_size=1, max_size=40))
def test_with_everything_sampled_the_curve_is_that_of_leaf_first_lru(requests):
    curve = new_curve()

    replay(curve, requests)

    num_lookups = sum(map(len, requests))
    for capacity_blocks in range(1, 11):
        exact = lru_hits(requests, capacity_blocks) / num_lookups
        assert curve.curve().hit_ratio(capacity_blocks * BLOCK) == pytest.approx(exact)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_sample_tells_the_hit_rates_of_a_synthetic_trace(seed):
    requests = conversations(seed, 3000)
    curve = new_curve(seed, max_blocks=2048)

    replay(curve, requests)

    num_lookups = sum(map(len, requests))
    assert curve.sample_ratio < 0.2
    for capacity_blocks in (500, 1000, 2000, 4000, 8000):
        exact = lru_hits(requests, capacity_blocks) / num_lookups
        assert curve.tells(curve.curve(), capacity_blocks * BLOCK)
        assert curve.curve().hit_ratio(capacity_blocks * BLOCK) == pytest.approx(exact, abs=0.02)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the trace is not beside the checkout")
def test_a_sample_tells_the_hit_rates_of_a_real_trace():
    lines = (TRACES / "traces" / "mooncake_conversation.jsonl").read_text().splitlines()
    requests = [json.loads(line)["hash_ids"] for line in lines]
    known = json.loads((TRACES / "hit_rate_reference.json").read_text())["exact_integers"]["conversation"]
    curve = new_curve(3, limit_blocks=200_000)

    replay(curve, requests)

    assert curve.sample_ratio < 0.05
    assert round(curve.curve().lookups) == known["block_accesses"]
    for capacity_blocks, counts in known["policies"]["LRU_rev"].items():
        exact = counts["hit_blocks"] / known["block_accesses"]
        assert curve.curve().hit_ratio(int(capacity_blocks) * BLOCK) == pytest.approx(exact, abs=0.02)


def test_a_fetch_of_what_a_match_found_is_no_second_lookup():
    curve = new_curve()
    chain = chain_of("abcd")

    curve.note_match(SHELF, chain, num_hits=4)
    curve.note_fetch(SHELF, chain[:2])
    curve.note_fetch(SHELF, PrefixChain(chain.namespace, chain.keys[2:], 4, 2, chain.keys[1]))
    curve.settle()
    assert curve.curve().lookups == 4

    curve.note_fetch(SHELF, chain)
    curve.settle()
    assert curve.curve().lookups == 8


def test_blocks_that_are_looked_for_and_never_put_are_not_expected_to_hit():
    curve = new_curve()

    for _ in range(10):
        curve.note_match(SHELF, chain_of("abcd"), num_hits=0)
    curve.settle()

    assert (curve.curve().lookups, curve.curve().hit_ratio(1000 * BLOCK)) == (40, 0.0)


def test_larger_blocks_take_more_room():
    curve, large = new_curve(), shelf_of(length_bytes=3 * BLOCK - 5)
    for name in ("abc", "abc"):
        curve.note_match(large, chain_of(name), num_hits=0)
        curve.note_put(large, chain_of(name))
    curve.settle()

    assert [curve.curve().hit_ratio(size * BLOCK) for size in (2, 4, 7, 10)] == pytest.approx(
        [0, 1 / 6, 2 / 6, 3 / 6], abs=0.01
    )


def test_parts_of_a_block_are_different_things():
    curve = new_curve()
    for part in (Part(0, 1, 0, 1), Part(1, 2, 0, 1)):
        curve.note_match(shelf_of(part=part), chain_of("abc"), num_hits=0)
        curve.note_put(shelf_of(part=part), chain_of("abc"))
    curve.settle()

    assert (curve.num_sampled, curve.curve().hit_ratio(1000 * BLOCK)) == (6, 0.0)


def test_each_namespace_has_its_lookups_over_one_order():
    curve, other = new_curve(), shelf_of(b"two")
    for shelf, names in ((SHELF, "a"), (other, "bcdefghi"), (SHELF, "a")):
        curve.note_match(shelf, chain_of(names, shelf=shelf), num_hits=0)
        curve.note_put(shelf, chain_of(names, shelf=shelf))
    curve.settle()

    ours = curve.curve([SHELF.namespace])
    assert ours.lookups == 2
    assert [ours.hit_ratio(size * BLOCK) for size in (8, 9)] == pytest.approx([0, 0.5])
    assert curve.curve([other.namespace]).hit_ratio(100 * BLOCK) == 0
    assert curve.curve([NamespaceDigest(bytes(32))]).lookups == 0


def test_everything_is_bounded(monkeypatch):
    monkeypatch.setattr(size_curve, "MAX_NAMESPACES", 4)
    curve = new_curve(max_blocks=64, limit_blocks=3000)
    for number in range(400):
        shelf = shelf_of(str(number).encode())
        chain = chain_of(range(100 * number, 100 * number + 100), shelf=shelf)
        curve.note_match(shelf, chain, num_hits=0)
        if number % 2:
            curve.note_put(shelf, chain)
        curve.settle()
        assert curve.num_sampled <= 64
        assert len(curve._samples) == len(curve._stack) <= 64 + 16
        assert len(curve._largest) <= 2 * 64
        assert curve._stack.total_bytes <= 3000 * BLOCK * curve.sample_ratio + BLOCK
        assert len(curve.namespaces()) <= 4


def test_the_share_of_samples_stays_where_it_tells_of_the_largest_size():
    curve = new_curve(max_blocks=256, limit_blocks=1024)
    for number in range(2000):
        curve.note_put(SHELF, chain_of(range(32 * number, 32 * number + 32)))
        curve.settle()

    assert curve.sample_ratio > 0.15


def test_a_full_queue_leaves_lookups_out_and_counts_them(monkeypatch):
    monkeypatch.setattr(size_curve, "MAX_QUEUED_BLOCKS", 10)
    curve = new_curve()

    for _ in range(3):
        curve.note_match(SHELF, chain_of("abcd"), num_hits=0)
    curve.settle()

    assert (curve.lost_blocks, curve.curve().lookups) == (4, 8)
    curve.note_match(SHELF, chain_of("abcd"), num_hits=0)
    curve.settle()
    assert curve.curve().lookups == 12


def test_a_queue_full_of_small_lookups_leaves_others_out(monkeypatch):
    monkeypatch.setattr(size_curve, "MAX_QUEUED_VISITS", 3)
    curve = new_curve()

    for _ in range(5):
        curve.note_match(SHELF, chain_of("a"), num_hits=0)
    curve.settle()

    assert (curve.lost_blocks, curve.curve().lookups) == (2, 3)


def test_too_many_samples_in_a_second_leave_lookups_out_and_lower_their_share(monkeypatch):
    monkeypatch.setattr(size_curve, "_FEWEST_BLOCKS", 100)
    clock = FakeClock()
    curve = new_curve(clock=clock, max_samples_per_s=500)
    requests = conversations(1, 200)

    replay(curve, requests)
    assert curve.curve().lookups < 500
    assert curve.lost_blocks > 0
    assert curve.sample_ratio == 1

    clock.advance(1.5)
    replay(curve, requests[:1])
    assert curve.sample_ratio == pytest.approx(0.5)
    assert curve.curve().samples > 0


def test_old_lookups_fade():
    clock = FakeClock()
    curve = new_curve(clock=clock)
    replay(curve, ["abcd", "abcd"])
    assert (curve.curve().lookups, curve.curve().hit_ratio(100 * BLOCK)) == (8, 0.5)

    clock.advance(3601)
    replay(curve, ["abcd"])

    assert (curve.curve().lookups, curve.curve().hit_ratio(100 * BLOCK)) == (8, 0.75)


def test_nothing_is_told_on_too_few_samples_or_beyond_the_largest_size():
    curve = new_curve(limit_blocks=100)
    replay(curve, ["abcdefghij"] * (MIN_SAMPLES // 10 - 1))
    assert not curve.tells(curve.curve(), 50 * BLOCK)

    replay(curve, ["abcdefghij"])
    assert curve.tells(curve.curve(), 50 * BLOCK)
    assert not curve.tells(curve.curve(), 101 * BLOCK)
    assert not curve.tells(curve.curve(), 0)


def test_a_size_that_holds_few_samples_is_not_told_of():
    curve = new_curve(max_blocks=256)
    replay(curve, conversations(1, 2000))

    assert curve.tells(curve.curve(), 4000 * BLOCK)
    assert not curve.tells(curve.curve(), 50 * BLOCK)


def test_a_fault_is_logged_once_and_switches_it_off(caplog):
    curve = new_curve()
    broken = PrefixChain(SHELF.namespace, (BlockKey(b"short"),), 4)

    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            curve.note_match(SHELF, broken, num_hits=0)
            curve.settle()

    assert len(caplog.records) == 1
    assert not curve.is_on
    assert not curve.tells(curve.curve(), 50 * BLOCK)


async def test_what_was_noted_is_handled_in_the_background(monkeypatch):
    monkeypatch.setattr(size_curve, "_TICK_S", 0.001)
    curve, requests = new_curve(), conversations(1, 50)
    num_lookups = sum(map(len, requests))
    running = asyncio.create_task(curve.run_forever())
    for names in requests:
        curve.note_match(SHELF, chain_of(names), num_hits=0)
        curve.note_put(SHELF, chain_of(names))

    async with asyncio.timeout(60):
        while curve.curve().lookups < num_lookups:  # noqa: ASYNC110 (no event tells of it)
            await asyncio.sleep(0.001)
    running.cancel()


class PlainCurve(SizeCurve):
    """A curve that asks of each key by itself whether it is sampled, and keeps nothing to save time."""

    def _picked(self, visits):
        for _, _, part, chain in visits:
            words = [[int.from_bytes(key[at : at + 8], "little") for at in (0, 8, 16, 24)] for key in chain]
            factors = self._multipliers.tolist()
            hashes = [sum(map(operator.mul, word, factors)) % (1 << 64) for word in words]
            yield [(value ^ part, value) for value in hashes if value <= self._hash_limit]

    def _keep_within(self):
        self._sampled_bytes = self.limit_bytes * self.sample_ratio
        super()._keep_within()


VISITS = st.lists(
    st.tuples(st.sampled_from(["match", "fetch", "put", "put"]), st.integers(0, 40), st.integers(1, 12)),
    min_size=1,
    max_size=60,
)


@given(VISITS, st.integers(1, 9))
def test_what_is_sampled_is_what_each_key_says_by_itself(visits, at_a_time):
    clock = FakeClock()
    kinds = [SizeCurve, PlainCurve]
    fast, plain = curves = [
        kind(multipliers=[3, 5, 1 << 40 | 1, 7], limit_bytes=30 * BLOCK, clock=clock, max_blocks=8)
        for kind in kinds
    ]
    for number, (verb, first, length) in enumerate(visits):
        chain = chain_of(range(first, first + length))
        for curve in curves:
            if verb == "match":
                curve.note_match(SHELF, chain, num_hits=first % 2)
            elif verb == "fetch":
                curve.note_fetch(SHELF, chain)
            else:
                curve.note_put(SHELF, chain)
            if number % at_a_time == 0:
                curve.settle()
    for curve in curves:
        curve.settle()

    assert fast.is_on
    assert plain.is_on
    assert fast.sample_ratio == plain.sample_ratio
    assert fast._samples == plain._samples
    assert {name: fast._stack.above(name) for name in fast._samples} == {
        name: plain._stack.above(name) for name in plain._samples
    }
    assert fast.curve().hit_ratio(20 * BLOCK) == plain.curve().hit_ratio(20 * BLOCK)
