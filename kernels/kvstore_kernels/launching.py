"""KernelSpec and Launch: a kernel in one build, and a call of it; KernelRunner carries launches out."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

SOURCE_DIR = Path(__file__).parent / "cuda"
"""Folder of the CUDA sources; every file in it takes part in a build's identity."""

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
"""The sources' number of each dtype."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel in one build: a source file and the macros it is compiled with.

    ``threads`` is the size of its thread blocks.
    """

    source: str
    threads: int
    macros: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Name of the compiled function; unique among specs."""
        macros = "".join(f"_{name.lower()}{value}" for name, value in self.macros)
        return self.source.removesuffix(".cu") + macros

    def lines(self) -> list[str]:
        """The definitions as lines of source, the kernel's name among them."""
        return [
            f"#define KERNEL_NAME {self.name}",
            *(f"#define {name} {value}" for name, value in self.macros),
        ]


class Written(NamedTuple):
    """An argument that the kernel writes to."""

    tensor: torch.Tensor


Argument = torch.Tensor | Written | np.int32 | np.int64 | np.float32 | None
"""A tensor is passed as the address of its first element, None as a null pointer, a scalar by value."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a kernel: its grid, dynamic shared memory and arguments in order."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the launchers must know of a device.

    Attributes:
        multiprocessors: streaming multiprocessors.
        block_shared_bytes: most dynamic shared memory of one thread block.
        multiprocessor_shared_bytes: shared memory of one multiprocessor.
    """

    multiprocessors: int
    block_shared_bytes: int
    multiprocessor_shared_bytes: int


class KernelRunner(Protocol):
    """Carries launches out, in order, on one device."""

    @property
    def limits(self) -> DeviceLimits:
        """The device's limits."""

    def run(self, launch: Launch) -> None:
        """Start a launch; on a GPU it is queued on torch's current stream and the call returns at once."""
