"""The seam between engine and pages: every implementation writes, attends and moves blocks alike.

The CUDA sources run here under g++ (as in tests/kernels); ``-m gpu`` runs them on a device.
"""

import itertools
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvstore.layout import KVLayout
from kvstore_engine_adapter.attention import PageOps, Segment, TorchPageOps
from kvstore_engine_adapter.cpu_page_ops import CpuPageOps, page_ops_for
from kvstore_engine_adapter.kernel_page_ops import KernelPageOps
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_kernels import PagedKernels, open_kernels
from kvstore_kernels.kernels import ReferenceKernels
from tests.engine.conftest import CPU

LAYERS, KV_HEADS, HEADS, HEAD_DIM, PAGES = 2, 2, 6, 64, 40
DTYPE = torch.bfloat16
SPLIT_TOKENS = 64
TOLERANCE = 4 * (torch.finfo(DTYPE).eps + 5e-5)
"""Weights and results are rounded to bfloat16 once each, by half a unit of values that stay below 4; and the
scores' float32 sums move a weight by some 1e-5."""


@dataclass
class Seam:
    """An implementation: how a pool is made and what works on it."""

    make: Callable[[int], tuple[PagePool, PageOps]]

    def open(self, block_tokens: int = 16) -> tuple[PagePool, PageOps]:
        pool, ops = self.make(block_tokens)
        ops.prepare()
        assert not pool.tensor[pool.zero_page].any()
        return pool, ops


def layout_of(block_tokens: int) -> KVLayout:
    return KVLayout("bfloat16", LAYERS, block_tokens, KV_HEADS, HEAD_DIM)


def with_kernels(kernels: PagedKernels, device: torch.device = CPU, *, decodes_apart: bool = False) -> Seam:
    def make(block_tokens: int) -> tuple[PagePool, PageOps]:
        pool = PagePool(layout_of(block_tokens), PAGES, device, kernels=kernels)
        # Little memory for splits: long passes take several calls.
        return pool, KernelPageOps(
            pool,
            kernels,
            num_heads=HEADS,
            decodes_apart=decodes_apart,
            split_tokens=SPLIT_TOKENS,
            partial_bytes=40 * HEADS * 2 * (HEAD_DIM + 1) * 4,
        )

    return Seam(make)


def cuda_seam(*, decodes_apart: bool = False) -> Seam:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    return with_kernels(open_kernels(device), device, decodes_apart=decodes_apart)


