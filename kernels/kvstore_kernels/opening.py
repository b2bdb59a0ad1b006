"""open_kernels: the kernels for a device."""

from pathlib import Path

import torch

from kvstore_kernels.binary_cache import BinaryCache
from kvstore_kernels.cuda_device import CudaRunner
from kvstore_kernels.flashinfer_kernels import FlashInferKernels
from kvstore_kernels.kernels import LaunchedKernels, PagedKernels, ReferenceKernels


def open_kernels(
    device: torch.device, *, cache_dir: Path | None = None, prefers_flashinfer: bool = False
) -> PagedKernels:
    """Return the kernels for a device: CUDA kernels on a GPU, the torch reference elsewhere.

    Args:
        device: where the pages are.
        cache_dir: folder for compiled kernels, made with mode 0700; in the user's home by default.
        prefers_flashinfer: attend by FlashInfer where it is installed; it has no part in moving bytes.

    Raises:
        KernelsUnavailable: a CUDA device on which they cannot run.
    """
    if device.type != "cuda":
        return ReferenceKernels()
    runner = CudaRunner.open(device, cache=BinaryCache(cache_dir) if cache_dir else None)
    own = LaunchedKernels(runner)
    if prefers_flashinfer and FlashInferKernels.is_installed():
        return FlashInferKernels(own, device)
    return own
