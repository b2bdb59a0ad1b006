"""KVCacheDtype: what number an engine keeps keys and values as, in its pages and in the store."""

from enum import Enum

import torch

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Layout dtypes the runtime computes in."""

PAGE_DTYPES = {**TORCH_DTYPES, "float8_e4m3": torch.float8_e4m3fn}
"""Layout dtypes that pages may hold."""

FP8_LAYOUT = "float8_e4m3"


class KVCacheDtype(Enum):
    """The dtype of pages and blocks."""

    AUTO = "auto"
    """The one that the model computes in."""
    FP8 = "fp8"
    """float8 e4m3, every number by itself (a scale of 1): half the bytes of 16 bits, 3 bits of mantissa."""

    def layout_dtype(self, computes_in: torch.dtype) -> str:
        """Return the name that a layout has for it, where a model computes in a dtype."""
        if self is KVCacheDtype.FP8:
            return FP8_LAYOUT
        return next(name for name, value in TORCH_DTYPES.items() if value is computes_in)

    def weights_name(self, weights: str, computes_in: torch.dtype) -> str:
        """Return what a Namespace calls the weights.

        What is kept as fp8 was computed in another dtype, of which a layout of fp8 does not tell: models that
        compute in different ones share no blocks.
        """
        if self is KVCacheDtype.AUTO:
            return weights
        return f"{weights} in {KVCacheDtype.AUTO.layout_dtype(computes_in)}, kept by a scale of 1"
