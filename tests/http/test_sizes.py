"""Hit rates by size over HTTP: a tenant is told of its own lookups, the operator of all."""

import asyncio
from dataclasses import replace

import pytest

from kvstore.auth import Scope
from kvstore.http.metrics import metrics_text
from kvstore.keys import Namespace
from tests.http.http_store import LAYOUT
from tests.http.keyed_store import KEYRING, PUBLIC_MODEL, key_of, keyed_store

OURS = Namespace("m", LAYOUT, tenant_salt=KEYRING.salt("acme"))
THEIRS = replace(OURS, tenant_salt=KEYRING.salt("other"))
SHARED = Namespace(PUBLIC_MODEL, LAYOUT)


@pytest.fixture
async def store():
    """Three lookups of two blocks by one tenant, one by the other, two of a namespace that all share."""
    async with keyed_store(blocks=256) as running:
        manager = running.manager
        for space, times in ((OURS, 3), (THEIRS, 1), (SHARED, 2)):
            manager.open_namespace(space)
            for _ in range(times):
                await manager.match(space.chain(range(8)), timeout_s=1)
        async with asyncio.timeout(60):
            while manager.size_curve()["lookups_blocks"] < 12:  # noqa: ASYNC110 (no event tells of it)
                await asyncio.sleep(0.02)
        yield running


async def ask(store, tenant, path="/v1/size"):
    async with store.client(key_of(tenant, Scope.READ)) as client:
        return await client.ask("GET", path)


async def test_a_tenant_is_told_of_its_own_lookups_alone(store):
    ours, theirs = await ask(store, "acme"), await ask(store, "other")
    named = await ask(store, "acme", f"/v1/size?namespace={OURS.digest.hex()}")

    assert (ours.json["lookups_blocks"], theirs.json["lookups_blocks"]) == (6, 2)
    assert named.json == ours.json
    assert not {"sampled_blocks", "sample_ratio", "lost_blocks"} & set(ours.json)
    assert ours.json["hit_ratio"]["dram"] == {"0.5x": None, "1x": None, "2x": None, "4x": None}


async def test_a_tenant_is_not_told_of_others_and_of_what_others_share(store):
    theirs = await ask(store, "acme", f"/v1/size?namespace={THEIRS.digest.hex()}")
    shared = await ask(store, "acme", f"/v1/size?namespace={SHARED.digest.hex()}")

    assert (theirs.status, theirs.code) == (404, "unknown_namespace")
    assert (shared.status, shared.code) == (403, "forbidden")


def test_the_operator_is_told_of_everything_and_of_each_namespace():
    async def told():
        async with keyed_store(blocks=256) as running:
            running.manager.open_namespace(OURS)
            for _ in range(300):
                await running.manager.match(OURS.chain(range(8)), timeout_s=1)
            async with asyncio.timeout(60):
                while running.manager.size_curve()["lookups_blocks"] < 600:  # noqa: ASYNC110 (see above)
                    await asyncio.sleep(0.02)
            return running.manager.stats(), running.manager.size_curve([THEIRS.digest])

    stats, theirs = asyncio.run(told())

    text = metrics_text(stats)
    assert stats["size_curve"]["hit_ratio"]["all"]["4x"] == 0.0
    assert 'kvstore_size_curve_hit_ratio{of="dram",size="0.5x"} 0' in text
    assert "kvstore_size_curve_samples 600" in text
    assert theirs["lookups_blocks"] == 0
