"""Hot prefixes: exact where every lookup is sampled, near where few are, bounded, off after a fault."""

import logging
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import branches as branches_module
from kvstore.branch_tree import CHECKPOINTS, CONTINUES_RATIO, WINDOW_MINUTES, path_of
from kvstore.branches import MAX_NAMESPACES, Branches
from kvstore.directory import Shelf
from kvstore.keys import Namespace
from kvstore.layout import KVLayout, Part
from kvstore.testing import FakeClock

LAYOUT = KVLayout.opaque(block_bytes=4096, block_tokens=4)
SPACE = Namespace("m", LAYOUT)
UNPACED = 1 << 40


def shelf_of(space=SPACE, part=LAYOUT.whole):
    return Shelf(space.digest, part, b"", 4096)


SHELF = shelf_of()


def chain_of(names, space=SPACE):
    """A chain of a block per name; chains that begin with the same names share these blocks."""
    return space.chain([token for name in names for token in (name, name, name, name)])


def counted(clock=None, **options):
    return Branches(clock=clock or FakeClock(), seed=1, **{"max_samples_per_s": UNPACED, **options})


def told(branches, space=SPACE):
    """Every branch that is told, by the key of its last block."""
    ((_, tree),) = branches.trees([space.digest])
    return {at.node.keys[-1]: at for at in tree.told(branches.minute, limit=UNPACED)}


SYSTEM, ONE, TWO = [1] * 4, [2] * 4, [3] * 4


def use(branches, names, times=1, found=None, shelf=SHELF):
    chain = chain_of(names)
    for _ in range(times):
        branches.note_fetch(shelf, chain, len(chain) if found is None else found)


def test_a_branch_is_told_where_it_divides_with_all_lookups_that_went_through_it():
    branches = counted()
    use(branches, SYSTEM + ONE, 6)
    use(branches, SYSTEM + TWO, 4, found=5)

    found = told(branches)

    system, one, two = (chain_of(names).keys[-1] for names in (SYSTEM, SYSTEM + ONE, SYSTEM + TWO))
    assert found.keys() == {system, one, two}
    assert {key: at.tally.fetches for key, at in found.items()} == {system: 10, one: 6, two: 4}
    assert {key: at.tally.fetch_hits for key, at in found.items()} == {system: 10, one: 6, two: 0}
    assert {key: at.leaves_at_blocks for key, at in found.items()} == {system: 0, one: 4, two: 4}
    assert found[one].parent is found[two].parent is found[system].node
    assert [at.node.depth_blocks for at in found.values()] == [4, 8, 8]


def test_a_branch_that_most_lookups_follow_is_one_branch():
    branches = counted()
    use(branches, SYSTEM + ONE, 9)
    use(branches, SYSTEM + TWO, 1)

    found = told(branches)

    one, two = (chain_of(names).keys[-1] for names in (SYSTEM + ONE, SYSTEM + TWO))
    assert {key: at.tally.fetches for key, at in found.items()} == {one: 9, two: 1}
    assert (found[two].parent, found[two].leaves_at_blocks) == (found[one].node, 4)


def test_matches_and_fetches_of_the_same_requests_are_counted_apart_and_rank_once():
    branches = counted()
    chain = chain_of(SYSTEM)
    for _ in range(3):
        branches.note_match(SHELF, chain, 4)
        branches.note_fetch(SHELF, chain, 4)
    branches.note_match(SHELF, chain, 2)

    (only,) = told(branches).values()

    assert (only.tally.matches, only.tally.match_hits) == (4, 3)
    assert (only.tally.fetches, only.tally.fetch_hits) == (3, 3)
    assert only.tally.lookups == 4


def test_a_fetch_in_pieces_is_one_lookup_along_its_whole_way():
    branches = counted()
    chain = chain_of(range(100))
    for _ in range(2):
        for start in range(0, 100, 30):
            piece = chain[start : start + 30]
            branches.note_fetch(SHELF, piece, len(piece))
            branches.settle()

    (only,) = told(branches).values()

    assert (only.tally.fetches, only.tally.fetch_hits) == (2, 2)
    assert only.node.depth_blocks == 96


def test_a_piece_whose_beginning_is_not_known_is_left_out():
    branches = counted()
    branches.note_fetch(SHELF, chain_of(range(20))[10:], 10)

    assert branches.namespaces() == []


def test_of_the_parts_of_a_block_one_counts():
    layout = KVLayout(dtype="float16", num_layers=4, block_tokens=4, num_kv_heads=2, head_dim=8)
    branches = counted()
    for part in (Part(0, 2, 0, 2), Part(2, 4, 0, 2)):
        use(branches, SYSTEM, shelf=Shelf(SPACE.digest, part, b"", layout.part_bytes(part)))

    (only,) = told(branches).values()

    assert only.tally.fetches == 1


def test_what_was_longer_ago_than_the_window_is_not_told():
    clock = FakeClock()
    branches = counted(clock)
    use(branches, SYSTEM + ONE, 5)
    branches.settle()
    clock.advance(60.0 * WINDOW_MINUTES)
    use(branches, SYSTEM + TWO, 2)
    before = {at.tally.fetches for at in told(branches).values()}
    clock.advance(60.0)

    assert before == {7, 5, 2}
    assert {at.tally.fetches for at in told(branches).values()} == {2}
    clock.advance(60.0 * WINDOW_MINUTES)
    assert told(branches) == {}


