"""Sessions over records that are lost, damaged, refused or away: told, and never continued wrongly."""

import asyncio
import dataclasses
import json

import pytest

from kvstore.errors import ServerUnavailable
from kvstore.records import RecordOutcome, RecordWrite
from kvstore_engine_adapter.faces import stored_responses
from kvstore_engine_adapter.faces.memory_records import MemoryRecords
from kvstore_engine_adapter.faces.record_access import RESPONSES, SESSIONS, TURNS
from tests.engine.faces.session_kit import Clock, apis, chat, refused


async def test_a_session_whose_history_has_a_hole_is_never_continued(api, records):
    await api.say("one", "talk", create=True)
    await api.say("two", "talk")
    (turn, _) = await records.list_records(TURNS)
    await records.drop_record(TURNS, turn.name)
    for call in (api.say("x", "talk"), api.show("talk"), api.fork("talk")):
        await refused(call, 404, "session_history_lost")
    await api.delete("talk")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"format":2}',
        b'{"format":1,"turns":[5],"num_shared":0,"created_s":1,"forked_from":null}',
        b'{"format":1,"turns":["../x"],"num_shared":0,"created_s":1,"forked_from":null}',
        b"[" * 100_000,
    ],
    ids=lambda value: repr(value[:20]),
)
async def test_a_damaged_record_is_an_error_and_the_engine_goes_on(api, records, caplog, value):
    await records.put_record(SESSIONS, "talk", value, ttl_s=100)
    await refused(api.say("x", "talk"), 500, "session_damaged")
    await records.put_record(TURNS, "0" * 32, value, ttl_s=100)
    head = {"format": 1, "turns": ["0" * 32], "num_shared": 0, "created_s": 1, "forked_from": None}
    await records.put_record(SESSIONS, "talk", json.dumps(head).encode(), ttl_s=100)
    await refused(api.say("x", "talk"), 500, "session_damaged")
    assert "is damaged" in caplog.text
    assert (await api.client.chat.completions.create(**chat())).usage.completion_tokens > 0


async def test_a_history_that_cannot_be_renewed_is_continued_all_the_same(lively, caplog):
    clock = Clock()
    records = Away(clock=clock)
    async with apis(lively, records, ttl_s=100) as (api,):
        await api.say("one", "talk", create=True)
        clock.now_s += 90
        records.away = frozenset({("put", TURNS)})
        assert await api.texts("talk")
        assert "was not renewed: unavailable" in caplog.text
        records.away = frozenset()
        await api.say("two", "talk")
        assert len(await api.texts("talk")) == 4


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (RecordOutcome.QUOTA, 429, "insufficient_quota"),
        (RecordOutcome.FULL, 503, "sessions_unavailable"),
    ],
)
async def test_what_the_store_refuses_is_told_and_leaves_the_session_as_it_was(lively, outcome, status, code):
    records = Away()
    async with apis(lively, records) as (api,):
        await api.say("one", "talk", create=True)
        records.away = frozenset({("put", TURNS)})
        records.write = RecordWrite(outcome, problem="no room")
        await refused(api.say("two", "talk"), status, code)
        unstored = await api.client.responses.create(model="tiny", input="x", max_output_tokens=2)
        assert unstored.store is True
        records.away = frozenset({("put", RESPONSES)})
        unstored = await api.client.responses.create(model="tiny", input="x", max_output_tokens=2)
        assert unstored.store is False
        assert len(await api.texts("talk")) == 2


class Hanging(MemoryRecords):
    """Records of a store that takes its time."""

    is_hanging = False
    num_puts = 0

    async def put_record(self, collection, name, value, **options):
        self.num_puts += 1
        if self.is_hanging:
            await asyncio.Event().wait()
        return await super().put_record(collection, name, value, **options)


async def test_a_response_is_not_held_up_by_a_store_that_hangs_more_than_once(lively, monkeypatch):
    monkeypatch.setattr(stored_responses, "_PATIENCE_S", 0.6)
    records = Hanging()
    async with apis(lively, records) as (api,):
        ask = {"model": "tiny", "max_output_tokens": 2, "input": "x"}
        records.is_hanging = True
        first = await api.client.responses.create(**ask)
        second = await api.client.responses.create(**ask)
        assert (first.store, second.store) == (False, False)
        assert "within 0.6 seconds" in first.kvstore["not_stored"]
        assert records.num_puts == 1


class Away(MemoryRecords):
    """Records of a store that does not answer, for some of the calls."""

    away = frozenset()
    write = RecordWrite(RecordOutcome.UNAVAILABLE, problem="the store is away")

    async def put_record(self, collection, name, value, **options):
        if ("put", collection) in self.away:
            if self.write.is_doubtful and self.write.version:
                await super().put_record(collection, name, value, **options)
            return self.write
        return await super().put_record(collection, name, value, **options)

    async def get_record(self, collection, name, **options):
        if ("get", collection) in self.away:
            raise ServerUnavailable("the store is away")
        return await super().get_record(collection, name, **options)

    async def drop_record(self, collection, name, **options):
        if ("drop", collection) in self.away:
            raise ServerUnavailable("the store is away")
        return await super().drop_record(collection, name, **options)

    async def list_records(self, collection, **options):
        if ("list", collection) in self.away:
            raise ServerUnavailable("the store is away")
        return await super().list_records(collection, **options)


@pytest.mark.parametrize("collection", [SESSIONS, TURNS])
async def test_a_store_that_is_away_is_503_and_chats_without_a_session_go_on(lively, collection):
    records = Away()
    async with apis(lively, records) as (api,):
        await api.say("one", "talk", create=True)
        before = await api.texts("talk")
        for call in ("get", "put"):
            records.away = frozenset({(call, collection)})
            await refused(api.say("two", "talk"), 503, "sessions_unavailable")
            assert (await api.client.chat.completions.create(**chat())).usage.completion_tokens > 0
        records.away = frozenset({("list", SESSIONS)})
        await refused(api.all(), 503, "sessions_unavailable")
        records.away = frozenset({("drop", SESSIONS)})
        await refused(api.delete("talk"), 503, "sessions_unavailable")
        records.away = frozenset()
        assert await api.texts("talk") == before


async def test_a_put_whose_end_is_unknown_is_looked_up(lively):
    records = Away()
    async with apis(lively, records) as (api,):
        await api.create(name="talk")
        records.away = frozenset({("put", SESSIONS)})
        records.write = dataclasses.replace(Away.write, is_doubtful=True, version=1)
        answer = await api.say("one", "talk")
        assert answer.kvstore["session"]["num_turns"] == 1
        records.write = dataclasses.replace(Away.write, is_doubtful=True)
        await refused(api.say("two", "talk"), 503, "sessions_unavailable")
        records.away = frozenset()
        assert len(await api.texts("talk")) == 2
