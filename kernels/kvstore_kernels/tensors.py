"""Checks of tensors for kernels: a wrong one is refused here, not read out of bounds there."""

from collections.abc import Sequence

import torch

from kvstore.errors import InvalidLayout

VECTOR_BYTES = 16
"""Bytes of the kernels' widest access; rows must start and be spaced at multiples of it."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes that are held with a scale."""


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Refuse a tensor whose shape differs; None stands for any size.

    Raises:
        InvalidLayout: another number of dimensions or another size.
    """
    is_same = tensor.dim() == len(shape) and all(
        want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not is_same:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise InvalidLayout(f"{name}: shape {list(tensor.shape)}, expected [{wanted}]")


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a tensor of another dtype.

    Raises:
        InvalidLayout: the dtype is none of ``dtypes``.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise InvalidLayout(f"{name}: dtype {tensor.dtype}, expected {wanted}")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous 16-byte vectors.

    Raises:
        InvalidLayout: a stride, the start or the row length is no multiple of 16 bytes.
    """
    size = tensor.element_size()
    steps = [
        stride * size for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1
    ]
    steps += [tensor.data_ptr(), tensor.shape[-1] * size]
    if tensor.stride(-1) != 1 or any(step % VECTOR_BYTES for step in steps):
        raise InvalidLayout(
            f"{name}: strides {tensor.stride()} of {tensor.dtype}: rows must be contiguous and start at "
            f"multiples of {VECTOR_BYTES} bytes"
        )


def check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors that are elsewhere.

    Raises:
        InvalidLayout: one of them is on another device.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise InvalidLayout(f"{name}: is on {tensor.device}, the others are on {device}")


def byte_strides(tensor: torch.Tensor) -> list[int]:
    """Strides in bytes."""
    return [stride * tensor.element_size() for stride in tensor.stride()]
