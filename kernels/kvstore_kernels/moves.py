"""Launches that move KV bytes: new rows into pages, pages to and from blocks in the store's layout."""

from math import gcd

import numpy as np
import torch

from kvstore.errors import InvalidLayout
from kvstore_kernels.launching import KINDS, Argument, KernelSpec, Launch, Written
from kvstore_kernels.tensors import (
    FP8_DTYPES,
    VECTOR_BYTES,
    byte_strides,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
)

SOURCE = "kv_move.cu"
_THREADS = 256  # kThreads there
_CHUNK_UNITS = _THREADS * 4  # kThreads * kUnroll there
_GROUP = 16  # kGroup there
_COPY, _CONVERT, _WRITE, _WRITE_QUANTISED = range(4)
_MAX_GRID = 2**31 - 1


def copy_spec(unit_bytes: int) -> KernelSpec:
    """The kernel that copies blocks in accesses of ``unit_bytes``."""
    return KernelSpec(SOURCE, _THREADS, (("MOVE_OPERATION", _COPY), ("UNIT_BYTES", unit_bytes)))


def convert_spec(from_dtype: torch.dtype, to_dtype: torch.dtype) -> KernelSpec:
    """The kernel that copies blocks and quantises or dequantises them on the way."""
    kinds = (("FROM_KIND", KINDS[from_dtype]), ("TO_KIND", KINDS[to_dtype]))
    return KernelSpec(SOURCE, _THREADS, (("MOVE_OPERATION", _CONVERT), *kinds))


def write_spec(unit_bytes: int) -> KernelSpec:
    """The kernel that writes rows in accesses of ``unit_bytes``."""
    return KernelSpec(SOURCE, _THREADS, (("MOVE_OPERATION", _WRITE), ("UNIT_BYTES", unit_bytes)))


def write_quantised_spec(from_dtype: torch.dtype, to_dtype: torch.dtype) -> KernelSpec:
    """The kernel that writes rows and quantises them on the way."""
    kinds = (("FROM_KIND", KINDS[from_dtype]), ("TO_KIND", KINDS[to_dtype]))
    return KernelSpec(SOURCE, _THREADS, (("MOVE_OPERATION", _WRITE_QUANTISED), *kinds))


