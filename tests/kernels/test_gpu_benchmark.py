"""The benchmark for a GPU machine: its cases are right, run small on the CPU; without a GPU it says so."""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels.conftest import UnderTest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks are not part of the wheel")


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_kernels"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def wall_time_us(work: Callable[[int], object]) -> float:
    started = time.perf_counter()
    work(0)
    return (time.perf_counter() - started) * 1e6


@pytest.mark.parametrize("under_test", ["plain"], indirect=True)
def test_every_kind_of_case_is_right_on_the_emulation(under_test: UnderTest) -> None:
    script = loaded()
    model = script.Model(4, 2, 64)
    bench = script.Bench(under_test.kernels, under_test.device, wall_time_us, places=8)
    bench.measure_ceilings(copy_bytes=1 << 16, matmul_size=16)
    script.moves(bench, model, 4)
    script.write(bench, model, 20)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        script.decode(bench, model, [40, 17, 600], dtype)
        script.prefill(bench, model, 33, 20, dtype)

    assert len(bench.rows) == 9
    assert [row.name for row in bench.rows if not row.is_right] == []
    assert all(row.rate > 0 for row in bench.rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "no CUDA device" in done.stderr
