"""Paged attention against its meaning, computed in float64."""

import random

import pytest
import torch

from kvstore.errors import InvalidLayout
from kvstore_kernels import reference
from kvstore_kernels.splits import SplitPlan
from tests.kernels.cases import Case, Shape, make_case, tolerance
from tests.kernels.conftest import UnderTest
from tests.kernels.specs import ADA, ATTENTION, BF16, E4M3

NAMES = [f"{str(q)[6:]}-{str(kv)[6:]}-{dim}" for q, kv, dim in ATTENTION]
DTYPES = pytest.mark.parametrize("dtypes", ATTENTION, ids=NAMES)


def decode_shape(draw: random.Random) -> Shape:
    block_tokens = draw.choice([1, 5, 16, 32, 64])
    lengths = [0, 1, 2, 15, 16, 17, 63, 64, 65, 130, 200]
    contexts = tuple(draw.choice(lengths) for _ in range(draw.randint(1, 4)))
    group = draw.choice([1, 2, 3, 4, 8, 16, 17, 33])
    return Shape((1,) * len(contexts), contexts, block_tokens, draw.choice([1, 2, 3]), group)


def prefill_shape(draw: random.Random) -> Shape:
    block_tokens = draw.choice([1, 5, 16, 32, 64])
    queries = tuple(draw.choice([0, 1, 2, 15, 16, 17, 40, 70]) for _ in range(draw.randint(1, 4)))
    contexts = tuple(count + draw.choice([0, 0, 1, 16, 63, 100]) for count in queries)
    return Shape(queries, contexts, block_tokens, draw.choice([1, 2]), draw.choice([1, 2, 3, 4, 8]))


def split_plan(draw: random.Random, shape: Shape) -> SplitPlan | None:
    tokens = draw.choice([None, 64, 128, 192])
    return None if tokens is None else SplitPlan(tokens, -(-max(*shape.contexts, 1) // tokens))


def expected(case: Case) -> torch.Tensor:
    """The reference in float64, before it is rounded to the result's dtype."""
    wide = case.q.double()
    pages = case.kv_pages.double()
    scales = case.kv_scales
    if scales is not None:
        pages = pages * scales.double()[None, :, None, :, None]
    return reference.paged_prefill(
        wide, pages, case.block_tables, case.query_starts, case.context_lens, compute_dtype=torch.float64
    )


def check_decode(under_test: UnderTest, case: Case, plan: SplitPlan | None) -> None:
    moved = case.to(under_test.device)
    out = under_test.kernels.paged_decode(
        moved.q, moved.kv_pages, moved.block_tables, moved.context_lens, kv_scales=moved.kv_scales, plan=plan
    )
    assert (out.cpu().double() - expected(case)).abs().max() <= tolerance(case)


def check_prefill(under_test: UnderTest, case: Case, plan: SplitPlan | None) -> None:
    moved = case.to(under_test.device)
    out = under_test.kernels.paged_prefill(
        *(moved.q, moved.kv_pages, moved.block_tables, moved.query_starts, moved.context_lens),
        kv_scales=moved.kv_scales,
        plan=plan,
    )
    assert out.shape == case.q.shape
    if out.numel():
        assert (out.cpu().double() - expected(case)).abs().max() <= tolerance(case)


@DTYPES
@pytest.mark.parametrize("seed", range(3))
def test_decode_is_attention_over_the_cached_tokens(
    under_test: UnderTest, dtypes: tuple[torch.dtype, torch.dtype, int], seed: int
) -> None:
    draw = random.Random(f"decode {dtypes} {seed}")
    shape = decode_shape(draw)
    case = make_case(shape, dtypes, torch.Generator().manual_seed(seed))
    check_decode(under_test, case, split_plan(draw, shape))


@DTYPES
@pytest.mark.parametrize("seed", range(3))
def test_prefill_is_causal_attention_over_the_cached_tokens(
    under_test: UnderTest, dtypes: tuple[torch.dtype, torch.dtype, int], seed: int
) -> None:
    draw = random.Random(f"prefill {dtypes} {seed}")
    shape = prefill_shape(draw)
    case = make_case(shape, dtypes, torch.Generator().manual_seed(seed))
    check_prefill(under_test, case, split_plan(draw, shape))


def test_decode_with_two_stages_gives_the_same(under_test: UnderTest) -> None:
    if under_test.emulated is None:
        pytest.skip("the device's own limits decide")
    case = make_case(Shape((1, 1), (200, 33), 16, 1, 4), (BF16, BF16, 128), torch.Generator().manual_seed(5))
    limits, under_test.emulated.limits = under_test.emulated.limits, ADA
    try:
        check_decode(under_test, case, SplitPlan(256, 1))
    finally:
        under_test.emulated.limits = limits


@pytest.mark.parametrize("sequences", [0, 1, 40])
def test_any_number_of_sequences_finds_its_rows(under_test: UnderTest, sequences: int) -> None:
    queries = tuple(1 + i % 3 for i in range(sequences))
    shape = Shape(queries, queries, 4, 1, 2)
    case = make_case(shape, (BF16, BF16, 64), torch.Generator().manual_seed(3))
    check_prefill(under_test, case, None)


def test_rows_before_the_first_cached_token_give_zeros(under_test: UnderTest) -> None:
    case = make_case(Shape((6,), (4,), 16, 1, 2), (BF16, BF16, 64), torch.Generator().manual_seed(4))
    moved = case.to(under_test.device)
    out = under_test.kernels.paged_prefill(
        moved.q, moved.kv_pages, moved.block_tables, moved.query_starts, moved.context_lens
    )
    assert not out[:2].any()
    assert out[2:].any()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e4, 1e30])
