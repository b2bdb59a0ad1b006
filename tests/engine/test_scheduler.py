"""The scheduler against its promises: budget, blocks, order, preemption, and a turn for every request."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine_adapter.scheduler import (
    Phase,
    RequestView,
    SchedulerLimits,
    in_order,
    plan_admissions,
    plan_pass,
)
from tests.example_counts import examples

LIMITS = SchedulerLimits(max_seated=4, step_tokens=32, block_tokens=4, ageing_s=10.0)


def blocks_of(tokens):
    return math.ceil(tokens / LIMITS.block_tokens)


def view(number, phase=Phase.RUNNING, *, known=8, computed=0, priority=0, arrived_s=None, held=None, **rest):
    held = blocks_of(computed) if held is None else held
    return RequestView(
        number=number,
        priority=priority,
        arrived_s=float(number) if arrived_s is None else arrived_s,
        phase=phase,
        known_tokens=known,
        computed_tokens=computed,
        held_blocks=held,
        releasable_blocks=held,
        missing_blocks=blocks_of(known + 1),
        **rest,
    )


@st.composite
def live_requests(draw):
    views = []
    for number in range(draw(st.integers(1, 10))):
        phase = draw(st.sampled_from(Phase))
        known = draw(st.integers(1, 60))
        computed = draw(st.integers(0, known - 1)) if phase is Phase.RUNNING else 0
        work = draw(st.sampled_from([None, None, "a", "b"])) if phase is Phase.RUNNING else None
        views.append(
            view(
                number, phase, known=known, computed=computed, priority=draw(st.integers(-1, 2)),
                arrived_s=draw(st.floats(0, 50)), next_work=work,
            )
        )  # fmt: skip
    return views


@given(live_requests(), st.integers(-2, 40))
def test_a_pass_keeps_to_its_budget_and_to_the_blocks_there_are(views, free):
    plan = plan_pass(views, LIMITS, free_blocks=free)
    by_number = {each.number: each for each in views}
    assert sum(span.tokens for span in plan.spans) <= LIMITS.step_tokens
    taken = 0
    for span in plan.spans:
        each = by_number[span.number]
        assert each.phase is Phase.RUNNING
        assert 0 < span.tokens <= each.known_tokens - each.computed_tokens
        taken += max(0, blocks_of(each.computed_tokens + span.tokens) - each.held_blocks)
    assert taken <= max(0, free + sum(by_number[number].releasable_blocks for number in plan.preempted))
    numbers = [span.number for span in plan.spans]
    assert len(set(numbers)) == len(numbers)
    assert not set(plan.preempted) & {*numbers, *plan.stalled}


@given(live_requests(), st.integers(0, 40))
def test_only_later_requests_lose_their_seat_to_a_pass(views, free):
    plan = plan_pass(views, LIMITS, free_blocks=free)
    order = [each.number for each in in_order(views, LIMITS) if each.phase is not Phase.WAITING]
    if plan.preempted:
        first_out = min(order.index(number) for number in plan.preempted)
        assert [order[index] for index in range(first_out, len(order))] == list(reversed(plan.preempted))
        assert all(order.index(span.number) < first_out for span in plan.spans)


@given(live_requests(), st.integers(0, 40))
def test_every_request_that_decodes_has_its_token_if_budget_and_blocks_allow(views, free):
    plan = plan_pass(views, LIMITS, free_blocks=1000)
    spans = {span.number for span in plan.spans}
    works = [each.next_work for each in views if each.phase is Phase.RUNNING]
    for each in views:
        if each.phase is Phase.RUNNING and each.is_decoding and works.count(each.next_work) == 1:
            assert each.number in spans


@given(live_requests(), st.integers(0, 60))
def test_admission_keeps_to_the_seats_and_blocks_and_takes_only_from_the_less_urgent(views, free):
    plan = plan_admissions(views, LIMITS, free_blocks=free)
    by_number = {each.number: each for each in views}
    seated = {each.number for each in views if each.phase is not Phase.WAITING}
    after = (seated - set(plan.preempted)) | set(plan.seated)
    assert len(after) <= max(LIMITS.max_seated, len(seated))
    for number in plan.seated:
        assert by_number[number].phase is Phase.WAITING
    for number in plan.preempted:
        assert number in seated
        assert any(by_number[other].priority < by_number[number].priority for other in plan.seated)
    waiting = [each.number for each in in_order(views, LIMITS) if each.phase is Phase.WAITING]
    assert list(plan.seated) == waiting[: len(plan.seated)], "nobody is seated before one that comes first"


@given(live_requests())
def test_somebody_is_always_seated_and_something_always_computed(views):
    running = [dataclasses.replace(each, phase=Phase.RUNNING, next_work=None) for each in views]
    enough = blocks_of(61)
    held = sum(each.held_blocks for each in running)
    assert plan_pass(running, LIMITS, free_blocks=max(0, enough - held)).spans
    waiting = [dataclasses.replace(each, phase=Phase.WAITING) for each in views]
    assert plan_admissions(waiting, LIMITS, free_blocks=0).seated


def test_an_urgent_request_takes_the_seat_of_the_last_less_urgent_one():
    seated = [view(n, priority=1) for n in range(4)]
    urgent = view(9, Phase.WAITING, priority=0)
    plan = plan_admissions([*seated, urgent], LIMITS, free_blocks=100)
    assert (plan.preempted, plan.seated) == ((3,), (9,))


def test_requests_of_one_class_take_no_seat_from_each_other():
    seated = [view(n) for n in range(1, 5)]
    earlier = view(9, Phase.WAITING, arrived_s=0.0)
    assert plan_admissions([*seated, earlier], LIMITS, free_blocks=100).seated == ()


def test_one_that_has_waited_long_enough_keeps_its_seat_against_an_urgent_one():
    seated = [view(n, priority=1) for n in range(4)]
    late = view(9, Phase.WAITING, priority=0, arrived_s=3.0 + LIMITS.ageing_s)
    assert plan_admissions([*seated, late], LIMITS, free_blocks=100).preempted == ()


def test_blocks_that_seated_requests_still_need_are_not_promised_again():
    prefilling = view(0, known=40)
    waiting = view(1, Phase.WAITING, known=8)
    need = blocks_of(41) + blocks_of(9) + 1
    assert plan_admissions([prefilling, waiting], LIMITS, free_blocks=need - 1).seated == ()
    assert plan_admissions([prefilling, waiting], LIMITS, free_blocks=need).seated == (1,)


def test_a_request_waits_for_the_block_that_another_one_computes_in_this_pass():
    views = [view(0, known=20, next_work="block"), view(1, known=20, next_work="block"), view(2, known=20)]
    plan = plan_pass(views, LIMITS, free_blocks=100)
    assert [span.number for span in plan.spans] == [0, 2]


def test_prefill_leaves_a_token_to_each_that_decodes():
    views = [view(0, known=100), view(1, known=5, computed=4), view(2, known=5, computed=4)]
    plan = plan_pass(views, LIMITS, free_blocks=100)
    assert [(span.number, span.tokens) for span in plan.spans] == [(0, 30), (1, 1), (2, 1)]


class Simulated:
    """An engine without a model: every pass takes a second; blocks are counted and nothing is shared."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.now_s = 0.0
        self.live = {}
        self.left = {}
        self.ended_s = {}
        self.preemptions = 0

    def arrive(self, number, *, prompt, answer, priority):
        self.live[number] = view(number, Phase.WAITING, known=prompt, priority=priority, arrived_s=self.now_s)
        self.left[number] = answer

    def free(self):
        return self.num_blocks - sum(each.held_blocks for each in self.live.values())

    def leave_seat(self, number):
        each = self.live[number]
        self.preemptions += 1
        self.live[number] = dataclasses.replace(
            each, phase=Phase.WAITING, computed_tokens=0, held_blocks=0, releasable_blocks=0,
            missing_blocks=blocks_of(each.known_tokens + 1),
        )  # fmt: skip

    def turn(self):
        plan = plan_admissions(list(self.live.values()), LIMITS, free_blocks=self.free())
        for number in plan.preempted:
            self.leave_seat(number)
        for number in plan.seated:
            self.live[number] = dataclasses.replace(self.live[number], phase=Phase.RUNNING)
        step = plan_pass(list(self.live.values()), LIMITS, free_blocks=self.free())
        for number in step.preempted:
            self.leave_seat(number)
        for span in step.spans:
            self.compute(span)
        assert self.free() >= 0
        self.now_s += 1.0

    def compute(self, span):
        each = self.live[span.number]
        computed = each.computed_tokens + span.tokens
        held = max(each.held_blocks, blocks_of(computed))
        known = each.known_tokens
        if computed == known:
            known += 1
            self.left[span.number] -= 1
        self.live[span.number] = dataclasses.replace(
            each, computed_tokens=computed, known_tokens=known, held_blocks=held, releasable_blocks=held
        )
        if self.left[span.number] == 0:
            self.ended_s[span.number] = self.now_s
            del self.live[span.number]


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_all_requests_end_whatever_their_class_length_and_time(seed):
    choose = random.Random(seed)
    engine = Simulated(num_blocks=choose.randint(30, 60))
    for number in range(40):
        engine.arrive(
            number, prompt=choose.randint(1, 60), answer=choose.randint(1, 40), priority=choose.randint(0, 3)
        )
        for _ in range(choose.randint(0, 4)):
            engine.turn()
    for _ in range(20_000):
        if not engine.live:
            break
        engine.turn()
    assert len(engine.ended_s) == 40


