"""The builds of the kernels that the tests run: one of each kind, and the shapes where kinds differ."""

import torch

from kvstore_kernels.launching import KernelSpec
from kvstore_kernels.moves import convert_spec, copy_spec, write_quantised_spec, write_spec

WIDE = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

MOVES: list[KernelSpec] = [
    *(copy_spec(width) for width in (1, 2, 4, 8, 16)),
    *(write_spec(width) for width in (1, 2, 4, 8, 16)),
    *(convert_spec(wide, fp8) for wide in WIDE for fp8 in FP8),
    *(convert_spec(fp8, wide) for wide in WIDE for fp8 in FP8),
    *(write_quantised_spec(wide, fp8) for wide in WIDE for fp8 in FP8),
]

SPECS: list[KernelSpec] = [*MOVES]
