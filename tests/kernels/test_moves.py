"""Writing rows, gathering and scattering pages: equal to the reference to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidLayout
from kvstore_kernels import reference
from tests.example_counts import examples
from tests.kernels.conftest import UnderTest
from tests.kernels.specs import FP8, WIDE

DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8, torch.uint8)
SIZES = st.integers(1, 5)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bit patterns of the dtype, NaN and infinity among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    flat = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return flat.view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, where any NaN equals any other: converting may change a NaN's payload."""
    return torch.equal(a.cpu().float().nan_to_num(nan=1e30), b.cpu().float().nan_to_num(nan=1e30))


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    layers=SIZES,
    block_tokens=st.sampled_from([1, 3, 16, 32]),
    heads=SIZES,
    head_dim=st.sampled_from([1, 7, 8, 64, 128]),
    pages=st.integers(1, 9),
    data=st.data(),
)
def test_gathered_blocks_scattered_again_are_the_same_pages(
    under_test: UnderTest,
    seed: int,
    dtype: torch.dtype,
    layers: int,
    block_tokens: int,
    heads: int,
    head_dim: int,
    pages: int,
    data: st.DataObject,
) -> None:
    generator = generator_of(seed)
    shape = (layers, 2, block_tokens, heads, head_dim)
    pool = random_bytes((pages, *shape), dtype, generator).to(under_test.device)
    slots = torch.tensor(data.draw(st.permutations(range(pages)))[: data.draw(st.integers(0, pages))])
    slots = slots.long().to(under_test.device)
    blocks = torch.zeros(len(slots), *shape, device=under_test.device).to(dtype)
    other = torch.zeros_like(pool.view(torch.uint8)).view(dtype)

    under_test.kernels.gather_blocks(pool, slots, blocks)
    under_test.kernels.scatter_blocks(blocks, other, slots)

    expected = torch.zeros_like(pool.view(torch.uint8))
    expected[slots] = pool.view(torch.uint8)[slots]
    assert same_bits(blocks, pool.view(torch.uint8)[slots])
    assert same_bits(other, expected)


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1), first=st.integers(0, 3), count=st.integers(1, 3))
def test_a_range_of_layers_moves_alone(under_test: UnderTest, seed: int, first: int, count: int) -> None:
    generator = generator_of(seed)
    pool = random_bytes((4, 6, 2, 16, 2, 64), torch.bfloat16, generator).to(under_test.device)
    slots = torch.tensor([3, 1], device=under_test.device)
    blocks = torch.zeros(2, 6, 2, 16, 2, 64, dtype=torch.bfloat16, device=under_test.device)
    layers = slice(first, first + count)

    under_test.kernels.gather_blocks(pool[:, layers], slots, blocks[:, layers])

    expected = torch.zeros_like(blocks)
    expected[:, layers] = pool[slots][:, layers]
    assert same_bits(blocks, expected)


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1))
def test_pages_of_separate_layers_gather_into_blocks(under_test: UnderTest, seed: int) -> None:
    by_layer = random_bytes((5, 2, 7, 16, 2, 64), torch.float16, generator_of(seed)).to(under_test.device)
    pool = by_layer.permute(2, 0, 1, 3, 4, 5)  # [pages, layers, 2, ...] over memory [layers, 2, pages, ...]
    slots = torch.tensor([6, 0, 3], device=under_test.device)
    blocks = torch.zeros(3, *pool.shape[1:], dtype=torch.float16, device=under_test.device)

    under_test.kernels.gather_blocks(pool, slots, blocks)

    assert same_bits(blocks, pool[slots])


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 2**32 - 1),
    wide=st.sampled_from(WIDE),
    fp8=st.sampled_from(FP8),
    layers=SIZES,
    block_tokens=st.sampled_from([1, 5, 16]),
    heads=SIZES,
    head_dim=st.sampled_from([16, 48, 128]),
)
def test_blocks_are_quantised_and_dequantised_on_the_way(
    under_test: UnderTest,
    seed: int,
    wide: torch.dtype,
    fp8: torch.dtype,
    layers: int,
    block_tokens: int,
    heads: int,
    head_dim: int,
) -> None:
    generator = generator_of(seed)
    pool = random_bytes((3, layers, 2, block_tokens, heads, head_dim), wide, generator).to(under_test.device)
    scales = (torch.rand(layers, 2, heads, generator=generator) * 4 + 1e-3).to(under_test.device)
    slots = torch.tensor([2, 0], device=under_test.device)
    small = torch.zeros(2, *pool.shape[1:], device=under_test.device).to(fp8)
    small_expected = small.clone()

    under_test.kernels.gather_blocks(pool, slots, small, kv_scales=scales)
    reference.gather_blocks(pool, slots, small_expected, kv_scales=scales)
    assert same_numbers(small, small_expected)

    back, back_expected = torch.zeros_like(pool), torch.zeros_like(pool)
    under_test.kernels.scatter_blocks(small_expected, back, slots, kv_scales=scales)
    reference.scatter_blocks(small_expected, back_expected, slots, kv_scales=scales)
    assert same_numbers(back, back_expected)


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 40),
    block_tokens=st.sampled_from([1, 3, 16, 32]),
    heads=SIZES,
    head_dim=st.sampled_from([1, 7, 64, 128]),
)
def test_new_rows_land_in_their_slots(
    under_test: UnderTest,
    seed: int,
    dtype: torch.dtype,
    tokens: int,
    block_tokens: int,
    heads: int,
    head_dim: int,
) -> None:
    generator = generator_of(seed)
    pages = -(-tokens // block_tokens) + 2
    pool = random_bytes((pages, 2, 2, block_tokens, heads, head_dim), dtype, generator).to(under_test.device)
    expected = pool.view(torch.uint8).clone().view(dtype)
    fused = random_bytes((tokens, 3, heads, head_dim), dtype, generator).to(under_test.device)
    k, v = fused[:, 1], fused[:, 2]  # as a projection of queries, keys and values leaves them
    slots = torch.randperm(pages * block_tokens, generator=generator)[:tokens]
    slots[::5] = -1
    slots = slots.to(under_test.device)

    under_test.kernels.write_kv(k, v, pool[:, 1], slots)
    reference.write_kv(k, v, expected[:, 1], slots)

    assert same_bits(pool, expected)


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 2**32 - 1),
    wide=st.sampled_from(WIDE),
    fp8=st.sampled_from(FP8),
    tokens=st.integers(1, 20),
    heads=SIZES,
    head_dim=st.sampled_from([16, 80, 128]),
)
def test_new_rows_are_quantised_on_the_way(
    under_test: UnderTest,
    seed: int,
    wide: torch.dtype,
    fp8: torch.dtype,
    tokens: int,
    heads: int,
    head_dim: int,
) -> None:
    generator = generator_of(seed)
    k = random_bytes((tokens, heads, head_dim), wide, generator).to(under_test.device)
    v = random_bytes((tokens, heads, head_dim), wide, generator).to(under_test.device)
    scales = (torch.rand(2, heads, generator=generator) * 4 + 1e-3).to(under_test.device)
    pool = torch.zeros(2, 2, 16, heads, head_dim, device=under_test.device).to(fp8)
    expected = pool.clone()
    slots = torch.randperm(32, generator=generator)[:tokens].to(under_test.device)

    under_test.kernels.write_kv(k, v, pool, slots, kv_scales=scales)
    reference.write_kv(k, v, expected, slots, kv_scales=scales)

    assert same_numbers(pool, expected)


