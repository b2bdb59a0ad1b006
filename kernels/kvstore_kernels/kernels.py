"""PagedKernels: what an engine calls; LaunchedKernels carries the calls out by the CUDA sources."""

from typing import Protocol

import torch

from kvstore_kernels import reference
from kvstore_kernels.attention import (
    Attention,
    check_decode,
    check_prefill,
    decode_launches,
    plan_decode,
    plan_prefill,
    prefill_launches,
    problem_of,
)
from kvstore_kernels.launching import KernelRunner, Launch
from kvstore_kernels.moves import gather_launch, scatter_launch, write_launch
from kvstore_kernels.splits import SplitPlan


class PagedKernels(Protocol):
    """Operations on pages of KV memory. Shapes, dtypes and errors are those of `kvstore_kernels.reference`.

    On a GPU a call queues work on torch's current stream and returns at once; tensors may be freed or
    changed by later work on that stream only.
    """

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_pages: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Write new keys and values of one layer into page rows; see `reference.write_kv`."""

    def gather_blocks(
        self,
        kv_pages: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Copy pages into one contiguous run of blocks; see `reference.gather_blocks`."""

    def scatter_blocks(
        self,
        blocks: torch.Tensor,
        kv_pages: torch.Tensor,
        slots: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Copy one contiguous run of blocks into pages; see `reference.scatter_blocks`."""

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
        """Return the attention of one new token per sequence; see `reference.paged_decode`.

        ``plan`` says how contexts are split (see `plan_splits`); by default one is made for contexts as
        long as the block tables have room for, so keep those as narrow as the longest context allows.
        """

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
        """Return the causal attention of each sequence's newest tokens; see `reference.paged_prefill`.

        Rows of ``q`` that belong to no sequence come back undefined.

        ``plan`` says how contexts are split; by default they are where rows are too few to fill the device.
        """


class ReferenceKernels:
    """PagedKernels by the torch reference; on any device, and slow."""

    write_kv = staticmethod(reference.write_kv)
    gather_blocks = staticmethod(reference.gather_blocks)
    scatter_blocks = staticmethod(reference.scatter_blocks)

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
        """Return the attention of one new token per sequence; the plan does not matter."""
        del plan
        return reference.paged_decode(
            q, kv_pages, block_tables, context_lens, scale=scale, kv_scales=kv_scales
        )

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
        """Return the causal attention of each sequence's newest tokens; the plan does not matter."""
        del plan
        return reference.paged_prefill(
            q, kv_pages, block_tables, query_starts, context_lens, scale=scale, kv_scales=kv_scales
        )


class LaunchedKernels:
    """PagedKernels by launches of the CUDA sources of this package."""

    def __init__(self, runner: KernelRunner) -> None:
        self._runner = runner

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_pages: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Write new keys and values of one layer into page rows; see `reference.write_kv`."""
        self._run(write_launch(k, v, kv_pages, slot_mapping, kv_scales))

    def gather_blocks(
        self,
        kv_pages: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Copy pages into one contiguous run of blocks; see `reference.gather_blocks`."""
        self._run(gather_launch(kv_pages, slots, out, kv_scales))

    def scatter_blocks(
        self,
        blocks: torch.Tensor,
        kv_pages: torch.Tensor,
        slots: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Copy one contiguous run of blocks into pages; see `reference.scatter_blocks`."""
        self._run(scatter_launch(blocks, kv_pages, slots, kv_scales))

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
        """Return the attention of one new token per sequence; see `reference.paged_decode`.

        ``plan`` says how contexts are split; by default they are where rows are too few to fill the device.
        """
        check_decode(q, kv_pages, block_tables, context_lens, kv_scales)
        problem = problem_of(q, kv_pages, block_tables, context_lens, kv_scales=kv_scales, scale=scale)
        limits = self._runner.limits
        return self._attend(decode_launches(problem, plan or plan_decode(problem, limits), limits))

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
        """Return the causal attention of each sequence's newest tokens; see `reference.paged_prefill`.

        ``plan`` says how contexts are split; by default they are where rows are too few to fill the device.
        """
        check_prefill(q, kv_pages, block_tables, query_starts, context_lens, kv_scales)
        problem = problem_of(q, kv_pages, block_tables, context_lens, kv_scales=kv_scales, scale=scale)
        plan = plan or plan_prefill(problem, self._runner.limits)
        return self._attend(prefill_launches(problem, query_starts, plan))

    def _attend(self, attention: Attention) -> torch.Tensor:
        for launch in attention.launches:
            self._runner.run(launch)
        return attention.out

    def _run(self, launch: Launch | None) -> None:
        if launch is not None:
            self._runner.run(launch)
