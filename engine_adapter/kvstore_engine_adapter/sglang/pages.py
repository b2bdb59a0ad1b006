"""HostPages: pages of SGLang's host pools as flat bytes.

Two ways, by what a pool offers. ``FlatPages`` goes through the pool's own flat pages, in whatever layout.
``PointedPages`` goes through the addresses that the pool gives to zero-copy backends, for pools that have no
flat pages. The order of a page's bytes differs between the two, so its name is part of the namespace.
A page is written only after its bytes were checked.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidLayout

HostPool = Any  # SGLang's HostKVCache: attributes only, so that contract tests need no SGLang
"""A host pool of SGLang's, pages of ``page_size`` tokens of which ``size`` fit."""

Payload = npt.NDArray[np.uint8]
"""``[page_bytes]`` uint8, C order, CPU: the bytes of one page on this rank."""


class HostPages(Protocol):
    """The pages of one host pool. A page is named by the index of its first token in the pool."""

    kind: str
    page_bytes: int

    def read(self, starts: Sequence[int]) -> list[Payload]:
        """Return the bytes of pages: copies, or views that change when the pool does.

        Raises:
            InvalidLayout: an index is not that of a page, or a page has another size.
        """

    def write(self, start: int, payload: Payload) -> None:
        """Write a page that nobody else uses.

        Raises:
            InvalidLayout: the index is not that of a page.
        """


class FlatPages:
    """Pages as the pool flattens them: ``get_data_page`` and ``set_from_flat_data_page``."""

    kind = "flat"

    def __init__(self, pool: HostPool) -> None:
        """Look at the pool's first page.

        Raises:
            InvalidLayout: the pool has no flat pages.
        """
        self._pool = pool
        self._page_tokens = page_tokens(pool)
        try:
            page = pool.get_data_page(0, flat=True)
            is_flat = isinstance(page, torch.Tensor) and page.dim() == 1
        except (NotImplementedError, ValueError, TypeError, AttributeError) as error:
            raise InvalidLayout(f"pages: {type(pool).__name__} has no flat pages: {error}") from error
        if (
            not is_flat
            or page.device.type != "cpu"
            or not callable(getattr(pool, "set_from_flat_data_page", None))
        ):
            raise InvalidLayout(f"pages: {type(pool).__name__} has no flat pages in memory of the host")
        self._dtype = page.dtype
        self.page_bytes = page.numel() * page.element_size()

    def read(self, starts: Sequence[int]) -> list[Payload]:
        """Return the bytes of pages: copies, or views that change when the pool does."""
        rows: list[Payload] = []
        for start in starts:
            _require_page(start, self._pool, self._page_tokens)
            rows.append(as_bytes(self._pool.get_data_page(start, flat=True)))
            if rows[-1].nbytes != self.page_bytes:
                raise InvalidLayout(f"pages: a page has {rows[-1].nbytes} bytes, expected {self.page_bytes}")
        return rows

    def write(self, start: int, payload: Payload) -> None:
        """Write a page."""
        _require_page(start, self._pool, self._page_tokens)
        self._pool.set_from_flat_data_page(start, torch.from_numpy(payload).view(self._dtype))


class PointedPages:
    """Pages as regions of memory: ``get_page_buffer_meta``."""

    kind = "regions"

    def __init__(self, pool: HostPool) -> None:
        """Look at the pool's buffers and first page.

        Raises:
            InvalidLayout: the pool gives no addresses for its layout, or some outside its buffers.
        """
        self._pool = pool
        self._page_tokens = page_tokens(pool)
        self._spans = _spans(pool)
        self.page_bytes = sum(size for _, size in self._regions(0))

    def read(self, starts: Sequence[int]) -> list[Payload]:
        """Return the bytes of pages: copies, or views that change when the pool does."""
        rows: list[Payload] = []
        for start in starts:
            row, at = np.empty(self.page_bytes, np.uint8), 0
            for address, size in self._regions_of_page(start):
                ctypes.memmove(row.ctypes.data + at, address, size)
                at += size
            rows.append(row)
        return rows

    def write(self, start: int, payload: Payload) -> None:
        """Write a page."""
        at = 0
        for address, size in self._regions_of_page(start):
            ctypes.memmove(address, payload.ctypes.data + at, size)
            at += size

    def _regions_of_page(self, start: int) -> list[tuple[int, int]]:
        _require_page(start, self._pool, self._page_tokens)
        regions = self._regions(start)
        if sum(size for _, size in regions) != self.page_bytes:
            raise InvalidLayout(f"pages: page {start} is not of {self.page_bytes} bytes")
        return regions

    def _regions(self, start: int) -> list[tuple[int, int]]:
        tokens = torch.arange(start, start + self._page_tokens, dtype=torch.int64)
        try:
            addresses, sizes = self._pool.get_page_buffer_meta(tokens)
        except (NotImplementedError, ValueError, TypeError, AttributeError) as error:
            raise InvalidLayout(f"pages: {type(self._pool).__name__} gives no addresses: {error}") from error
        regions = [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        for address, size in regions:
            if not any(low <= address and address + size <= high for low, high in self._spans):
                raise InvalidLayout(f"pages: {type(self._pool).__name__} gives addresses outside its buffers")
        return regions


def pages_of(pool: HostPool) -> HostPages:
    """Return the pages of a host pool.

    Raises:
        InvalidLayout: it offers neither way.
    """
    try:
        return FlatPages(pool)
    except InvalidLayout:
        return PointedPages(pool)


def page_tokens(pool: HostPool) -> int:
    """Return the tokens of a page; pools of states have one state to a page."""
    return int(getattr(pool, "page_size", 1) or 1)


def as_bytes(page: torch.Tensor) -> Payload:
    """Return a tensor's bytes; a view of them if they lie in one run."""
    flat: Payload = page.detach().contiguous().view(torch.uint8).reshape(-1).numpy()
    return flat


def _require_page(start: int, pool: HostPool, tokens: int) -> None:
    size = getattr(pool, "size", None)
    if start < 0 or start % tokens or (size is not None and start + tokens > int(size)):
        raise InvalidLayout(f"pages: {start} is not the index of a page of {tokens} tokens")


def _spans(pool: HostPool) -> list[tuple[int, int]]:
    """Return where the pool's buffers begin and end."""
    found: list[torch.Tensor] = []
    for name in ("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer"):
        buffer = getattr(pool, name, None)
        found += [
            one for one in (buffer if isinstance(buffer, tuple | list) else [buffer]) if one is not None
        ]
    whole = [
        one.untyped_storage() for one in found if isinstance(one, torch.Tensor) and one.device.type == "cpu"
    ]
    return [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in whole]
