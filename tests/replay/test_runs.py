"""Replays count what policies do, for one tier and for several."""

import io
import json

import pytest

from kvstore.errors import InvalidRequest
from kvstore.policy import GittinsPolicy, Offer, PolicyCache
from kvstore.replay import (
    ProgressBar,
    ReplayPlan,
    TierSize,
    default_capacities,
    lru_curve,
    policy_names,
    policy_of,
    read_trace,
    replay,
)
from kvstore.replay.choosing import require_distinct
from kvstore.tier import StorageKey
from tests.replay.traces import CHAT, PUBLISHED, REFERENCE, needs_published_trace, trace_of

OWN = """
from kvstore.policy import FifoPolicy


class Mine(FifoPolicy):
    pass


class Bare:
    def __init__(self, capacity_bytes):
        pass


class Failing(FifoPolicy):
    def insert(self, blocks, **rest):
        raise RuntimeError("no more")


class Unmade:
    def __init__(self, capacity_bytes):
        raise ValueError("too small")


class Inventive(FifoPolicy):
    def candidates(self, **rest):
        return iter([b"never stored"])
"""


def run(trace, *names, capacities=(4,), **plan):
    plan = ReplayPlan([policy_of(name) for name in names], capacities, **plan)
    return replay(trace, plan, ProgressBar(io.StringIO()))


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_lru_and_the_bound_hit_what_was_counted_by_hand():
    lru, bound = run(trace_of(*CHAT), "lru", "bound")

    assert (lru.policy, lru.capacity_blocks, lru.requests, lru.block_accesses) == ("lru", 4, 5, 17)
    # 1 2 3; then 4; then 5 (there is no room for 6); then 7 8; then 4 9 again: nine are written.
    assert (lru.hit_blocks, lru.hit_tokens, lru.written_blocks) == (7, 28, 9)
    assert (bound.hit_blocks, bound.written_blocks) == (8, 4)
    assert (lru.share_of_bound, bound.share_of_bound) == (7 / 8, 1.0)


def test_tiers_hit_and_write_what_was_counted_by_hand():
    tiers = (TierSize("dram", 2), TierSize("ssd", 4))

    (result,) = run(trace_of(*CHAT), "lru", tiers=tiers)

    assert (result.capacity_blocks, result.hit_blocks, result.written_blocks) == (6, 7, 16)
    dram, ssd = result.tiers
    assert (dram.tier, dram.capacity_blocks, dram.hit_blocks, dram.written_blocks) == ("dram", 2, 4, 6)
    # 3; 4; 5 6; then 1 2 when 7 8 come; then 4 9 and 7 8 when 1 2 come back, whose copies here stay.
    assert (ssd.tier, ssd.capacity_blocks, ssd.hit_blocks, ssd.written_blocks) == ("ssd", 4, 3, 10)


def test_three_tiers_hit_as_one_of_their_size_where_all_fits():
    tiers = (TierSize("a", 3), TierSize("b", 3), TierSize("c", 9))

    (result,) = run(trace_of(*CHAT), "lru", tiers=tiers)

    assert result.hit_blocks == 8
    assert sum(tier.hit_blocks for tier in result.tiers) == 8


@pytest.mark.parametrize("name", [name for name in policy_names() if name != "bound"])
def test_no_policy_hits_more_than_the_bound_and_with_room_for_all_each_hits_all(name):
    trace = trace_of(*(CHAT * 4))

    results = run(trace, name, capacities=(1, 2, 3, 5, 9))

    assert all(result.hit_blocks <= result.bound_blocks for result in results)
    assert results[-1].share_of_bound == 1.0


def test_the_length_of_answers_reaches_policies_that_want_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from kvstore.policy import LruPolicy\n"
        "seen = []\n"
        "class Listening(LruPolicy):\n"
        "    def insert(self, blocks, *, hint, **rest):\n"
        "        super().insert(blocks, hint=hint, **rest)\n"
        "        raise SystemError(hint.output_tokens)\n"
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 1, "output_length": 77, "hash_ids": [1]}))

    with pytest.raises(InvalidRequest, match="SystemError: 77"):
        run(read_trace(str(trace)), f"{path}:Listening", tells_output=True)


@pytest.mark.parametrize("spelling", ["LRU", "lru"])
def test_a_name_is_shown_as_it_was_written_but_small(spelling):
    assert policy_of(spelling).name == "lru"


@pytest.mark.parametrize("name", [name for name in policy_names() if "-" in name])
def test_dashes_may_be_left_out(name):
    plain = name.replace("-", "")

    assert policy_of(plain).name == plain
    assert policy_of(plain).new is policy_of(name).new


def test_an_unknown_policy_says_which_there_are():
    with pytest.raises(InvalidRequest, match=r"'clock' is unknown, expected some of .*lru.*bound"):
        policy_of("clock")


