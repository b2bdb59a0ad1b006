"""PagedEngine under pressure: more requests than fit, of several classes, some of them abandoned."""

import asyncio
import contextlib
import random

import pytest

from kvstore.testing import FaultyTier, MemoryTier
from kvstore_engine_adapter.generation import Finished, GenerateRequest, Prefilled, Token
from kvstore_engine_adapter.paged_engine import EngineSettings, PagedEngine
from kvstore_engine_adapter.request_blocks import Waits
from kvstore_engine_adapter.sampling import SamplingParams

STEMS = [[random.Random(seed).randrange(3, 300) for _ in range(150)] for seed in range(3)]


def some_request(number):
    """One of a fixed set: prompts share beginnings of several lengths, classes and lengths differ."""
    choose = random.Random(number)
    stem = STEMS[number % 3][: choose.choice([5, 40, 64, 100, 150])]
    prompt = [*stem, *(choose.randrange(3, 300) for _ in range(choose.randrange(1, 60)))]
    sampling = SamplingParams() if number % 4 else SamplingParams(temperature=1.0, top_k=20, seed=number)
    return GenerateRequest(
        prompt, choose.randrange(1, 70), sampling=sampling, priority=choose.randrange(3)
    )  # fmt: skip


async def answer(engine, request):
    events = [event async for event in engine.generate(request)]
    assert isinstance(events[0], Prefilled)
    assert isinstance(events[-1], Finished)
    return [event.token for event in events if isinstance(event, Token)], events[-1].report


@contextlib.asynccontextmanager
async def opened(model, *, lower=(), **settings):
    engine = PagedEngine(model, EngineSettings(max_model_tokens=320, **settings), lower=lower)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


async def assert_nothing_is_kept(engine):
    supply = engine._running.supply
    assert not supply.holders
    assert len(supply.spare) == 320 // 16
    assert engine.manager.num_kept_slots == 0
    assert engine.manager.stats()["owners"] == 0
    assert await engine.manager.flush(timeout_s=10)
    assert await engine.manager.check() == []


@pytest.fixture(scope="module")
def alone(tiny_bf16):
    """What each request is answered with no other beside it and nothing reused."""

    async def answers():
        async with opened(tiny_bf16, is_reusing=False) as engine:
            return {number: (await answer(engine, some_request(number)))[0] for number in range(40)}

    return asyncio.run(answers())


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_the_pressure_every_answer_is_that_of_the_request_alone(tiny_bf16, alone, seed):
    choose = random.Random(seed)
    numbers = choose.sample(range(40), 24)
    store = MemoryTier(is_shared=bool(seed % 2))
    settings = {"num_blocks": choose.choice([24, 40, 60]), "max_num_seqs": choose.choice([2, 5, 24])}
    settings |= {"step_tokens": choose.choice([8, 24, 64, None]), "max_waiting": 64}

    async def ask(engine, number):
        for _ in range(choose.randrange(30)):
            await asyncio.sleep(0)
        tokens, _ = await answer(engine, some_request(number))
        assert tokens == alone[number], f"request {number} with {settings}"

    async with opened(tiny_bf16, lower=[store], **settings) as engine:
        await asyncio.gather(*(ask(engine, number) for number in numbers))
        await assert_nothing_is_kept(engine)


