"""Engines of several ranks, whose followers are processes: equal answers, reuse, and the loss of a rank."""

import asyncio
import os
import signal

import pytest
import torch

from kvstore.async_client import AsyncKVStore
from kvstore.layout import Part
from kvstore_engine_adapter.generation import GenerateRequest
from kvstore_engine_adapter.load_policy import LoadSpeed
from kvstore_engine_adapter.tensor_parallel import messages
from kvstore_engine_adapter.tensor_parallel.rank_group import RankGroup, RankLost
from tests.engine.tensor_parallel.conftest import KV_HEADS, engine_of
from tests.engine.test_paged_engine import answer
from tests.engine.tiny_model import LAYERS
from tests.store_process import StoreProcess

LONG_S = 100.0
"""More than anything here takes on a busy machine."""


def prompt(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count,), generator=generator).tolist()


PROMPTS = [prompt(seed, count) for seed, count in enumerate((5, 64, 131, 203))]


async def answers_alone(engine, max_tokens=8):
    return [await answer(engine, tokens, max_tokens) for tokens in PROMPTS]


async def answers_together(engine, max_tokens=8):
    return await asyncio.gather(*(answer(engine, tokens, max_tokens) for tokens in PROMPTS))


def tokens_of(answers):
    return [tokens for tokens, _ in answers]


def logits_of(answers):
    return [finished.report.first_logits for _, finished in answers]


def without_loading_costs(engine):
    """Make the engine load whatever is stored."""
    policy = engine._running.supply.policy
    for tier in ("dram", "ssd", "remote"):
        policy.speeds[tier] = LoadSpeed(call_s=0.0, block_s=0.0)


@pytest.fixture(scope="module")
def one_rank(shared_gguf):
    """What an engine of one rank answers, float32."""

    async def answers():
        async with engine_of(shared_gguf, 1) as (engine, _):
            return await answers_alone(engine)

    return asyncio.run(answers())


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_ranks_answer_as_one_does(shared_gguf, one_rank, num_ranks):
    async with engine_of(shared_gguf, num_ranks) as (engine, _):
        found = await answers_together(engine)
        assert await engine.manager.check() == []
    assert tokens_of(found) == tokens_of(one_rank)
    # float32 sums in another order, through three layers.
    for logits, wanted in zip(logits_of(found), logits_of(one_rank), strict=True):
        assert abs(logits - wanted).max() < 1e-4


@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_alone_in_a_batch_and_after_reuse_the_bits_are_equal(shared_gguf, num_ranks):
    async with engine_of(shared_gguf, num_ranks, dtype="bfloat16") as (engine, _):
        together = await answers_together(engine)
        reused = await answers_alone(engine)
    async with engine_of(shared_gguf, num_ranks, dtype="bfloat16", is_reusing=False) as (engine, _):
        alone = await answers_alone(engine)
    assert [finished.report.matched_tokens for _, finished in reused] == [0, 48, 128, 192]
    for found in (together, reused):
        assert tokens_of(found) == tokens_of(alone)
        for logits, wanted in zip(logits_of(found), logits_of(alone), strict=True):
            assert (logits == wanted).all()


async def test_replicas_of_two_ranks_share_blocks_and_one_missing_part_is_a_miss_for_all(
    shared_gguf, one_rank, tmp_path
):
    tokens = PROMPTS[3]
    with StoreProcess(tmp_path) as store:
        address = str(store.socket_path)
        async with engine_of(shared_gguf, 2, store=address) as (engine, _):
            wanted = await answer(engine, tokens)
            assert await engine.manager.flush(timeout_s=LONG_S)
            namespace = engine.namespace
        async with engine_of(shared_gguf, 1, store=address) as (engine, _):
            single = await answer(engine, tokens)
        async with engine_of(shared_gguf, 2, store=address) as (engine, _):
            without_loading_costs(engine)
            found = await answer(engine, tokens)
            assert await engine.manager.check() == []
        async with await AsyncKVStore.connect(address) as client:
            await client.open_namespace(namespace)
            last = Part(0, LAYERS, KV_HEADS // 2, KV_HEADS)
            assert await client.drop(namespace.chain(tokens)[5:6], part=last) == 1
        async with engine_of(shared_gguf, 2, store=address) as (engine, _):
            without_loading_costs(engine)
            partly = await answer(engine, tokens)
            store.pause()
            while_paused = await answer(engine, PROMPTS[2])
            store.resume()
            store.kill()
            others = [await answer(engine, other) for other in (tokens, PROMPTS[1])]
    assert (single[0], single[1].report.matched_tokens) == (wanted[0], 0)
    assert (found[0], found[1].report.tokens_by_tier) == (wanted[0], {"dram": 192})
    assert (partly[0], partly[1].report.tokens_by_tier) == (wanted[0], {"dram": 80})
    assert partly[1].report.miss_reason == "dropped"
    assert (found[1].report.first_logits == wanted[1].report.first_logits).all()
    assert (partly[1].report.first_logits == wanted[1].report.first_logits).all()
    assert tokens_of([while_paused, others[1]]) == tokens_of([one_rank[2], one_rank[1]])
    assert others[0][0] == wanted[0]
    assert others[0][1].report.tokens_by_tier == {"vram": 192}
    assert while_paused[1].report.matched_tokens == others[1][1].report.matched_tokens == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_loss_of_a_rank_ends_every_request_with_its_name(shared_gguf, number):
    async with engine_of(shared_gguf, 2) as (engine, group):
        if number is signal.SIGKILL:
            wanted = f"rank 1 .process {group.process_ids[0]}. was killed by SIGKILL"
        else:
            wanted, group.patience_s = "a follower has not answered for 1 s", 1.0
        request = GenerateRequest(PROMPTS[0], 400)
        events = engine.generate(request)
        await anext(events)
        os.kill(group.process_ids[0], number)
        async with asyncio.timeout(LONG_S):
            with pytest.raises(RankLost, match=wanted):
                async for _ in events:
                    pass
            lost = await group.wait_lost()
            with pytest.raises(RankLost):
                await answer(engine)
    assert "an engine of 2 ranks cannot go on without it" in str(lost)


async def test_an_idle_engine_notices_that_a_rank_was_killed(shared_gguf):
    async with engine_of(shared_gguf, 2) as (_, group):
        process_id = group.process_ids[0]
        os.kill(process_id, signal.SIGKILL)
        async with asyncio.timeout(LONG_S):
            lost = await group.wait_lost()
    assert f"rank 1 (process {process_id}) was killed by SIGKILL" in str(lost)


async def test_a_follower_that_cannot_load_the_model_says_why(tmp_path):
    group = RankGroup(2)
    try:
        await group.start()
        about = messages.Load(0, 2, str(tmp_path / "gone.gguf"), "float32", "cpu", 1, "")
        with pytest.raises(RankLost, match=r"rank 1 failed: .*gone.gguf: no such file"):
            await group.load(about)
        with pytest.raises(RankLost):
            await group.ask(messages.Ping(), messages.Done)
    finally:
        await group.close()
