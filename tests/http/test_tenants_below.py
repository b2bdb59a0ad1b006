"""Tenants over HTTP and the tiers below memory: raw keys of another's blocks are names of nothing.

The blocks at stake are the operator's, in a namespace without salt. A tenant knows their tokens, so it knows
their keys, and names them in a namespace of its own, where any 32 bytes are a key.
"""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from kvstore.auth import Scope
from kvstore.checksum import checksum
from kvstore.epochs import epoch_record_id
from kvstore.keys import Namespace, PrefixChain
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.ssd import SsdTier
from tests.encryption.node import values_in
from tests.http.http_store import BLOCK_BYTES, LAYOUT, hex_keys, payload
from tests.http.keyed_store import KEYRING, key_of, keyed_store
from tests.redis_server import RedisServer

OPERATORS = Namespace("m", LAYOUT)
OURS, THEIRS = (replace(OPERATORS, tenant_salt=KEYRING.salt(tenant)) for tenant in ("acme", "other"))
STORED = OPERATORS.chain(range(16))
UNKNOWN = OPERATORS.chain(range(100, 116))
MEDIA = ["dram", "ssd", "remote"]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def redis(redis_server):
    redis_server.ask(b"FLUSHALL")
    return redis_server


def named_in(space, chain):
    """The same raw keys as a chain of another namespace."""
    return PrefixChain(space.digest, chain.keys, space.block_tokens)


def as_ours(chain):
    return named_in(OURS, chain)


def altered(key):
    """Bytes that a tenant puts under a key, which are not those of the operator's block."""
    return payload(bytes(byte ^ 0x5A for byte in key))


async def put(store, chain):
    """Store blocks as the operator's engine does, and have them in every tier."""
    manager = store.manager
    owner = manager.new_owner()
    reserved = await manager.reserve(chain, owner=owner, timeout_s=5)
    slots = [at.slot for at in reserved.slots]
    async with store.dram.writing(slots, BLOCK_BYTES) as buffers:
        for key, buffer in zip(chain.keys, buffers, strict=True):
            np.asarray(buffer)[:BLOCK_BYTES] = np.frombuffer(payload(key), dtype=np.uint8)
    sums = [checksum(payload(key)) for key in chain.keys]
    assert all(manager.commit(chain, slots, owner=owner, checksums=sums))
    manager.release_owner(owner)
    assert await manager.flush(timeout_s=30)


async def bytes_of(store, chain):
    """The bytes of a chain as the operator's engine gets them, and where they came from."""
    owner = store.manager.new_owner()
    fetched = await store.manager.fetch(chain, owner=owner, timeout_s=5)
    view = store.dram.arena.view
    found = [bytes(view.slot(block.slot, BLOCK_BYTES)) for block in fetched.blocks]
    store.manager.release_owner(owner)
    return found, [block.origin for block in fetched.blocks]


class Media:
    """Real tiers below memory, anew for every store over the same folder and server."""

    def __init__(self, folder, redis):
        self._folder = folder
        self._redis = redis

    @contextlib.asynccontextmanager
    async def store(self, *names, **options):
        made = {
            "ssd": lambda: SsdTier(self._folder / "ssd", capacity_bytes=64 * BLOCK_BYTES),
            "remote": lambda: RemoteTier(self._redis.url, timeout_s=5),
        }
        async with keyed_store(*(made[name]() for name in names), **options) as store:
            store.manager.open_namespace(OPERATORS)
            yield store

    @contextlib.asynccontextmanager
    async def store_with_blocks_only_in(self, medium):
        """A store whose operator has STORED in one tier and nowhere else."""
        below = [] if medium == "dram" else [medium]
        async with self.store(*below) as first:
            await put(first, STORED)
            if medium == "dram":
                yield first
                return
        async with self.store(medium) as store:  # anew: nothing in memory
            yield store


@pytest.fixture
def media(tmp_path, redis):
    return Media(tmp_path, redis)


