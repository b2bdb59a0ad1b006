"""OpenAI's responses through the official client: kept, gone on from, streamed, deleted."""

import asyncio

import openai
import pytest

from kvstore_engine_adapter.faces.http_face import FaceDoors
from kvstore_engine_adapter.faces.memory_records import MemoryRecords
from kvstore_engine_adapter.faces.record_access import SessionLimits
from tests.engine.faces.face_server import LONG_TEXT, face_server


def response(text=LONG_TEXT, **fields):
    return {"model": "tiny", "input": text, "temperature": 0, "max_output_tokens": 8} | fields


async def test_the_synchronous_client_gets_a_response(server):
    def ask():
        with server.openai() as client:
            return client.responses.create(**response())

    answer = await asyncio.to_thread(ask)
    assert answer.object == "response"
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == answer.output[0].content[0].text != ""
    assert answer.usage.output_tokens == 8
    assert answer.usage.total_tokens == answer.usage.input_tokens + 8


async def test_it_is_what_a_chat_of_the_same_messages_answers(client):
    answer = await client.responses.create(**response(instructions="Be brief."))
    chat = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG_TEXT}],
        temperature=0,
        max_tokens=8,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


async def test_a_response_goes_on_from_another_with_only_what_is_new(client):
    first = await client.responses.create(**response(instructions="Be brief."))
    second = await client.responses.create(**response("And then?", previous_response_id=first.id))
    third = await client.responses.create(**response("Why?", previous_response_id=second.id))
    chat = await client.chat.completions.create(
        model="tiny",
        # The instructions of a response are its own.
        messages=[
            {"role": "user", "content": LONG_TEXT},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": second.output_text},
            {"role": "user", "content": "Why?"},
        ],
        temperature=0,
        max_tokens=8,
    )
    assert third.output_text == chat.choices[0].message.content
    assert third.usage.input_tokens == chat.usage.prompt_tokens
    assert third.usage.input_tokens_details.cached_tokens > 100
    assert third.previous_response_id == second.id


async def test_two_responses_may_go_on_from_the_same_one(client):
    first = await client.responses.create(**response())
    forks = await asyncio.gather(
        *(client.responses.create(**response(text, previous_response_id=first.id)) for text in ("a", "b"))
    )
    ends = [
        await client.responses.create(**response("c", previous_response_id=fork.id, temperature=0))
        for fork in forks
    ]
    assert ends[0].usage.input_tokens > 100
    assert ends[0].previous_response_id != ends[1].previous_response_id


async def test_input_may_be_items_with_parts(client):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": LONG_TEXT}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        {"role": "user", "content": "And then?"},
    ]
    answer = await client.responses.create(**response(items))
    chat = await client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": LONG_TEXT},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "And then?"},
        ],
        temperature=0,
        max_tokens=8,
    )
    assert answer.output_text == chat.choices[0].message.content


async def test_a_stream_has_the_events_of_openai_in_their_order(client):
    whole = await client.responses.create(**response())
    events = [event async for event in await client.responses.create(**response(stream=True))]
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-4].text == whole.output_text
    assert events[-1].response.usage.output_tokens == 8
    assert events[0].response.id == events[-1].response.id


async def test_the_clients_stream_helper_puts_a_response_together(client):
    whole = (await client.responses.create(**response())).output_text
    stop = whole[4:6]
    async with client.responses.stream(**response(), extra_body={"stop": stop}) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == whole[: whole.index(stop)]


async def test_a_streamed_response_is_kept_too(client):
    events = [event async for event in await client.responses.create(**response(stream=True))]
    found = await client.responses.retrieve(events[-1].response.id)
    assert found.output_text == events[-1].response.output_text


async def test_log_probabilities_are_included_if_asked_for(client):
    answer = await client.responses.create(
        **response(include=["message.output_text.logprobs"], top_logprobs=2)
    )
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == 8
    assert all(len(at.top_logprobs) == 2 and at.logprob < 0 for at in logprobs)
    plain = await client.responses.create(**response(include=["reasoning.encrypted_content"]))
    assert plain.output[0].content[0].logprobs == []


