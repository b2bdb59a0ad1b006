"""A store with one open namespace, and a client of it."""

import pytest

from tests.http.http_store import http_store


@pytest.fixture
async def store():
    async with http_store() as running:
        yield running


@pytest.fixture
async def client(store):
    async with store.client() as connected:
        await connected.open()
        yield connected