def test_a_head_major_page_takes_rows_too(under_test: UnderTest) -> None:
    generator = generator_of(1)
    pool = torch.zeros(
        3, 2, 4, 16, 64, dtype=torch.bfloat16, device=under_test.device
    )  # [.., heads, tokens, dim]
    k = torch.randn(5, 4, 64, generator=generator).to(torch.bfloat16).to(under_test.device)
    slots = torch.tensor([0, 17, 33, 47, 16], device=under_test.device)

    under_test.kernels.write_kv(k, k, pool.transpose(2, 3), slots)

    assert same_bits(pool[1, 0, :, 1], k[1])


BF16 = torch.bfloat16
PAGES = torch.zeros(2, 2, 4, 2, 16, dtype=BF16)
ROWS = torch.zeros(3, 2, 16, dtype=BF16)
SLOTS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("k", "pages", "slots", "scales"),
    [
        (ROWS[:, :1], PAGES, SLOTS, None),
        (ROWS[..., :8], PAGES, SLOTS, None),
        (ROWS, PAGES, SLOTS[:2], None),
        (ROWS, PAGES, SLOTS.int(), None),
        (ROWS, PAGES.half(), SLOTS, None),
        (ROWS, PAGES.to(torch.float8_e4m3fn), SLOTS, None),
        (ROWS, PAGES.to(torch.float8_e4m3fn), SLOTS, torch.ones(2, 3)),
        (ROWS, PAGES.to(torch.float8_e4m3fn), SLOTS, torch.ones(2, 2, dtype=torch.float64)),
        (ROWS, PAGES[:, :1], SLOTS, None),
    ],
)
def test_rows_that_do_not_fit_the_pages_are_refused(
    k: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, scales: torch.Tensor | None
) -> None:
    with pytest.raises(InvalidLayout):
        reference.write_kv(k, k, pages, slots, kv_scales=scales)


@pytest.mark.parametrize(
    ("blocks", "slots"),
    [
        (torch.zeros(2, 3, 2, 4, 2, 16, dtype=BF16), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 2, 2, 4, 2, 16, dtype=BF16), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 3, 2, 4, 2, 16, dtype=BF16), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3, 2, 4, 2, 16), torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_blocks_that_do_not_fit_the_pages_are_refused(blocks: torch.Tensor, slots: torch.Tensor) -> None:
    pool = torch.zeros(5, 3, 2, 4, 2, 16, dtype=BF16)
    with pytest.raises(InvalidLayout):
        reference.gather_blocks(pool, slots, blocks)
    with pytest.raises(InvalidLayout):
        reference.scatter_blocks(blocks, pool, slots)