def keys_in(redis, space):
    """The keys of the blocks of a namespace on the server."""
    start = b"kvstore:2:" + space.digest.hex().encode() + b":"
    return {name.split(b":")[3].decode() for name in values_in(redis) if name.startswith(start)}


@contextlib.asynccontextmanager
async def tenant(store, name="acme"):
    async with store.client(key_of(name, *Scope)) as client:
        await client.open()
        yield client


def seen(answer, chain):
    """All that tells answers apart, with the keys that were asked for left out."""
    body = answer.body
    for key in chain.keys:
        body = body.replace(key.hex().encode(), b"KEY").replace(payload(key), b"PAYLOAD")
    headers = {
        name: text for name, text in answer.headers.items() if name not in ("Date", "KVStore-Checksum")
    }
    return answer.status, headers, body


async def lookups(client, chain):
    about = {"namespace": chain.namespace.hex(), "keys": hex_keys(chain)}
    answers = [await client.post(f"/v1/{name}", **about, timeout_s=5) for name in ("match", "exists", "why")]
    answers += [
        await client.post(f"/v1/{name}", **about, timeout_s=5) for name in ("prefetch", "fetch", "leases")
    ]
    for at in range(len(chain)):
        answers.append(await client.ask("HEAD", client.block_path(chain[at : at + 1], timeout_s=5)))
        answers.append(await client.get_block(chain[at : at + 1], timeout_s=5))
    return [seen(answer, chain) for answer in answers]


async def changes(client, chain):
    about = {"namespace": chain.namespace.hex(), "keys": hex_keys(chain)}
    return [
        seen(await client.post("/v1/drop", **about), chain),
        seen(await client.post("/v1/admin/drop", **about), chain),
        seen(await client.ask("DELETE", client.block_path(chain)), chain),
        seen(await client.put_block(chain), chain),
        seen(await client.store(chain), chain),
        seen(await client.post("/v1/admin/flush", timeout_s=30), chain),
        seen(await client.post("/v1/admin/demote", **about), chain),
        seen(await client.post("/v1/drop", **about), chain),
    ]


@pytest.mark.parametrize("medium", MEDIA)
async def test_raw_keys_of_the_operators_blocks_look_like_keys_of_nothing(media, medium):
    """Found in the remote tier, where a probe asked for the key and not for its namespace."""
    async with media.store_with_blocks_only_in(medium) as store, tenant(store) as client:
        known, unknown = [await lookups(client, as_ours(chain)) for chain in (STORED, UNKNOWN)]

    assert known == unknown


@pytest.mark.parametrize("medium", MEDIA)
async def test_raw_keys_of_the_operators_blocks_change_nothing_of_theirs(media, medium):
    async with media.store_with_blocks_only_in(medium) as store, tenant(store) as client:
        known, unknown = [await changes(client, as_ours(chain)) for chain in (STORED, UNKNOWN)]
        found, origins = await bytes_of(store, STORED)

    assert known == unknown
    assert (found, set(origins)) == ([payload(key) for key in STORED.keys], {medium})


async def test_namespaces_keep_a_block_of_one_raw_key_in_every_tier_at_once(media, redis):
    chains = [STORED, as_ours(STORED), named_in(THEIRS, STORED)]
    async with media.store("ssd", "remote") as store, tenant(store) as ours, tenant(store, "other") as theirs:
        await put(store, STORED)
        assert (await ours.store(chains[1], [altered(key) for key in STORED.keys])).json["stored"] == 4
        assert (await theirs.store(chains[2])).json["stored"] == 4
        assert await store.manager.flush(timeout_s=30)
        reports = [await store.manager.why(chain, timeout_s=5) for chain in chains]

        assert {report.tiers for told in reports for report in told} == {("dram", "ssd")}
        assert [keys_in(redis, space) for space in (OPERATORS, OURS, THEIRS)] == [set(hex_keys(STORED))] * 3
        assert store.manager.stats()["corrupt_blocks"] == {}


