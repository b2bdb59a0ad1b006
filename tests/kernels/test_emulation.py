"""The emulation finds the mistakes that it is there to find."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore_kernels.launching import KernelSpec, Launch, Written
from tests.kernels.conftest import not_possible
from tests.kernels.emulator import FLAGS, Build, EmulatedRunner, EmulationFailed, find_compiler, start_build

THREADS = 64
NONE, NO_BARRIER, MISSED_BARRIER, TWO_BARRIERS, MISSED_SHUFFLE, EARLY, UNAWAITED = range(7)
BEHIND_BUFFER, BEHIND_SHARED, MISALIGNED, OVERFLOW, CONFLICT = range(7, 12)
SPECS = [KernelSpec("faults.cu", THREADS, (("FAULT", fault),)) for fault in range(12)]


@pytest.fixture(scope="module")
def builds(cuda_headers: Path, pytestconfig: pytest.Config) -> Iterator[dict[str, Build]]:
    if find_compiler() is None:
        not_possible("no g++ found: apt-get install g++")
    folder = pytestconfig.rootpath / ".cache" / "kernels"
    builds = {kind: start_build(SPECS, kind, cuda_headers, folder) for kind in FLAGS}
    yield builds
    for build in builds.values():
        build.stop()


def run(build: Build, fault: int, seed: int = 0) -> tuple[torch.Tensor, EmulatedRunner]:
    runner = EmulatedRunner(build, seed=seed)
    # Four numbers for each thread where 16 bytes are copied, one where not.
    size = 4 * THREADS if fault in (EARLY, UNAWAITED, MISALIGNED) else THREADS
    numbers = torch.arange(size, dtype=torch.int32) + 1
    out = torch.zeros(THREADS, dtype=torch.int32)
    shared_bytes = 4 * 32 * THREADS if fault == CONFLICT else 16 * THREADS
    try:
        runner.run(Launch(SPECS[fault], (1, 1, 1), (numbers, Written(out), np.int32(THREADS)), shared_bytes))
    finally:
        runner.close()
    return out, runner


@pytest.mark.parametrize("kind", FLAGS)
def test_a_right_kernel_runs(builds: dict[str, Build], kind: str) -> None:
    for seed in range(10):
        out, _ = run(builds[kind], NONE, seed)
        assert out.tolist() == [*range(2, THREADS + 1), 1]


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (MISSED_BARRIER, "wait for each other for ever: __syncthreads line"),
        (TWO_BARRIERS, "meets one at line"),
        (MISSED_SHUFFLE, "wait for each other for ever"),
        (UNAWAITED, "asynchronous copies"),
        (BEHIND_SHARED, "outside the block's shared memory"),
        (MISALIGNED, "no multiple of 16"),
    ],
)
def test_a_mistake_stops_the_run(builds: dict[str, Build], kind: str, fault: int, words: str) -> None:
    with pytest.raises(EmulationFailed, match=words):
        # Copies are late under an odd seed; a run counts before it uses its seed.
        run(builds[kind], fault, seed=0)


@pytest.mark.parametrize(
    ("fault", "words"), [(BEHIND_BUFFER, "heap-buffer-overflow"), (OVERFLOW, "signed integer overflow")]
)
def test_the_sanitizers_stop_the_run(builds: dict[str, Build], fault: int, words: str) -> None:
    with pytest.raises(EmulationFailed, match=words):
        run(builds["sanitized"], fault)


@pytest.mark.parametrize("fault", [NO_BARRIER, EARLY])
def test_shared_memory_that_was_not_written_holds_nan(builds: dict[str, Build], fault: int) -> None:
    """In some order of events, that is: some seeds must show it."""
    seen = [run(builds["plain"], fault, seed)[0] for seed in range(10)]
    assert any((out == -1).any() for out in seen)


def test_bank_conflicts_are_counted(builds: dict[str, Build]) -> None:
    _, runner = run(builds["plain"], CONFLICT)
    assert runner.conflicts[SPECS[CONFLICT].name, "load", 4] == 31