def test_a_policy_of_ones_own_is_replayed(own):
    theirs, ours = run(trace_of(*CHAT), "fifo", f"{own}:Mine")

    assert ours.policy == "Mine"
    assert (ours.hit_blocks, ours.written_blocks) == (theirs.hit_blocks, theirs.written_blocks)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Absent", r"mine\.py has no class Absent: its classes are FifoPolicy, Mine, Bare"),
        ("not a name", r"expected FILE\.py:CLASS"),
        (
            "Bare",
            r"has no method touch, offer, insert, candidates, evict, refuse, remove: see kvstore\.policy",
        ),
        ("Failing", r"policy Failing: .*mine\.py:16: RuntimeError: no more"),
        ("Unmade", r"policy Unmade: .*mine\.py:21: ValueError: too small"),
        ("Inventive", r"policy Inventive: .*mine\.py: KeyError: b'never stored'"),
    ],
)
def test_a_policy_of_ones_own_that_is_wrong_says_so(own, name, said):
    with pytest.raises(InvalidRequest, match=said):
        run(trace_of(*CHAT), f"{own}:{name}")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("absent.py", None, r"there is no file .*absent\.py"),
        ("mine.txt", "", r"its name must end in \.py"),
        ("mine.py", "x = (", r"mine\.py:1: SyntaxError"),
        ("mine.py", "\nimport nowhere_to_be_found", r"mine\.py:2: ModuleNotFoundError"),
        ("mine.py", "_x = 1", r"it has no classes"),
    ],
)
def test_a_file_that_has_no_policy_says_so(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)

    with pytest.raises(InvalidRequest, match=said):
        policy_of(f"{tmp_path / name}:Mine")


def test_two_policies_of_one_name_are_refused_and_one_named_twice_is_replayed_once(own):
    lru = policy_of("lru")

    assert require_distinct([lru, policy_of("lru")]) == [lru]
    spellings = [policy_of(name) for name in ("s3fifo", "S3-FIFO", "lru+s3fifo", "LRU+s3-fifo")]
    assert [policy.name for policy in require_distinct(spellings)] == ["s3fifo", "lru+s3fifo"]
    with pytest.raises(InvalidRequest, match="two have that name"):
        require_distinct([policy_of(f"{own}:Mine"), policy_of(f"{own}:Mine")])


def test_capacities_go_from_a_hundredth_to_all_by_default():
    assert default_capacities(trace_of(*([block] for block in range(1000)))) == [
        10, 20, 50, 100, 200, 500, 1000,
    ]  # fmt: skip


@needs_published_trace
def test_lru_and_fifo_equal_the_published_integers():
    expected = json.loads(REFERENCE.read_text())["exact_integers"]["conversation[:3000]"]["policies"]
    trace = read_trace(str(PUBLISHED), max_requests=3000)
    sizes = [500, 5000, 30000]

    results = run(trace, "lru", "fifo", capacities=sizes)

    names = {"lru": "LRU_rev", "fifo": "FIFO"}
    for result in results:
        reference = expected[names[result.policy]][str(result.capacity_blocks)]
        assert {"hit_blocks": result.hit_blocks, "hit_tokens": result.hit_tokens} == reference
    curve = lru_curve(trace)
    assert [curve.at(size)[0] for size in sizes] == [result.hit_blocks for result in results[:3]]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_only():
    now_s = [100.0]
    terminal, file = Terminal(), io.StringIO()
    bars = [ProgressBar(stream, clock=lambda: now_s[0]) for stream in (terminal, file)]

    for bar in bars:
        bar.start("lru 4", 10)
    now_s[0] += 5
    for bar in bars:
        bar.show(5)
        bar.clear()

    assert file.getvalue() == ""
    assert " 50%, 5 s left" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_each_tier_may_have_a_policy_of_its_own():
    trace = trace_of(*CHAT)
    tiers = (TierSize("dram", 2), TierSize("ssd", 4))

    both, mixed, same = replay(
        trace,
        ReplayPlan([*map(policy_of, ("lru", "lru+fifo", "lru+lru"))], [], tiers),
        ProgressBar(io.StringIO()),
    )

    assert (both.hit_blocks, both.tiers) == (same.hit_blocks, same.tiers)
    assert mixed.policy == "lru+fifo"
    assert mixed.tiers[0] == both.tiers[0]


@pytest.mark.parametrize(
    ("text", "tiers", "message"),
    [
        ("lru+lru", (), "names 2 policies, and there is one tier"),
        ("lru+lru+lru", (TierSize("a", 2), TierSize("b", 2)), "names 3 policies, and there are 2 tiers"),
    ],
)
def test_as_many_policies_are_named_as_there_are_tiers(text, tiers, message):
    plan = ReplayPlan([policy_of(text)], [4], tiers)

    with pytest.raises(InvalidRequest, match=message):
        replay(trace_of(*CHAT), plan, ProgressBar(io.StringIO()))


def test_the_bound_is_no_policy_of_a_tier():
    with pytest.raises(InvalidRequest, match="the bound is no policy of a tier"):
        policy_of("lru+bound")


def test_a_tier_below_knows_how_long_ago_a_block_was_used():
    cache = PolicyCache(GittinsPolicy(), 8)
    old, young = [StorageKey(bytes([n])) for n in range(4)], [StorageKey(bytes([10 + n])) for n in range(4)]
    cache.pass_by(Offer(old, 1), now_s=0.0)
    cache.pass_by(Offer(young, 1), now_s=1000.0)

    cache.store(young, now_s=1001.0)
    cache.store(old, now_s=1002.0)

    assert list(cache.policy.candidates(now_s=1003.0))[:4] == old[::-1]


def test_a_block_that_left_and_comes_again_from_above_has_no_children_of_its_former_life():
    policy = GittinsPolicy()
    parent, child = StorageKey(b"parent"), StorageKey(b"child")
    policy.insert([parent, child], size_bytes=1, now_s=0.0)
    policy.evict(parent, now_s=1.0)
    policy.insert([parent], size_bytes=1, now_s=2.0, is_use=False)

    policy.evict(child, now_s=3.0)

    assert list(policy.candidates(now_s=4.0)) == [parent]
