"""TGI's routes through huggingface_hub's client."""

import asyncio

import aiohttp
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, OverloadedError, ValidationError

from tests.engine.faces.face_server import LONG_TEXT, face_server


def in_thread(server, ask):
    """Run ``ask`` with the synchronous client; the server runs on the test's loop."""
    return asyncio.to_thread(lambda: ask(InferenceClient(server.url, provider="hf-inference")))


@pytest.fixture
async def hf(server):
    async with AsyncInferenceClient(server.url) as client:
        yield client


async def post(server, path, **body):
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.post(path, json={"inputs": LONG_TEXT} | body) as response,
    ):
        return response.status, await response.json()


async def test_a_text_is_continued_greedily_by_default(server):
    first, second = await in_thread(
        server, lambda hf: [hf.text_generation(LONG_TEXT, max_new_tokens=12) for _ in range(2)]
    )
    assert first == second != ""


async def test_details_hold_every_token_with_its_probability(server, lively):
    answer = await in_thread(
        server, lambda hf: hf.text_generation(LONG_TEXT, max_new_tokens=12, details=True, top_n_tokens=2)
    )
    details = answer.details
    assert details.finish_reason == "length"
    assert details.generated_tokens == len(details.tokens) == len(details.top_tokens) == 12
    assert answer.generated_text == lively.tokenizer.decode([token.id for token in details.tokens])
    for token, top in zip(details.tokens, details.top_tokens, strict=True):
        # The client leaves lists of lists as they are. Tokens may be equally likely.
        assert token.logprob == top[0]["logprob"] < 0
        assert not token.special


async def test_a_stream_has_an_event_for_each_token_and_ends_with_the_whole(server):
    whole, events = await in_thread(
        server,
        lambda hf: (
            hf.text_generation(LONG_TEXT, max_new_tokens=12, details=True),
            list(hf.text_generation(LONG_TEXT, max_new_tokens=12, details=True, stream=True)),
        ),
    )
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert [event.index for event in events] == list(range(1, 13))
    assert all(event.generated_text is None and event.details is None for event in events[:-1])
    assert events[-1].generated_text == whole.generated_text
    assert events[-1].details.finish_reason == "length"
    assert events[-1].details.generated_tokens == 12
    assert events[-1].details.input_length > 100


async def test_the_asynchronous_client_streams_texts(hf):
    whole = await hf.text_generation(LONG_TEXT, max_new_tokens=10)
    stream = await hf.text_generation(LONG_TEXT, max_new_tokens=10, stream=True)
    assert whole.startswith("".join([text async for text in stream]).rstrip("\N{REPLACEMENT CHARACTER}"))


async def test_a_stop_text_is_part_of_the_answer_as_in_tgi(server):
    def ask(hf):
        text = hf.text_generation(LONG_TEXT, max_new_tokens=40)
        stop = text[4:6]
        whole = hf.text_generation(LONG_TEXT, max_new_tokens=40, stop=[stop], details=True)
        events = list(
            hf.text_generation(LONG_TEXT, max_new_tokens=40, stop=[stop], details=True, stream=True)
        )
        return text, stop, whole, events

    text, stop, whole, events = await in_thread(server, ask)
    assert whole.details.finish_reason == "stop_sequence"
    assert text.startswith(whole.generated_text)
    assert whole.generated_text.index(stop) == text.index(stop)
    assert whole.details.generated_tokens < 40
    assert events[-1].generated_text == whole.generated_text
    assert events[-1].details.finish_reason == "stop_sequence"


async def until_an_end_token(hf, **options):
    """Ask with growing seeds until the model ends its answer by itself."""
    for seed in range(400):
        answer = await hf.text_generation(
            LONG_TEXT, max_new_tokens=60, details=True, do_sample=True, seed=seed, **options
        )
        if answer.details.finish_reason == "eos_token":
            return seed, answer
    raise AssertionError("no answer ended by itself")


async def test_an_answer_that_ends_by_itself_ends_with_its_end_token(hf, lively):
    seed, whole = await until_an_end_token(hf)
    last = whole.details.tokens[-1]
    assert last.id in lively.tokenizer.end_tokens
    assert last.special
    assert last.logprob < 0
    assert last.text not in whole.generated_text
    assert whole.details.generated_tokens == len(whole.details.tokens)
    assert whole.details.seed == seed
    stream = await hf.text_generation(
        LONG_TEXT, max_new_tokens=60, details=True, do_sample=True, seed=seed, stream=True
    )
    events = [event async for event in stream]
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert events[-1].token.special
    assert events[-1].generated_text == whole.generated_text


