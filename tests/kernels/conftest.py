"""Kernels under test: the CUDA sources on the CPU, with and without sanitizers, and on a GPU."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from kvstore_kernels.cuda_device import CudaRunner
from kvstore_kernels.cuda_headers import CudaHeadersMissing, find_cuda_headers
from kvstore_kernels.kernels import LaunchedKernels
from tests.kernels.emulator import FLAGS, Build, EmulatedRunner, find_compiler, start_build
from tests.kernels.specs import SPECS


@dataclass(frozen=True)
class UnderTest:
    """Kernels, where their tensors must be, and how they are run."""

    kernels: LaunchedKernels
    device: torch.device
    kind: str
    emulated: EmulatedRunner | None


def not_possible(reason: str) -> NoReturn:
    """Skip, but not in CI: there everything that these tests need is installed."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cuda_headers() -> Path:
    try:
        return find_cuda_headers()
    except CudaHeadersMissing as error:
        not_possible(str(error))


@pytest.fixture(scope="session")
def builds(cuda_headers: Path, pytestconfig: pytest.Config) -> Iterator[dict[str, Build]]:
    if find_compiler() is None:
        not_possible("no g++ found: apt-get install g++")
    folder = pytestconfig.rootpath / ".cache" / "kernels"
    builds = {kind: start_build(SPECS, kind, cuda_headers, folder) for kind in FLAGS}
    yield builds
    for build in builds.values():
        build.stop()


@pytest.fixture(scope="session", params=[*FLAGS, pytest.param("cuda", marks=pytest.mark.gpu)])
def under_test(request: pytest.FixtureRequest) -> Iterator[UnderTest]:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        device = torch.device("cuda", torch.cuda.current_device())
        yield UnderTest(LaunchedKernels(CudaRunner.open(device)), device, "cuda", None)
        return
    runner = EmulatedRunner(request.getfixturevalue("builds")[request.param])
    yield UnderTest(LaunchedKernels(runner), torch.device("cpu"), request.param, runner)
    runner.close()
