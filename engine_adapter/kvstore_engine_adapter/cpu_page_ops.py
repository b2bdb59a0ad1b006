"""CpuPageOps: attention over pages in position, in C++ (``cpu_attention.cpp``)."""

import ctypes
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from kvstore_engine_adapter.attention import PageOps, Segment, TorchPageOps
from kvstore_engine_adapter.native_library import load_library
from kvstore_engine_adapter.page_pool import PagePool

SOURCE = Path(__file__).with_name("cpu_attention.cpp")
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
"""Head sizes that are built in."""

_FUNCTIONS = {
    torch.bfloat16: "attend_bfloat16",
    torch.float16: "attend_float16",
    torch.float32: "attend_float32",
}
_FP8 = "_over_fp8"
"""What their names end in where the pages hold fp8."""

_MAX_QUERIES = 1024
_MAX_ROWS = 64
_BLOCK_KEYS = 32


class _Call(ctypes.Structure):
    """Arguments of one call: ``Call`` in the C++ source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages", "queries", "mixed", "scratch", "tables")),
        *((name, ctypes.c_void_p) for name in ("offsets", "firsts", "counts", "starts")),
        *((name, ctypes.c_int64) for name in ("page_stride", "value_offset", "block_tokens")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "groups", "head_dim")),
        ("scale", ctypes.c_float),
    )


def page_ops_for(pool: PagePool, *, num_heads: int, folder: Path | None) -> PageOps:
    """Return the quickest operations there are for a pool; ``folder`` keeps what is compiled (None: nothing).

    Blocks for seconds where something is compiled.
    """
    if folder is None or pool.device.type != "cpu" or pool.layout.head_dim not in HEAD_DIMS:
        return TorchPageOps(pool, num_heads=num_heads)
    library = load_library(SOURCE, folder)
    if library is None:
        return TorchPageOps(pool, num_heads=num_heads)
    return CpuPageOps(pool, library, num_heads=num_heads)


class CpuPageOps:
    """Compiled attention. A row's bits depend on its query and its sequence alone by construction.

    Pages are read where they lie, once per segment; softmax and sums are float32. Runs on as many threads as
    torch is told to use.
    """

    def __init__(self, pool: PagePool, library: ctypes.CDLL, *, num_heads: int) -> None:
        layout = pool.layout
        self.pool = pool
        self.groups = num_heads // layout.num_kv_heads
        self.attend = getattr(
            library, _FUNCTIONS[pool.computes_in] + (_FP8 if pool.scales is not None else "")
        )
        self.attend.argtypes = (ctypes.POINTER(_Call), ctypes.c_int64, ctypes.c_int64)
        self.max_rows = min(_MAX_ROWS, _MAX_QUERIES // self.groups)
        self.scratch: list[torch.Tensor] = []
        self.helpers: ThreadPoolExecutor | None = None

    def prepare(self) -> None:
        """Get scratch memory, and helping threads if torch uses several."""
        threads = torch.get_num_threads()
        size = 2 * (_BLOCK_KEYS + _MAX_QUERIES) * self.pool.layout.head_dim
        self.scratch = [torch.empty(size, dtype=torch.float32) for _ in range(threads)]
        if threads > 1:
            self.helpers = ThreadPoolExecutor(max_workers=threads - 1, thread_name_prefix="attention")

    def begin(self, segments: Sequence[Segment]) -> "CpuPageStep":
        """Lay out segments and block tables for the C++ side."""
        return CpuPageStep(self, segments)

    def describe(self) -> str:
        """Say that it is compiled."""
        return "compiled for this CPU"

    def close(self) -> None:
        """End the helping threads. Idempotent."""
        if self.helpers is not None:
            self.helpers.shutdown()


class CpuPageStep:
    """One pass of CpuPageOps."""

    def __init__(self, ops: CpuPageOps, segments: Sequence[Segment]) -> None:
        self._ops = ops
        block_tokens = ops.pool.layout.block_tokens
        tables: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        rows: list[tuple[int, int, int, int]] = []
        pages: list[int] = []
        offsets: list[int] = []
        first = table_at = 0
        for segment in segments:
            stop = segment.start + len(segment.tokens)
            for start in range(segment.start, stop, ops.max_rows):
                count = min(ops.max_rows, stop - start)
                rows.append((table_at, first + start - segment.start, count, start))
            positions = np.arange(segment.start, stop)
            table = np.array(segment.slots, dtype=np.int32)
            pages += table[positions // block_tokens].tolist()
            offsets += (positions % block_tokens).tolist()
            tables.append(table)
            table_at += len(table)
            first += len(segment.tokens)
        self._count = first
        self._tables = np.concatenate(tables)
        self._rows = np.array(rows, dtype=np.int64).T.copy()
        self._pages, self._offsets = torch.tensor(pages), torch.tensor(offsets)
        self._calls = [self._call(scratch) for scratch in ops.scratch]
        self._shares = _shares(self._rows[2] * (self._rows[3] + self._rows[2]), len(self._calls))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values; see PageStep."""
        count = self._count
        self._ops.pool.write(layer, keys[:count], values[:count], pages=self._pages, rows=self._offsets)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attend in one call per thread; see PageStep."""
        queries = queries.contiguous()
        mixed = torch.empty_like(queries)
        mixed[self._count :].zero_()
        pages = self._ops.pool.tensor[0, layer, 0].data_ptr()
        for call in self._calls:
            call.pages, call.queries, call.mixed = pages, queries.data_ptr(), mixed.data_ptr()
        waiting = [
            self._ops.helpers.submit(self._ops.attend, ctypes.byref(call), begin, end)
            for call, (begin, end) in zip(self._calls[1:], self._shares[1:], strict=True)
            if self._ops.helpers is not None and end > begin
        ]
        status = self._ops.attend(ctypes.byref(self._calls[0]), *self._shares[0])
        assert not any([status, *(future.result() for future in waiting)]), "a head size that is not built in"
        return mixed.flatten(1)

    def _call(self, scratch: torch.Tensor) -> _Call:
        pool, layout = self._ops.pool, self._ops.pool.layout
        offsets, firsts, counts, starts = (row.ctypes.data for row in self._rows)
        return _Call(
            scratch=scratch.data_ptr(),
            tables=self._tables.ctypes.data,
            offsets=offsets,
            firsts=firsts,
            counts=counts,
            starts=starts,
            page_stride=pool.tensor.stride(0),
            value_offset=pool.tensor.stride(2),
            block_tokens=layout.block_tokens,
            kv_heads=layout.num_kv_heads,
            groups=self._ops.groups,
            head_dim=layout.head_dim,
            scale=layout.head_dim**-0.5,
        )


def _shares(costs: "np.ndarray[tuple[int], np.dtype[np.int64]]", threads: int) -> list[tuple[int, int]]:
    """Cut segments into one range per thread of about equal cost."""
    if threads == 1:
        return [(0, len(costs))]
    sums = np.cumsum(costs)
    cuts = [int(np.searchsorted(sums, sums[-1] * part / threads)) for part in range(1, threads)]
    bounds = [0, *cuts, len(costs)]
    return list(itertools.pairwise(bounds))