def test_queries_beyond_the_range_of_float16_meet_fp8_pages(under_test: UnderTest, magnitude: float) -> None:
    """A bfloat16 query of 1e5 or more does not fit the float16 that fp8 keys are turned into."""
    case = make_case(Shape((1, 1), (70, 9), 16, 1, 4), (BF16, E4M3, 64), torch.Generator().manual_seed(6))
    scale = 64**-0.5 / magnitude
    q = (case.q.float() * magnitude).to(BF16)
    wide_pages = case.kv_pages.float() * case.kv_scales[:, None, :, None]  # type: ignore[index]  # fp8 has scales
    meant = reference.paged_decode(
        q.float().double(),
        wide_pages.double(),
        case.block_tables,
        case.context_lens,
        scale=scale,
        compute_dtype=torch.float64,
    )
    moved = case.to(under_test.device)
    arguments = (moved.kv_pages, moved.block_tables)
    for out in (
        under_test.kernels.paged_decode(
            q.to(under_test.device), *arguments, moved.context_lens, scale=scale, kv_scales=moved.kv_scales
        ),
        under_test.kernels.paged_prefill(
            q.to(under_test.device),
            *arguments,
            moved.query_starts,
            moved.context_lens,
            scale=scale,
            kv_scales=moved.kv_scales,
        ),
    ):
        assert (out.cpu().double() - meant).abs().max() <= tolerance(case)


@pytest.mark.parametrize("plan", [None, SplitPlan(64, 2)])
@pytest.mark.parametrize("slot", [-1, 7, 2**31 - 1])
def test_a_slot_outside_the_pages_gives_nan_for_its_sequence_alone(
    under_test: UnderTest, slot: int, plan: SplitPlan | None
) -> None:
    case = make_case(Shape((1, 1), (70, 9), 16, 1, 4), (BF16, BF16, 64), torch.Generator().manual_seed(7))
    block_tables = case.block_tables.clone()
    block_tables[0, 2] = slot if slot != 7 else case.kv_pages.shape[0]
    moved = case.to(under_test.device)
    tables = block_tables.to(under_test.device)

    decoded = under_test.kernels.paged_decode(moved.q, moved.kv_pages, tables, moved.context_lens, plan=plan)
    prefilled = under_test.kernels.paged_prefill(
        moved.q, moved.kv_pages, tables, moved.query_starts, moved.context_lens, plan=plan
    )

    for out in (decoded, prefilled):
        assert out[0].isnan().all()
        assert (out[1].cpu().double() - expected(case)[1]).abs().max() <= tolerance(case)


@pytest.mark.parametrize("length", [-1, 81, 2**31 - 1])
def test_a_context_longer_than_its_table_gives_nan_for_its_sequence_alone(
    under_test: UnderTest, length: int
) -> None:
    case = make_case(Shape((1, 1), (70, 9), 16, 1, 4), (BF16, BF16, 64), torch.Generator().manual_seed(8))
    moved = case.to(under_test.device)
    context_lens = torch.tensor([length, 9], dtype=torch.int32, device=under_test.device)

    decoded = under_test.kernels.paged_decode(moved.q, moved.kv_pages, moved.block_tables, context_lens)
    prefilled = under_test.kernels.paged_prefill(
        moved.q, moved.kv_pages, moved.block_tables, moved.query_starts, context_lens
    )

    for out in (decoded, prefilled):
        assert out[0].isnan().all()
        assert (out[1].cpu().double() - expected(case)[1]).abs().max() <= tolerance(case)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("plan", [SplitPlan(64, 3), SplitPlan(192, 1)])
