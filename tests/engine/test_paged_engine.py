"""PagedEngine: reuse, equality with a cold run, pressure, faults of the store, cancellation, closing."""

import asyncio
import contextlib
import time

import pytest
import torch

from kvstore.errors import InvalidConfig, InvalidRequest, PromptTooLong
from kvstore.hints import Hints
from kvstore.miss import MissReason
from kvstore.results import Fetched
from kvstore.testing import FaultyTier, MemoryTier
from kvstore.tier import ReadStatus
from kvstore_engine_adapter.generation import (
    EngineBusy,
    EngineClosed,
    Finished,
    GenerateRequest,
    Prefilled,
    Token,
)
from kvstore_engine_adapter.load_policy import LoadSpeed
from kvstore_engine_adapter.paged_engine import EngineSettings, PagedEngine
from kvstore_engine_adapter.request_blocks import Waits
from kvstore_engine_adapter.sampling import SamplingParams

PROMPT = torch.randint(3, 300, (203,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER = torch.randint(3, 300, (203,), generator=torch.Generator().manual_seed(2)).tolist()


@contextlib.asynccontextmanager
async def opened(model, *, lower=(), is_checked=True, **settings):
    engine = PagedEngine(model, EngineSettings(max_model_tokens=320, **settings), lower=lower)
    await engine.open()
    try:
        yield engine
        if engine.manager is not None and is_checked:
            assert await engine.manager.check() == []
    finally:
        await engine.close()


async def answer(engine, prompt=PROMPT, max_tokens=8, **options):
    request = GenerateRequest(prompt, max_tokens, wants_first_logits=True, **options)
    events = [event async for event in engine.generate(request)]
    assert isinstance(events[0], Prefilled)
    assert isinstance(events[-1], Finished)
    return [event.token for event in events if isinstance(event, Token)], events[-1]


async def started(engine, prompt):
    """A task that computes a long answer; its first token is there."""
    has_token = asyncio.Event()

    async def consume():
        async with contextlib.aclosing(engine.generate(GenerateRequest(prompt, 100))) as events:
            async for _ in events:
                has_token.set()

    task = asyncio.create_task(consume())
    await has_token.wait()
    return task


@pytest.fixture(scope="module")
def cold(tiny_bf16):
    async def answers():
        async with opened(tiny_bf16, is_reusing=False) as engine:
            return {tuple(prompt): await answer(engine, prompt) for prompt in (PROMPT, OTHER)}

    return asyncio.run(answers())


def assert_same_answer(found, wanted):
    assert found[0] == wanted[0]
    assert (found[1].report.first_logits == wanted[1].report.first_logits).all()


async def settled(engine):
    assert await engine.manager.flush(timeout_s=5)


async def test_without_reuse_nothing_is_matched_and_the_report_says_so(cold):
    _, finished = cold[tuple(PROMPT)]
    report = finished.report
    assert (report.prompt_tokens, report.matched_tokens, report.output_tokens) == (203, 0, 8)
    assert (report.miss_reason, finished.reason) == ("no_store", "length")


async def test_a_second_request_reuses_all_full_blocks_of_its_prompt(tiny_bf16, cold):
    async with opened(tiny_bf16) as engine:
        first, second = await answer(engine), await answer(engine)
    assert first[1].report.miss_reason == "never_seen"
    assert second[1].report.tokens_by_tier == {"vram": 192}
    assert second[1].report.miss_reason is None
    assert_same_answer(first, cold[tuple(PROMPT)])
    assert_same_answer(second, cold[tuple(PROMPT)])


async def test_the_last_token_is_computed_even_if_every_block_is_stored(tiny_bf16):
    async with opened(tiny_bf16) as engine:
        await answer(engine, PROMPT[:96])
        tokens, finished = await answer(engine, PROMPT[:64])
    assert finished.report.matched_tokens == 48
    assert len(tokens) == 8


async def test_a_conversation_reuses_what_decoding_computed(tiny_bf16):
    async with opened(tiny_bf16) as engine:
        first, _ = await answer(engine, PROMPT[:60], 40)
        longer = [*PROMPT[:60], *first, *OTHER[:20]]
        warm = await answer(engine, longer)
    async with opened(tiny_bf16, is_reusing=False) as engine:
        wanted = await answer(engine, longer)
    assert warm[1].report.matched_tokens == 96
    assert_same_answer(warm, wanted)


async def test_a_new_engine_reuses_what_another_one_wrote_to_a_lower_tier(tiny_bf16, cold):
    store = MemoryTier(is_shared=True)
    async with opened(tiny_bf16, lower=[store]) as engine:
        await answer(engine)
        await settled(engine)
    async with opened(tiny_bf16, lower=[store]) as engine:
        found = await answer(engine)
    assert found[1].report.tokens_by_tier == {"memory": 192}
    assert_same_answer(found, cold[tuple(PROMPT)])


async def test_tenants_and_epochs_share_nothing(tiny_bf16):
    store = MemoryTier(is_shared=True)
    async with opened(tiny_bf16, lower=[store]) as engine:
        await answer(engine)
        await settled(engine)
    for settings in ({"tenant_salt": b"another tenant's"}, {"epoch": 1}, {"block_tokens": 32}):
        async with opened(tiny_bf16, lower=[store], **settings) as engine:
            _, finished = await answer(engine)
            assert finished.report.found_tokens == 0


async def test_models_share_nothing(tiny_bf16, tiny_f32):
    store = MemoryTier(is_shared=True)
    async with opened(tiny_bf16, lower=[store]) as engine:
        await answer(engine)
        await settled(engine)
    async with opened(tiny_f32, lower=[store]) as engine:
        _, finished = await answer(engine)
    assert finished.report.found_tokens == 0


async def test_answers_stay_right_under_eviction_pressure(tiny_bf16, cold):
    async with opened(tiny_bf16, num_blocks=20) as engine:
        for _ in range(3):
            for prompt in (PROMPT, OTHER):
                assert_same_answer(await answer(engine, prompt), cold[tuple(prompt)])


async def test_a_pool_smaller_than_a_prompt_computes_it_in_spare_pages(tiny_bf16, cold):
    async with opened(tiny_bf16, num_blocks=4) as engine:
        for _ in range(2):
            assert_same_answer(await answer(engine), cold[tuple(PROMPT)])
        assert engine.manager.stats()["tiers"]["vram"]["used_bytes"] == 0
        assert engine.stats()["store_faults"] == {"reserve_full": 2}


async def test_a_store_that_hangs_on_writes_fails_no_request(tiny_bf16, cold):
    store = FaultyTier(MemoryTier(is_shared=False))
    waits = Waits(reserve_s=0.05)
    async with opened(tiny_bf16, lower=[store], num_blocks=16, waits=waits, is_checked=False) as engine:
        store.hold()
        for prompt in (PROMPT, OTHER, PROMPT):
            assert_same_answer(await answer(engine, prompt), cold[tuple(prompt)])
        store.let_go()


@pytest.mark.alone
async def test_a_store_that_hangs_on_reads_costs_at_most_the_waits(tiny_bf16, cold):
    store = FaultyTier(MemoryTier(is_shared=False))
    async with opened(tiny_bf16, lower=[store]) as engine:
        await answer(engine)
        await settled(engine)
    waits = Waits(match_s=0.05, load_s=0.1, shortest_load_s=0.05)
    async with opened(tiny_bf16, lower=[store], waits=waits, is_checked=False) as engine:
        engine._running.supply.policy.speeds["memory"] = LoadSpeed(call_s=0.0, block_s=1e-6)
        store.hold()
        started_s = time.monotonic()
        found = await answer(engine)
        load_s = found[1].report.load_s
        store.let_go()
    assert found[1].report.miss_reason == MissReason.TIMED_OUT.value
    assert load_s < 0.8, f"of {time.monotonic() - started_s} s"
    assert_same_answer(found, cold[tuple(PROMPT)])


async def test_a_load_that_comes_late_is_taken_over_where_prefill_has_come_to(tiny_bf16, cold):
    store = FaultyTier(MemoryTier(is_shared=False))
    async with opened(tiny_bf16, lower=[store]) as engine:
        await answer(engine)
        await settled(engine)
    waits = Waits(load_s=0.01, shortest_load_s=0.01)
    async with opened(tiny_bf16, lower=[store], waits=waits, step_tokens=1, max_num_seqs=1) as engine:
        engine._running.supply.policy.speeds["memory"] = LoadSpeed(call_s=0.0, block_s=1e-6)
        store.hold()
        task = asyncio.create_task(answer(engine))
        while engine.stats()["counters"].get("passes", 0) < 3:  # noqa: ASYNC110  counted, not announced
            await asyncio.sleep(0)
        store.let_go()
        found = await task
    report = found[1].report
    assert 0 < report.matched_tokens < 192
    assert report.tokens_by_tier == {"memory": report.matched_tokens}
    assert_same_answer(found, cold[tuple(PROMPT)])


@pytest.mark.parametrize("status", [ReadStatus.CORRUPT, ReadStatus.ABSENT, ReadStatus.UNAVAILABLE])
async def test_a_failed_read_is_computed_instead(tiny_bf16, cold, status):
    store = FaultyTier(MemoryTier(is_shared=True))
    async with opened(tiny_bf16, lower=[store]) as engine:
        await answer(engine)
        await settled(engine)
    async with opened(tiny_bf16, lower=[store]) as engine:
        store.fail_reads(status)
        found = await answer(engine)
    assert found[1].report.matched_tokens == 0
    assert found[1].report.found_tokens == 192
    assert_same_answer(found, cold[tuple(PROMPT)])


async def test_a_load_slower_than_prefill_is_skipped_and_reported(tiny_bf16, cold):
    store = MemoryTier(is_shared=True)
    async with opened(tiny_bf16, lower=[store]) as engine:
        await answer(engine)
        await settled(engine)
    async with opened(tiny_bf16, lower=[store]) as engine:
        engine._running.supply.policy.speeds["memory"] = LoadSpeed(call_s=0.0, block_s=10.0)
        found = await answer(engine)
    report = found[1].report
    assert (report.matched_tokens, report.found_tokens) == (0, 192)
    assert report.miss_reason == "not_worth_loading"
    assert_same_answer(found, cold[tuple(PROMPT)])


async def test_a_manager_that_never_answers_costs_at_most_the_waits(tiny_bf16, cold, monkeypatch):
    async def never(*_args, **_kwargs) -> Fetched:
        await asyncio.Event().wait()
        raise AssertionError

    async with opened(tiny_bf16, waits=Waits(match_s=0.01, load_s=0.01, shortest_load_s=0.01)) as engine:
        await answer(engine)
        monkeypatch.setattr(engine.manager, "fetch", never)
        found = await answer(engine)
        assert engine.stats()["store_faults"] == {"fetch_late": 1}
    assert_same_answer(found, cold[tuple(PROMPT)])


async def test_an_end_token_ends_the_answer_and_is_not_part_of_it(tiny_bf16, cold):
    tokens, _ = cold[tuple(PROMPT)]
    end = tokens[4]
    async with opened(tiny_bf16) as engine:
        found, finished = await answer(engine, end_tokens=frozenset({end}))
    assert found == tokens[: tokens.index(end)]
    assert finished.reason == "stop"


async def test_a_seed_repeats_a_sampled_answer_also_on_reused_blocks(tiny_bf16):
    sampling = SamplingParams(temperature=1.0, seed=11)
    async with opened(tiny_bf16) as engine:
        first, _ = await answer(engine, sampling=sampling)
        second, finished = await answer(engine, sampling=sampling)
    assert finished.report.matched_tokens == 192
    assert first == second


async def test_log_probabilities_come_with_the_tokens_if_asked_for(tiny_bf16, cold):
    async with opened(tiny_bf16) as engine:
        events = [event async for event in engine.generate(GenerateRequest(PROMPT, 4, logprobs=3))]
    tokens = [event for event in events if isinstance(event, Token)]
    assert [token.top_logprobs[0] for token in tokens] == [(token.token, token.logprob) for token in tokens]
    assert {len(token.top_logprobs) for token in tokens} == {3}
    first = torch.tensor(cold[tuple(PROMPT)][1].report.first_logits).double().log_softmax(0)
    assert tokens[0].logprob == float(first[tokens[0].token])


async def test_requests_that_run_together_are_answered_as_each_would_be_alone(tiny_bf16, cold):
    async with opened(tiny_bf16) as engine:
        prompts = [PROMPT, OTHER, PROMPT, OTHER]
        found = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
        counters = engine.stats()["counters"]
    for prompt, each in zip(prompts, found, strict=True):
        assert_same_answer(each, cold[tuple(prompt)])
    assert counters["passes"] < 4 * 8


async def test_running_requests_with_one_prompt_compute_it_once(tiny_bf16, cold):
    async with opened(tiny_bf16) as engine:
        found = await asyncio.gather(*(answer(engine) for _ in range(4)))
        computed = engine.stats()["counters"]["computed_tokens"]
    for each in found:
        assert_same_answer(each, cold[tuple(PROMPT)])
    assert computed == 203 + 3 * 1 + 4 * 7
    reports = [each[1].report for each in found]
    assert sorted(report.matched_tokens for report in reports) == [0, 202, 202, 202]
    assert [report.miss_reason for report in reports].count(None) == 3


async def test_a_prompt_that_ends_inside_a_block_of_a_running_one_takes_over_the_tokens_they_share(tiny_bf16):
    changed = [*PROMPT[:200], *OTHER[200:]]
    async with opened(tiny_bf16, is_reusing=False) as engine:
        wanted = await answer(engine, changed)
    async with opened(tiny_bf16) as engine:
        first = await started(engine, PROMPT)
        found = await answer(engine, changed)
        first.cancel()
    assert found[1].report.matched_tokens == 200
    assert_same_answer(found, wanted)


async def test_a_full_queue_refuses(tiny_bf16):
    async with opened(tiny_bf16, max_num_seqs=1, max_waiting=1) as engine:
        tasks = [asyncio.create_task(answer(engine)) for _ in range(3)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, EngineBusy)]
    assert len(refused) == 1


async def test_a_cancelled_request_gives_everything_back(tiny_bf16, cold):
    async with opened(tiny_bf16) as engine:
        for at in (1, 3):
            events = engine.generate(GenerateRequest(PROMPT, 100))
            for _ in range(at):
                await anext(events)
            await events.aclose()
        task = await started(engine, OTHER)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.manager.stats()["owners"] == 0
        assert_same_answer(await answer(engine), cold[tuple(PROMPT)])


async def test_closing_ends_running_and_waiting_requests(tiny_bf16):
    engine = PagedEngine(tiny_bf16, EngineSettings(max_model_tokens=320))
    await engine.open()
    tasks = [await started(engine, PROMPT)]
    tasks += [asyncio.create_task(answer(engine)) for _ in range(2)]
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineClosed) for result in results)


