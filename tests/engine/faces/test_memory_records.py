"""Records in memory keep the law of a store's, and to their bounds."""

import pytest

from kvstore.errors import InvalidRequest
from kvstore.records import MAX_TTL_S, RecordOutcome
from kvstore_engine_adapter.faces.memory_records import MemoryRecords


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def records(clock):
    return MemoryRecords(max_bytes=10_000, clock=clock)


async def test_what_was_put_is_read_back_with_its_version(records):
    write = await records.put_record("c", "n", b"hello")
    record = await records.get_record("c", "n")
    assert (record.value, record.version, record.is_current) == (b"hello", write.version, True)
    assert record.expires_in_s == MAX_TTL_S


async def test_a_put_of_the_present_version_goes_through_and_another_does_not(records):
    first = await records.put_record("c", "n", b"1", if_version=0)
    second = await records.put_record("c", "n", b"2", if_version=first.version)
    late = await records.put_record("c", "n", b"3", if_version=first.version)
    again = await records.put_record("c", "n", b"4", if_version=0)
    assert second.version > first.version
    for write in (late, again):
        assert (write.outcome, write.version) == (RecordOutcome.CONFLICT, second.version)
    assert (await records.get_record("c", "n")).value == b"2"


async def test_a_version_of_a_record_that_is_gone_is_a_conflict_and_never_comes_again(records):
    first = await records.put_record("c", "n", b"1")
    assert await records.drop_record("c", "n") is True
    assert await records.drop_record("c", "n") is False
    late = await records.put_record("c", "n", b"2", if_version=first.version)
    anew = await records.put_record("c", "n", b"3", if_version=0)
    assert (late.outcome, late.version) == (RecordOutcome.CONFLICT, 0)
    assert anew.version > first.version


async def test_a_record_ends_with_its_time_and_its_bytes_count_no_more(records, clock):
    await records.put_record("c", "n", b"x" * 5000, ttl_s=10)
    clock.now_s += 9.9
    assert (await records.get_record("c", "n")).expires_in_s == pytest.approx(0.1)
    clock.now_s += 0.1
    assert await records.get_record("c", "n") is None
    assert await records.list_records("c") == []
    assert (await records.put_record("c", "n", b"", if_version=0)).is_stored


async def test_records_of_salts_and_collections_are_apart(records):
    for salt in (b"", b"a"):
        for collection in ("c", "d"):
            value = collection.encode() + salt
            await records.put_record(collection, "n", value, tenant_salt=salt)
    assert (await records.get_record("c", "n", tenant_salt=b"a")).value == b"ca"
    await records.drop_record("c", "n", tenant_salt=b"a")
    assert (await records.get_record("c", "n")).value == b"c"
    assert [at.name for at in await records.list_records("d", tenant_salt=b"a")] == ["n"]


async def test_a_listing_is_by_name_and_goes_on_behind_a_name(records):
    for name in ("b", "a2", "c", "a1"):
        await records.put_record("c", name, b"12")
    assert [at.name for at in await records.list_records("c")] == ["a1", "a2", "b", "c"]
    assert [at.name for at in await records.list_records("c", after="a2", limit=1)] == ["b"]
    assert [at.name for at in await records.list_records("c", prefix="a")] == ["a1", "a2"]
    assert (await records.list_records("c"))[0].value_bytes == 2


async def test_when_memory_is_full_the_least_recently_used_go(records):
    for name in "abc":
        await records.put_record("c", name, b"x" * 2000)
    await records.get_record("c", "a")
    await records.put_record("c", "d", b"x" * 2000)
    assert [at.name for at in await records.list_records("c")] == ["a", "c", "d"]


async def test_what_has_ended_goes_first(records, clock):
    await records.put_record("c", "a", b"x" * 4000)
    await records.put_record("c", "b", b"x" * 4000, ttl_s=10)
    clock.now_s += 10
    await records.put_record("c", "c", b"x" * 4000)
    assert [at.name for at in await records.list_records("c")] == ["a", "c"]


async def test_a_record_larger_than_all_memory_is_refused_and_nothing_goes(records):
    await records.put_record("c", "a", b"x")
    assert (await records.put_record("c", "b", b"x" * 10_000)).outcome is RecordOutcome.FULL
    assert [at.name for at in await records.list_records("c")] == ["a"]


async def test_names_and_times_that_can_be_none_are_refused(records):
    for call in (
        records.put_record("c", "/", b""),
        records.put_record("/", "n", b""),
        records.put_record("c", "n", b"", ttl_s=0),
        records.get_record("c", ""),
        records.drop_record("", "n"),
        records.list_records("c", after="/"),
        records.list_records("c", limit=0),
    ):
        with pytest.raises(InvalidRequest):
            await call
