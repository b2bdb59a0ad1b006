"""What every client promises about records, whichever way it reaches a store."""

import asyncio
import hashlib

import numpy as np
import pytest

from kvstore import RecordAbsence, RecordOutcome, RecordPlace
from kvstore.errors import InvalidRequest
from kvstore.records import MAX_RECORD_BYTES, MAX_TTL_S
from tests.client.facade import Face


@pytest.fixture
def collection(request: pytest.FixtureRequest) -> str:
    """One that no other test has: guests share a store."""
    return hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:32]


async def until_gone(client: Face, collection: str) -> None:
    while True:
        if await client.get_record(collection, "n") is None:
            return
        await asyncio.sleep(0.001)


async def test_what_was_put_is_read_back_with_its_version(guest: Face, collection: str) -> None:
    write = await guest.put_record(collection, "one", b"hello")
    record = await guest.get_record(collection, "one")

    assert (write.outcome, write.is_stored, write.is_doubtful) == (RecordOutcome.STORED, True, False)
    assert (record.value, record.version, record.is_current) == (b"hello", write.version, True)
    assert record.place is write.place is RecordPlace.MEMORY
    assert 0 < record.expires_in_s <= MAX_TTL_S


async def test_there_is_no_record_that_nobody_put(guest: Face, collection: str) -> None:
    assert await guest.get_record(collection, "none") is None
    assert (await guest.look_up_record(collection, "none")).reason is RecordAbsence.NEVER_SEEN


@pytest.mark.parametrize("size", [0, 1, 65_536, MAX_RECORD_BYTES])
async def test_a_value_of_any_length_up_to_the_limit_is_kept(guest: Face, size: int) -> None:
    value = np.random.default_rng(size).integers(0, 256, size, np.uint8)

    assert (await guest.put_record("c", "n", value)).is_stored

    assert (await guest.get_record("c", "n")).value == value.tobytes()


async def test_a_longer_value_is_refused(guest: Face) -> None:
    with pytest.raises(InvalidRequest, match="limit 1048576"):
        await guest.put_record("c", "n", bytes(MAX_RECORD_BYTES + 1))


async def test_every_put_makes_a_higher_version(guest: Face) -> None:
    versions = [(await guest.put_record("c", "n", b"x")).version for _ in range(4)]

    assert versions == sorted(set(versions))


async def test_a_put_of_the_present_version_goes_through_and_another_does_not(
    guest: Face, collection: str
) -> None:
    first = await guest.put_record(collection, "n", b"1", if_version=0)
    second = await guest.put_record(collection, "n", b"2", if_version=first.version)

    late = await guest.put_record(collection, "n", b"3", if_version=first.version)
    again = await guest.put_record(collection, "n", b"4", if_version=0)

    assert second.is_stored
    assert (late.outcome, late.version) == (RecordOutcome.CONFLICT, second.version)
    assert (again.outcome, again.version) == (RecordOutcome.CONFLICT, second.version)
    assert (await guest.get_record(collection, "n")).value == b"2"


async def test_a_version_of_a_record_that_is_gone_is_a_conflict_with_none(
    guest: Face, collection: str
) -> None:
    first = await guest.put_record(collection, "n", b"1")
    await guest.drop_record(collection, "n")

    late = await guest.put_record(collection, "n", b"2", if_version=first.version)

    assert (late.outcome, late.version) == (RecordOutcome.CONFLICT, 0)
    assert (await guest.put_record(collection, "n", b"3", if_version=0)).is_stored


async def test_of_puts_at_the_same_time_one_goes_through(guest: Face, collection: str) -> None:
    first = await guest.put_record(collection, "n", b"0")
    puts = [guest.put_record(collection, "n", b"%d" % at, if_version=first.version) for at in range(8)]

    outcomes = [write.outcome for write in await asyncio.gather(*puts)]

    assert sorted(outcome.value for outcome in outcomes) == ["conflict"] * 7 + ["stored"]


async def test_a_dropped_record_is_gone_for_a_reason(guest: Face, collection: str) -> None:
    await guest.put_record(collection, "n", b"1")

    assert [await guest.drop_record(collection, "n") for _ in range(2)] == [True, False]

    found = await guest.look_up_record(collection, "n")
    assert (found.record, found.reason) == (None, RecordAbsence.DROPPED)


