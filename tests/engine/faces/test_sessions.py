"""Sessions: a client sends only what is new; who may continue them, forks, races, lost records, quotas."""

import asyncio
import contextlib

import openai
import pytest

from kvstore.auth import KeyRecord, Keyring, Scope, key_digest
from kvstore.gate import Gate
from kvstore_engine_adapter.faces import sessions, stored_responses
from kvstore_engine_adapter.faces.http_face import FaceDoors
from kvstore_engine_adapter.faces.memory_records import MemoryRecords
from kvstore_engine_adapter.faces.record_access import SESSIONS, TURNS
from tests.engine.faces.face_server import LONG_TEXT, face_server
from tests.engine.faces.session_kit import Api, Clock, apis, chat, refused, text_of


async def test_a_session_goes_on_with_only_what_is_new(api):
    made = await api.create(name="talk", messages=[{"role": "system", "content": "Be brief."}])
    first = await api.say(LONG_TEXT, "talk")
    second = await api.say("And then?", "talk")
    whole = await api.client.chat.completions.create(
        **chat()
        | {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": LONG_TEXT},
                {"role": "assistant", "content": text_of(first)},
                {"role": "user", "content": "And then?"},
            ]
        }
    )
    assert made["num_turns"] == 1
    assert text_of(second) == text_of(whole)
    assert second.usage.prompt_tokens == whole.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 100
    assert second.kvstore["session"]["num_turns"] == 3
    assert await api.texts("talk") == ["Be brief.", LONG_TEXT, text_of(first), "And then?", text_of(second)]


async def test_a_header_names_the_session_too(api):
    await api.create(name="talk")
    answer = await api.client.chat.completions.create(**chat(), extra_headers={"KVStore-Session": "talk"})
    assert answer.kvstore["session"]["id"] == "talk"
    await refused(
        api.client.chat.completions.create(
            **chat(session="other"), extra_headers={"KVStore-Session": "talk"}
        ),
        400,
        None,
    )


async def test_a_session_is_made_with_its_first_turn_if_that_is_asked_for(api):
    await refused(api.say("x", "talk"), 404, "session_not_found")
    first = await api.say("x", "talk", create=True)
    again = await api.say("y", "talk", create=True)
    assert first.kvstore["session"]["num_turns"] == 1
    assert again.kvstore["session"]["num_turns"] == 2


async def test_a_streamed_turn_is_kept_before_its_last_chunk(api):
    await api.create(name="talk")
    text = ""
    async for chunk in await api.client.chat.completions.create(**chat(session="talk", stream=True)):
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].finish_reason is not None:
            assert chunk.kvstore["session"]["num_turns"] == 1
            assert await api.texts("talk") == [LONG_TEXT, text]
    assert await api.texts("talk") == [LONG_TEXT, text]


async def test_a_turn_that_is_cancelled_leaves_the_session_as_it_was(lively, records):
    async with apis(lively, records) as (api,):
        await api.say("x", "talk", create=True)
        before = await api.show("talk")
        stream = await api.client.chat.completions.create(**chat(session="talk", stream=True, max_tokens=600))
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        again = None
        while again is None:
            # Until the server has seen that the client is gone, the session is in its hand.
            with contextlib.suppress(openai.ConflictError):
                again = await api.say("y", "talk")
        assert again.kvstore["session"]["num_turns"] == before["num_turns"] + 1
        assert (await api.texts("talk"))[:2] == [message["content"] for message in before["messages"]]


async def test_a_fork_has_the_history_and_then_its_own(api):
    first = await api.say("one", "talk", create=True)
    await api.say("two", "talk")
    fork = await api.fork("talk", name="other", turns=1)
    await api.say("three", "other")
    assert fork["forked_from"] == "talk@1"
    assert (await api.texts("other"))[:3] == ["one", text_of(first), "three"]
    assert (await api.texts("talk"))[2] == "two"
    whole = await api.fork("talk")
    assert await api.texts(whole["id"]) == await api.texts("talk")


@pytest.mark.parametrize("first", ["talk", "other"])
async def test_deleting_one_of_two_forks_leaves_the_other_whole(api, records, first):
    await api.say("one", "talk", create=True)
    await api.fork("talk", name="other")
    await api.say("two", "talk")
    await api.say("three", "other")
    left = {"talk": "other", "other": "talk"}[first]
    before = await api.texts(left)
    await api.delete(first)
    assert await api.texts(left) == before
    await api.say("four", left)
    await api.delete(left)
    for collection in (SESSIONS, TURNS):
        assert await records.list_records(collection) == []


async def test_a_deleted_session_is_unknown_and_nothing_of_it_is_left(api, records):
    await api.say("one", "talk", create=True)
    assert (await api.delete("talk"))["deleted"] is True
    for call in (api.show("talk"), api.say("x", "talk"), api.delete("talk"), api.fork("talk")):
        await refused(call, 404, "session_not_found")
    assert await records.list_records(TURNS) == []