def test_what_a_row_gets_does_not_depend_on_chunks_or_on_other_sequences(
    under_test: UnderTest, kv_dtype: torch.dtype, plan: SplitPlan
) -> None:
    """To the bit, as long as splits are equally long: an engine's answers must not depend on its batches."""
    shape = Shape((90, 5), (150, 5), 16, 2, 3)
    case = make_case(shape, (BF16, kv_dtype, 64), torch.Generator().manual_seed(11)).to(under_test.device)
    kernels, scales = under_test.kernels, case.kv_scales

    def prefill(rows: slice, sequences: slice, counts: list[int], contexts: list[int]) -> torch.Tensor:
        starts = torch.tensor([0, *counts], device=under_test.device).cumsum(0).int()
        lens = torch.tensor(contexts, dtype=torch.int32, device=under_test.device)
        tables = case.block_tables[sequences].contiguous()
        return kernels.paged_prefill(
            case.q[rows], case.kv_pages, tables, starts, lens, kv_scales=scales, plan=plan
        )

    def decode(rows: list[int], sequences: list[int], contexts: list[int]) -> torch.Tensor:
        lens = torch.tensor(contexts, dtype=torch.int32, device=under_test.device)
        tables = case.block_tables[sequences].contiguous()
        return kernels.paged_decode(case.q[rows], case.kv_pages, tables, lens, kv_scales=scales, plan=plan)

    whole = prefill(slice(0, 95), slice(0, 2), [90, 5], [150, 5])
    first = prefill(slice(0, 37), slice(0, 1), [37], [97])
    rest = prefill(slice(37, 90), slice(0, 1), [53], [150])
    assert torch.equal(torch.cat([first, rest]), whole[:90])
    assert torch.equal(prefill(slice(90, 95), slice(1, 2), [5], [5]), whole[90:])
    both = decode([89, 94], [0, 1], [150, 5])
    assert torch.equal(both[:1], decode([89], [0], [150]))
    assert torch.equal(both[1:], decode([94], [1], [5]))


def test_the_inner_loops_read_shared_memory_without_bank_conflicts(under_test: UnderTest) -> None:
    if under_test.emulated is None:
        pytest.skip("only the emulation counts them")
    for dtypes in ATTENTION:
        case = make_case(Shape((1,), (70,), 16, 1, 4), dtypes, torch.Generator().manual_seed(9))
        check_decode(under_test, case, None)
        check_prefill(under_test, case, None)

    # Decode reads queries in pieces of 8 bytes, outside the loop unless heads are large.
    counted = {key: extra for key, extra in under_test.emulated.conflicts.items() if key[1:] != ("load", 8)}
    assert {what for _, what, _ in counted} == {"ldmatrix", "load"}
    assert not any(counted.values()), counted


CASE = make_case(Shape((1, 1), (20, 9), 16, 2, 2), (BF16, BF16, 64), torch.Generator().manual_seed(0))
FP8_CASE = make_case(Shape((1, 1), (20, 9), 16, 2, 2), (BF16, E4M3, 64), torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "case",
    [
        Case(*{**vars(CASE), "q": CASE.q[:, :3]}.values()),
        Case(*{**vars(CASE), "q": CASE.q[..., :32]}.values()),
        Case(*{**vars(CASE), "q": CASE.q.half()}.values()),
        Case(*{**vars(CASE), "kv_pages": CASE.kv_pages[:, :1]}.values()),
        Case(*{**vars(CASE), "block_tables": CASE.block_tables[:1]}.values()),
        Case(*{**vars(CASE), "block_tables": CASE.block_tables.long()}.values()),
        Case(*{**vars(CASE), "query_starts": CASE.query_starts[:2]}.values()),
        Case(*{**vars(CASE), "context_lens": CASE.context_lens.long()}.values()),
        Case(*{**vars(FP8_CASE), "kv_scales": None}.values()),
        Case(*{**vars(FP8_CASE), "kv_scales": torch.ones(2, 1)}.values()),
    ],
)
def test_arguments_that_do_not_fit_each_other_are_refused(case: Case) -> None:
    with pytest.raises(InvalidLayout):
        reference.paged_prefill(
            *(case.q, case.kv_pages, case.block_tables, case.query_starts, case.context_lens),
            kv_scales=case.kv_scales,
        )


@pytest.mark.parametrize(
    ("q", "pages", "scale"),
    [
        (CASE.q.float(), CASE.kv_pages.float(), None),
        (CASE.q, CASE.kv_pages, 0.0),
        (CASE.q, CASE.kv_pages, -1.0),
        (CASE.q, CASE.kv_pages, float("nan")),
        (CASE.q[..., :63], CASE.kv_pages[..., :63], None),
        (CASE.q[..., 1:41], CASE.kv_pages[..., 1:41], None),
        (CASE.q.repeat(1, 1, 8), CASE.kv_pages.repeat(1, 1, 1, 1, 8), None),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_before_a_launch(
    under_test: UnderTest, q: torch.Tensor, pages: torch.Tensor, scale: float | None
) -> None:
    with pytest.raises(InvalidLayout):
        under_test.kernels.paged_decode(q, pages, CASE.block_tables, CASE.context_lens, scale=scale)
    with pytest.raises(InvalidLayout):
        under_test.kernels.paged_prefill(
            q, pages, CASE.block_tables, CASE.query_starts, CASE.context_lens, scale=scale
        )
