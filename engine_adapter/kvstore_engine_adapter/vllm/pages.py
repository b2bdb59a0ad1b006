"""TensorPages: vLLM's KV cache tensors as pages: on a CPU by copies, on CUDA over a stream of their own.

A block of a group is the bytes of its layers one after another, each as the layer's tensor has them.
The CUDA half follows the order that streams give: a snapshot is copied on a stream that first waits for what
vLLM has launched, and what vLLM launches next waits for the snapshot. It is compiled and reviewed only; the
tests run on CPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.errors import InvalidLayout
from kvstore_engine_adapter.block_transfers import Payloads, Snapshot
from kvstore_engine_adapter.vllm.identity import GroupIdentity


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's tensor as bytes, ``[blocks, page_bytes]`` uint8, and where its bytes are in a block."""

    rows: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Here:
    """A snapshot whose bytes are in memory."""

    rows: Payloads

    def payloads(self) -> Payloads:
        """Return them."""
        return self.rows


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    """A snapshot that a stream copies into pinned memory."""

    pinned: torch.Tensor
    event: Any  # torch.cuda.Event, whose type torch does not annotate

    def payloads(self) -> Payloads:
        """Wait for the copy, and return the bytes."""
        self.event.synchronize()
        rows: Payloads = self.pinned.numpy()
        return rows


class TensorPages:
    """The pages of all groups of one rank."""

    def __init__(self, caches: Mapping[str, torch.Tensor], groups: Sequence[GroupIdentity]) -> None:
        """Look at the tensors of the groups' layers.

        Raises:
            InvalidLayout: a layer has no tensor, or its blocks are not contiguous or of another size.
        """
        self._layers: dict[int, list[_Layer]] = {}
        self._block_bytes: dict[int, int] = {}
        self._device = torch.device("cpu")
        for group in groups:
            start, layers = 0, []
            for name, size_bytes in group.page_bytes.items():
                if name not in caches:
                    raise InvalidLayout(f"pages: vLLM has registered no tensor for the layer {name}")
                rows = _as_rows(name, caches[name], size_bytes)
                layers.append(_Layer(rows, start, start + size_bytes))
                start += size_bytes
                self._device = rows.device
            self._layers[group.index] = layers
            self._block_bytes[group.index] = start
        self._stream: Any = None  # torch.cuda.Stream, whose type torch does not annotate
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # the same

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of that group, as this rank holds it."""
        return self._block_bytes[group]

    def read(self, group: int, pages: Sequence[int]) -> Snapshot:
        """Take a snapshot of pages, ordered before everything that vLLM launches next."""
        if self._stream is not None:
            return self._read_over_stream(group, pages)
        rows: Payloads = np.empty((len(pages), self._block_bytes[group]), np.uint8)
        for layer in self._layers[group]:
            source = layer.rows.numpy()
            for at, page in enumerate(pages):
                rows[at, layer.start : layer.stop] = source[page]
        return _Here(rows)

    def write(self, group: int, pages: Sequence[int], payloads: Payloads) -> None:
        """Write blocks into pages that nobody else uses, and wait until they are there."""
        if self._stream is not None:
            self._write_over_stream(group, pages, payloads)
            return
        for layer in self._layers[group]:
            target = layer.rows.numpy()
            for at, page in enumerate(pages):
                target[page] = payloads[at, layer.start : layer.stop]

    def _read_over_stream(self, group: int, pages: Sequence[int]) -> Snapshot:
        stream = self._stream
        assert stream is not None
        compute = torch.cuda.current_stream(self._device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            index = torch.tensor(list(pages), dtype=torch.int64).to(self._device, non_blocking=True)
            whole = torch.cat([layer.rows.index_select(0, index) for layer in self._layers[group]], dim=1)
            pinned = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(whole, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
            event.record(stream)
        # vLLM's next kernels may overwrite these pages: they wait for the copy, the CPU does not.
        compute.wait_stream(stream)
        return _OnTheWay(pinned, event)

    def _write_over_stream(self, group: int, pages: Sequence[int], payloads: Payloads) -> None:
        stream = self._stream
        assert stream is not None
        with torch.cuda.stream(stream):
            index = torch.tensor(list(pages), dtype=torch.int64).to(self._device)
            whole = torch.from_numpy(payloads).pin_memory().to(self._device, non_blocking=True)
            for layer in self._layers[group]:
                layer.rows.index_copy_(0, index, whole[:, layer.start : layer.stop].contiguous())
        stream.synchronize()


def _as_rows(name: str, cache: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """Return a view ``[blocks, size_bytes]`` uint8 of one layer's tensor, whose first axis is the block.

    Raises:
        InvalidLayout: a block's bytes do not lie in one run of that size.
    """
    shape = (cache.shape[0], cache[0].numel() * cache.element_size())
    stride = cache.stride(0) * cache.element_size()
    if shape[1] != size_bytes or not cache[0].is_contiguous():
        raise InvalidLayout(
            f"pages: a block of {name} has {shape[1]} bytes in a tensor of shape {tuple(cache.shape)}, "
            f"expected {size_bytes} in one run, blocks first: this KV cache layout is not supported"
        )
    if stride == size_bytes:
        return cache.view(torch.uint8).reshape(shape)
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device)
    offset = cache.storage_offset() * cache.element_size()
    return flat.set_(cache.untyped_storage(), offset, shape, (stride, 1))