async def test_sessions_are_listed_by_name_page_by_page(api):
    for name in ("c", "a", "b"):
        await api.create(name=name)
    page = await api.all(limit=2)
    rest = await api.all(limit=2, after="b")
    assert [at["id"] for at in page["data"]] == ["a", "b"]
    assert (page["has_more"], rest["has_more"]) == (True, False)
    assert [at["id"] for at in rest["data"]] == ["c"]
    for limit in ("0", "x", "99999"):
        await refused(api.all(limit=limit), 400, None)
    await refused(api.all(after="/"), 400, None)


async def test_names_that_exist_or_can_be_none_are_refused(api):
    await api.create(name="talk")
    await refused(api.create(name="talk"), 409, "session_exists")
    await refused(api.fork("talk", name="talk"), 409, "session_exists")
    for name in ("", "../x", "a b", "x" * 129, "é", ".x"):
        await refused(api.create(name=name), 400, None)
        await refused(api.say("x", name), 400, None)
    await refused(api.create(name=5), 400, None)
    await refused(api.create(nam="x"), 400, "unknown_parameter")
    await refused(api.fork("talk", turns=1), 400, None)
    await refused(api.fork("talk", turns=-1), 400, None)
    await refused(api.client.chat.completions.create(**chat(session="talk", n=2)), 400, None)


async def test_two_that_continue_one_session_on_one_replica_never_mix(api):
    await api.create(name="talk")
    answers = await asyncio.gather(*(api.say(f"{i}", "talk") for i in range(4)), return_exceptions=True)
    won = [answer for answer in answers if not isinstance(answer, Exception)]
    lost = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(won) == 1
    assert {(error.status_code, error.code) for error in lost} == {(409, "session_conflict")}
    assert len(await api.texts("talk")) == 2


async def test_two_that_continue_one_session_on_two_replicas_never_mix(lively, records):
    async with apis(lively, records, count=2) as replicas:
        await replicas[0].create(name="talk")
        for number in range(5):
            answers = await asyncio.gather(
                *(api.say(f"{number}", "talk") for api in replicas), return_exceptions=True
            )
            won = [answer for answer in answers if not isinstance(answer, Exception)]
            assert won
            texts = await replicas[0].texts("talk")
            assert len(texts) == 2 * sum(text in "01234" for text in texts[::2])
        lost = [answer for answer in answers if isinstance(answer, Exception)]
        assert {error.status_code for error in lost} <= {409}


class SecondInTurn(MemoryRecords):
    """Records in which another replica continues a session just before the next one does."""

    other = None

    async def put_record(self, collection, name, value, **options):
        other, self.other = self.other, None
        if other is not None and collection == SESSIONS:
            await other()
        elif other is not None:
            self.other = other
        return await super().put_record(collection, name, value, **options)


async def read_reasons(stream, reasons):
    async for chunk in stream:
        reasons.add(chunk.choices[0].finish_reason)


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_the_second_of_two_replicas_is_told_so_and_its_turn_is_gone(lively, is_streaming):
    records = SecondInTurn()
    async with apis(lively, records, count=2) as (first, second):
        await first.create(name="talk")
        records.other = lambda: first.say("first", "talk")
        if is_streaming:
            stream = await second.client.chat.completions.create(**chat(session="talk", stream=True))
            reasons = set()
            with pytest.raises(openai.APIError) as error:
                await read_reasons(stream, reasons)
            assert error.value.code == "session_conflict"
            assert reasons == {None}
        else:
            await refused(second.say("second", "talk"), 409, "session_conflict")
        assert (await first.texts("talk"))[0] == "first"
        assert len(await first.texts("talk")) == 2
        assert len(await records.list_records(TURNS)) == 1


async def test_a_fork_meanwhile_does_not_disturb_a_turn(lively):
    records = SecondInTurn()
    async with apis(lively, records, count=2) as (first, second):
        await first.say("one", "talk", create=True)
        records.other = lambda: first.fork("talk", name="other")
        await second.say("two", "talk")
        assert len(await first.texts("talk")) == 4
        assert len(await first.texts("other")) == 2
        await first.delete("talk")
        assert len(await first.texts("other")) == 2


async def test_a_session_that_is_deleted_meanwhile_is_not_made_anew(lively):
    records = SecondInTurn()
    async with apis(lively, records, count=2) as (first, second):
        await first.say("one", "talk", create=True)
        records.other = lambda: first.delete("talk")
        await refused(second.say("two", "talk"), 409, "session_conflict")
        await refused(first.show("talk"), 404, "session_not_found")
        assert await records.list_records(TURNS) == []


async def test_a_version_that_is_named_must_be_the_present_one(api):
    first = await api.say("one", "talk", create=True, version=0)
    version = first.kvstore["session"]["version"]
    second = await api.say("two", "talk", version=version)
    assert second.kvstore["session"]["version"] != version
    await refused(api.say("three", "talk", version=version), 409, "session_conflict")
    await refused(
        api.client.chat.completions.create(**chat(), extra_body={"kvstore": {"version": 1}}), 400, None
    )


