"""PageMoves: pages to and from host buffers, and its form for a device with paged kernels."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from kvstore.tier import Slot
from kvstore_kernels import PagedKernels

STAGING_BYTES = 64 << 20
"""Most device memory of one direction's staging."""

_MOST_BLOCKS = 64


class KernelPageMoves:
    """Pages gathered into, or scattered from, one contiguous run of blocks on the device.

    The run crosses to the host in one copy for each stretch of buffers that lie one after another there
    (``new_buffers``). Each direction has a staging run and, on a GPU, a stream of its own, so that loads and
    stores pass each other and the passes; callers of one direction take turns. The pages must not be part of
    a pass under way.
    """

    def __init__(self, pages: torch.Tensor, kernels: PagedKernels) -> None:
        self._pages = pages
        page_bytes = pages[0].numel() * pages.element_size()
        blocks = max(1, min(STAGING_BYTES // page_bytes, _MOST_BLOCKS))
        self._kernels = kernels
        self._page_bytes = page_bytes
        self._out, self._in = (_Lane(pages, blocks) for _ in range(2))
        self._slabs: list[torch.Tensor] = []

    def new_buffers(self, count: int) -> list[memoryview]:
        """Make host buffers of one block each, one after another in memory; page-locked for a GPU."""
        slab = torch.empty(count, self._page_bytes, dtype=torch.uint8, pin_memory=self._pages.is_cuda)
        self._slabs.append(slab)
        return [row.data for row in slab.numpy()]

    def gather(self, slots: Sequence[Slot], buffers: Sequence[memoryview]) -> None:
        """Copy pages into host buffers; done when it returns."""
        with self._out.turn():
            for first, blocks in self._out.batches(slots):
                where = self._slots(slots[first : first + len(blocks)])
                self._kernels.gather_blocks(self._pages, where, blocks)
                for at, host in self._stretches(buffers[first : first + len(blocks)]):
                    host.copy_(_as_bytes(blocks[at : at + len(host)]), non_blocking=True)

    def scatter(self, slots: Sequence[Slot], buffers: Sequence[memoryview]) -> None:
        """Copy host buffers into pages; done when it returns."""
        with self._in.turn():
            for first, blocks in self._in.batches(slots):
                for at, host in self._stretches(buffers[first : first + len(blocks)]):
                    _as_bytes(blocks[at : at + len(host)]).copy_(host, non_blocking=True)
                where = self._slots(slots[first : first + len(blocks)])
                self._kernels.scatter_blocks(blocks, self._pages, where)

    def _slots(self, slots: Sequence[Slot]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._pages.device)

    def _stretches(self, buffers: Sequence[memoryview]) -> list[tuple[int, torch.Tensor]]:
        """Return (number of the first buffer, ``[buffers, page_bytes]``) for those that follow each other."""
        found: list[tuple[int, torch.Tensor]] = []
        for number, buffer in enumerate(buffers):
            one = torch.frombuffer(buffer, dtype=torch.uint8).view(1, -1)
            if found:
                first, before = found[-1]
                longer = self._joined(before, one)
                if longer is not None:
                    found[-1] = (first, longer)
                    continue
            found.append((number, one))
        return found

    def _joined(self, before: torch.Tensor, one: torch.Tensor) -> torch.Tensor | None:
        if one.data_ptr() != before.data_ptr() + before.numel():
            return None
        for slab in self._slabs:
            row, rest = divmod(before.data_ptr() - slab.data_ptr(), self._page_bytes)
            if rest == 0 and row >= 0 and row + len(before) < len(slab):
                return slab[row : row + len(before) + 1]
        return None


class _Lane:
    """One direction: a run of blocks on the device, whose turn it is, and a stream."""

    def __init__(self, pages: torch.Tensor, blocks: int) -> None:
        self._lock = threading.Lock()
        self._blocks = torch.empty(blocks, *pages.shape[1:], dtype=pages.dtype, device=pages.device)
        self._stream: torch.cuda.Stream | None = None
        if pages.is_cuda:
            self._stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call]  # torch's own

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the lane, queue on its stream, and leave when what was queued is done."""
        with self._lock, torch.inference_mode():
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                try:
                    yield
                finally:
                    self._stream.synchronize()

    def batches(self, slots: Sequence[Slot]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (number of the first slot, blocks on the device) for as many at a time as fit."""
        for first in range(0, len(slots), len(self._blocks)):
            yield first, self._blocks[: len(slots) - first]


def _as_bytes(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.uint8).view(len(blocks), -1)
