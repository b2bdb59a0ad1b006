"""Directory.adopt: copies of an earlier run, filed by the thousand, against the rules they must end up by."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.directory import Copy, CopyState, Directory
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout
from kvstore.tier import BlockHeader, BlockId
from tests.example_counts import examples

LAYOUT = KVLayout.opaque(block_bytes=4096, block_tokens=1)
SPACE = Namespace(model="m", layout=LAYOUT)
OTHER = Namespace(model="other", layout=LAYOUT)


def headers_of(chain: PrefixChain, space: Namespace = SPACE) -> list[BlockHeader]:
    parents = [BlockKey(space.digest), *chain.keys]
    return [
        BlockHeader(
            BlockId(space.digest, LAYOUT.whole, key), parents[depth], depth, LAYOUT.fingerprint, 4096, 7
        )
        for depth, key in enumerate(chain.keys)
    ]


def forest(dice: random.Random, num_chains: int) -> list[BlockHeader]:
    """Blocks of chains that share starts, each block once."""
    found: dict[BlockId, BlockHeader] = {}
    for _ in range(num_chains):
        space = dice.choice([SPACE, OTHER])
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 8))]
        found |= {header.block: header for header in headers_of(space.chain(tokens), space)}
    return list(found.values())


def assert_rules(directory: Directory, tier: str) -> None:
    """What the eviction order and the accounting rest on, counted anew from the entries."""
    children: dict[tuple[object, BlockKey], int] = {}
    used: dict[object, int] = {}
    for entry in directory.entries():
        copy = entry.copies.get(tier)
        if copy is None:
            continue
        used[entry.shelf.namespace] = used.get(entry.shelf.namespace, 0) + entry.length_bytes
        assert copy.is_counted == (entry.depth > 0)
        if copy.is_counted:
            assert entry.parent is not None
            assert entry.shelf.entries[entry.parent].depth == entry.depth - 1
            about = (entry.shelf.namespace, entry.parent)
            children[about] = children.get(about, 0) + 1
    for entry in directory.entries():
        assert entry.children.get(tier, 0) == children.get((entry.shelf.namespace, entry.key), 0)
        assert entry.copies or any(entry.children.values())
    for space in (SPACE, OTHER):
        assert directory.used_bytes(tier, space.digest) == used.get(space.digest, 0)


@settings(max_examples=examples(100))
@given(st.integers(0, 1 << 30), st.integers(1, 12), st.integers(1, 5))
def test_in_any_order_and_in_any_number_of_parts_the_directory_is_the_same(
    seed: int, num_chains: int, num_parts: int
) -> None:
    dice = random.Random(seed)
    headers = [header for header in forest(dice, num_chains) if dice.random() < 0.8]
    dice.shuffle(headers)
    directory = Directory(["dram", "ssd"])
    names = []
    for part in range(num_parts):
        found, strangers = directory.adopt(headers[part::num_parts], "ssd")
        assert strangers == []
        names += found
    assert sorted(names) == sorted(header.block.storage_key for header in headers)
    assert_rules(directory, "ssd")
    for header in headers:
        entry = directory.find(header.block.storage_key)
        assert entry is not None
        assert (entry.key, entry.parent, entry.depth) == (header.block.key, header.parent, header.depth)
        assert (entry.fastest, entry.residency()) == ("ssd", ("ssd",))


@settings(max_examples=examples(50))
@given(st.integers(0, 1 << 30))
def test_when_the_last_adopted_copy_goes_nothing_is_left(seed: int) -> None:
    dice = random.Random(seed)
    headers = [header for header in forest(dice, 6) if dice.random() < 0.8]
    directory = Directory(["dram", "ssd"])
    directory.adopt(headers, "ssd")
    dice.shuffle(headers)
    for header in headers:
        entry = directory.find(header.block.storage_key)
        assert entry is not None
        directory.remove_copy(entry, "ssd")
        assert_rules(directory, "ssd")
    assert list(directory.entries()) == []


def test_a_block_that_is_known_from_another_tier_gets_one_more_copy() -> None:
    directory = Directory(["dram", "ssd"])
    directory.open_namespace(SPACE)
    headers = headers_of(SPACE.chain([1, 2, 3]))
    shelf = directory.shelf(SPACE.digest, None)
    top = directory.entry(shelf, headers[1].block.key, headers[1].parent, 1)
    directory.set_copy(top, "dram", Copy(CopyState.READY))
    names, strangers = directory.adopt(headers, "ssd")
    assert (len(names), strangers) == (3, [])
    assert (top.residency(), top.fastest) == (("dram", "ssd"), "dram")
    assert_rules(directory, "ssd")
    assert_rules_of_dram(directory)


def assert_rules_of_dram(directory: Directory) -> None:
    (parent,) = [entry for entry in directory.entries() if entry.depth == 0]
    assert dict(parent.children) == {"dram": 1, "ssd": 1}


@pytest.mark.parametrize("state", list(CopyState))
def test_a_copy_that_is_known_already_is_left_as_it_is(state: CopyState) -> None:
    directory = Directory(["dram", "ssd"])
    directory.open_namespace(SPACE)
    (header,) = headers_of(SPACE.chain([1]))
    entry = directory.entry(directory.shelf(SPACE.digest, None), header.block.key, header.parent, 0)
    directory.set_copy(entry, "ssd", Copy(state))
    assert directory.adopt([header], "ssd") == ([], [])
    assert entry.copies["ssd"].state is state
    assert directory.used_bytes("ssd", SPACE.digest) == 4096


def test_the_same_header_twice_is_filed_once() -> None:
    directory = Directory(["ssd"])
    headers = headers_of(SPACE.chain([1, 2]))
    names, _ = directory.adopt(headers * 2, "ssd")
    assert len(names) == 2
    assert_rules(directory, "ssd")


def test_blocks_that_contradict_their_shelf_are_told_apart() -> None:
    directory = Directory(["ssd"])
    headers = headers_of(SPACE.chain([1, 2, 3, 4]))
    odd = [headers[1]._replace(length_bytes=8192), headers[2]._replace(layout=b"x" * 32)]
    names, strangers = directory.adopt([headers[0], *odd, headers[3]], "ssd")
    assert names == [headers[0].block.storage_key, headers[3].block.storage_key]
    assert strangers == [odd[0].block, odd[1].block]


def test_claims_of_depth_that_disagree_never_count_a_block_below_itself() -> None:
    directory = Directory(["ssd"])
    one, two, *_ = headers_of(SPACE.chain([1, 2]))
    looping = [one._replace(parent=two.block.key, depth=5), two._replace(parent=one.block.key, depth=6)]
    directory.adopt(looping, "ssd")
    for entry in list(directory.entries()):
        if entry.copies:
            directory.remove_copy(entry, "ssd")
    assert list(directory.entries()) == []
