"""CudaRunner: launches on a GPU by CuPy. No other module touches CuPy's runtime, and this one only in use."""

import ctypes
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvstore_kernels.binary_cache import BinaryCache
from kvstore_kernels.compiling import (
    KernelBinaries,
    KernelsUnavailable,
    NvrtcCompiler,
    default_cache,
    open_nvrtc,
)
from kvstore_kernels.cuda_headers import CudaHeadersMissing
from kvstore_kernels.launching import Argument, DeviceLimits, KernelSpec, Launch, Written

_log = logging.getLogger(__name__)

_OLDEST = (8, 0)


class CudaRunner:
    """Runs launches on one CUDA device, on torch's current stream there.

    A kernel is loaded when it is first launched: from the cache on disk, else compiled (0.3 to 2 s). May be
    used from several threads; two that need the same kernel first may both load it.
    """

    def __init__(self, device: torch.device, binaries: KernelBinaries, limits: DeviceLimits) -> None:
        self._device = device
        self._binaries = binaries
        self._limits = limits
        self._functions: dict[KernelSpec, Any] = {}  # CuPy ships no types

    @classmethod
    def open(cls, device: torch.device, *, cache: BinaryCache | None = None) -> "CudaRunner":
        """Return a runner for a device.

        Args:
            device: a CUDA device; without an index, the current one.
            cache: where compiled kernels are kept; in the user's home by default.

        Raises:
            KernelsUnavailable: no such device, or too old a one. A missing compiler shows when a kernel that
                was not compiled ahead of time is first launched.
        """
        if not torch.cuda.is_available():
            raise KernelsUnavailable("no CUDA device, or a torch without CUDA")
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        if capability < _OLDEST:
            raise KernelsUnavailable(f"compute capability {capability}, at least {_OLDEST} is needed")
        architecture = f"sm_{capability[0]}{capability[1]}"
        limits = _limits(index)
        binaries = KernelBinaries(_compiler(), cache or default_cache(), architecture)
        return cls(torch.device("cuda", index), binaries, limits)

    @property
    def limits(self) -> DeviceLimits:
        """The device's limits."""
        return self._limits

    def run(self, launch: Launch) -> None:
        """Queue a launch.

        Raises:
            KernelsUnavailable: the kernel does not compile, or the driver refuses it.
        """
        cuda = _cupy_cuda()
        with cuda.Device(self._device.index):
            try:
                function = self._functions.get(launch.spec) or self._load(launch)
                words, pointers = packed(launch.arguments)
                cuda.driver.launchKernel(
                    *(function.ptr, *launch.grid, launch.spec.threads, 1, 1, launch.shared_bytes),
                    torch.cuda.current_stream(self._device).cuda_stream,
                    ctypes.addressof(pointers),
                    0,
                )
                del words  # read by the call above, through the pointers
            except cuda.driver.CUDADriverError as error:
                raise KernelsUnavailable(f"{launch.spec.name}: {error}") from error

    def _load(self, launch: Launch) -> Any:  # CuPy ships no types
        cuda = _cupy_cuda()
        module = cuda.function.Module()
        module.load(self._binaries.get(launch.spec))
        loaded = module.get_function(launch.spec.name)
        if launch.shared_bytes:
            # A build always asks for the same amount.
            for attribute, value in (
                (cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes),
                (cuda.driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            ):
                cuda.driver.funcSetAttribute(loaded.ptr, attribute, value)
        self._functions[launch.spec] = loaded
        return loaded


def _cupy_cuda() -> Any:  # CuPy ships no types
    """CuPy's module; it is optional and takes a second to import."""
    return importlib.import_module("cupy.cuda")


def _compiler() -> NvrtcCompiler | None:
    try:
        return open_nvrtc()
    except (KernelsUnavailable, CudaHeadersMissing) as error:
        _log.info("kernels: only those compiled ahead of time: %s", error)
        return None


def _limits(index: int) -> DeviceLimits:
    runtime = _cupy_cuda().runtime
    return DeviceLimits(
        multiprocessors=runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index),
        block_shared_bytes=runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
        multiprocessor_shared_bytes=runtime.deviceGetAttribute(
            runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor, index
        ),
    )


def packed(
    arguments: Sequence[Argument],
) -> tuple["ctypes.Array[ctypes.c_uint64]", "ctypes.Array[ctypes.c_void_p]"]:
    """Return the arguments' bytes, little-endian, eight for each, and the address of each in them."""
    words = (ctypes.c_uint64 * len(arguments))(*(_word(argument) for argument in arguments))
    first = ctypes.addressof(words)
    return words, (ctypes.c_void_p * len(arguments))(*(first + 8 * i for i in range(len(arguments))))


def _word(argument: Argument) -> int:
    if argument is None:
        return 0
    if isinstance(argument, Written):
        return argument.tensor.data_ptr()
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return int.from_bytes(argument.tobytes(), "little")
