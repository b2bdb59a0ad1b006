"""Shapes of blocks and parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidLayout
from kvstore.layout import DTYPE_BYTES, MAX_BLOCK_BYTES, KVLayout, Part

GOOD = {"dtype": "bfloat16", "num_layers": 30, "block_tokens": 16, "num_kv_heads": 3, "head_dim": 64}


def test_a_block_of_the_demo_model_has_the_documented_size():
    assert KVLayout(**GOOD).block_bytes == 16 * 23_040


@given(
    st.sampled_from(sorted(DTYPE_BYTES)), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.data()
)
def test_parts_that_tile_a_block_have_its_bytes_together(dtype, layers, heads, tokens, data):
    layout = KVLayout(dtype=dtype, num_layers=layers, block_tokens=tokens, num_kv_heads=heads, head_dim=8)
    layer_cut, head_cut = data.draw(st.integers(0, layers)), data.draw(st.integers(0, heads))

    parts = [
        Part(a, b, c, d)
        for a, b in ((0, layer_cut), (layer_cut, layers))
        for c, d in ((0, head_cut), (head_cut, heads))
        if a < b and c < d
    ]

    assert sum(layout.part_bytes(part) for part in parts) == layout.block_bytes


@given(st.tuples(*[st.integers(0, 65_535)] * 4))
def test_a_part_survives_packing_or_is_refused(numbers):
    packed = Part(*numbers).pack()
    is_sound = numbers[0] < numbers[1] and numbers[2] < numbers[3]

    outcome = _unpacked(packed)

    assert outcome == (Part(*numbers) if is_sound else None)


def _unpacked(packed):
    try:
        return Part.unpack(packed)
    except InvalidLayout:
        return None


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int4"},
        {"num_layers": 0},
        {"num_layers": 70_000},
        {"block_tokens": "16"},
        {"head_dim": 0},
        {"num_kv_heads": -1},
        {"head_dim": MAX_BLOCK_BYTES},
        {"order": ""},
        {"order": "a\nb"},
    ],
    ids=str,
)
def test_an_impossible_layout_is_refused(change):
    with pytest.raises(InvalidLayout, match="layout"):
        KVLayout(**{**GOOD, **change})


@pytest.mark.parametrize("part", [Part(0, 31, 0, 3), Part(0, 30, 2, 4), Part(5, 5, 0, 3)])
def test_a_part_outside_the_layout_is_refused(part):
    with pytest.raises(InvalidLayout, match="part"):
        KVLayout(**GOOD).part_bytes(part)


def test_part_bytes_of_another_size_are_refused():
    with pytest.raises(InvalidLayout, match="7 bytes"):
        Part.unpack(b"1234567")


def test_an_opaque_layout_has_the_size_that_was_asked_for():
    assert KVLayout.opaque(block_bytes=4096, block_tokens=16).block_bytes == 4096


@pytest.mark.parametrize(("block_bytes", "block_tokens"), [(100, 16), (0, 16), (16, 0)])
def test_an_opaque_layout_of_uneven_size_is_refused(block_bytes, block_tokens):
    with pytest.raises(InvalidLayout, match="multiple"):
        KVLayout.opaque(block_bytes=block_bytes, block_tokens=block_tokens)
