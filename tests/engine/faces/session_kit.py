"""What tests of sessions share: replicas on common records, and their routes as methods."""

import contextlib

import openai
import pytest

from kvstore_engine_adapter.faces.http_face import FaceDoors
from kvstore_engine_adapter.faces.record_access import SessionLimits
from tests.engine.faces.face_server import LONG_TEXT, face_server


def chat(text=LONG_TEXT, session=None, **fields):
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 6,
    }
    if session is not None:
        request["extra_body"] = {"kvstore": {"session": session}}
    return request | fields


class Api:
    """The client, and the session routes that it has no methods for."""

    def __init__(self, client):
        self.client = client

    async def say(self, text, session, **extra):
        request = chat(text) | {"extra_body": {"kvstore": {"session": session} | extra}}
        return await self.client.chat.completions.create(**request)

    async def create(self, **body):
        return await self.client.post("/sessions", cast_to=dict, body=body)

    async def show(self, name):
        return await self.client.get(f"/sessions/{name}", cast_to=dict)

    async def texts(self, name):
        return [message["content"] for message in (await self.show(name))["messages"]]

    async def all(self, **query):
        return await self.client.get("/sessions", cast_to=dict, options={"params": query})

    async def fork(self, origin, **body):
        return await self.client.post(f"/sessions/{origin}/fork", cast_to=dict, body=body)

    async def delete(self, name):
        return await self.client.delete(f"/sessions/{name}", cast_to=dict)


def text_of(answer):
    return answer.choices[0].message.content


@contextlib.asynccontextmanager
async def apis(model, records, count=1, serving=None, **limits):
    """Replicas that share records, as an Api each."""
    doors = FaceDoors(records=records, limits=SessionLimits(**limits))
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            server = await stack.enter_async_context(face_server(model, doors=doors, **serving or {}))
            found.append(Api(await stack.enter_async_context(server.async_openai())))
        yield found


async def refused(call, status, code):
    with pytest.raises(openai.APIStatusError) as error:
        await call
    assert (error.value.status_code, error.value.code) == (status, code)
    assert set(error.value.body) == {"message", "type", "param", "code"}


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s