names = st.lists(st.integers(1, 3), min_size=1, max_size=24)
requests = st.lists(st.tuples(names, st.integers(0, 24)), min_size=1, max_size=30)


@given(requests)
def test_every_branch_has_the_lookups_and_hits_that_a_count_of_all_prefixes_gives(requests):
    branches = counted()
    exact, hits = Counter(), Counter()
    for request, found_blocks in requests:
        chain = chain_of(request)
        branches.note_fetch(SHELF, chain, min(found_blocks, len(chain)))
        exact.update(chain.keys)
        hits.update(chain.keys[:found_blocks])

    found = told(branches)

    for key, at in found.items():
        assert (at.tally.fetches, at.tally.fetch_hits) == (exact[key], hits[key])
        path = path_of(at.node)
        assert [depth for depth, _ in path] == list(CHECKPOINTS[: len(path)])
        on = [exact[child.keys[-1]] for child in at.node.children.values()]
        assert all(child < CONTINUES_RATIO * exact[path[at_depth(path, at)][1]] for child in on)
    firsts = {chain_of(request).keys[0] for request, _ in requests}
    assert {path_of(at.node)[0][1] for at in found.values() if at.parent is None} == firsts


def at_depth(path, told_branch):
    """Where the branch begins, behind the block where it left the other: there it has most lookups."""
    return next(place for place, (depth, _) in enumerate(path) if depth > told_branch.leaves_at_blocks)


def test_branches_are_bounded_and_the_hot_ones_stay():
    branches = counted(max_branches=64)
    for number in range(2000):
        use(branches, [*SYSTEM, 100 + number, *range(40)])
        if number % 4 == 0:
            use(branches, SYSTEM + ONE)
        branches.settle()

    found = told(branches)

    assert branches.num_branches <= 64
    assert found[chain_of(SYSTEM).keys[-1]].tally.fetches == 2500
    assert found[chain_of(SYSTEM + ONE).keys[-1]].tally.fetches == 500


def test_a_namespace_of_many_prompts_does_not_push_out_another():
    other = Namespace("other", LAYOUT)
    branches = counted(max_branches=64)
    branches.note_fetch(shelf_of(other), chain_of(SYSTEM, other), 4)
    for number in range(500):
        use(branches, [number, number])
        branches.settle()

    assert len(told(branches, other)) == 1


def test_namespaces_are_bounded_and_the_one_used_longest_ago_makes_way():
    clock = FakeClock()
    branches = counted(clock)
    spaces = [Namespace(f"m{number}", LAYOUT) for number in range(MAX_NAMESPACES + 1)]
    for space in (*spaces[:-1], spaces[0], spaces[-1]):
        clock.advance(0.01)
        branches.note_fetch(shelf_of(space), chain_of(SYSTEM, space), 4)
        branches.settle()

    left = set(branches.namespaces())

    assert left == {space.digest for space in spaces} - {spaces[1].digest}


def test_while_there_are_too_many_lookups_a_sample_stands_for_the_others():
    clock = FakeClock()
    branches = counted(clock, max_samples_per_s=100)
    chosen = random.Random(2)
    share, seconds, per_s = 0.2, 30, 5000
    chains = [chain_of(SYSTEM + ONE), chain_of(SYSTEM + TWO)]
    for _ in range(seconds):
        for at in range(per_s):
            branches.note_fetch(SHELF, chains[chosen.random() < share], 8)
            if at % 500 == 0:
                clock.advance(0.1)
                branches.settle()

    found = told(branches)

    assert branches.sample_ratio == pytest.approx(100 / per_s, rel=0.5)
    total = found[chains[0].keys[-1]].tally.fetches + found[chains[1].keys[-1]].tally.fetches
    assert total == pytest.approx(seconds * per_s, rel=0.1)
    assert found[chains[1].keys[-1]].tally.fetches == pytest.approx(share * total, rel=0.2)
    for _ in range(2):
        clock.advance(5.0)
        branches.settle()
    assert branches.sample_ratio == 1


def test_a_full_queue_loses_samples_and_counts_them(monkeypatch):
    monkeypatch.setattr(branches_module, "_MAX_QUEUED", 3)
    branches = counted()
    use(branches, SYSTEM, 5)

    (only,) = told(branches).values()

    assert (only.tally.fetches, branches.lost_samples) == (3, 2)


def test_a_fault_is_logged_and_switches_it_off(caplog, monkeypatch):
    branches = counted()
    monkeypatch.setattr(branches_module, "BranchTree", None)
    use(branches, SYSTEM)

    with caplog.at_level(logging.ERROR):
        branches.settle()
    use(branches, SYSTEM)

    assert not branches.is_on
    assert "counting the branches that are used failed" in caplog.text
    assert (branches.namespaces(), branches.step()) == ([], False)


def test_checkpoints_are_every_block_at_first_and_an_eighth_apart_then():
    gaps = [after - before for before, after in pairwise(CHECKPOINTS)]

    assert CHECKPOINTS[:16] == tuple(range(1, 17))
    assert all(gap <= max(1, before / 8) for gap, before in zip(gaps, CHECKPOINTS, strict=False))
    assert len([depth for depth in CHECKPOINTS if depth <= 6250]) == 84
