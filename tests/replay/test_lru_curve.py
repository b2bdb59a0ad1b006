"""The curve of LRU in one pass is what LRU does at each capacity."""

import io
import json
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.replay import ProgressBar, ReplayPlan, lru_curve, policy_of, read_trace, replay
from tests.replay.traces import CHAT, PUBLISHED, REFERENCE, needs_published_trace, trace_of


def lru_hits(trace, capacity):
    """Tail-first LRU in a few lines, with an ordered dictionary."""
    stack: OrderedDict[int, None] = OrderedDict()
    hit_blocks = hit_tokens = 0
    for request, chain in enumerate(trace.chains()):
        hits = next((at for at, block in enumerate(chain) if block not in stack), len(chain))
        hit_blocks += hits
        hit_tokens += min(hits * trace.block_tokens, int(trace.input_tokens[request]))
        for block in reversed(chain):
            stack[block] = None
            stack.move_to_end(block)
        while len(stack) > capacity:
            stack.popitem(last=False)
    return hit_blocks, hit_tokens


chains_of_a_tree = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(chains_of_a_tree, st.integers(1, 4))
def test_every_capacity_is_as_a_replay_of_it(chains, tail_tokens):
    trace = trace_of(*chains, tail_tokens=tail_tokens)
    curve = lru_curve(trace)

    sizes = range(trace.unique_blocks + 3)
    assert [curve.at(size) for size in sizes] == [lru_hits(trace, size) for size in sizes]


@settings(max_examples=40, deadline=None)
@given(chains_of_a_tree)
def test_it_is_what_the_policy_itself_does_at_each_capacity(chains):
    trace = trace_of(*chains)
    curve = lru_curve(trace)

    sizes = range(1, trace.unique_blocks + 2)
    results = replay(trace, ReplayPlan([policy_of("lru")], sizes), ProgressBar(io.StringIO()))

    assert [result.hit_blocks for result in results] == [curve.at(size)[0] for size in sizes]


def test_a_small_chat_hits_what_was_counted_by_hand():
    curve = lru_curve(trace_of(*CHAT))

    # 4 blocks: 2 hits, then 1 2 4 3 are there: 3 hits; then 1 2 3 5 of five, and 7 8 1 2: 2 hits.
    assert curve.at(4)[0] == 7


@needs_published_trace
def test_the_published_trace_gives_the_published_integers():
    for name, requests in (("conversation[:3000]", 3000), ("conversation", None)):
        expected = json.loads(REFERENCE.read_text())["exact_integers"][name]["policies"]["LRU_rev"]
        curve = lru_curve(read_trace(str(PUBLISHED), max_requests=requests))

        found = {
            size: dict(zip(("hit_blocks", "hit_tokens"), curve.at(int(size)), strict=True))
            for size in expected
        }
        assert found == expected
