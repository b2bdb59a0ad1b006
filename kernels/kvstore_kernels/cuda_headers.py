"""Where CUDA's own headers (cuda_bf16.h, cuda_fp16.h, cuda_fp8.h) are on this machine."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import KVStoreError

TOOLKIT = Path("/usr/local/cuda/include")
"""Where CUDA's installers put the headers."""

NEEDED = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")


class CudaHeadersMissing(KVStoreError):
    """No folder with CUDA's headers was found."""


def find_cuda_headers() -> Path:
    """Return the folder of CUDA's headers: of the package nvidia-cuda-runtime, else of an installed toolkit.

    Raises:
        CudaHeadersMissing: neither is there.
    """
    for folder in _candidates():
        if all((folder / name).is_file() for name in NEEDED):
            return folder
    raise CudaHeadersMissing(
        f"no {NEEDED[0]} found: pip install 'nvidia-cuda-runtime>=13', or CUDA in {TOOLKIT.parent}"
    )


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    if spec is not None:
        for place in spec.submodule_search_locations or ():
            yield Path(place) / "cu13" / "include"
    yield TOOLKIT