async def test_a_record_whose_time_is_over_is_gone(guest: Face, collection: str) -> None:
    await guest.put_record(collection, "n", b"1", ttl_s=0.001)

    await until_gone(guest, collection)

    assert (await guest.look_up_record(collection, "n")).reason is RecordAbsence.EXPIRED
    assert (await guest.put_record(collection, "n", b"2", if_version=0)).is_stored


async def test_records_are_listed_by_name_in_their_collection(guest: Face, collection: str) -> None:
    for name in ("b", "a/"[:1] + "2", "a1"):
        await guest.put_record(collection, name, b"x" * len(name))
    await guest.put_record(collection + "x", "a3", b"x")

    listed = await guest.list_records(collection)

    assert [(info.name, info.value_bytes, info.is_current) for info in listed] == [
        ("a1", 2, True),
        ("a2", 2, True),
        ("b", 1, True),
    ]
    assert [info.name for info in await guest.list_records(collection, prefix="a")] == ["a1", "a2"]
    assert [info.name for info in await guest.list_records(collection, after="a1", limit=1)] == ["a2"]
    assert await guest.list_records(collection + "y") == []


async def test_a_listing_says_the_version_and_the_time_left(guest: Face, collection: str) -> None:
    write = await guest.put_record(collection, "n", b"1", ttl_s=1000)

    (info,) = await guest.list_records(collection)

    assert info.version == write.version
    assert 0 < info.expires_in_s <= 1000


async def test_records_of_another_salt_are_others(guest: Face, collection: str) -> None:
    await guest.put_record(collection, "n", b"ours")
    await guest.put_record(collection, "n", b"theirs", tenant_salt=b"salt of theirs")

    assert (await guest.get_record(collection, "n")).value == b"ours"
    assert (await guest.get_record(collection, "n", tenant_salt=b"salt of theirs")).value == b"theirs"
    assert await guest.get_record(collection, "n", tenant_salt=b"another") is None
    assert [info.name for info in await guest.list_records(collection, tenant_salt=b"another")] == []
    assert await guest.drop_record(collection, "n", tenant_salt=b"another") is False


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", ".hidden", "-x", "a b", "a\n", "\u00e4", "x" * 201, "%2e"]
)
async def test_a_name_of_another_form_is_refused(guest: Face, name: str) -> None:
    for call in (
        guest.put_record("c", name, b""),
        guest.get_record("c", name),
        guest.drop_record("c", name),
        guest.get_record(name, "n"),
    ):
        with pytest.raises(InvalidRequest, match="record: its"):
            await call


@pytest.mark.parametrize("name", ["a", "resp_0123456789abcdef", "A.b-c_d~e:f@g", "x" * 200])
async def test_names_hold_letters_digits_and_some_signs(guest: Face, name: str) -> None:
    await guest.put_record("c", name, b"v")

    assert (await guest.get_record("c", name)).value == b"v"
    assert [info.name for info in await guest.list_records("c", prefix=name)] == [name]


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), MAX_TTL_S + 1])
async def test_a_time_out_of_range_is_refused(guest: Face, ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match="ttl_s"):
        await guest.put_record("c", "n", b"", ttl_s=ttl_s)


@pytest.mark.parametrize("limit", [0, -1, 1001])
async def test_a_listing_out_of_range_is_refused(guest: Face, limit: int) -> None:
    with pytest.raises(InvalidRequest, match="limit"):
        await guest.list_records("c", limit=limit)


@pytest.mark.parametrize("value", ["text", 3, None, memoryview(b"abcd")[::2]])
async def test_what_is_no_contiguous_buffer_is_refused(guest: Face, value: object) -> None:
    with pytest.raises(InvalidRequest, match="buffer"):
        await guest.put_record("c", "n", value)


async def test_stats_count_puts_and_what_came_of_reads(client: Face) -> None:
    await client.put_record("c", "n", b"1", if_version=0)
    await client.put_record("c", "n", b"2", if_version=0)
    await client.get_record("c", "n")
    await client.get_record("c", "none")

    records = (await client.stats())["records"]

    assert records["puts"] == {"stored": 1, "conflict": 1}
    assert (records["gets"]["memory"], records["gets"]["absent"]) == (1, 1)
    assert records["absent"] == {"never_seen": 1}
    assert (records["place"], records["is_durable"], records["records"]) == ("memory", False, 1)
