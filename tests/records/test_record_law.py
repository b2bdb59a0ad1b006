"""What records promise wherever they are kept: in memory, on disk, in Redis, in the clear or encrypted."""

import asyncio
import os
import random

import pytest

from kvstore.records import MAX_RECORD_BYTES, RecordAbsence, RecordOutcome
from kvstore_tiers.record_format import charge_bytes
from tests.record_kit import ANN, BOB, MIB, Kit, Store


async def test_what_was_put_is_read_on_every_store(stores: list[Store]) -> None:
    write = await stores[0].set("n", b"value")

    for store in stores:
        record = (await store.look("n")).record
        assert record is not None
        assert (record.value, record.version, record.is_current) == (b"value", write.version, True)
        assert record.place is store.truth.place


@pytest.mark.parametrize("size", [0, 1, 4096, MAX_RECORD_BYTES])
async def test_values_of_every_size_come_back(store: Store, size: int) -> None:
    value = os.urandom(size)

    assert (await store.set("n", value)).is_stored

    assert await store.value("n") == value


async def test_a_put_names_the_version_it_replaces(stores: list[Store]) -> None:
    one, other = stores[0], stores[-1]
    first = await one.set("n", b"1", 0)
    second = await other.set("n", b"2", first.version)

    late = await one.set("n", b"3", first.version)

    assert first.version < second.version
    assert (late.outcome, late.version) == (RecordOutcome.CONFLICT, second.version)
    assert await one.value("n") == b"2"


async def test_zero_stands_for_no_record(stores: list[Store]) -> None:
    first = await stores[0].set("n", b"1", 0)

    assert (await stores[-1].set("n", b"2", 0)).outcome is RecordOutcome.CONFLICT
    assert (await stores[-1].set("m", b"2", first.version)).version == 0
    assert await stores[0].value("m") is None


async def test_the_same_put_again_is_the_same_put(stores: list[Store]) -> None:
    token = b"t" * 16
    first = await stores[0].set("n", b"1", 0, token=token)

    again = await stores[-1].set("n", b"1", 0, token=token)

    assert (again.outcome, again.version) == (RecordOutcome.STORED, first.version)


async def test_of_many_writers_one_wins_each_version(stores: list[Store]) -> None:
    """Each reads a number and puts the next one: no increment is lost, none counted twice."""
    await stores[0].set("n", b"0")
    won: list[int] = []

    async def count(store: Store, times: int) -> None:
        for _ in range(times):
            record = (await store.look("n")).record
            assert record is not None
            write = await store.set("n", b"%d" % (int(record.value) + 1), record.version)
            if write.is_stored:
                won.append(record.version)
            else:
                assert write.outcome is RecordOutcome.CONFLICT

    await asyncio.gather(*(count(store, 10) for store in stores for _ in range(4)))

    assert len(won) == len(set(won)) == int(await stores[-1].value("n") or b"")


async def test_puts_without_a_version_all_go_through(stores: list[Store]) -> None:
    writes = await asyncio.gather(*(store.set("n", b"x") for store in stores for _ in range(5)))

    assert {write.outcome for write in writes} == {RecordOutcome.STORED}
    assert len({write.version for write in writes}) == len(writes)


async def test_a_dropped_record_is_gone_on_every_store(stores: list[Store]) -> None:
    await stores[0].set("n", b"1")

    assert await stores[-1].remove("n")

    for store in stores:
        assert (await store.look("n")).reason is RecordAbsence.DROPPED
        assert not await store.remove("n")
    assert (await stores[0].set("n", b"2", 0)).is_stored
    assert await stores[-1].value("n") == b"2"


async def test_records_of_other_tenants_are_out_of_reach(stores: list[Store]) -> None:
    await stores[0].set("n", b"anns", salt=ANN)
    await stores[0].set("n", b"bobs", salt=BOB)

    assert await stores[-1].value("n", salt=ANN) == b"anns"
    assert await stores[-1].value("n", salt=b"") is None
    assert await stores[-1].remove("n", salt=BOB)
    assert [info.name for info in await stores[-1].listed(salt=BOB)] == []
    assert await stores[-1].value("n", salt=ANN) == b"anns"


