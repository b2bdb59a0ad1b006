"""Compile kernels ahead of time into a cache folder: ``python -m kvstore_kernels.precompile --help``.

The folder then serves `open_kernels(..., cache_dir=...)` on machines without NVRTC and CUDA's headers.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from kvstore_kernels.attention_builds import combine_spec, decode_build, prefill_build
from kvstore_kernels.binary_cache import BinaryCache
from kvstore_kernels.compiling import Compiler, KernelBinaries, KernelsUnavailable, NvccCompiler, open_nvrtc
from kvstore_kernels.cuda_headers import CudaHeadersMissing, find_cuda_headers
from kvstore_kernels.launching import DeviceLimits, KernelSpec
from kvstore_kernels.moves import convert_spec, copy_spec, write_quantised_spec, write_spec

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_BLOCK_SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_120": 99}
_LATER_SHARED_KIB = 227  # sm_90, sm_100


def specs_for(query: torch.dtype, kv: torch.dtype, head_dim: int, architecture: str) -> list[KernelSpec]:
    """The kernels that an engine with these dtypes and head size launches on an architecture.

    Raises:
        InvalidLayout: a head size that the kernels cannot take.
    """
    shared_bytes = _BLOCK_SHARED_KIB.get(architecture, _LATER_SHARED_KIB) << 10
    limits = DeviceLimits(1, shared_bytes, shared_bytes + 1024)
    specs = [
        copy_spec(16),
        decode_build(query, kv, head_dim, limits).spec,
        prefill_build(query, kv, head_dim).spec,
        combine_spec(query, head_dim),
    ]
    if query == kv:
        return [*specs, write_spec(16)]
    return [*specs, write_quantised_spec(query, kv), convert_spec(query, kv), convert_spec(kv, query)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print one line per kernel; status 1 if one does not compile or cannot be stored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache-dir", type=Path, required=True, help="folder, made with mode 0700")
    parser.add_argument("--architecture", action="append", required=True, help="such as sm_90; repeatable")
    parser.add_argument("--head-dim", type=int, action="append", required=True, help="repeatable")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="of queries")
    parser.add_argument("--kv-dtype", choices=list(DTYPES), help="of pages; that of queries by default")
    parser.add_argument("--nvcc", action="store_true", help="compile by nvcc (on PATH) and not by NVRTC")
    args = parser.parse_args(arguments)
    query, kv = DTYPES[args.dtype], DTYPES[args.kv_dtype or args.dtype]
    try:
        compiler = _compiler(by_nvcc=args.nvcc)
        for architecture in args.architecture:
            binaries = KernelBinaries(compiler, BinaryCache(args.cache_dir), architecture)
            for head_dim in args.head_dim:
                for spec in specs_for(query, kv, head_dim, architecture):
                    if not binaries.keep_ahead(spec):
                        print(f"precompile: cannot write to {args.cache_dir}", file=sys.stderr)
                        return 1
                    print(architecture, spec.name)
    except (KernelsUnavailable, CudaHeadersMissing) as error:
        print(f"precompile: {error}", file=sys.stderr)
        return 1
    return 0


def _compiler(*, by_nvcc: bool) -> Compiler:
    if not by_nvcc:
        return open_nvrtc()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise KernelsUnavailable("no nvcc on PATH")
    return NvccCompiler(Path(nvcc), find_cuda_headers())


if __name__ == "__main__":
    sys.exit(main())