async def test_a_closed_engine_refuses(tiny_bf16):
    engine = PagedEngine(tiny_bf16)
    with pytest.raises(EngineClosed):
        await answer(engine)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message"),
    [
        ([], 1, InvalidRequest, "no tokens"),
        ([5], 0, InvalidRequest, "at least 1"),
        ([99999], 1, InvalidRequest, "outside 0"),
        ([-1], 1, InvalidRequest, "outside 0"),
        ([5] * 320, None, PromptTooLong, "320 tokens, the context is 320"),
        ([5] * 310, 11, PromptTooLong, "at most 10"),
    ],
)
async def test_a_request_that_cannot_be_served_says_why(tiny_bf16, prompt, max_tokens, error, message):
    async with opened(tiny_bf16) as engine:
        with pytest.raises(error, match=message):
            await answer(engine, prompt, max_tokens)


async def test_an_answer_may_fill_the_context_to_the_last_token(tiny_bf16):
    async with opened(tiny_bf16) as engine:
        tokens, finished = await answer(engine, PROMPT, None)
    assert len(tokens) == 320 - 203
    assert finished.reason == "length"


async def test_more_pages_than_memory_are_refused(tiny_bf16):
    engine = PagedEngine(tiny_bf16, EngineSettings(num_blocks=10**12))
    with pytest.raises(InvalidConfig, match="lower the number of blocks"):
        await engine.open()


def test_a_model_length_beyond_the_models_is_refused(tiny_bf16):
    with pytest.raises(InvalidConfig, match=r"the model allows 2\.\.1024"):
        PagedEngine(tiny_bf16, EngineSettings(max_model_tokens=1025))


async def test_a_request_that_ends_tells_the_store_what_it_knows_of_its_blocks(tiny_bf16):
    async with opened(tiny_bf16) as engine:
        told = []
        note = engine.manager.note_hints
        engine.manager.note_hints = lambda chain, hints, **rest: (
            told.append((len(chain), hints)),
            note(chain, hints, **rest),
        )
        await answer(engine, max_tokens=8)
        await answer(engine, OTHER, max_tokens=5, hints=Hints(ends_session=True))

        # All blocks that are full: of 210 and 207 tokens whose keys and values were computed.
        assert told == [
            (13, Hints(output_tokens=8)),
            (12, Hints(ends_session=True, output_tokens=5)),
        ]
        assert engine.manager.stats()["hinted_requests"] == 2