def cpu_seam(folder) -> Seam:
    def make(block_tokens: int) -> tuple[PagePool, PageOps]:
        pool = PagePool(layout_of(block_tokens), PAGES, CPU)
        ops = page_ops_for(pool, num_heads=HEADS, folder=folder)
        assert isinstance(ops, TorchPageOps if folder is None else CpuPageOps)
        return pool, ops

    return Seam(make)


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["torch", "compiled", "reference", "emulated", CUDA])
def seam(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seam:
    """Each implementation."""
    return seam_of(request, tmp_path_factory)


@pytest.fixture(params=["torch", "compiled", "emulated", CUDA])
def exact_seam(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seam:
    """Each implementation that promises equal bits: the reference's products may depend on company."""
    return seam_of(request, tmp_path_factory)


def seam_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seam:
    match request.param:
        case "torch":
            return cpu_seam(None)
        case "compiled":
            if shutil.which("c++") is None and shutil.which("g++") is None:
                pytest.skip("there is no C++ compiler")
            return cpu_seam(tmp_path_factory.getbasetemp() / "compiled")
        case "reference":
            return with_kernels(ReferenceKernels())
        case "emulated":
            return with_kernels(request.getfixturevalue("emulated_kernels"))
        case _:
            return cuda_seam()


@pytest.fixture(params=["reference", "emulated", CUDA])
def fast_seam(request: pytest.FixtureRequest) -> Seam:
    """Kernels that decode apart."""
    match request.param:
        case "reference":
            return with_kernels(ReferenceKernels(), decodes_apart=True)
        case "emulated":
            return with_kernels(request.getfixturevalue("emulated_kernels"), decodes_apart=True)
        case _:
            return cuda_seam(decodes_apart=True)


@dataclass
class Sequence:
    """A sequence's rows, and the pages they lie in."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: list[int]

    def segment(self, start: int, stop: int) -> Segment:
        return Segment([0] * (stop - start), start, self.slots)


def sequences_of(lengths: list[int], block_tokens: int, seed: int) -> list[Sequence]:
    """Sequences in pages of any order; what is beyond a sequence in its last page is zero."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(PAGES, generator=generator).tolist()
    made = []
    for length in lengths:
        count = math.ceil(length / block_tokens)
        rows = [
            torch.randn(length, heads, HEAD_DIM, generator=generator).to(DTYPE)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        made.append(Sequence(*rows, [order.pop() for _ in range(count)]))
    return made


def run_pass(
    pool: PagePool, ops: PageOps, parts: list[tuple[Sequence, int, int]], *, layer: int = 1, padding: int = 3
) -> list[torch.Tensor]:
    """Write and attend (sequence, start, stop) in one pass; returns ``[rows, heads, head_dim]`` each."""
    step = ops.begin([sequence.segment(start, stop) for sequence, start, stop in parts])
    queries, keys, values = (
        torch.cat([*(getattr(sequence, name)[start:stop] for sequence, start, stop in parts), filler])
        for name, filler in (
            ("queries", torch.zeros(padding, HEADS, HEAD_DIM, dtype=DTYPE)),
            ("keys", torch.zeros(padding, KV_HEADS, HEAD_DIM, dtype=DTYPE)),
            ("values", torch.zeros(padding, KV_HEADS, HEAD_DIM, dtype=DTYPE)),
        )
    )
    # As the projection makes them: values are a view whose rows are wider than they are.
    wide = torch.cat([queries, keys, values], dim=1).to(pool.device)
    step.write(layer, wide[:, HEADS : HEADS + KV_HEADS].clone(), wide[:, HEADS + KV_HEADS :])
    mixed = step.attend(layer, wide[:, :HEADS].contiguous())
    assert mixed.shape == (len(wide), HEADS * HEAD_DIM)
    assert mixed.isfinite().all()
    found = mixed.cpu().view(len(wide), HEADS, HEAD_DIM)
    return list(
        torch.split(found[:-padding] if padding else found, [stop - start for _, start, stop in parts])
    )


def meaning(sequence: Sequence) -> torch.Tensor:
    """Causal attention in float64."""
    queries, keys, values = (part.double() for part in (sequence.queries, sequence.keys, sequence.values))
    group = HEADS // KV_HEADS
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(HEAD_DIM)
    hidden = torch.ones(len(queries), len(queries), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


def prefilled(pool: PagePool, ops: PageOps, sequences: list[Sequence], until: list[int]) -> None:
    """Fill pages up to a position of each sequence."""
    for sequence, stop in zip(sequences, until, strict=True):
        if stop:
            run_pass(pool, ops, [(sequence, 0, stop)])


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.double() - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("block_tokens", [8, 16, 24])
def test_a_pass_of_prefills_and_decodes_is_attention(seam: Seam, block_tokens: int) -> None:
    draw = random.Random(block_tokens)
    lengths = [1, 15, 16, 17, 64, 65, 70]
    draw.shuffle(lengths)
    starts = [draw.choice([0, length // 2, length - 1]) for length in lengths]
    pool, ops = seam.open(block_tokens)
    sequences = sequences_of(lengths, block_tokens, block_tokens)
    prefilled(pool, ops, sequences, starts)

    parts = list(zip(sequences, starts, lengths, strict=True))
    found = run_pass(pool, ops, parts)

    for (sequence, start, _), rows in zip(parts, found, strict=True):
        assert_close(rows, meaning(sequence)[start:])


def test_decoding_apart_is_attention(fast_seam: Seam) -> None:
    lengths = [1, 17, 64, 65, 130, 33]
    starts = [0, 16, 63, 64, 129, 20]
    pool, ops = fast_seam.open()
    sequences = sequences_of(lengths, 16, 3)
    prefilled(pool, ops, sequences, starts)

    parts = list(zip(sequences, starts, lengths, strict=True))
    found = run_pass(pool, ops, parts)

    for (sequence, start, _), rows in zip(parts, found, strict=True):
        assert_close(rows, meaning(sequence)[start:])


def test_a_row_has_the_same_bits_however_its_sequence_is_cut(exact_seam: Seam) -> None:
    pool, ops = exact_seam.open()
    (sequence,) = sequences_of([150], 16, 5)
    (whole,) = run_pass(pool, ops, [(sequence, 0, 150)])

    for cuts in ([0, 1, 2, 3, 150], [0, 63, 64, 128, 149, 150], [0, 100, 150]):
        pool.tensor[sequence.slots] = 0
        pieces = [
            run_pass(pool, ops, [(sequence, start, stop)])[0] for start, stop in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(pieces), whole), cuts


def test_a_row_has_the_same_bits_in_any_company(exact_seam: Seam) -> None:
    pool, ops = exact_seam.open()
    lengths = [130, 40, 70, 1, 129]
    sequences = sequences_of(lengths, 16, 6)
    alone = [run_pass(pool, ops, [(sequence, 0, len(sequence.queries))])[0] for sequence in sequences]

    starts = [129, 0, 69, 0, 30]
    parts = list(zip(sequences, starts, lengths, strict=True))
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 3, 4, 1]):
        found = run_pass(pool, ops, [parts[number] for number in order])
        for number, rows in zip(order, found, strict=True):
            assert torch.equal(rows, alone[number][starts[number] :]), (order, number)


def test_written_rows_lie_where_the_block_layout_has_them(seam: Seam) -> None:
    pool, ops = seam.open()
    (sequence,) = sequences_of([40], 16, 7)
    before = pool.tensor.clone()

    run_pass(pool, ops, [(sequence, 0, 40)], layer=0)

    expected = before
    for position in range(40):
        slot, row = sequence.slots[position // 16], position % 16
        expected[slot, 0, 0, row] = sequence.keys[position].to(pool.device)
        expected[slot, 0, 1, row] = sequence.values[position].to(pool.device)
    assert torch.equal(pool.tensor, expected)


@pytest.mark.parametrize("count", [1, 5, PAGES])
def test_gathered_blocks_hold_the_pages_bytes_and_scatter_back(
    seam: Seam, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = layout_of(16).block_bytes
    monkeypatch.setattr("kvstore_engine_adapter.page_moves.STAGING_BYTES", 8 * page_bytes)
    pool, _ = seam.open()
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(count)))
    slots = torch.randperm(PAGES, generator=torch.Generator().manual_seed(count))[:count].tolist()
    buffers = pool.new_buffers(count + 1)
    chosen = [*buffers[3:count], *buffers[:3]][:count]  # two stretches

    pool.gather(slots, chosen)

    for slot, buffer in zip(slots, chosen, strict=True):
        assert bytes(buffer) == pool.tensor[slot].cpu().contiguous().view(torch.uint8).numpy().tobytes()

    wanted = pool.tensor[slots].clone()
    pool.tensor.zero_()
    pool.scatter(slots, chosen)
    assert torch.equal(pool.tensor[slots], wanted)
    others = [slot for slot in range(PAGES) if slot not in slots]
    assert not pool.tensor[others].any()


def test_buffers_of_other_makers_are_gathered_into_too(seam: Seam) -> None:
    pool, _ = seam.open()
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    memory = bytearray(2 * pool.page_bytes)
    buffers = [memoryview(memory)[: pool.page_bytes], memoryview(memory)[pool.page_bytes :]]
    pool.gather([3, 1], buffers)
    wanted = pool.tensor[[3, 1]].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    assert bytes(memory) == wanted