def test_a_request_of_the_last_class_ends_while_urgent_ones_never_stop_coming():
    engine = Simulated(num_blocks=40)
    engine.arrive(0, prompt=60, answer=20, priority=5)
    number = 0
    while 0 in engine.live:
        for _ in range(2):
            number += 1
            engine.arrive(number, prompt=20, answer=10, priority=0)
        engine.turn()
        assert engine.now_s < 200, "it starves"
    assert engine.ended_s[0] > LIMITS.ageing_s, "the urgent ones came first"


def test_a_burst_of_urgent_requests_overtakes_and_the_others_go_on_afterwards():
    engine = Simulated(num_blocks=200)
    for number in range(4):
        engine.arrive(number, prompt=8, answer=30, priority=1)
    engine.turn()
    for number in range(4, 8):
        engine.arrive(number, prompt=8, answer=5, priority=0)
    while engine.live:
        engine.turn()
    assert max(engine.ended_s[n] for n in range(4, 8)) < min(engine.ended_s[n] for n in range(4))
    assert engine.preemptions == 4


@pytest.mark.parametrize("priorities", [(0, 1), (-1000, 1000)])
def test_what_counts_is_the_order_of_classes_not_their_numbers(priorities):
    views = [
        view(number, Phase.WAITING, priority=priority, arrived_s=at)
        for number, (priority, at) in enumerate([(priorities[0], 9.0), (priorities[1], 0.0)])
    ]
    assert [each.number for each in in_order(views, LIMITS)] == [0, 1][:: 1 if LIMITS.ageing_s > 9 else -1]
