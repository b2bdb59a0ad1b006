"""Leases and lent slots: each ends exactly once, by release, by its owner's end or by its deadline."""

import math

import pytest

from kvstore.directory import BlockEntry, Shelf
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.lease import LeaseTable
from kvstore.tier import Slot


def entry(number=1):
    shelf = Shelf(NamespaceDigest(b"n" * 32), Part(0, 1, 0, 1), b"l" * 32, 4096)
    key = BlockKey(bytes([number]) * 32)
    return BlockEntry(shelf, key, shelf.name(key), BlockKey(b"p" * 32), 0)


@pytest.fixture
def table():
    return LeaseTable()


def test_a_lease_counts_on_its_entries_until_it_ends(table):
    one = entry()
    lease = table.grant(table.new_owner(), [one], deadline_s=10)
    assert one.leases == 1

    table.end(lease)

    assert one.leases == 0
    assert table.num_leases == 0


def test_a_second_end_changes_nothing(table):
    one = entry()
    owner = table.new_owner()
    lease = table.grant(owner, [one], deadline_s=10)
    table.grant(owner, [one], deadline_s=10)
    table.end(lease)

    assert table.end(lease) is None
    assert one.leases == 1


def test_a_lease_of_another_owner_cannot_be_ended(table):
    one = entry()
    lease = table.grant(table.new_owner(), [one], deadline_s=10)

    assert table.end(lease, owner=table.new_owner()) is None
    assert one.leases == 1


def test_leases_past_their_deadline_expire(table):
    one = entry()
    table.grant(table.new_owner(), [one], deadline_s=10)

    assert table.expire(9.9) == ([], 0)
    assert table.expire(10.0) == ([one], 0)
    assert one.leases == 0


def test_an_endless_lease_ends_only_with_its_owner(table):
    one = entry()
    owner = table.new_owner()
    table.grant(owner, [one], deadline_s=math.inf)
    table.expire(1e12)
    assert one.leases == 1

    assert table.end_owner(owner) == ([one], [])
    assert one.leases == 0
    assert not table.is_live(owner)


def test_unnamed_slots_come_back_when_their_owner_ends(table):
    owner = table.new_owner()
    table.lend(owner, [Slot(1), Slot(2)], length_bytes=64, deadline_s=10)
    one = entry()
    table.publish(owner, Slot(2), one)

    entries, slots = table.end_owner(owner)

    assert (entries, slots) == ([one], [Slot(1)])
    assert one.leases == 0
    assert table.lent_slots() == []


def test_a_renewed_lease_lasts_until_its_new_deadline(table):
    one, owner = entry(), table.new_owner()
    lease = table.grant(owner, [one], deadline_s=10)

    assert table.renew(lease, owner, 20)
    assert table.expire(15) == ([], 0)
    assert table.expire(20) == ([one], 0)
    assert not table.renew(lease, owner, 30)


def test_a_lease_of_another_owner_cannot_be_renewed(table):
    lease = table.grant(table.new_owner(), [entry()], deadline_s=10)

    assert not table.renew(lease, table.new_owner(), 20)


def test_many_renewals_leave_no_memory_behind(table):
    owner = table.new_owner()
    lease = table.grant(owner, [entry()], deadline_s=1e9)

    for at in range(20_000):
        table.renew(lease, owner, 1e9 + at)

    assert len(table._deadlines) < 10_000


def test_a_lent_slot_past_its_deadline_cannot_be_published_and_stays_with_its_owner(table):
    owner = table.new_owner()
    table.lend(owner, [Slot(1)], length_bytes=64, deadline_s=10)
    table.lend(owner, [Slot(2)], length_bytes=64, deadline_s=20)

    assert table.expire(15) == ([], 1)
    assert table.expire(16) == ([], 0)
    assert table.lent(owner, Slot(1)) is None
    assert table.lent(owner, Slot(2)) is not None
    assert len(table.lent_slots()) == 2
    assert table.num_overdue == 1


def test_an_overdue_slot_comes_back_by_hand_or_with_its_owner(table):
    owner = table.new_owner()
    table.lend(owner, [Slot(1), Slot(2)], length_bytes=64, deadline_s=10)
    table.expire(15)

    assert table.take_back(owner, Slot(1)) is not None
    assert table.end_owner(owner) == ([], [Slot(2)])
    assert table.num_overdue == 0


def test_slots_lent_together_go_ways_of_their_own(table):
    one, owner = entry(), table.new_owner()
    slots = [Slot(at) for at in range(1, 7)]
    table.lend(owner, slots, length_bytes=5000, deadline_s=10, is_ahead=True)
    table.lend(owner, [Slot(9)], length_bytes=5000, deadline_s=20, is_ahead=True)
    table.publish(owner, Slot(2), one)
    assert table.expire(15) == ([one], 5)
    assert table.are_lent(owner, [Slot(9)], 5000)
    assert not table.are_lent(owner, [Slot(9), Slot(1)], 5000)

    taken = table.take_all_back(owner, [Slot(1), Slot(7), Slot(9), Slot(3)])

    assert [lent and lent.is_overdue for lent in taken] == [True, None, False, True]
    assert table.num_overdue == 3
    assert table.ahead_bytes(owner) == table.ahead_bytes() == 3 * 8192
    assert table.end_owner(owner) == ([], [Slot(4), Slot(5), Slot(6)])
    assert table.num_kept == table.num_overdue == table.ahead_bytes() == 0


def test_a_slot_that_has_a_name_is_lent_on_as_that_block_and_those_beside_it_have_none(table):
    one, owner = entry(), table.new_owner()
    table.lend(owner, [Slot(1), Slot(2)], length_bytes=64, deadline_s=10)
    table.publish(owner, Slot(1), one)
    assert not table.are_lent(owner, [Slot(1)], 64)
    assert table.are_lent(owner, [Slot(2)], 64)

    named, unnamed = table.take_all_back(owner, [Slot(1), Slot(2)])

    assert (named.entry, unnamed.entry, one.leases) == (one, None, 0)


def test_taking_back_a_slot_of_another_owner_does_nothing(table):
    owner = table.new_owner()
    table.lend(owner, [Slot(1)], length_bytes=64, deadline_s=10)

    assert table.take_back(table.new_owner(), Slot(1)) is None
    assert table.lent(owner, Slot(1)) is not None


def test_many_short_leases_leave_no_memory_behind(table):
    one = entry()
    owner = table.new_owner()

    for _ in range(20_000):
        table.end(table.grant(owner, [one], deadline_s=1e9))

    assert len(table._deadlines) < 5_000
