"""Kits of every kind of store."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.record_kit import Kit, Store
from tests.redis_server import RedisServer


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "disk", "shared", "sealed disk", "sealed shared"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Kit:
    kind = request.param
    url = request.getfixturevalue("redis").url if "shared" in kind else ""
    return Kit(None if kind == "memory" else tmp_path, url, "sealed" in kind)


@pytest.fixture
async def store(kit: Kit) -> AsyncIterator[Store]:
    async with kit.store() as opened:
        yield opened
        assert await opened.check(sample_records=100) == []


@pytest.fixture
async def stores(kit: Kit) -> AsyncIterator[list[Store]]:
    """As many stores as may share their records."""
    async with contextlib.AsyncExitStack() as opened:
        names = ("a", "b", "c") if kit.redis_url else ("a",)
        found = [await opened.enter_async_context(kit.store(name)) for name in names]
        yield found
        for store in found:
            assert await store.check(sample_records=100) == []
