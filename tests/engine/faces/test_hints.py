"""Hints: what requests say of their blocks' future, and the ends of conversations, reach the policy."""

import pytest

from kvstore import Hints
from kvstore_engine_adapter.tokenizer import ChatMessage
from tests.engine.faces.face_server import LONG_TEXT, face_server

SAID = {"ends_session": True, "is_one_off": True, "next_use_s": 60, "block_priority": -2}
MEANT = {"ends_session": True, "is_one_off": True, "next_use_s": 60.0, "priority": -2}


class Told:
    """The hints that a manager is given, each with the blocks that it is about."""

    def __init__(self, manager):
        self.hints = []
        self._note = manager.note_hints
        manager.note_hints = self._hear

    def _hear(self, chain, hints, **where):
        self.hints.append((list(chain.keys), hints))
        self._note(chain, hints, **where)

    @property
    def ends(self):
        """Those that say no more than that a conversation is over."""
        return [keys for keys, hints in self.hints if hints == Hints(ends_session=True)]


@pytest.fixture
def told(server):
    return Told(server.engine.manager)


def chat(client, text, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=6, extra_body={"kvstore": more}
    )


def keys_of(server, messages):
    """The names of the full blocks of a conversation."""
    engine = server.engine
    tokens = server.face._service.tokenizer.encode_chat(messages, context_tokens=engine.context_tokens)
    return list(engine.namespace.chain(tokens).keys)


async def test_every_face_takes_what_is_known_of_the_blocks_future(server, client, told):
    await chat(client, LONG_TEXT, **SAID)
    await client.completions.create(model="tiny", prompt=LONG_TEXT, extra_body={"kvstore": SAID})
    await client.responses.create(
        model="tiny", input=LONG_TEXT, max_output_tokens=16, extra_body={"kvstore": SAID}
    )
    body = {"inputs": LONG_TEXT, "parameters": {"max_new_tokens": 16}, "kvstore": SAID}
    await client.with_options(base_url=server.url).post("/generate", cast_to=dict, body=body)

    assert len(told.hints) == 4
    for keys, hints in told.hints:
        said = hints.as_dict()
        assert said.pop("output_tokens") > 0
        assert said == MEANT
        assert keys


async def test_a_deleted_session_is_over_for_the_policy(server, client, told):
    await chat(client, LONG_TEXT, session="talk", create=True)
    shown = await client.get("/sessions/talk", cast_to=dict)
    await client.delete("/sessions/talk", cast_to=dict)

    history = [ChatMessage(at["role"], at["content"]) for at in shown["messages"]]
    assert told.ends == [keys_of(server, history)]


async def test_a_fork_keeps_what_it_goes_on_from(server, client, told):
    await chat(client, LONG_TEXT, session="talk", create=True)
    await client.post("/sessions/talk/fork", cast_to=dict, body={"name": "other"})
    shared = (await client.get("/sessions/other", cast_to=dict))["messages"]
    await chat(client, LONG_TEXT[::-1], session="talk")
    await client.delete("/sessions/talk", cast_to=dict)

    (over,) = told.ends
    kept = keys_of(server, [ChatMessage(at["role"], at["content"]) for at in shared])
    assert over
    assert not set(kept[:-1]).intersection(over)


async def test_a_deleted_response_ends_its_own_turn_alone(server, client, told):
    first = await client.responses.create(
        model="tiny", input=LONG_TEXT, instructions="Be brief.", max_output_tokens=16
    )
    second = await client.responses.create(
        model="tiny", input=LONG_TEXT[::-1], previous_response_id=first.id, max_output_tokens=16
    )
    await client.responses.delete(second.id)
    await client.responses.delete(first.id)

    later, earlier = told.ends
    assert earlier
    assert later
    assert not set(earlier[:-1]).intersection(later)


async def test_the_end_of_a_session_whose_tokens_are_too_many_is_not_told(server, client, told):
    messages = [{"role": "user", "content": LONG_TEXT * 150}]
    await client.post("/sessions", cast_to=dict, body={"name": "long", "messages": messages})
    answer = await client.delete("/sessions/long", cast_to=dict)

    assert answer["deleted"]
    assert told.ends == []


@pytest.mark.parametrize("value", [5, -5, 1.5, "high"])
async def test_a_priority_that_is_none_is_refused(lively, value):
    async with face_server(lively) as server, server.async_openai() as client:
        with pytest.raises(Exception, match=r"kvstore\.block_priority"):
            await chat(client, "x", block_priority=value)
