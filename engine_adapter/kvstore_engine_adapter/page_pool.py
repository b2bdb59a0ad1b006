"""PagePool: the engine's KV memory, one page per block."""

import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.layout import KVLayout
from kvstore.tier import Slot
from kvstore_engine_adapter.page_moves import KernelPageMoves
from kvstore_kernels import PagedKernels

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Layout dtypes the runtime computes in."""


class PagePool:
    """KV pages ``[num_pages + 1, layers, 2, block_tokens, kv_heads, head_dim]``, C order, on one device.

    A page is one block in the store's layout, so that gather and scatter are one copy each. A slot is the
    number of a page. The last page is never lent: it is all zeros and stands in block tables for positions
    that have no page. A page must be cleared, or written whole, before it stands in a table.

    With ``kernels`` the host does not address the pages: they reach it through staging (`page_moves`).
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, *, kernels: PagedKernels | None = None
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        self.kernels = kernels
        shape = (
            num_pages + 1,
            layout.num_layers,
            2,
            layout.block_tokens,
            layout.num_kv_heads,
            layout.head_dim,
        )
        self.tensor = _zeros(shape, TORCH_DTYPES[layout.dtype], device)

        self._moves = None if kernels is None else KernelPageMoves(self.tensor, kernels)
        self._bytes: npt.NDArray[np.uint8] | None = None
        if device.type == "cpu" and kernels is None:
            self._bytes = self.tensor.view(torch.uint8).view(num_pages + 1, -1).numpy()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layout.block_bytes

    @property
    def zero_page(self) -> int:
        """Number of the page that is all zeros."""
        return self.num_pages

    def clear(self, slots: Sequence[Slot]) -> None:
        """Zero pages: masked positions are multiplied by zero, and zero times a stale NaN is NaN."""
        for slot in slots:
            self.tensor[slot].zero_()

    def copy(self, source: Slot, target: Slot) -> None:
        """Copy one page to another."""
        self.tensor[target].copy_(self.tensor[source])

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, pages: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Store keys and values ``[tokens, kv_heads, head_dim]`` of one layer at (page, row) pairs."""
        self.tensor[pages, layer, 0, rows] = keys
        self.tensor[pages, layer, 1, rows] = values

    def read(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer over a block table, each ``[tokens, kv_heads, head_dim]``."""
        layout = self.layout
        shape = (len(table) * layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        return self.tensor[table, layer, 0].view(shape), self.tensor[table, layer, 1].view(shape)

    def finish(self) -> None:
        """Wait until what was queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def host_views(self, slots: Sequence[Slot]) -> list[memoryview] | None:
        """Return the pages as writable bytes, or None if they are not in host memory."""
        if self._bytes is None:
            return None
        return [self._bytes[slot].data for slot in slots]

    def new_buffers(self, count: int) -> list[memoryview]:
        """Make host buffers of one page each for ``gather`` and ``scatter``."""
        if self._moves is not None:
            return self._moves.new_buffers(count)
        return [row.data for row in np.empty((count, self.page_bytes), dtype=np.uint8)]

    def gather(self, slots: Sequence[Slot], buffers: Sequence[memoryview]) -> None:
        """Copy pages into host buffers of ``block_bytes`` each. Blocking; releases the GIL."""
        if self._moves is not None:
            self._moves.gather(slots, buffers)
            return
        for slot, buffer in zip(slots, buffers, strict=True):
            self._host_tensor(buffer).copy_(self.tensor[slot])

    def scatter(self, slots: Sequence[Slot], buffers: Sequence[memoryview]) -> None:
        """Copy host buffers of ``block_bytes`` each into pages. Blocking; releases the GIL."""
        if self._moves is not None:
            self._moves.scatter(slots, buffers)
            return
        for slot, buffer in zip(slots, buffers, strict=True):
            self.tensor[slot].copy_(self._host_tensor(buffer))

    def _host_tensor(self, buffer: memoryview) -> torch.Tensor:
        return torch.frombuffer(buffer, dtype=self.tensor.dtype).view(self.tensor.shape[1:])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous memory is zero and costs nothing until it is touched; torch.zeros touches all of it.
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
