"""Chats through the official client."""

import asyncio
import math

import openai
import pytest

from tests.engine.faces.face_server import LONG_TEXT, face_server


def chat(text=LONG_TEXT, **fields):
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8} | fields


async def test_the_synchronous_client_gets_a_whole_and_a_streamed_answer(server):
    def ask():
        with server.openai() as client:
            whole = client.chat.completions.create(**chat())
            with client.chat.completions.create(**chat(stream=True)) as stream:
                streamed = [chunk.choices[0].delta.content or "" for chunk in stream]
            return whole, streamed

    whole, streamed = await asyncio.to_thread(ask)
    assert whole.choices[0].message.content == "".join(streamed)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8


async def test_usage_comes_last_in_a_stream_and_counts_reused_tokens(client):
    await client.chat.completions.create(**chat())
    stream = await client.chat.completions.create(**chat(stream=True, stream_options={"include_usage": True}))
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 100


async def test_choices_of_one_prompt_compute_it_once_and_count_it_once(client):
    answer = await client.chat.completions.create(**chat(n=3, temperature=1.5, seed=5))
    single = await client.chat.completions.create(**chat())
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = await client.chat.completions.create(**chat(n=3, temperature=1.5, seed=5))
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]


async def test_streamed_choices_are_those_of_the_whole_answer(client):
    request = chat(n=3, temperature=1.2, seed=-3)
    whole = await client.chat.completions.create(**request)
    texts, reasons = ["", "", ""], [None] * 3
    async for chunk in await client.chat.completions.create(**request, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


async def test_log_probabilities_are_of_the_tokens_of_the_answer(client):
    answer = await client.chat.completions.create(**chat(logprobs=True, top_logprobs=3))
    (choice,) = answer.choices
    content = choice.logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(at.bytes) for at in content).decode(errors="replace") == choice.message.content
    for at in content:
        assert len(at.top_logprobs) == 3
        # Greedy: the chosen token is the likeliest.
        assert at.logprob == at.top_logprobs[0].logprob
        assert sum(math.exp(other.logprob) for other in at.top_logprobs) <= 1.0


async def test_streamed_log_probabilities_are_those_of_the_whole_answer(client):
    whole = await client.chat.completions.create(**chat(logprobs=True, max_tokens=20))
    stream = await client.chat.completions.create(**chat(logprobs=True, max_tokens=20, stream=True))
    content = [
        at
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for at in chunk.choices[0].logprobs.content
    ]
    assert [at.token for at in content] == [at.token for at in whole.choices[0].logprobs.content]


async def test_log_probabilities_end_where_a_stop_text_cuts_the_answer(client):
    plain = await client.chat.completions.create(**chat(max_tokens=30))
    text = plain.choices[0].message.content
    stop = text[5:8]
    wanted = chat(max_tokens=30, stop=[stop], logprobs=True)
    whole = await client.chat.completions.create(**wanted)
    content = whole.choices[0].logprobs.content
    shown = b"".join(bytes(at.bytes) for at in content).decode(errors="replace")
    assert whole.choices[0].message.content == text[: text.index(stop)]
    assert len(content) < whole.usage.completion_tokens
    assert shown.startswith(whole.choices[0].message.content)
    without_last = b"".join(bytes(at.bytes) for at in content[:-1]).decode(errors="replace")
    assert len(without_last) < len(whole.choices[0].message.content)
    streamed = [
        at.token
        async for chunk in await client.chat.completions.create(**wanted, stream=True)
        if chunk.choices[0].logprobs is not None
        for at in chunk.choices[0].logprobs.content
    ]
    assert streamed == [at.token for at in content]


async def test_penalties_min_p_and_repetition_change_what_is_drawn(client):
    plain = await client.chat.completions.create(**chat(max_tokens=40))
    for extra in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 5.0}},
    ):
        changed = await client.chat.completions.create(**chat(max_tokens=40, **extra))
        assert changed.choices[0].message.content != plain.choices[0].message.content
    only_likeliest = await client.chat.completions.create(
        **chat(max_tokens=40, temperature=2.0, extra_body={"min_p": 1.0})
    )
    assert only_likeliest.choices[0].message.content == plain.choices[0].message.content


async def test_a_stop_token_ends_the_answer_and_ignoring_ends_goes_on(client, lively):
    plain = await client.chat.completions.create(**chat(extra_body={"kvstore": {"output_tokens": True}}))
    tokens = plain.kvstore["output_tokens"]
    answer = await client.chat.completions.create(
        **chat(extra_body={"stop_token_ids": [tokens[4]], "kvstore": {"output_tokens": True}})
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.kvstore["output_tokens"] == tokens[: tokens.index(tokens[4])]
    endless = await client.chat.completions.create(
        **chat(temperature=2.0, seed=1, max_tokens=900 // 4, extra_body={"ignore_eos": True})
    )
    assert endless.usage.completion_tokens == 900 // 4


async def test_more_log_probabilities_than_fit_in_memory_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="a request may ask for 1048576 in all"):
        await client.completions.create(
            model="tiny", prompt=["pier"] * 128, max_tokens=900, logprobs=20, temperature=0
        )


async def test_max_completion_tokens_wins(client):
    answer = await client.chat.completions.create(**chat(max_completion_tokens=3))
    assert answer.usage.completion_tokens == 3


async def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**chat("word " * 3000))
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(**chat(model="gpt-9"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        await client.chat.completions.create(**chat(tools=[{"type": "function", "function": {"name": "x"}}]))
    assert unsupported.value.code == "unsupported_parameter"
    assert (await client.chat.completions.create(**chat())).usage.completion_tokens == 8


async def test_models_are_listed_and_shown(client):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "kvstore"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_that_is_closed_in_the_middle_ends_all_its_choices(server, client, n):
    stream = await client.chat.completions.create(**chat(max_tokens=700, n=n, stream=True, temperature=1))
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await server.has_requests(False)
    assert (await client.chat.completions.create(**chat())).usage.completion_tokens == 8


async def test_a_synchronous_stream_that_is_closed_in_the_middle_ends_its_request(server):
    def ask():
        with server.openai() as client:
            with client.chat.completions.create(**chat(max_tokens=700, stream=True)) as stream:
                next(iter(stream))
            return client.chat.completions.create(**chat())

    answer = await asyncio.to_thread(ask)
    assert answer.usage.completion_tokens == 8
    await server.has_requests(False)


async def test_a_cancelled_task_ends_its_request(server, client):
    task = asyncio.create_task(client.chat.completions.create(**chat(max_tokens=700)))
    await server.has_requests(True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.has_requests(False)
    assert (await client.chat.completions.create(**chat())).usage.completion_tokens == 8


async def test_an_engine_that_closes_ends_streams_with_an_error_event(lively):
    async with face_server(lively) as server, server.async_openai() as client:
        stream = await client.chat.completions.create(**chat(max_tokens=900 // 2, n=2, stream=True))
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await server.engine.close()
        with pytest.raises(openai.APIError, match="closed"):
            async for _ in stream:
                pass
