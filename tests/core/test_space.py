"""Who is named to leave a tier: children first, nobody who is kept."""

import pytest

from kvstore.directory import Copy, CopyState, Directory
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.policy import FifoPolicy, LruPolicy
from kvstore.space import plan_departures
from kvstore.state import ManagerSettings, State
from kvstore.tier import Slot

SPACE = Namespace(model="m", layout=KVLayout.opaque(block_bytes=4096, block_tokens=4))


class TopName:
    name = "dram"


@pytest.fixture(params=[LruPolicy, FifoPolicy])
def state(request):
    directory = Directory(["dram"])
    directory.open_namespace(SPACE)
    return State(
        top=TopName(),
        lower=(),
        policies={"dram": request.param()},
        settings=ManagerSettings(),
        clock=lambda: 0.0,
        directory=directory,
    )


def store(state, chain, *, one_by_one=False):
    shelf = state.directory.shelf(SPACE.digest, None)
    entries = []
    parent = chain.parent or SPACE.digest
    for index, key in enumerate(chain.keys):
        entry = state.directory.entry(shelf, key, parent, chain.start + index)
        state.directory.set_copy(entry, "dram", Copy(CopyState.READY, Slot(index)))
        entries.append(entry)
        parent = key
    for group in [[entry] for entry in entries] if one_by_one else [entries]:
        state.policies["dram"].insert([entry.name for entry in group], size_bytes=4096, now_s=0.0)
    return entries


def plan(state, wanted):
    return list(plan_departures(state, "dram", wanted_blocks=wanted, must_demote=lambda _: False).leaving)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_children_are_named_before_their_parents(state, one_by_one):
    entries = store(state, SPACE.chain(range(20)), one_by_one=one_by_one)

    assert plan(state, 3)[:3] == entries[:1:-1][:3]
    assert plan(state, 99) == entries[::-1]


def test_a_leased_block_keeps_itself_and_its_ancestors(state):
    entries = store(state, SPACE.chain(range(20)))
    entries[2].leases = 1

    assert plan(state, 99) == [entries[4], entries[3]]


def test_a_parent_with_two_children_waits_for_both(state):
    trunk = store(state, SPACE.chain(range(4)))
    left = store(state, SPACE.chain([0, 1, 2, 3, 7, 7, 7, 7])[1:])
    right = store(state, SPACE.chain([0, 1, 2, 3, 8, 8, 8, 8])[1:])
    right[0].holds = 1

    assert plan(state, 99) == left
    right[0].holds = 0
    assert plan(state, 99)[-1:] == trunk


def test_a_chain_whose_claims_disagree_cannot_keep_blocks_forever(state):
    shelf = state.directory.shelf(SPACE.digest, None)
    one, other = SPACE.chain(range(8)).keys
    first = state.directory.entry(shelf, one, other, 3)
    second = state.directory.entry(shelf, other, one, 3)
    for slot, entry in enumerate((first, second)):
        state.directory.set_copy(entry, "dram", Copy(CopyState.READY, Slot(slot)))
        state.policies["dram"].insert([entry.name], size_bytes=4096, now_s=0.0)

    assert sorted(plan(state, 99), key=id) == sorted([first, second], key=id)


def test_the_record_of_a_parent_that_left_goes_with_its_last_child(state):
    shelf = state.directory.shelf(SPACE.digest, None)
    entries = store(state, SPACE.chain(range(12)))

    for entry in entries:
        state.directory.remove_copy(entry, "dram")

    assert shelf.entries == {}