async def test_a_session_in_use_outlasts_its_time_and_an_idle_one_does_not(lively):
    clock = Clock()
    records = MemoryRecords(clock=clock)
    async with apis(lively, records, ttl_s=100) as (api,):
        await api.say("0", "talk", create=True)
        await api.fork("talk", name="idle")
        for number in range(1, 8):
            clock.now_s += 90
            await api.say(str(number), "talk")
        assert (await api.texts("talk"))[::2] == [str(number) for number in range(8)]
        await refused(api.show("idle"), 404, "session_not_found")
        clock.now_s += 101
        await refused(api.say("x", "talk"), 404, "session_not_found")
        clock.now_s += 101
        assert await records.list_records(TURNS) == []


async def test_a_response_in_use_outlasts_its_time(lively):
    clock = Clock()
    async with apis(lively, MemoryRecords(clock=clock), ttl_s=100) as (api,):
        ask = {"model": "tiny", "temperature": 0, "max_output_tokens": 3}
        last = await api.client.responses.create(**ask, input="0")
        for number in range(8):
            clock.now_s += 90
            last = await api.client.responses.create(**ask, input=f"{number}", previous_response_id=last.id)
        assert last.usage.input_tokens > 50


async def test_a_session_beyond_the_quota_is_refused_until_there_is_room(lively, records):
    async with apis(lively, records, quota_bytes=1400) as (api,):
        await api.say("x" * 300, "one", create=True)
        await api.say("x" * 300, "two", create=True)
        await refused(api.say("x" * 300, "three", create=True), 429, "insufficient_quota")
        await refused(api.say("x" * 300, "two"), 429, "insufficient_quota")
        await refused(
            api.create(messages=[{"role": "user", "content": "x" * 300}]), 429, "insufficient_quota"
        )
        await api.delete("one")
        await api.say("x" * 300, "two")


async def test_a_turn_too_long_for_a_record_is_refused(lively, records):
    options = {"server_options": {"max_body_bytes": 4 << 20}}
    async with apis(lively, records, serving=options) as (api,):
        long = [{"role": "user", "content": "x" * 1_100_000}]
        await refused(api.create(messages=long), 400, "session_too_long")


async def test_a_session_of_as_many_turns_as_may_be_is_continued_no_more(api, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_TURNS", 2)
    await api.say("one", "talk", create=True)
    await api.say("two", "talk")
    await refused(api.say("three", "talk"), 400, "session_too_long")


async def test_a_response_after_as_many_as_may_be_is_refused(api, monkeypatch):
    monkeypatch.setattr(stored_responses, "MAX_ANCESTORS", 1)
    ask = {"model": "tiny", "max_output_tokens": 2, "input": "x"}
    first = await api.client.responses.create(**ask)
    second = await api.client.responses.create(**ask, previous_response_id=first.id)
    await refused(
        api.client.responses.create(**ask, previous_response_id=second.id),
        400,
        "previous_response_not_found",
    )


KEYS = {"amy": "amys key", "bob": "bobs key"}
KEYRING = Keyring(
    b"s" * 32,
    [
        KeyRecord(name, f"house-{name}", frozenset({Scope.WRITE}), key_digest(text))
        for name, text in KEYS.items()
    ],
)


async def test_sessions_and_responses_of_another_owner_are_unknown(lively, records):
    doors = FaceDoors(records=records, gate=Gate(lambda: KEYRING))
    async with face_server(lively, doors=doors) as server:
        amy, bob = (Api(server.async_openai(api_key=text)) for text in KEYS.values())
        await amy.say("mine", "talk", create=True)
        kept = await amy.client.responses.create(model="tiny", input="mine", max_output_tokens=2)
        for call in (bob.say("x", "talk"), bob.show("talk"), bob.delete("talk"), bob.fork("talk")):
            await refused(call, 404, "session_not_found")
        await refused(bob.client.responses.retrieve(kept.id), 404, "response_not_found")
        await refused(bob.client.responses.delete(kept.id), 404, "response_not_found")
        await refused(
            bob.client.responses.create(model="tiny", input="x", previous_response_id=kept.id),
            400,
            "previous_response_not_found",
        )
        assert (await bob.all())["data"] == []
        await bob.say("his", "talk", create=True)
        assert (await amy.texts("talk"))[0] == "mine"
        for each in (amy, bob):
            await each.client.close()


async def test_nobody_learns_from_reused_tokens_what_another_owner_asked(lively):
    """Also while both run: neither whole blocks nor the tail of a prompt are shared."""
    doors = FaceDoors(gate=Gate(lambda: KEYRING))
    async with face_server(lively, doors=doors) as server:
        amy, bob = (server.async_openai(api_key=text) for text in KEYS.values())
        stream = await amy.chat.completions.create(**chat(max_tokens=200, stream=True))
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        answers = [await client.chat.completions.create(**chat()) for client in (bob, bob, amy)]
        await stream.close()
        reused = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
        assert reused[0] == 0
        assert reused[1] > 100
        assert reused[2] > 100
        assert len({text_of(answer) for answer in answers}) == 1
        for client in (amy, bob):
            await client.close()