@pytest.mark.parametrize("medium", ["ssd", "remote"])
async def test_each_of_two_namespaces_gets_its_own_bytes_from_below(media, medium):
    async with media.store(medium) as first, tenant(first) as client:
        await client.store(as_ours(STORED), [altered(key) for key in STORED.keys])
        await put(first, STORED)
    async with media.store(medium) as store, tenant(store) as client:
        operators, origins = await bytes_of(store, STORED)
        head, tenants = await client.fetch(as_ours(STORED), timeout_s=5)
        why = (await client.post("/v1/why", namespace=OURS.digest.hex(), keys=hex_keys(STORED))).json

    assert (operators, set(origins)) == ([payload(key) for key in STORED.keys], {medium})
    assert (tenants, set(head["origins"])) == ([altered(key) for key in STORED.keys], {medium})
    # What is in memory need not be asked for in a tier that others change.
    below = () if medium == "remote" else (medium,)
    assert {tuple(block["tiers"]) for block in why["blocks"]} == {("dram", *below)}


@pytest.mark.parametrize("by_tenant", [True, False])
async def test_a_dropped_block_goes_from_one_namespace_only(media, redis, by_tenant):
    ours = as_ours(STORED)
    gone, kept = (ours, STORED) if by_tenant else (STORED, ours)
    async with media.store("ssd", "remote") as store, tenant(store) as client:
        await put(store, STORED)
        await client.store(ours, [altered(key) for key in ours.keys])
        assert await store.manager.flush(timeout_s=30)
        if by_tenant:
            dropped = await client.post("/v1/drop", namespace=ours.namespace.hex(), keys=hex_keys(ours))
            assert dropped.json == {"dropped": 4}
        else:
            assert await store.manager.drop(STORED) == 4
        reports = [await store.manager.why(chain, timeout_s=5) for chain in (gone, kept)]

    assert {(report.tiers, report.reason.value) for report in reports[0]} == {((), "dropped")}
    assert {report.tiers for report in reports[1]} == {("dram", "ssd")}
    left = {space: keys_in(redis, space) for space in (OPERATORS, OURS)}
    assert left == {
        space: set(hex_keys(STORED)) if space.digest == kept.namespace else set()
        for space in (OPERATORS, OURS)
    }


async def test_why_tells_nothing_of_what_happened_to_another_namespaces_block(media):
    async with media.store("remote") as store, tenant(store) as client:
        await put(store, STORED)
        await store.manager.drop(STORED)
        (told,) = [await store.manager.why(STORED[:1], timeout_s=5)]
        known, unknown = [await lookups(client, as_ours(chain)) for chain in (STORED, UNKNOWN)]

    assert told[0].reason.value == "dropped"
    assert known == unknown


async def test_no_tenant_reaches_the_records_that_nodes_share(media, redis):
    """An epoch that has ended is told through a record whose key anyone can compute."""
    record = PrefixChain(OURS.digest, (epoch_record_id("m").key,), OURS.block_tokens)
    async with media.store("remote") as store, tenant(store) as client:
        await store.manager.advance_epoch("m")
        before = values_in(redis)
        assert len(before) == 1
        await changes(client, record)

        assert values_in(redis) == before


async def test_what_an_earlier_version_named_without_its_namespace_is_not_seen(media, redis):
    """Its names are other ones: a miss like any other. The values stay until the server lets go of them."""
    async with media.store("remote") as store:
        await put(store, STORED)
    values = values_in(redis)
    redis.ask(b"FLUSHALL")
    for name, value in values.items():
        prefix, _, _, key, part = name.split(b":")
        redis.ask(b"SET", b":".join([prefix, b"1", key, part]), value)
    async with media.store("remote") as store:
        assert (await store.manager.match(STORED, timeout_s=5)).blocks == 0
        assert await bytes_of(store, STORED) == ([], [])