async def test_a_response_is_shown_with_its_input_and_deleted(client):
    answer = await client.responses.create(**response(metadata={"for": "the test"}))
    found = await client.responses.retrieve(answer.id)
    assert found == answer
    assert found.metadata == {"for": "the test"}
    items = await client.responses.input_items.list(answer.id)
    assert [item.content[0].text for item in items.data] == [LONG_TEXT]
    await client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as unknown:
            await call(answer.id)
        assert unknown.value.code == "response_not_found"


async def test_an_unknown_or_unstored_response_cannot_be_gone_on_from(client):
    unstored = await client.responses.create(**response(store=False))
    assert unstored.store is False
    for name in (unstored.id, "resp_" + "0" * 32, "resp_1", "x" * 5000, "../../etc", ""):
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.responses.create(**response(previous_response_id=name))
        assert (unknown.value.code, unknown.value.param) == (
            "previous_response_not_found",
            "previous_response_id",
        )
    assert (await client.responses.create(**response())).usage.output_tokens == 8


async def test_a_history_with_a_hole_is_never_gone_on_from(client):
    first = await client.responses.create(**response())
    second = await client.responses.create(**response("b", previous_response_id=first.id))
    await client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="was deleted, or its time is over"):
        await client.responses.create(**response("c", previous_response_id=second.id))


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": ""}, None, "input"),
        ({"input": []}, None, "input"),
        ({"input": 5}, None, "input"),
        ({"input": [5]}, None, "input[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, None, "input[0].role"),
        ({"input": [{"type": "function_call"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "input[0].content[0]"),
        ({"input": "word " * 3000}, "context_length_exceeded", "input"),
        ({"instructions": 5}, None, "instructions"),
        ({"previous_response_id": 5}, None, "previous_response_id"),
        ({"metadata": {"a": 5}}, None, "metadata"),
        ({"metadata": {"a": "x" * 513}}, None, "metadata"),
        ({"include": ["x y"]}, None, "include"),
        ({"top_logprobs": 3}, None, "top_logprobs"),
        ({"max_output_tokens": 0}, None, "max_output_tokens"),
        ({"store": "yes"}, None, "store"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "unsupported_parameter", "text"),
        ({"messages": []}, "unknown_parameter", "messages"),
        ({"n": 2}, "unknown_parameter", "n"),
    ],
    ids=str,
)
async def test_a_bad_request_is_refused_with_its_parameter(client, fields, code, param):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**response(), extra_body=fields)
    assert (refused.value.code, refused.value.param) == (code, param)


async def test_a_stream_cancelled_in_the_middle_is_not_kept(server, client):
    records = []
    stream = await client.responses.create(**response(max_output_tokens=600, stream=True))
    async for event in stream:
        if event.type == "response.created":
            records.append(event.response.id)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await server.has_requests(False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(records[0])


async def test_a_stream_that_fails_half_way_ends_with_an_error_and_a_failed_response(lively):
    async with face_server(lively) as server, server.async_openai() as client:
        stream = await client.responses.create(**response(max_output_tokens=700, stream=True))
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta" and server.engine.manager is not None:
                await server.engine.close()
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert "closed" in events[-2].message
    assert events[-1].response.status == "failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_where_the_quota_is_used_up_the_oldest_responses_go(lively):
    doors = FaceDoors(limits=SessionLimits(quota_bytes=20_000))
    async with face_server(lively, doors=doors) as server, server.async_openai() as client:
        kept = [await client.responses.create(**response(max_output_tokens=1)) for _ in range(30)]
        assert all(answer.store for answer in kept)
        assert (await client.responses.retrieve(kept[-1].id)).id == kept[-1].id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(kept[0].id)


async def test_a_response_that_cannot_be_stored_is_answered_and_says_so(lively, caplog):
    doors = FaceDoors(records=MemoryRecords(max_bytes=1000))
    async with face_server(lively, doors=doors) as server, server.async_openai() as client:
        answer = await client.responses.create(**response())
    assert answer.output_text
    assert answer.store is False
    assert "memory" in answer.kvstore["not_stored"]
    assert "was not stored" in caplog.text
