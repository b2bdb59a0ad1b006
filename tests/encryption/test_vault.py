"""Vault: nodes agree on a tenant's key through Redis, keep it in files, and forget it for good."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvstore.key_exchange import KeyExchange, erased_record_id, key_record_id
from kvstore.key_file import KeyFile
from kvstore.keys import Namespace, NamespaceDigest
from kvstore.master_keys import MasterKeys
from kvstore.tenant import TenantId, tenant_of
from kvstore.tenant_record import RECORD_BYTES
from kvstore.vault import Vault
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.remote_session import KeyNames
from kvstore_tiers.sealing import DataKey
from tests.encryption.node import ANN, BOB, MASTER, OTHER_MASTER, tenant
from tests.redis_server import RedisServer

NAMES = KeyNames("kvstore")
SPACES = {space.digest: space for space in (ANN, BOB)}


def soon() -> float:
    return time.monotonic() + 30


class Nodes:
    """Vaults over one Redis server, each with a folder of its own."""

    def __init__(self, folder: Path, redis: RedisServer, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.redis = redis
        self._stack = stack
        self.heard: list[tuple[str, TenantId]] = []

    async def open(
        self, name: str, *, master: str = MASTER, is_remote: bool = True, has_file: bool = True
    ) -> Vault:
        masters = MasterKeys.parse(master, key="keys")
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        exchange = None
        if is_remote:
            tier = RemoteTier(self.redis.url, timeout_s=5, breaker_backoff_s=0.05)
            await tier.open()
            self._stack.push_async_callback(tier.close)
            exchange = KeyExchange(tier, masters, clock=time.monotonic)
        vault = Vault(
            masters,
            file=KeyFile([folder], record_bytes=RECORD_BYTES, in_use=lambda: [folder]) if has_file else None,
            exchange=exchange,
            clock=time.monotonic,
        )

        async def on_erased(erased: TenantId, _: object) -> None:
            self.heard.append((name, erased))
            vault.reopen(erased)

        vault.follow(SPACES.get, on_erased)
        await vault.open()
        self._stack.push_async_callback(vault.close)
        return vault

    def forget_key(self, space: Namespace, number: int = 1) -> None:
        """Have Redis lose the record of a key, as it does when it evicts."""
        self.redis.ask(b"DEL", NAMES.of(key_record_id(tenant(space), number)))

    def key_record(self, space: Namespace, number: int = 1) -> bytes:
        return self.redis.ask(b"GET", NAMES.of(key_record_id(tenant(space), number)))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
async def nodes(tmp_path: Path, redis: RedisServer) -> AsyncIterator[Nodes]:
    redis.ask(b"FLUSHALL")
    async with AsyncExitStack() as stack:
        yield Nodes(tmp_path, redis, stack)


async def key_of(vault: Vault, space: Namespace = ANN) -> DataKey:
    key = await vault.sealing_key(space.digest, deadline_s=soon())
    assert key is not None
    return key


async def erase(vault: Vault) -> list[str]:
    """Erase Ann, whose blocks nobody has."""
    vault.forget(tenant(ANN))
    problems = await vault.spread_erasure(tenant(ANN))
    vault.reopen(tenant(ANN))
    return problems


async def until_told(vault: Vault) -> None:
    """Wait until Redis has taken every erasure."""
    for _ in range(1200):
        await vault.poll()
        if not vault.stats()["untold_erasures"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the erasure was never told")


# One key per tenant


async def test_a_tenant_has_one_key_and_another_tenant_another(nodes: Nodes) -> None:
    vault = await nodes.open("a")
    ann = await key_of(vault, ANN)
    assert await key_of(vault, ANN) is ann
    assert (await key_of(vault, BOB)).id != ann.id
    assert ann.tenant == tenant_of(ANN.tenant_salt)


async def test_a_namespace_that_is_not_open_has_no_key(nodes: Nodes) -> None:
    vault = await nodes.open("a")
    assert await vault.sealing_key(NamespaceDigest(b"x" * 32), deadline_s=soon()) is None


async def test_two_nodes_that_make_a_key_at_once_have_the_same(nodes: Nodes) -> None:
    for round_ in range(10):
        nodes.redis.ask(b"FLUSHALL")
        one = await nodes.open(f"a{round_}")
        other = await nodes.open(f"b{round_}")
        first, second = await asyncio.gather(key_of(one), key_of(other))
        assert first.id == second.id


async def test_a_key_survives_a_restart_with_the_file_alone(nodes: Nodes) -> None:
    first = await key_of(await nodes.open("a", is_remote=False))
    again = await nodes.open("a", is_remote=False)
    assert again.is_known(first.id)
    assert (await key_of(again)).secret() == first.secret()


async def test_a_key_survives_a_restart_with_redis_alone(nodes: Nodes) -> None:
    first = await key_of(await nodes.open("a", has_file=False))
    assert (await key_of(await nodes.open("b", has_file=False))).id == first.id


async def test_no_key_is_in_the_clear_in_the_file_or_in_redis(nodes: Nodes) -> None:
    secret = (await key_of(await nodes.open("a"))).secret()
    everything = (nodes.folder / "a" / "keys").read_bytes() + nodes.key_record(ANN)
    assert secret not in everything
    assert ANN.tenant_salt not in everything
    assert len(nodes.key_record(ANN)) == 192 + RECORD_BYTES


async def test_a_key_that_was_made_while_redis_was_away_gives_way_and_still_opens(nodes: Nodes) -> None:
    alone = await nodes.open("a", is_remote=False)
    early = await key_of(alone)
    await alone.close()
    agreed = await key_of(await nodes.open("b"))

    back = await nodes.open("a")

    assert (await key_of(back)).id == agreed.id != early.id
    opened = await back.opening_key(ANN.digest, early.id, deadline_s=soon())
    assert opened is not None
    assert opened.secret() == early.secret()
    again = await nodes.open("a", is_remote=False)
    assert (await key_of(again)).id == agreed.id
    assert again.is_known(early.id)


async def test_another_nodes_key_is_asked_for_when_a_copy_names_it(nodes: Nodes) -> None:
    one, other = await nodes.open("a"), await nodes.open("b")
    key = await key_of(one)
    assert not other.is_known(key.id)
    found = await other.opening_key(ANN.digest, key.id, deadline_s=soon())
    assert found is not None
    assert found.secret() == key.secret()


async def test_a_key_opens_only_what_is_its_tenants(nodes: Nodes) -> None:
    vault = await nodes.open("a")
    key = await key_of(vault, ANN)
    assert await vault.opening_key(BOB.digest, key.id, deadline_s=soon()) is None


async def test_a_key_that_redis_has_evicted_is_put_back(nodes: Nodes) -> None:
    vault = await nodes.open("a")
    key = await key_of(vault)
    nodes.forget_key(ANN)
    vault._keys.state(tenant(ANN)).looked_s = -1e9
    await vault.poll()
    assert (await key_of(await nodes.open("b"))).id == key.id


async def test_what_is_no_record_in_redis_is_replaced(nodes: Nodes) -> None:
    nodes.redis.ask(b"SET", NAMES.of(key_record_id(tenant(ANN), 1)), b"junk")
    nodes.redis.ask(b"SET", NAMES.of(erased_record_id(tenant(ANN))), b"junk")
    key = await key_of(await nodes.open("a"))
    assert (await key_of(await nodes.open("b"))).id == key.id


# Erasing


async def test_an_erased_key_is_in_no_file_and_not_in_redis(nodes: Nodes) -> None:
    vault = await nodes.open("a")
    key = await key_of(vault)
    with (nodes.folder / "a" / "keys").open("rb") as held:
        wrapped = held.read()[-80:-8]
        assert wrapped in nodes.key_record(ANN)

        assert await erase(vault) == []

        assert key.is_forgotten
        held.seek(0)
        assert not any(held.read())
    assert wrapped not in (nodes.folder / "a" / "keys").read_bytes()
    assert wrapped not in nodes.key_record(ANN)
    assert vault.is_erased(ANN.digest)
    assert not vault.has_key(ANN.digest)
    assert (await key_of(vault)).id != key.id


async def test_other_nodes_hear_of_an_erasure(nodes: Nodes) -> None:
    one, other = await nodes.open("a"), await nodes.open("b")
    await key_of(one, ANN)
    kept = await key_of(other, ANN), await key_of(other, BOB)
    await erase(one)

    await other.poll()
    await asyncio.sleep(0)

    assert nodes.heard == [("b", tenant(ANN))]
    assert [key.is_forgotten for key in kept] == [True, False]
    assert (await key_of(other)).id == (await key_of(one)).id


async def test_a_node_that_was_down_forgets_at_its_start_before_anything_is_read(nodes: Nodes) -> None:
    one, other = await nodes.open("a"), await nodes.open("b")
    key = await key_of(one)
    await other.opening_key(ANN.digest, key.id, deadline_s=soon())
    await other.poll()
    await other.close()
    await erase(one)

    back = await nodes.open("b")

    assert not back.is_known(key.id)
    assert back.is_erased(ANN.digest)
    assert nodes.heard == []
    alone = await nodes.open("b", is_remote=False)
    assert not alone.is_known(key.id)


async def test_an_erasure_survives_the_eviction_of_its_record(nodes: Nodes) -> None:
    one, other = await nodes.open("a"), await nodes.open("b")
    key = await key_of(one)
    await other.opening_key(ANN.digest, key.id, deadline_s=soon())
    await erase(one)
    nodes.redis.ask(b"FLUSHALL")

    await one.poll()
    await other.poll()

    assert key.is_forgotten
    assert not other.is_known(key.id)


async def test_an_old_key_record_that_somebody_puts_back_is_not_used(nodes: Nodes) -> None:
    one = await nodes.open("a")
    key = await key_of(one)
    saved = nodes.key_record(ANN)
    await erase(one)

    nodes.redis.ask(b"SET", NAMES.of(key_record_id(tenant(ANN), 1)), saved)

    other = await nodes.open("b")
    assert await other.opening_key(ANN.digest, key.id, deadline_s=soon()) is None
    nodes.redis.ask(b"SET", NAMES.of(key_record_id(tenant(ANN), 2)), saved)
    assert (await key_of(other)).id != key.id


async def test_a_forged_erasure_is_not_believed(nodes: Nodes) -> None:
    one = await nodes.open("a")
    key = await key_of(one)
    nodes.redis.ask(b"SET", NAMES.of(erased_record_id(tenant(ANN))), nodes.key_record(ANN))
    await one.poll()
    assert (await key_of(one)).id == key.id


async def test_an_erasure_that_could_not_be_told_is_told_after_a_restart_too(nodes: Nodes) -> None:
    one, other = await nodes.open("a"), await nodes.open("b")
    key = await key_of(one)
    await other.opening_key(ANN.digest, key.id, deadline_s=soon())
    await one.close()
    nodes.redis.kill()
    try:
        back = await nodes.open("a")
        assert await erase(back) == ["remote: does not take the erasure now"]
        await back.close()
    finally:
        nodes.redis.start()
    back = await nodes.open("a")
    assert back.stats()["untold_erasures"] == 1 or back.stats()["erased_tenants"] == 1

    await until_told(back)
    await other.poll()

    assert not other.is_known(key.id)
    assert not back.is_known(key.id)


async def test_an_erasure_told_late_takes_what_others_made_meanwhile_with_it(nodes: Nodes) -> None:
    one, other = await nodes.open("a"), await nodes.open("b")
    await key_of(one)
    await other.poll()
    one.forget(tenant(ANN))
    one.reopen(tenant(ANN))
    # Before it is told, another node erases too, and stores under a newer key.
    await erase(other)
    newer = await key_of(other)

    assert await one.spread_erasure(tenant(ANN)) == []
    await other.poll()

    assert newer.is_forgotten
    assert (await key_of(other)).id == (await key_of(one)).id


async def test_a_key_record_that_is_written_late_does_not_outlive_its_erasure(nodes: Nodes) -> None:
    one, other = await nodes.open("a"), await nodes.open("b")
    key = await key_of(one)
    await other.opening_key(ANN.digest, key.id, deadline_s=soon())
    saved = nodes.key_record(ANN)
    await erase(one)

    # The other node has not heard of it, and puts the record back as if Redis had lost it.
    nodes.forget_key(ANN)
    await other._publish(tenant(ANN))

    assert nodes.key_record(ANN) != saved
    assert not other.is_known(key.id)


# Master keys


async def test_a_new_first_master_key_wraps_everything_anew(nodes: Nodes) -> None:
    key = await key_of(await nodes.open("a"))
    before = nodes.key_record(ANN)

    both = await nodes.open("a", master=f"{OTHER_MASTER}\n{MASTER}")
    assert (await key_of(both)).id == key.id
    await both.close()

    assert nodes.key_record(ANN) != before
    assert (await key_of(await nodes.open("a", master=OTHER_MASTER, is_remote=False))).id == key.id
    assert (await key_of(await nodes.open("b", master=OTHER_MASTER))).id == key.id


async def test_with_the_wrong_master_key_the_vault_is_down_and_the_file_stays(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    key = await key_of(await nodes.open("a", is_remote=False))
    before = (nodes.folder / "a" / "keys").read_bytes()

    wrong = await nodes.open("a", master=OTHER_MASTER, is_remote=False)

    assert not wrong.health().is_up
    assert "another master key" in wrong.health().reason
    assert await wrong.sealing_key(BOB.digest, deadline_s=soon()) is None
    assert await wrong.opening_key(ANN.digest, key.id, deadline_s=soon()) is None
    await wrong.poll()
    assert (nodes.folder / "a" / "keys").read_bytes() == before
    assert len([record for record in caplog.records if record.name == "kvstore.vault"]) == 1
    right = await nodes.open("a", is_remote=False)
    assert (await key_of(right)).id == key.id


async def test_a_record_of_another_master_key_in_redis_is_left_alone(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    key = await key_of(await nodes.open("a"))
    before = nodes.key_record(ANN)

    stranger = await nodes.open("b", master=OTHER_MASTER)

    assert await stranger.sealing_key(ANN.digest, deadline_s=soon()) is None
    assert (await key_of(stranger, BOB)).tenant == tenant(BOB)
    await stranger.poll()
    assert nodes.key_record(ANN) == before
    assert "another master key" in caplog.text
    assert (await key_of(await nodes.open("c"))).id == key.id


# Files


async def test_a_damaged_key_file_costs_its_keys_and_no_start(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    key = await key_of(await nodes.open("a", is_remote=False))
    (nodes.folder / "a" / "keys").write_bytes(b"junk")

    back = await nodes.open("a", is_remote=False)

    assert back.health().is_up
    assert not back.is_known(key.id)
    assert "is damaged" in caplog.text
    assert (await key_of(back)).id != key.id


async def test_keys_that_cannot_be_kept_are_used_all_the_same_and_kept_later(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    vault = await nodes.open("a", is_remote=False)
    (nodes.folder / "a").rename(nodes.folder / "away")
    key = await key_of(vault)
    assert "cannot be written" in caplog.text
    (nodes.folder / "away").rename(nodes.folder / "a")
    await vault.poll()
    vault._keep_again_s = 0.0
    await vault.poll()
    assert (await key_of(await nodes.open("a", is_remote=False))).id == key.id


async def test_of_several_files_an_older_one_changes_nothing(nodes: Nodes, tmp_path: Path) -> None:
    alone = await nodes.open("a", is_remote=False)
    early = await key_of(alone)
    old = (nodes.folder / "a" / "keys").read_bytes()
    agreed = await key_of(await nodes.open("b"))
    back = await nodes.open("a")
    assert (await key_of(back)).id == agreed.id
    folders = [nodes.folder / name for name in ("a", "stale")]
    folders[1].mkdir()
    (folders[1] / "keys").write_bytes(old)

    masters = MasterKeys.parse(MASTER, key="keys")
    vault = Vault(
        masters,
        file=KeyFile(folders, record_bytes=RECORD_BYTES, in_use=lambda: folders),
        exchange=None,
        clock=time.monotonic,
    )
    vault.follow(SPACES.get, lambda *_: asyncio.sleep(0))
    await vault.open()

    assert (await key_of(vault)).id == agreed.id
    assert vault.is_known(early.id)
    assert (folders[0] / "keys").read_bytes() == (folders[1] / "keys").read_bytes()


async def test_an_erasure_says_which_file_could_not_be_overwritten(nodes: Nodes) -> None:
    vault = await nodes.open("a", is_remote=False)
    await key_of(vault)
    (nodes.folder / "a").rename(nodes.folder / "away")
    (problem,) = await erase(vault)
    assert problem.startswith(f"{nodes.folder / 'a' / 'keys'}: cannot be written")


async def test_asking_for_unknown_keys_is_limited(nodes: Nodes) -> None:
    vault = await nodes.open("a")
    nodes.redis.ask(b"CONFIG", b"RESETSTAT")
    for number in range(50):
        await vault.opening_key(ANN.digest, number.to_bytes(8, "big"), deadline_s=soon())
    calls = re.search(rb"cmdstat_get:calls=(\d+)", nodes.redis.ask(b"INFO", b"commandstats"))
    assert calls is not None
    assert int(calls[1]) <= 40


async def test_no_key_is_made_while_an_erasures_blocks_are_still_about(nodes: Nodes) -> None:
    vault = await nodes.open("a")
    first = await key_of(vault)
    vault.forget(tenant(ANN))
    await vault.spread_erasure(tenant(ANN))
    other = await nodes.open("b")
    second = await key_of(other)
    await vault.poll()

    assert await vault.sealing_key(ANN.digest, deadline_s=soon()) is None

    vault.reopen(tenant(ANN))
    assert (await key_of(vault)).id == second.id != first.id
