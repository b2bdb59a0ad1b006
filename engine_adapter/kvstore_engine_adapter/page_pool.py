"""PagePool: the engine's KV memory, one page per block."""

import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.layout import KVLayout
from kvstore.tier import Slot
from kvstore_engine_adapter.kv_dtype import FP8_LAYOUT, PAGE_DTYPES
from kvstore_engine_adapter.page_moves import KernelPageMoves
from kvstore_kernels import PagedKernels
from kvstore_kernels.reference import dequantise, quantise


class PagePool:
    """KV pages ``[num_pages + 1, layers, 2, block_tokens, kv_heads, head_dim]``, C order, on one device.

    A page is one block in the store's layout, so that gather and scatter are one copy each. A slot is the
    number of a page. The last page is never lent: it is all zeros and stands in block tables for positions
    that have no page. A page must be cleared, or written whole, before it stands in a table.

    With ``kernels`` the host does not address the pages: they reach it through staging (`page_moves`).

    Pages of a layout of fp8 hold quantised numbers: what is written is quantised, what is read is in
    ``computes_in`` (else the layout's own dtype). ``scales`` are then ``[layers, 2, kv_heads]``, float32.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        *,
        kernels: PagedKernels | None = None,
        computes_in: torch.dtype | None = None,
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
        self.tensor = _zeros(shape, PAGE_DTYPES[layout.dtype], device)
        self.computes_in = computes_in or self.tensor.dtype
        self.scales: torch.Tensor | None = None
        # torch does not index fp8 everywhere: bytes are moved for it.
        self._raw = self.tensor
        if layout.dtype == FP8_LAYOUT:
            self.scales = torch.ones(layout.num_layers, 2, layout.num_kv_heads, device=device)
            self._raw = self.tensor.view(torch.uint8)
        self._moves = None if kernels is None else KernelPageMoves(self.tensor, kernels)
        self._bytes: npt.NDArray[np.uint8] | None = None
        if device.type == "cpu" and kernels is None:
            self._bytes = self.tensor.view(torch.uint8).view(num_pages + 1, -1).numpy()

    def layer_scales(self, layer: int) -> torch.Tensor | None:
        """Return the scales of one layer, ``[2, kv_heads]``; None where nothing is quantised."""
        return None if self.scales is None else self.scales[layer]

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
            self._raw[slot].zero_()

    def copy(self, source: Slot, target: Slot) -> None:
        """Copy one page to another."""
        self._raw[target].copy_(self._raw[source])

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, pages: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Store keys and values ``[tokens, kv_heads, head_dim]`` of one layer at (page, row) pairs."""
        for plane, new in enumerate((keys, values)):
            self._raw[pages, layer, plane, rows] = self._quantised(new, layer, plane)

    def read(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer over a block table, each ``[tokens, kv_heads, head_dim]``."""
        layout = self.layout
        shape = (len(table) * layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        keys, values = (self._raw[table, layer, plane].view(shape) for plane in (0, 1))
        if self.scales is None:
            return keys, values
        return self._dequantised(keys, layer, 0), self._dequantised(values, layer, 1)

    def _quantised(self, new: torch.Tensor, layer: int, plane: int) -> torch.Tensor:
        if self.scales is None:
            return new
        return quantise(new, self.scales[layer, plane, :, None], self.tensor.dtype).view(torch.uint8)

    def _dequantised(self, raw: torch.Tensor, layer: int, plane: int) -> torch.Tensor:
        assert self.scales is not None, "only what is quantised is dequantised"
        return dequantise(raw.view(self.tensor.dtype), self.scales[layer, plane, :, None], self.computes_in)

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
            self._host_tensor(buffer).copy_(self._raw[slot])

    def scatter(self, slots: Sequence[Slot], buffers: Sequence[memoryview]) -> None:
        """Copy host buffers of ``block_bytes`` each into pages. Blocking; releases the GIL."""
        if self._moves is not None:
            self._moves.scatter(slots, buffers)
            return
        for slot, buffer in zip(slots, buffers, strict=True):
            self._raw[slot].copy_(self._host_tensor(buffer))

    def _host_tensor(self, buffer: memoryview) -> torch.Tensor:
        return torch.frombuffer(buffer, dtype=self._raw.dtype).view(self.tensor.shape[1:])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous memory is zero and costs nothing until it is touched; torch.zeros touches all of it.
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
