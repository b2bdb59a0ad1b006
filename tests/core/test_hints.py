"""Hints: what is refused, and what becomes of blocks whose future was told."""

import asyncio
import math

import pytest

from kvstore import Hints
from kvstore.errors import InvalidRequest
from kvstore.policy import NO_HINT, GittinsPolicy, Hint, Offer
from kvstore.tier import StorageKey
from tests.core.manager_harness import SPACE, running

WRONG = [
    {"ends_session": 1},
    {"is_one_off": "yes"},
    {"next_use_s": -1},
    {"next_use_s": math.nan},
    {"next_use_s": math.inf},
    {"next_use_s": 1e9},
    {"next_use_s": True},
    {"next_use_s": 10**400},
    {"next_use_s": 10**5000},
    {"next_use_s": float("nan")},
    {"priority": 10**5000},
    {"output_tokens": -(10**5000)},
    {"priority": 5},
    {"priority": -5},
    {"priority": 0.5},
    {"priority": True},
    {"output_tokens": -1},
    {"output_tokens": 1 << 31},
    {"output_tokens": 2.0},
]


@pytest.mark.parametrize("members", WRONG)
def test_a_hint_outside_its_range_is_refused_by_name(members):
    (name,) = members

    with pytest.raises(InvalidRequest, match=f"hints: {name}"):
        Hints(**members)


def test_a_hint_of_another_name_is_refused():
    with pytest.raises(InvalidRequest, match="'endsSession' is unknown"):
        Hints.from_dict({"endsSession": True})


def test_hints_come_back_from_json_as_they_were():
    hints = Hints(ends_session=True, next_use_s=3.5, priority=-1, output_tokens=7)

    assert Hints.from_dict(hints.as_dict()) == hints
    assert Hints().as_dict() == {}


def _first_victim(manager):
    policy = manager.policy_of("dram")
    return next(iter(policy.candidates(now_s=asyncio.get_running_loop().time())))


def _names(chain):
    return {key[:8] for key in chain.keys}


@pytest.mark.parametrize("how", ["put", "fetch", "later", "after its fetch"])
async def test_blocks_of_a_session_that_ended_leave_first(how):
    over, goes_on = SPACE.chain(list(range(100, 116))), SPACE.chain(list(range(16)))
    ended = Hints(ends_session=True)
    async with running(blocks=16) as harness:
        # The one that goes on is the older one: without a word it would leave first.
        await harness.put(goes_on)
        await harness.put(over, hints=ended if how == "put" else None)
        if how == "fetch":
            await harness.fetch(over, hints=ended)
        if how == "later":
            harness.manager.note_hints(over, ended)
        if how == "after its fetch":
            await harness.fetch(goes_on)
            await harness.fetch(over)
            await harness.put(over, hints=ended)

        assert _first_victim(harness.manager)[:8] in _names(over)
        assert harness.manager.stats()["hinted_requests"] == 1


async def test_without_a_hint_the_older_blocks_leave_first():
    newer, older = SPACE.chain(list(range(100, 116))), SPACE.chain(list(range(16)))
    async with running(blocks=16) as harness:
        await harness.put(older)
        await harness.put(newer)

        assert _first_victim(harness.manager)[:8] in _names(older)


async def test_hints_about_blocks_that_are_not_stored_are_no_matter():
    async with running(blocks=16) as harness:
        harness.manager.note_hints(SPACE.chain(list(range(16))), Hints(ends_session=True))


async def test_what_a_hit_saves_follows_from_prefill_speed_and_block_size():
    async with running(blocks=16, prefill_tokens_per_s=1000.0) as harness:
        chain = SPACE.chain(list(range(16)))
        await harness.put(chain)
        told = []
        policy = harness.manager.policy_of("dram")
        touch = policy.touch
        policy.touch = lambda *args, **rest: (told.append(rest["hint"]), touch(*args, **rest))
        await harness.fetch(chain)

    # 4 tokens at 1000 a second, for 8192 bytes.
    assert [hint.saves_s_per_byte for hint in told] == [4 / 1000 / 8192]


def _keys(*numbers):
    return [StorageKey(bytes([number])) for number in numbers]


def _stored(policy, blocks, now_s, hint=NO_HINT):
    policy.offer(Offer(blocks, 1, None, hint), now_s=now_s)
    policy.insert(blocks, size_bytes=1, now_s=now_s, hint=hint)


def test_blocks_that_save_more_per_byte_are_kept_longer():
    policy = GittinsPolicy()
    cheap, dear = _keys(1), _keys(2)
    _stored(policy, dear, 0.0, Hint(saves_s_per_byte=1e-6))
    _stored(policy, cheap, 1.0, Hint(saves_s_per_byte=1e-8))

    assert list(policy.candidates(now_s=2.0)) == [*cheap, *dear]


def test_a_later_hint_is_no_use():
    policy = GittinsPolicy()
    first, second = _keys(1), _keys(2)
    _stored(policy, first, 0.0)
    _stored(policy, second, 1.0)
    used_before = sum(sum(used) for _, used, _ in policy.to_state()["classes"])
    policy.note_hint(first, now_s=2.0, hint=Hint(output_tokens=5))

    assert sum(sum(used) for _, used, _ in policy.to_state()["classes"]) == used_before
