"""Names of blocks: golden vectors, and what must never share a key."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import KVLayout, Namespace
from kvstore.errors import InvalidLayout, InvalidRequest, InvalidTokens
from kvstore.keys import BlockKey, NamespaceDigest, PrefixChain, token_bytes

LAYOUT = KVLayout(dtype="bfloat16", num_layers=2, block_tokens=4, num_kv_heads=2, head_dim=8)
SPACE = Namespace(model="m", layout=LAYOUT, weights="w", tenant_salt=b"salt")
GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text())
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_keys_equal_the_golden_vectors(case):
    fields = dict(case["namespace"])
    fields["tenant_salt"] = bytes.fromhex(fields["tenant_salt"])
    space = Namespace(layout=KVLayout(**case["layout"]), **fields)

    chain = space.chain(case["tokens"])

    assert space.layout.fingerprint.hex() == case["fingerprint"]
    assert space.digest.hex() == case["digest"]
    assert [key.hex() for key in chain] == case["keys"]


def test_keys_are_equal_in_processes_with_other_hash_seeds():
    code = (
        "from kvstore import KVLayout, Namespace\n"
        "layout = KVLayout(dtype='bfloat16', num_layers=2, block_tokens=4, num_kv_heads=2, head_dim=8)\n"
        "print(Namespace(model='m', layout=layout).chain(range(8)).keys[-1].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "4242")
    }

    assert len(outputs) == 1


@given(tokens_lists)
def test_a_key_hashes_its_parent_and_its_own_tokens(tokens):
    chain = SPACE.chain(tokens)

    expected = []
    parent = SPACE.digest
    for start in range(0, len(tokens) - 3, 4):
        block = np.asarray(tokens[start : start + 4], dtype="<u4").tobytes()
        parent = hashlib.sha256(parent + block).digest()
        expected.append(parent)
    assert list(chain.keys) == expected


@given(tokens_lists, tokens_lists)
def test_chains_share_exactly_the_blocks_of_their_common_prefix(first, second):
    a, b = SPACE.chain(first), SPACE.chain(second)

    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    shared = min(common // 4, len(a), len(b))
    assert a.keys[:shared] == b.keys[:shared]
    assert not set(a.keys[shared:]) & set(b.keys[shared:])


@given(tokens_lists, st.integers(0, 12), st.integers(0, 12))
def test_a_slice_keeps_place_and_parent(tokens, start, stop):
    chain = SPACE.chain(tokens)

    part = chain[start:stop]

    assert part.keys == chain.keys[start:stop]
    assert part.start == min(start, len(chain))
    assert part.parent == (chain.keys[part.start - 1] if part.start else None)


def test_a_slice_of_a_slice_counts_from_the_sequence():
    chain = SPACE.chain(range(40))

    part = chain[2:8][1:3]

    assert (part.start, part.parent, part.keys) == (3, chain.keys[2], chain.keys[3:5])


def test_a_slice_with_a_step_is_refused():
    with pytest.raises(InvalidRequest, match="contiguous"):
        SPACE.chain(range(40))[::2]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"weights": "v"},
        {"tokenizer": "t"},
        {"adapter": "lora"},
        {"rope": "theta=1e6"},
        {"tenant_salt": b"other"},
        {"epoch": 1},
        {"layout": dataclasses.replace(LAYOUT, dtype="float16")},
        {"layout": dataclasses.replace(LAYOUT, order="other")},
        {"layout": dataclasses.replace(LAYOUT, head_dim=4, num_kv_heads=4)},
    ],
    ids=str,
)
def test_a_namespace_that_differs_in_one_field_shares_no_key(change):
    other = dataclasses.replace(SPACE, **change)

    assert not set(SPACE.chain(range(8)).keys) & set(other.chain(range(8)).keys)


@given(st.text(max_size=12), st.text(max_size=12))
def test_text_that_moves_to_another_field_changes_the_digest(one, other):
    names = ("model", "weights", "tokenizer", "adapter", "rope")
    digests = set()
    for a in names:
        for b in names:
            if a != b:
                fields = {"model": "", a: one, b: other}
                digests.add((Namespace(layout=LAYOUT, **fields).digest, tuple(sorted(fields.items()))))

    assert len({digest for digest, _ in digests}) == len(
        {tuple((k, v) for k, v in fields if v) for _, fields in digests}
    )


def test_an_adapter_named_like_a_salt_is_no_salt():
    adapter = Namespace(model="m", layout=LAYOUT, adapter="secret")
    salt = Namespace(model="m", layout=LAYOUT, tenant_salt=b"secret")

    assert adapter.digest != salt.digest


@pytest.mark.parametrize("pair", [(65, 321), (0, 2**16), (1, 2**16 + 1), (0, 2**31), (255, 256)])
def test_tokens_that_agree_in_their_low_bits_have_different_keys(pair):
    one, other = (SPACE.chain([token, 1, 2, 3]).keys for token in pair)

    assert one != other


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [[1, 2]], [None], [2**70], [True]])
def test_tokens_that_cannot_be_named_are_refused(tokens):
    with pytest.raises(InvalidTokens):
        token_bytes(tokens)


def test_an_unfilled_block_has_no_name():
    assert len(SPACE.chain(range(7))) == 1
    assert len(SPACE.chain(range(3))) == 0
    assert len(SPACE.chain([])) == 0


def test_engine_hashes_are_named_within_the_namespace():
    hashes = [bytes([i]) * 32 for i in range(3)]
    other = dataclasses.replace(SPACE, tenant_salt=b"x")

    assert len(set(SPACE.chain_of_hashes(hashes).keys) | set(other.chain_of_hashes(hashes).keys)) == 6


@pytest.mark.parametrize(
    "fields",
    [{"model": 3}, {"weights": "x" * 5000}, {"tenant_salt": "text"}, {"epoch": -1}, {"epoch": "1"}],
    ids=str,
)
def test_a_namespace_of_wrong_fields_is_refused(fields):
    with pytest.raises(InvalidLayout):
        Namespace(**{"model": "m", "layout": LAYOUT, **fields})


def test_equal_hashes_of_an_engine_make_no_chain():
    with pytest.raises(InvalidRequest, match="names a block twice"):
        Namespace("m", KVLayout.opaque(block_bytes=64, block_tokens=4)).chain_of_hashes([b"a", b"b", b"a"])


def test_a_chain_with_a_parent_that_is_not_as_long_as_a_digest_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="chain: its parent has 16 bytes, expected 32: name blocks by"):
        PrefixChain(NamespaceDigest(bytes(32)), (BlockKey(bytes(32)),), 4, 1, BlockKey(bytes(16)))


@pytest.mark.parametrize(("tokens", "start"), [(4, -1), (4, 2**32), (0, 0), (2**16, 0)])
def test_a_chain_that_no_request_can_carry_is_refused(tokens: int, start: int) -> None:
    parent = BlockKey(bytes(32)) if start else None

    with pytest.raises(InvalidRequest, match=f"start {start} and block_tokens {tokens} lie in"):
        PrefixChain(NamespaceDigest(bytes(32)), (BlockKey(bytes(32)),), tokens, start, parent)


@pytest.mark.parametrize("key", [None, 7])
def test_a_key_that_is_no_bytes_is_refused(key: object) -> None:
    chain = PrefixChain(NamespaceDigest(bytes(32)), (BlockKey(bytes(32)), key), 4)  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest, match="chain: a key is no bytes"):
        chain.require_key_lengths()
