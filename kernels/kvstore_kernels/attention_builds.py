"""The attention kernels' builds: which tile sizes and how much shared memory each shape of problem takes.

The sources compute the same sizes from the same macros and refuse to compile when they disagree.
"""

import functools
from dataclasses import dataclass

import torch

from kvstore.errors import InvalidLayout
from kvstore_kernels.launching import KINDS, DeviceLimits, KernelSpec

_CHUNK = 16
_ROWS = 16
_PREFILL_THREADS = 128
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class DecodeBuild:
    """One build of paged_decode.cu.

    Attributes:
        spec: the kernel.
        shared_bytes: dynamic shared memory of a thread block.
        query_rows: query heads of a thread block.
    """

    spec: KernelSpec
    shared_bytes: int
    query_rows: int = _ROWS


@functools.lru_cache(maxsize=64)
def decode_build(query: torch.dtype, kv: torch.dtype, head_dim: int, limits: DeviceLimits) -> DecodeBuild:
    """Return the build for these dtypes and head size: three stages of loads where they fit, else two.

    Raises:
        InvalidLayout: a head size that the kernel cannot take.
    """
    check_head_dim(head_dim, kv)
    stages = 3 if _decode_bytes(kv, head_dim, 3) <= limits.block_shared_bytes else 2
    shared_bytes = _decode_bytes(kv, head_dim, stages)
    macros = (
        *(("QUERY_KIND", KINDS[query]), ("KV_KIND", KINDS[kv]), ("HEAD_DIM", head_dim)),
        *(("STAGES", stages), ("SHARED_BYTES", shared_bytes)),
    )
    spec = KernelSpec("paged_decode.cu", 32 * _decode_warps(kv, head_dim), macros)
    return DecodeBuild(spec, shared_bytes)


@dataclass(frozen=True, slots=True)
class PrefillBuild:
    """One build of paged_prefill.cu.

    Attributes:
        spec: the kernel.
        shared_bytes: dynamic shared memory of a thread block.
        rows: rows (query heads of new tokens that share a KV head) of a thread block.
    """

    spec: KernelSpec
    shared_bytes: int
    rows: int


@functools.lru_cache(maxsize=64)
def prefill_build(query: torch.dtype, kv: torch.dtype, head_dim: int) -> PrefillBuild:
    """Return the build for these dtypes and head size.

    Raises:
        InvalidLayout: a head size that the kernel cannot take.
    """
    check_head_dim(head_dim, kv)
    dim = padded_dim(head_dim)
    rows = 128 if dim <= 128 else 64
    tokens = 64 if dim <= 96 else 48 if dim <= 128 else 32
    stride = row_stride(dim * 2)
    raw = 0
    if kv.itemsize == 1:
        raw = -(-tokens * head_dim // _CHUNK // _PREFILL_THREADS) * _PREFILL_THREADS * _CHUNK
    shared_bytes = (rows + 2 * tokens) * stride + 2 * raw + 2 * tokens * 8 + rows * 4 + 16
    macros = (("QUERY_KIND", KINDS[query]), ("KV_KIND", KINDS[kv]), ("HEAD_DIM", head_dim))
    spec = KernelSpec("paged_prefill.cu", _PREFILL_THREADS, (*macros, ("SHARED_BYTES", shared_bytes)))
    return PrefillBuild(spec, shared_bytes, rows)


@functools.lru_cache(maxsize=64)
def combine_spec(query: torch.dtype, head_dim: int) -> KernelSpec:
    """The kernel that joins the splits' results; each of its thread blocks takes four rows."""
    return KernelSpec("combine_splits.cu", 128, (("QUERY_KIND", KINDS[query]), ("HEAD_DIM", head_dim)))


def check_head_dim(head_dim: int, kv: torch.dtype) -> None:
    """Refuse a head size whose rows are not whole 16-byte vectors, or that is too large.

    Raises:
        InvalidLayout: such a head size.
    """
    if head_dim * kv.itemsize % _CHUNK or not 0 < head_dim <= MAX_HEAD_DIM or head_dim % 4:
        raise InvalidLayout(
            f"head_dim {head_dim} of {kv}: expected at most {MAX_HEAD_DIM} and a multiple of {_CHUNK} bytes"
        )


def padded_dim(head_dim: int) -> int:
    """The head size rounded up to what the matrix products take."""
    return -(-head_dim // 32) * 32


def row_stride(row_bytes: int) -> int:
    """Bytes between rows in shared memory (Rows in attention.cuh)."""
    return (row_bytes // _CHUNK | 1) * _CHUNK


def _decode_warps(kv: torch.dtype, head_dim: int) -> int:
    return 2 if padded_dim(head_dim) * kv.itemsize > 256 else 4


def _decode_bytes(kv: torch.dtype, head_dim: int, stages: int) -> int:
    dim = padded_dim(head_dim)
    row_bytes = dim * kv.itemsize
    tokens = 16 if row_bytes > 128 else 32
    warps = _decode_warps(kv, head_dim)
    rings = warps * stages * 2 * tokens * row_stride(row_bytes)
    joined = warps * _ROWS * (dim + 4 + 2) * 4
    return _ROWS * row_stride(dim * 2) + 2 * _ROWS * 4 + max(rings, joined)