async def test_drawing_is_repeatable_by_its_seed(hf):
    texts = [
        await hf.text_generation(LONG_TEXT, max_new_tokens=12, temperature=1.5, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_the_full_text_begins_with_the_prompt(hf):
    plain = await hf.text_generation(LONG_TEXT, max_new_tokens=6)
    assert await hf.text_generation(LONG_TEXT, max_new_tokens=6, return_full_text=True) == LONG_TEXT + plain


async def test_truncation_keeps_the_last_tokens(hf, lively):
    tokens = lively.tokenizer.encode(LONG_TEXT)
    end = lively.tokenizer.decode(tokens[-16:])
    assert lively.tokenizer.encode(end) == tokens[-16:]
    wanted = await hf.text_generation(end, max_new_tokens=6, details=True)
    found = await hf.text_generation(LONG_TEXT, max_new_tokens=6, truncate=16, details=True)
    assert found.generated_text == wanted.generated_text


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"best_of": 2}, "best_of is not supported"),
        ({"decoder_input_details": True}, "decoder_input_details is not supported"),
        ({"typical_p": 0.5}, "typical_p is not supported"),
        ({"watermark": True}, "watermark is not supported"),
        ({"grammar": {"type": "regex", "value": "x"}}, "grammar is not supported"),
        ({"adapter_id": "x"}, "adapter_id is not supported"),
        ({"temperature": 0}, "must be strictly positive"),
        ({"temperature": 9}, "outside 0..2"),
        ({"top_p": 1.0}, "above 0 and below 1"),
        ({"top_k": 0}, "must be strictly positive"),
        ({"top_n_tokens": 6}, "expected 0 to 5"),
        ({"max_new_tokens": 0}, "expected at least 1"),
        ({"max_new_tokens": 5000}, "exceed the context of 1024"),
        ({"truncate": 0}, "expected at least 1"),
        ({"stop": ["a"] * 5}, "at most 4"),
        ({"seed": -(2**70)}, "seed"),
        ({"frobnicate": 1}, "unrecognized"),
    ],
    ids=str,
)
async def test_a_bad_request_is_refused_in_tgis_shape(server, parameters, said):
    for path in ("/generate", "/generate_stream", "/"):
        status, answer = await post(server, path, parameters=parameters)
        assert status == 422
        assert answer["error_type"] == "validation"
        assert said in answer["error"]
    assert (await post(server, "/generate", parameters={"max_new_tokens": 1}))[0] == 200


async def test_the_client_sees_a_refusal_as_a_validation_error(hf):
    with pytest.raises(ValidationError, match="best_of is not supported"):
        await hf.text_generation(LONG_TEXT, best_of=2, do_sample=True)
    with pytest.raises(ValidationError, match="the context is 1024"):
        await hf.text_generation("word " * 3000)
    with pytest.raises(ValidationError, match="empty"):
        await hf.text_generation("")
    with pytest.raises(ValidationError, match="not supported"):
        [at async for at in await hf.text_generation(LONG_TEXT, best_of=2, stream=True)]


async def test_a_full_queue_is_overloaded(lively):
    async with (
        face_server(lively, max_num_seqs=1, max_waiting=1) as server,
        AsyncInferenceClient(server.url) as hf,
    ):
        answers = await asyncio.gather(
            *(hf.text_generation(LONG_TEXT, max_new_tokens=200) for _ in range(6)), return_exceptions=True
        )
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert refused
    for error in refused:
        assert isinstance(error, OverloadedError | HfHubHTTPError)


async def test_info_says_the_model_and_its_limits(server):
    info = await in_thread(server, lambda hf: hf.get_endpoint_info())
    assert info["model_id"] == "tiny"
    assert info["max_total_tokens"] == 1024
    assert info["max_input_tokens"] == 1023
    assert info["max_concurrent_requests"] == server.engine.max_requests
    assert await in_thread(server, lambda hf: hf.health_check())


async def test_chats_of_the_hub_client_are_answered_as_openais_are(server):
    messages = [{"role": "user", "content": LONG_TEXT}]
    async with AsyncInferenceClient(base_url=server.url) as hf:
        answer = await hf.chat_completion(messages, model="tiny", max_tokens=5, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens <= 5


async def test_a_stream_that_is_left_in_the_middle_ends_its_request(server, hf):
    stream = await hf.text_generation(LONG_TEXT, max_new_tokens=600, stream=True)
    await anext(stream)
    await stream.aclose()
    await server.has_requests(False)


async def test_a_wrong_method_has_tgis_shape(server):
    async with aiohttp.ClientSession(server.url) as session, session.get("/generate") as response:
        assert response.status == 405
        assert (await response.json())["error_type"] == "validation"
