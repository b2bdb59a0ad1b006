"""What is decided on the CPU: splits, FlashInfer's lists, which kernels a device gets."""

import ctypes
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore_kernels import (
    CudaHeadersMissing,
    KernelsUnavailable,
    cuda_headers,
    open_kernels,
    plan_splits,
    reference,
)
from kvstore_kernels.cuda_device import CudaRunner, packed
from kvstore_kernels.flashinfer_kernels import FlashInferKernels, page_lists
from kvstore_kernels.kernels import LaunchedKernels, PagedKernels, ReferenceKernels
from kvstore_kernels.launching import Written

PLACES = 264


@given(
    context_lens=st.lists(st.integers(0, 200_000), max_size=40),
    rows=st.integers(1, 64),
    places=st.integers(1, 300),
)
def test_splits_cover_every_context_and_none_is_empty(
    context_lens: list[int], rows: int, places: int
) -> None:
    plan = plan_splits(context_lens, rows=rows, places=places)
    longest = max(context_lens, default=0)
    assert plan.count >= 1
    assert plan.tokens * plan.count >= longest
    assert plan.tokens * (plan.count - 1) < max(longest, 1)
    assert plan.count <= 129


def test_a_single_long_context_fills_the_device_once() -> None:
    plan = plan_splits([32_768], rows=8, places=PLACES)
    assert PLACES * 0.9 <= plan.count * 8 <= PLACES


def test_many_sequences_are_not_split() -> None:
    assert plan_splits([2048] * 256, rows=8, places=PLACES).count == 1


def test_a_long_context_among_short_ones_is_split() -> None:
    assert plan_splits([100_000] + [500] * 63, rows=8, places=PLACES).count > 8


def test_short_contexts_are_not_split() -> None:
    assert plan_splits([200], rows=8, places=PLACES).count == 1


def test_block_tables_become_lists_of_the_blocks_in_use() -> None:
    tables = torch.tensor([[7, 3, 9], [4, 0, 0], [5, 6, 0]], dtype=torch.int32)
    lists = page_lists(tables, torch.tensor([33, 16, 17], dtype=torch.int32), 16)
    assert lists.starts.tolist() == [0, 3, 4, 6]
    assert lists.slots.tolist() == [7, 3, 9, 4, 5, 6]
    assert lists.last_tokens.tolist() == [1, 16, 1]
    assert {tensor.dtype for tensor in lists} == {torch.int32}


def test_the_cpu_gets_the_reference() -> None:
    assert isinstance(open_kernels(torch.device("cpu")), ReferenceKernels)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(KernelsUnavailable, match="no CUDA device"):
        CudaRunner.open(torch.device("cuda"))
    with pytest.raises(KernelsUnavailable, match="no CUDA device"):
        open_kernels(torch.device("cuda"))


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_headers, "_candidates", lambda: iter([tmp_path]))
    with pytest.raises(CudaHeadersMissing, match="nvidia-cuda-runtime"):
        cuda_headers.find_cuda_headers()


@pytest.mark.parametrize("kernels", [ReferenceKernels, LaunchedKernels, FlashInferKernels])
@pytest.mark.parametrize("call", ["paged_decode", "paged_prefill"])
def test_all_kernels_take_the_same_arguments(kernels: type[PagedKernels], call: str) -> None:
    asked = inspect.signature(getattr(PagedKernels, call))
    assert inspect.signature(getattr(kernels, call)) == asked


def test_the_reference_kernels_are_the_reference() -> None:
    kernels = open_kernels(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(4, 2, 16, 2, 8, generator=generator)
    q = torch.randn(3, 4, 8, generator=generator)
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    starts, lens = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([20, 31], dtype=torch.int32)

    prefilled = kernels.paged_prefill(q, pages, tables, starts, lens)
    decoded = kernels.paged_decode(q[:2], pages, tables, lens)

    assert torch.equal(prefilled, reference.paged_prefill(q, pages, tables, starts, lens))
    assert torch.equal(decoded, reference.paged_decode(q[:2], pages, tables, lens))
    assert torch.allclose(prefilled[0], decoded[0], atol=1e-6)


def test_the_reference_agrees_with_torch_on_one_whole_sequence() -> None:
    generator = torch.Generator().manual_seed(1)
    pages = torch.randn(3, 2, 16, 2, 32, generator=generator)
    q = torch.randn(40, 4, 32, generator=generator)
    tables, order = torch.tensor([[2, 0, 1]], dtype=torch.int32), [2, 0, 1]
    keys, values = pages[order].transpose(0, 1).reshape(2, 48, 2, 32)[:, :40]

    out = reference.paged_prefill(
        q, pages, tables, torch.tensor([0, 40], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    )

    meant = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    assert torch.allclose(out, meant.transpose(0, 1), atol=1e-5)


def test_arguments_are_packed_as_the_driver_reads_them() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    words, pointers = packed((a, Written(b), None, np.int32(-5), np.int64(-6), np.float32(1.5)))

    def at(index: int, kind: "type[ctypes._SimpleCData[int]]") -> object:
        address = pointers[index]
        assert address is not None
        return kind.from_address(address).value

    assert len(words) == 6
    assert [at(i, ctypes.c_uint64) for i in range(3)] == [a.data_ptr(), b.data_ptr(), 0]
    assert at(3, ctypes.c_int32) == -5
    assert at(4, ctypes.c_int64) == -6
    assert at(5, ctypes.c_float) == 1.5  # type: ignore[arg-type]  # a float by intent
