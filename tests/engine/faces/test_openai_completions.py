"""Plain completions through the official client."""

import openai
import pytest

from tests.engine.faces.face_server import LONG_TEXT

PROMPTS = [LONG_TEXT, "In 1847 the old pier", "The harbour master keeps a log"]


def completion(prompt=LONG_TEXT, **fields):
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8} | fields


async def test_a_text_and_its_tokens_are_completed_alike(client, lively):
    by_text = await client.completions.create(**completion())
    by_tokens = await client.completions.create(**completion(lively.tokenizer.encode(LONG_TEXT)))
    assert by_text.object == "text_completion"
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_tokens.usage.prompt_tokens_details.cached_tokens > 100


async def test_several_prompts_are_answered_in_their_order(client, lively):
    alone = [(await client.completions.create(**completion(prompt))).choices[0].text for prompt in PROMPTS]
    together = await client.completions.create(**completion(PROMPTS))
    tokens = [lively.tokenizer.encode(prompt) for prompt in PROMPTS]
    as_tokens = await client.completions.create(**completion(tokens))
    assert [choice.text for choice in together.choices] == alone
    assert [choice.text for choice in as_tokens.choices] == alone
    assert together.usage.completion_tokens == 24
    assert together.usage.prompt_tokens == sum(map(len, tokens))


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client):
    answer = await client.completions.create(**completion(PROMPTS[1:], n=2, echo=True))
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.text.startswith(PROMPTS[1 + choice.index // 2])


async def test_more_prompts_than_the_engine_takes_at_once_are_all_answered(client):
    answer = await client.completions.create(
        **completion([f"pier {i}" for i in range(100)], max_tokens=1), extra_body={"ignore_eos": True}
    )
    assert len(answer.choices) == 100
    assert answer.usage.completion_tokens == 100


async def test_echo_puts_the_prompt_first_also_for_tokens_and_streams(client, lively):
    plain = (await client.completions.create(**completion(PROMPTS[1]))).choices[0].text
    tokens = lively.tokenizer.encode(PROMPTS[1])
    for prompt in (PROMPTS[1], tokens):
        answer = await client.completions.create(**completion(prompt, echo=True))
        assert answer.choices[0].text == PROMPTS[1] + plain
        stream = await client.completions.create(**completion(prompt, echo=True, stream=True))
        assert "".join([chunk.choices[0].text async for chunk in stream]) == PROMPTS[1] + plain


async def test_streams_end_with_usage_if_it_is_wanted(client):
    stream = await client.completions.create(
        **completion(PROMPTS, stream=True, stream_options={"include_usage": True})
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_log_probabilities_have_offsets_into_the_text(client):
    answer = await client.completions.create(**completion(logprobs=2, max_tokens=12))
    (choice,) = answer.choices
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 12
    ends = [*found.text_offset[1:], len(choice.text)]
    assert found.text_offset[0] == 0
    for token, start, end in zip(found.tokens, found.text_offset, ends, strict=True):
        assert token.startswith("bytes:") or choice.text[start:end].endswith(token)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert 1 <= len(top) <= 3
        assert top[token] == logprob == max(top.values())


async def test_logprobs_0_is_of_the_chosen_tokens_alone(client):
    answer = await client.completions.create(**completion(logprobs=0))
    assert [len(top) for top in answer.choices[0].logprobs.top_logprobs] == [1] * 8


async def test_16_tokens_are_the_default(client):
    answer = await client.completions.create(
        model="tiny", prompt=LONG_TEXT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, None, "prompt"),
        ({"prompt": []}, None, "prompt"),
        ({"prompt": [""]}, None, "prompt"),
        ({"prompt": [[]]}, None, "prompt"),
        ({"prompt": [1.5]}, None, "prompt"),
        ({"prompt": [True]}, None, "prompt"),
        ({"prompt": [[1], "x", {}]}, None, "prompt"),
        ({"prompt": ["x"] * 129}, None, "prompt"),
        ({"prompt": ["x"] * 20, "n": 8}, None, "n"),
        ({"prompt": [10**12]}, None, "prompt"),
        ({"prompt": [999_999]}, None, None),
        ({"prompt": None}, None, "prompt"),
        ({"prompt": "word " * 3000}, "context_length_exceeded", "prompt"),
        ({"logprobs": 21}, None, "logprobs"),
        ({"logprobs": 1, "echo": True}, "unsupported_parameter", "echo"),
        ({"best_of": 3}, "unsupported_parameter", "best_of"),
        ({"suffix": "end"}, "unsupported_parameter", "suffix"),
        ({"max_tokens": 0}, None, "max_tokens"),
        ({"messages": []}, "unknown_parameter", "messages"),
        ({"kvstore": {"session": "x"}}, "unknown_parameter", "kvstore.session"),
    ],
    ids=str,
)
async def test_a_bad_request_is_refused_with_its_parameter(client, fields, code, param):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(**completion(), extra_body=fields)
    assert (refused.value.code, refused.value.param) == (code, param)
