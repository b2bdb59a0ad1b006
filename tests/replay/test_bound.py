"""The bound is the most that any policy could hit, and the published integers."""

import json
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.replay import read_trace, replay_bound
from tests.replay.traces import CHAT, PUBLISHED, REFERENCE, needs_published_trace, trace_of

PARENTS = {0: None, 1: 0, 2: 1, 3: 1, 4: 0, 5: None, 6: 5}
"""A small forest: every chain of a request goes from a root to one of these blocks."""


def chain_to(block):
    return [] if block is None else [*chain_to(PARENTS[block]), block]


def leading(chain, resident):
    count = 0
    while count < len(chain) and chain[count] in resident:
        count += 1
    return count


def most_hits(chains, capacity):
    """Try every way to keep at most ``capacity`` blocks after each request."""
    best = {frozenset(): 0}
    for chain in chains:
        after: dict[frozenset, int] = {}
        for resident, hits in best.items():
            now = hits + leading(chain, resident)
            there = sorted(resident | set(chain))
            for size in range(min(capacity, len(there)) + 1):
                for kept in combinations(there, size):
                    state = frozenset(kept)
                    after[state] = max(after.get(state, 0), now)
        best = after
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(PARENTS)), min_size=1, max_size=8), st.integers(0, 5))
def test_no_choice_of_blocks_hits_more_and_one_hits_as_much(leaves, capacity):
    chains = [chain_to(leaf) for leaf in leaves]

    assert replay_bound(trace_of(*chains), capacity).hit_blocks == most_hits(chains, capacity)


@pytest.mark.parametrize(
    ("capacity", "hits"),
    [
        (0, 0),
        (1, 3),  # block 1 alone, three times
        (2, 6),  # blocks 1 and 2, three times
        (3, 7),  # and block 3 for the third request, or 4 for the last
        (4, 8),  # 1, 2, 3 and 4
        (9, 8),  # all that comes again
    ],
)
def test_a_small_chat_hits_what_was_counted_by_hand(capacity, hits):
    assert replay_bound(trace_of(*CHAT), capacity).hit_blocks == hits


def test_only_what_is_asked_for_again_is_written():
    assert replay_bound(trace_of(*CHAT), 9).written_blocks == 4


def test_a_partly_filled_last_block_counts_its_tokens():
    trace = trace_of([1, 2], [1, 2], block_tokens=4, tail_tokens=3)

    assert replay_bound(trace, 2).hit_tokens == 7


def test_requests_without_blocks_are_counted_and_hit_nothing():
    assert replay_bound(trace_of([], [1], []), 1).hit_blocks == 0


@needs_published_trace
@pytest.mark.parametrize(("name", "requests"), [("conversation[:3000]", 3000), ("conversation", None)])
def test_the_published_trace_gives_the_published_integers(name, requests):
    expected = json.loads(REFERENCE.read_text())["exact_integers"][name]
    trace = read_trace(str(PUBLISHED), max_requests=requests)

    found = {size: replay_bound(trace, int(size)) for size in expected["policies"]["MIN_bypass"]}

    assert (trace.requests, trace.block_accesses) == (expected["requests"], expected["block_accesses"])
    assert trace.total_input_tokens == expected["tokens"]
    assert {
        size: {"hit_blocks": tally.hit_blocks, "hit_tokens": tally.hit_tokens}
        for size, tally in found.items()
    } == expected["policies"]["MIN_bypass"]