@pytest.mark.parametrize("seed", range(4))
async def test_requests_abandoned_at_any_time_leave_nothing_and_disturb_nobody(tiny_bf16, alone, seed):
    choose = random.Random(100 + seed)
    store = FaultyTier(MemoryTier(is_shared=False))

    async def leave_early(engine, number, events_wanted):
        async with contextlib.aclosing(engine.generate(some_request(number))) as events:
            for _ in range(events_wanted):
                if await anext(events, None) is None:
                    return

    async def stay(engine, number):
        assert (await answer(engine, some_request(number)))[0] == alone[number]

    async with opened(
        tiny_bf16, lower=[store], num_blocks=40, max_num_seqs=4, step_tokens=24, waits=Waits(reserve_s=0.01)
    ) as engine:
        tasks = []
        for number in range(40):
            if choose.random() < 0.4:
                tasks.append(asyncio.create_task(stay(engine, number)))
            else:
                tasks.append(asyncio.create_task(leave_early(engine, number, choose.randrange(8))))
                for _ in range(choose.randrange(20)):
                    await asyncio.sleep(0)
                if choose.random() < 0.5:
                    tasks[-1].cancel()
            (store.hold if choose.random() < 0.2 else store.let_go)()
        store.let_go()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), (
            results
        )
        await assert_nothing_is_kept(engine)


async def first_token(engine, request):
    """A task that computes an answer, once its first token is there."""
    has_token = asyncio.Event()

    async def consume():
        tokens = []
        async for event in engine.generate(request):
            if isinstance(event, Token):
                tokens.append(event.token)
                has_token.set()
        return tokens, event.report

    task = asyncio.create_task(consume())
    await has_token.wait()
    return task


async def test_an_urgent_request_takes_the_seat_of_another_that_comes_back_and_goes_on(tiny_bf16, alone):
    store = MemoryTier(is_shared=True)
    slow = GenerateRequest(some_request(7).prompt, 60, priority=1)
    async with opened(tiny_bf16, is_reusing=False) as engine:
        wanted, _ = await answer(engine, slow)
    async with opened(tiny_bf16, lower=[store], max_num_seqs=1) as engine:
        task = await first_token(engine, slow)
        urgent = GenerateRequest(some_request(3).prompt, some_request(3).max_tokens, priority=0)
        found, _ = await answer(engine, urgent)
        assert not task.done()
        tokens, report = await task
        await assert_nothing_is_kept(engine)
    assert found == alone[3]
    assert tokens == wanted
    assert report.preemptions == 1


async def test_a_victims_blocks_come_back_from_the_store_if_they_left(tiny_bf16):
    store = MemoryTier(is_shared=False)
    slow = GenerateRequest(STEMS[0], 100, priority=1)
    async with opened(tiny_bf16, is_reusing=False) as engine:
        wanted, _ = await answer(engine, slow)
    async with opened(tiny_bf16, lower=[store], max_num_seqs=1, num_blocks=20) as engine:
        task = await first_token(engine, slow)
        await asyncio.gather(*(answer(engine, GenerateRequest(stem, 100)) for stem in STEMS[1:]))
        tokens, report = await task
        loaded = engine.manager.stats()["transfers"]["memory->vram"]["blocks"]
        await assert_nothing_is_kept(engine)
    assert tokens == wanted
    assert report.preemptions >= 1
    assert loaded > 0


async def test_a_pass_that_fails_ends_its_requests_and_no_other(tiny_bf16, alone, monkeypatch):
    async with opened(tiny_bf16, max_num_seqs=2) as engine:
        model = engine._running.forward_model

        def broken(*_args):
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(model, "run", broken)
            with pytest.raises(ZeroDivisionError):
                await answer(engine, some_request(1))
        assert (await answer(engine, some_request(1)))[0] == alone[1]
        await assert_nothing_is_kept(engine)


async def test_logits_that_are_not_finite_end_their_request_alone(tiny_bf16, alone, monkeypatch):
    async with opened(tiny_bf16) as engine:
        model = engine._running.forward_model
        exact = model.logits

        def first_row_broken(hidden):
            logits = exact(hidden).clone()
            if len(logits) == 2:
                logits[0] = float("nan")
            return logits

        monkeypatch.setattr(model, "logits", first_row_broken)
        requests = [GenerateRequest(stem, 30) for stem in STEMS[:2]]
        results = await asyncio.gather(*(answer(engine, each) for each in requests), return_exceptions=True)
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["ArithmeticError", "tuple"]
        await assert_nothing_is_kept(engine)