def check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Refuse arguments of write_kv that do not fit each other.

    Raises:
        InvalidLayout: a shape, dtype or device.
    """
    check_shape("kv_pages", kv_pages, (None, 2, None, None, None))
    heads, head_dim = kv_pages.shape[3:]
    check_shape("k", k, (None, heads, head_dim))
    check_shape("v", v, k.shape)
    check_shape("slot_mapping", slot_mapping, (k.shape[0],))
    check_dtype("slot_mapping", slot_mapping, (torch.int64,))
    check_dtype("v", v, (k.dtype,))
    check_device(kv_pages.device, k=k, v=v, slot_mapping=slot_mapping, kv_scales=kv_scales)
    _check_scales(kv_scales, (2, heads), k.dtype, kv_pages.dtype)


def write_launch(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> Launch | None:
    """The launch of write_kv; None if there is no token.

    Raises:
        InvalidLayout: see check_write; or rows that the kernel cannot reach.
    """
    check_write(k, v, kv_pages, slot_mapping, kv_scales)
    tokens, heads, head_dim = k.shape
    strides = (k.stride(0), v.stride(0), k.stride(1), v.stride(1))
    source_strides = [stride * k.element_size() for stride in strides]
    page_strides = [byte_strides(kv_pages)[axis] for axis in (0, 1, 2, 3)]
    if kv_pages.dtype == k.dtype:
        row_bytes = head_dim * k.element_size()
        unit_bytes = _widest_unit(row_bytes, k.data_ptr(), v.data_ptr(), kv_pages.data_ptr(), *source_strides)
        unit_bytes = gcd(unit_bytes, _widest_unit(*page_strides))
        spec, units_per_head = write_spec(unit_bytes), row_bytes // unit_bytes
    else:
        for name, tensor in (("k", k), ("v", v), ("kv_pages", kv_pages)):
            check_rows(name, tensor)
        spec, units_per_head = write_quantised_spec(k.dtype, kv_pages.dtype), head_dim // _GROUP
    threads = 2 * tokens * heads * units_per_head
    if not threads:
        return None
    if threads > _MAX_GRID or k.stride(2) != 1 or v.stride(2) != 1 or kv_pages.stride(4) != 1:
        raise InvalidLayout(
            "write_kv: too many tokens for one call, or a last dimension that is not contiguous"
        )
    arguments: tuple[Argument, ...] = (
        *(k, v, Written(kv_pages), slot_mapping, kv_scales),
        *(np.int32(n) for n in (tokens, heads, units_per_head, kv_pages.shape[2])),
        *(np.int64(n) for n in (*source_strides, *page_strides)),
    )
    return Launch(spec, (-(-threads // _THREADS), 1, 1), arguments)


def check_blocks(
    blocks: torch.Tensor, kv_pages: torch.Tensor, slots: torch.Tensor, kv_scales: torch.Tensor | None
) -> None:
    """Refuse arguments of gather_blocks and scatter_blocks that do not fit each other.

    Raises:
        InvalidLayout: a shape, dtype or device.
    """
    check_shape("kv_pages", kv_pages, (None,) * 6)
    check_shape("slots", slots, (None,))
    check_dtype("slots", slots, (torch.int64,))
    check_shape("blocks", blocks, (slots.shape[0], *kv_pages.shape[1:]))
    check_device(kv_pages.device, slots=slots, kv_scales=kv_scales)
    layers, planes, _, heads, _ = kv_pages.shape[1:]
    _check_scales(kv_scales, (layers, planes, heads), blocks.dtype, kv_pages.dtype)


def gather_launch(
    kv_pages: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, kv_scales: torch.Tensor | None
) -> Launch | None:
    """The launch of gather_blocks; None if there is no block.

    Raises:
        InvalidLayout: see check_blocks; or pieces that are not contiguous.
    """
    check_blocks(out, kv_pages, slots, kv_scales)
    return _move(kv_pages, out, (slots, None), kv_scales)


def scatter_launch(
    blocks: torch.Tensor, kv_pages: torch.Tensor, slots: torch.Tensor, kv_scales: torch.Tensor | None
) -> Launch | None:
    """The launch of scatter_blocks; None if there is no block.

    Raises:
        InvalidLayout: see check_blocks; or pieces that are not contiguous.
    """
    check_blocks(blocks, kv_pages, slots, kv_scales)
    return _move(blocks, kv_pages, (None, slots), kv_scales)


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    numbers: tuple[torch.Tensor | None, torch.Tensor | None],
    kv_scales: torch.Tensor | None,
) -> Launch | None:
    slots = numbers[0] if numbers[0] is not None else numbers[1]
    assert slots is not None  # the two callers each give one
    if not slots.shape[0] or not source[:1].numel():
        return None
    for name, tensor in (("source", source), ("target", target)):
        if not tensor[0, 0, 0].is_contiguous():
            raise InvalidLayout(f"{name}: a plane [block_tokens, kv_heads, head_dim] must be contiguous")
    if source.dtype == target.dtype:
        return _copy(source, target, numbers, slots.shape[0])
    return _convert(source, target, numbers, kv_scales)


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    numbers: tuple[torch.Tensor | None, torch.Tensor | None],
    blocks: int,
) -> Launch:
    layers, planes = source.shape[1:3]
    piece_bytes = source[0, 0, 0].numel() * source.element_size()
    if source[0].is_contiguous() and target[0].is_contiguous():
        piece_bytes, layers, planes = piece_bytes * layers * planes, 1, 1
    strides = [*byte_strides(source)[:3], *byte_strides(target)[:3]]
    unit_bytes = _widest_unit(piece_bytes, source.data_ptr(), target.data_ptr(), *strides)
    chunks = -(-piece_bytes // (unit_bytes * _CHUNK_UNITS))
    arguments: tuple[Argument, ...] = (
        *(source, Written(target), *numbers, np.int32(layers), np.int32(planes)),
        *(np.int64(piece_bytes), np.int32(chunks)),
        *(np.int64(stride) for stride in strides),
    )
    return Launch(copy_spec(unit_bytes), _grid(blocks * layers * planes * chunks), arguments)


def _convert(
    source: torch.Tensor,
    target: torch.Tensor,
    numbers: tuple[torch.Tensor | None, torch.Tensor | None],
    kv_scales: torch.Tensor | None,
) -> Launch:
    layers, planes, tokens, heads, head_dim = source.shape[1:]
    for name, tensor in (("source", source), ("target", target)):
        check_rows(name, tensor)
    slots = numbers[0] if numbers[0] is not None else numbers[1]
    assert slots is not None  # see _move
    piece_groups = tokens * heads * head_dim // _GROUP
    chunks = -(-piece_groups // _CHUNK_UNITS)
    arguments: tuple[Argument, ...] = (
        *(source, Written(target), *numbers, kv_scales),
        *(np.int32(n) for n in (layers, planes, heads, head_dim // _GROUP, piece_groups, chunks)),
        *(np.int64(stride) for stride in (*byte_strides(source)[:3], *byte_strides(target)[:3])),
    )
    spec = convert_spec(source.dtype, target.dtype)
    return Launch(spec, _grid(slots.shape[0] * layers * planes * chunks), arguments)


def _grid(thread_blocks: int) -> tuple[int, int, int]:
    if thread_blocks > _MAX_GRID:
        raise InvalidLayout(f"{thread_blocks} chunks to copy, limit {_MAX_GRID}: copy fewer blocks at a time")
    return thread_blocks, 1, 1


def _widest_unit(*multiples: int) -> int:
    return gcd(VECTOR_BYTES, *multiples)


def _check_scales(
    kv_scales: torch.Tensor | None, shape: tuple[int, ...], a: torch.dtype, b: torch.dtype
) -> None:
    """Scales are needed exactly where an fp8 dtype meets a wider one."""
    if a == b:
        return
    fp8, wide = (a, b) if a in FP8_DTYPES else (b, a)
    if fp8 not in FP8_DTYPES or wide not in (torch.bfloat16, torch.float16):
        raise InvalidLayout(
            f"no conversion between {a} and {b}: one must be fp8, the other bfloat16 or float16"
        )
    if kv_scales is None:
        raise InvalidLayout(f"kv_scales: missing, needed between {a} and {b}")
    check_shape("kv_scales", kv_scales, shape)
    check_dtype("kv_scales", kv_scales, (torch.float32,))
    if not kv_scales.is_contiguous():
        raise InvalidLayout("kv_scales: must be contiguous")