async def test_a_thousand_records_are_kept_and_listed_in_pages(stores: list[Store]) -> None:
    names = [f"n{number:04}" for number in range(1000)]
    random.Random(1).shuffle(names)
    for start in range(0, 1000, 50):
        part = names[start : start + 50]
        writes = await asyncio.gather(
            *(stores[at % len(stores)].set(name, name.encode()) for at, name in enumerate(part))
        )
        assert all(write.is_stored for write in writes)

    found: list[str] = []
    while page := await stores[-1].listed(after=found[-1] if found else "", limit=300):
        found += [info.name for info in page]

    assert found == sorted(names)
    assert [info.name for info in await stores[0].listed(prefix="n000")] == sorted(names)[:10]
    assert await stores[-1].value("n0500") == b"n0500"


async def test_over_its_quota_a_tenant_is_refused_and_nothing_is_evicted(kit: Kit) -> None:
    kit.quota_bytes = MIB
    async with kit.store() as store:
        writes = [await store.set(f"n{number}", bytes(200_000)) for number in range(7)]
        stored = [f"n{at}" for at, write in enumerate(writes) if write.is_stored]

        assert {write.outcome for write in writes[len(stored) :]} == {RecordOutcome.QUOTA}
        assert len(stored) == MIB // charge_bytes(200_000)
        assert [info.name for info in await store.listed()] == stored
        assert (await store.set("n0", bytes(200_001))).is_stored
        assert (await store.set("n", b"x", salt=BOB)).is_stored
        assert await store.remove("n1")
        assert (await store.set("n9", bytes(200_000))).is_stored


async def test_a_quota_holds_for_all_who_put_at_once(kit: Kit) -> None:
    kit.quota_bytes = 40 * 4096
    names = ("a", "b") if kit.redis_url else ("a",)
    stores = [kit.store(name) for name in names]
    for store in stores:
        await store.open()
    writes = await asyncio.gather(*(stores[at % len(stores)].set(f"n{at}", b"x") for at in range(60)))
    listed = await stores[0].listed()
    for store in stores:
        await store.close()

    assert sum(write.is_stored for write in writes) == len(listed) == 40
    assert {write.outcome for write in writes} == {RecordOutcome.STORED, RecordOutcome.QUOTA}


async def test_a_small_record_counts_for_a_page(kit: Kit) -> None:
    kit.quota_bytes = 3 * 4096
    async with kit.store() as store:
        writes = [await store.set(f"n{number}", b"") for number in range(4)]

        assert [write.is_stored for write in writes] == [True, True, True, False]


async def test_a_record_that_is_over_makes_room_in_the_quota(kit: Kit) -> None:
    kit.quota_bytes = 4096
    async with kit.store() as store:
        assert (await store.set("short", b"x", ttl_s=0.001)).is_stored
        while True:
            if await store.value("short") is None:
                break

        assert (await store.set("next", b"x")).is_stored
        assert (await store.look("short")).reason in (RecordAbsence.EXPIRED, RecordAbsence.NEVER_SEEN)


async def test_a_put_that_nobody_waits_for_any_more_goes_on(store: Store) -> None:
    put = asyncio.create_task(store.set("n", bytes(100_000)))
    await asyncio.sleep(0)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put

    while True:
        if await store.value("n") is not None and not store.stats()["pending"]:
            break


async def test_a_closed_store_keeps_nothing_pending_and_refuses(kit: Kit) -> None:
    store = kit.store()
    assert (await store.set("n", b"1")).outcome is RecordOutcome.UNAVAILABLE
    await store.open()
    await store.set("n", b"1")
    await store.close()
    await store.close()

    write = await store.set("n", b"2")

    assert (write.outcome, write.is_doubtful) == (RecordOutcome.UNAVAILABLE, False)
