"""The tiny model as loaded model, and engines over it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore_engine_adapter.model import LoadedModel, load_model
from kvstore_kernels.attention_builds import combine_spec, decode_build, prefill_build
from kvstore_kernels.cuda_headers import CudaHeadersMissing, find_cuda_headers
from kvstore_kernels.kernels import LaunchedKernels
from kvstore_kernels.launching import Launch
from kvstore_kernels.moves import copy_spec, write_spec
from tests.engine.tiny_model import HEAD_DIM, TinyModel
from tests.kernels.emulator import EmulatedRunner, find_compiler, start_build
from tests.kernels.specs import BF16, H200

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="session")
def tiny_folder(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_gguf(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_bf16(tiny_gguf: Path) -> LoadedModel:
    return load_model(tiny_gguf, dtype=torch.bfloat16, device=CPU)


@pytest.fixture(scope="session")
def tiny_f32(tiny_gguf: Path) -> LoadedModel:
    return load_model(tiny_gguf, dtype=torch.float32, device=CPU)


class OneAtATime:
    """A runner for several threads: an engine computes in one and moves blocks in others."""

    def __init__(self, runner: EmulatedRunner) -> None:
        self._runner = runner
        self._lock = threading.Lock()
        self.limits = runner.limits

    def run(self, launch: Launch) -> None:
        with self._lock:
            self._runner.run(launch)


@pytest.fixture(scope="session")
def emulated_kernels(pytestconfig: pytest.Config) -> Iterator[LaunchedKernels]:
    """The CUDA sources under g++, for bfloat16 and head sizes of 64 and the tiny model's."""
    specs = [write_spec(16), copy_spec(16)]
    for head_dim in (64, HEAD_DIM):
        specs += [
            decode_build(BF16, BF16, head_dim, H200).spec,
            prefill_build(BF16, BF16, head_dim).spec,
            combine_spec(BF16, head_dim),
        ]
    missing = "no g++ found: apt-get install g++" if find_compiler() is None else None
    try:
        headers = find_cuda_headers()
    except CudaHeadersMissing as error:
        missing = str(error)
    if missing is not None:
        # In CI everything that these tests need is installed.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    runner = EmulatedRunner(
        start_build(specs, "plain", headers, pytestconfig.rootpath / ".cache" / "kernels")
    )
    yield LaunchedKernels(OneAtATime(runner))
    runner.close()
    runner.build.stop()
