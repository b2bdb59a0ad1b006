"""The builds of the kernels that the tests run and compile."""

import torch

from kvstore_kernels.attention_builds import combine_spec, decode_build, prefill_build
from kvstore_kernels.launching import DeviceLimits, KernelSpec
from kvstore_kernels.moves import convert_spec, copy_spec, write_quantised_spec, write_spec

H200 = DeviceLimits(multiprocessors=132, block_shared_bytes=227 << 10, multiprocessor_shared_bytes=228 << 10)
ADA = DeviceLimits(multiprocessors=58, block_shared_bytes=99 << 10, multiprocessor_shared_bytes=100 << 10)
"""A device with little shared memory: decode has two stages there."""

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = (BF16, FP16)
FP8 = (E4M3, E5M2)

ATTENTION = [
    *((BF16, BF16, head_dim) for head_dim in (64, 80, 96, 128, 192, 256)),
    *((BF16, E4M3, head_dim) for head_dim in (64, 80, 128, 256)),
    *((FP16, FP16, head_dim) for head_dim in (64, 128)),
    *((FP16, E5M2, 128), (FP16, E4M3, 64)),
]
"""Dtype of queries, dtype of pages, head size."""

COPIES = [
    *(copy_spec(width) for width in (1, 2, 4, 8, 16)),
    *(write_spec(width) for width in (1, 2, 4, 8, 16)),
]
CONVERSIONS = [
    *(convert_spec(wide, fp8) for wide in WIDE for fp8 in FP8),
    *(convert_spec(fp8, wide) for wide in WIDE for fp8 in FP8),
    *(write_quantised_spec(wide, fp8) for wide in WIDE for fp8 in FP8),
]
DECODES = [
    *(decode_build(*build, H200).spec for build in ATTENTION),
    decode_build(BF16, BF16, 128, ADA).spec,
]
PREFILLS = [prefill_build(*build).spec for build in ATTENTION]
COMBINES = list(dict.fromkeys(combine_spec(query, head_dim) for query, _, head_dim in ATTENTION))

SPECS: list[KernelSpec] = [*COPIES, *CONVERSIONS, *DECODES, *PREFILLS, *COMBINES]
