"""FlashInferKernels: attention by FlashInfer behind the same calls, where it takes the shapes."""

import importlib
import importlib.util
from typing import Any, NamedTuple

import torch

from kvstore_kernels.attention import check_decode, check_prefill
from kvstore_kernels.kernels import LaunchedKernels
from kvstore_kernels.splits import SplitPlan

HEAD_DIMS = (64, 128, 256)
"""Head sizes that FlashInfer's attention is built for."""

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends


class PageLists(NamedTuple):
    """Block tables as FlashInfer wants them; int32, on the CPU."""

    starts: torch.Tensor  # [sequences + 1], into slots
    slots: torch.Tensor  # each sequence's blocks, one after another
    last_tokens: torch.Tensor  # [sequences], tokens in the last block


class _Planned(NamedTuple):
    """What a plan was made for. Holding the tensors keeps their identity from being taken over by others."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    shape: tuple[object, ...]


def page_lists(block_tables: torch.Tensor, context_lens: torch.Tensor, block_tokens: int) -> PageLists:
    """Return the blocks in use of each sequence as one list. Every length must be at least 1."""
    tables, lengths = block_tables.cpu(), context_lens.cpu()
    blocks = (lengths + block_tokens - 1) // block_tokens
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = blocks.cumsum(0)
    is_used = torch.arange(tables.shape[1]) < blocks[:, None]
    last_tokens = lengths - (blocks - 1) * block_tokens
    return PageLists(starts, tables[is_used].contiguous(), last_tokens.int())


class FlashInferKernels:
    """PagedKernels with FlashInfer's attention.

    FlashInfer plans each step on the CPU, which waits for the lengths to arrive from the device; the plan
    serves all calls with the same tensors, unchanged, as the layers of one step make. fp8 pages (whose
    scales differ by head), other head sizes and empty sequences go to the own kernels, and so does
    everything but attention. Not for use while a CUDA graph is captured.
    """

    def __init__(self, own: LaunchedKernels, device: torch.device) -> None:
        self._own = own
        self._device = device
        self._wrappers: tuple[Any, Any] | None = None  # for decode and prefill; FlashInfer is optional
        self._planned: dict[str, _Planned] = {}
        self.write_kv = own.write_kv
        self.gather_blocks = own.gather_blocks
        self.scatter_blocks = own.scatter_blocks

    @staticmethod
    def is_installed() -> bool:
        """Whether FlashInfer can be imported."""
        return importlib.util.find_spec("flashinfer") is not None

    def paged_decode(
        self,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        scale: float | None = None,
        kv_scales: torch.Tensor | None = None,
        plan: SplitPlan | None = None,
    ) -> torch.Tensor:
        """Return the attention of one new token per sequence; see `reference.paged_decode`."""
        check_decode(q, kv_pages, block_tables, context_lens, kv_scales)
        planned = self._asked("decode", (block_tables, context_lens), q, kv_pages, scale)
        if not _takes(q, kv_pages) or not (
            self._is_planned("decode", planned) or bool((context_lens > 0).all())
        ):
            return self._own.paged_decode(
                q, kv_pages, block_tables, context_lens, scale=scale, kv_scales=kv_scales, plan=plan
            )
        wrapper = self._opened()[0]
        if not self._is_planned("decode", planned):
            lists = page_lists(block_tables, context_lens, kv_pages.shape[2])
            heads = (q.shape[1], *kv_pages.shape[3:])
            wrapper.plan(
                *lists,
                *heads,
                kv_pages.shape[2],
                q_data_type=q.dtype,
                kv_data_type=kv_pages.dtype,
                sm_scale=scale,
            )
            self._planned["decode"] = planned
        result: torch.Tensor = wrapper.run(q, (kv_pages[:, 0], kv_pages[:, 1]))
        return result

    def paged_prefill(
        self,
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        scale: float | None = None,
        kv_scales: torch.Tensor | None = None,
        plan: SplitPlan | None = None,
    ) -> torch.Tensor:
        """Return the causal attention of each sequence's newest tokens; see `reference.paged_prefill`."""
        check_prefill(q, kv_pages, block_tables, query_starts, context_lens, kv_scales)
        planned = self._asked("prefill", (block_tables, query_starts, context_lens), q, kv_pages, scale)
        is_planned = self._is_planned("prefill", planned)
        if not _takes(q, kv_pages) or not (is_planned or _fills_rows(q, query_starts, context_lens)):
            return self._own.paged_prefill(
                q,
                kv_pages,
                block_tables,
                query_starts,
                context_lens,
                scale=scale,
                kv_scales=kv_scales,
                plan=plan,
            )
        wrapper = self._opened()[1]
        if not is_planned:
            lists = page_lists(block_tables, context_lens, kv_pages.shape[2])
            heads = (q.shape[1], *kv_pages.shape[3:])
            wrapper.plan(
                query_starts.cpu(),
                *lists,
                *heads,
                kv_pages.shape[2],
                causal=True,
                q_data_type=q.dtype,
                kv_data_type=kv_pages.dtype,
                sm_scale=scale,
            )
            self._planned["prefill"] = planned
        result: torch.Tensor = wrapper.run(q, (kv_pages[:, 0], kv_pages[:, 1]))
        return result

    def _opened(self) -> tuple[Any, Any]:
        if self._wrappers is None:
            flashinfer = importlib.import_module("flashinfer")
            spaces = torch.zeros(2, _WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._wrappers = (
                flashinfer.BatchDecodeWithPagedKVCacheWrapper(spaces[0], "NHD", use_tensor_cores=True),
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(spaces[1], "NHD"),
            )
        return self._wrappers

    def _is_planned(self, call: str, asked: _Planned) -> bool:
        known = self._planned.get(call)
        return known is not None and (
            all(a is b for a, b in zip(known.tensors, asked.tensors, strict=True))
            and known.versions == asked.versions
            and known.shape == asked.shape
        )

    @staticmethod
    def _asked(
        call: str,
        tensors: tuple[torch.Tensor, ...],
        q: torch.Tensor,
        kv_pages: torch.Tensor,
        scale: float | None,
    ) -> _Planned:
        shape = (call, q.shape, q.dtype, kv_pages.shape[2:], kv_pages.dtype, scale)
        return _Planned(tensors, tuple(tensor._version for tensor in tensors), shape)


def _takes(q: torch.Tensor, kv_pages: torch.Tensor) -> bool:
    return q.dtype == kv_pages.dtype and q.shape[-1] in HEAD_DIMS and q.shape[0] > 0


def _fills_rows(q: torch.Tensor, query_starts: torch.Tensor, context_lens: torch.Tensor) -> bool:
    """Whether every sequence has keys for all its queries, and every row belongs to a sequence."""
    counts = query_starts.diff()
    return bool(((context_lens >= counts) & (context_lens > 0)).all()) and int(query_starts[-1]) == q.shape[0]
