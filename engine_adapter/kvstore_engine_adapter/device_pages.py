"""Which operations on pages a device has: paged kernels on a GPU, compiled C++ on a CPU, else torch's."""

import logging
from enum import Enum
from pathlib import Path

import torch

from kvstore.errors import InvalidLayout
from kvstore.layout import KVLayout
from kvstore_engine_adapter.attention import PageOps
from kvstore_engine_adapter.cpu_page_ops import page_ops_for
from kvstore_engine_adapter.kernel_page_ops import KernelPageOps
from kvstore_engine_adapter.kv_dtype import PAGE_DTYPES
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_kernels import KernelsUnavailable, PagedKernels, open_kernels
from kvstore_kernels.attention_builds import check_head_dim

logger = logging.getLogger(__name__)

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class AttentionBackend(Enum):
    """How a GPU attends; a CPU has one way."""

    EXACT = "exact"
    """Equal bits in any company and after any reuse: all rows by the prefill kernel, splits of one length."""
    FAST = "fast"
    """Decode by a kernel of its own, splits planned for each batch; last bits may vary."""
    FLASHINFER = "flashinfer"
    """FlashInfer where it is installed and takes the shapes, else as FAST."""


def kernels_for(
    layout: KVLayout,
    device: torch.device,
    backend: AttentionBackend,
    folder: Path | None,
    *,
    computes_in: torch.dtype | None = None,
) -> PagedKernels | None:
    """Return the kernels for pages of a layout; None where torch, or C++, does their work.

    ``folder`` keeps what is compiled (None: the user's cache folder). ``computes_in`` is the queries' dtype,
    where it is not that of the pages.
    """
    dtype = PAGE_DTYPES[layout.dtype]
    if device.type != "cuda" or (computes_in or dtype) not in _KERNEL_DTYPES:
        return None
    try:
        check_head_dim(layout.head_dim, dtype)
        kernels = open_kernels(
            device, cache_dir=folder, prefers_flashinfer=backend is AttentionBackend.FLASHINFER
        )
        _try(kernels, device)
        return kernels
    except (ImportError, InvalidLayout, KernelsUnavailable) as error:  # ImportError: no CuPy
        logger.warning("engine: the CUDA kernels cannot run, torch does their work, slower: %s", error)
        return None


def _try(kernels: PagedKernels, device: torch.device) -> None:
    """Copy a small page: a missing compiler shows only when a kernel is first launched."""
    pages = torch.zeros(1, 1, 2, 1, 1, 8, dtype=torch.bfloat16, device=device)
    kernels.gather_blocks(pages, torch.zeros(1, dtype=torch.int64, device=device), torch.empty_like(pages))


def ops_on(
    pool: PagePool,
    *,
    num_heads: int,
    folder: Path | None,
    backend: AttentionBackend = AttentionBackend.EXACT,
) -> PageOps:
    """Return the quickest operations there are for a pool; ``folder`` keeps what is compiled (None: nothing).

    Blocks for seconds where something is compiled.
    """
    if pool.kernels is not None:
        return KernelPageOps(
            pool,
            pool.kernels,
            num_heads=num_heads,
            decodes_apart=backend is not AttentionBackend.EXACT,
        )
    return page_ops_for(pool, num_heads=num_heads, folder=folder)
