"""Kernels of the bundled runtime and their references."""

from kvstore_kernels.compiling import KernelsUnavailable
from kvstore_kernels.cuda_headers import CudaHeadersMissing
from kvstore_kernels.kernels import PagedKernels
from kvstore_kernels.opening import open_kernels
from kvstore_kernels.splits import SplitPlan, plan_splits

__all__ = [
    "CudaHeadersMissing",
    "KernelsUnavailable",
    "PagedKernels",
    "SplitPlan",
    "open_kernels",
    "plan_splits",
]
