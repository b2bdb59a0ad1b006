"""EmulatedRunner: the shipped CUDA sources, built by g++ and run on the CPU (see emulation.h).

The headers of CUDA's number types come from an installed package or toolkit when a test runs; none is kept
here.
"""

import contextlib
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import torch

from kvstore_kernels.launching import SOURCE_DIR, Argument, DeviceLimits, KernelSpec, Launch, Written
from tests.kernels.specs import H200

HERE = Path(__file__).parent
FLAGS = {
    "plain": ["-O2"],
    # Without vectorised loops the sanitizers see each access.
    "sanitized": [
        "-O1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
    ],
}
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0:abort_on_error=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class EmulationFailed(AssertionError):
    """The emulation or a sanitizer stopped a kernel; the message is what it printed."""


def program_source(specs: Sequence[KernelSpec]) -> str:
    """One translation unit that holds every spec's kernel and serves launches of them."""
    parts = ['#include "harness.h"']
    for spec in specs:
        parts += spec.lines()
        parts.append(f'#include "{spec.source}"')
        parts += [f"#undef {name}" for name in ("KERNEL_NAME", *(name for name, _ in spec.macros))]
    parts.append("int main() {")
    parts += [f'    harness::kernels()["{spec.name}"] = harness::kernel(&{spec.name});' for spec in specs]
    parts += ["    return harness::serve();", "}"]
    return "\n".join(parts) + "\n"


def start_build(specs: Sequence[KernelSpec], build: str, headers: Path, folder: Path) -> "Build":
    """Start to build the program for these specs; ``Build.finish`` waits for it."""
    source = program_source(specs)
    digest = hashlib.sha256((source + repr(FLAGS[build])).encode())
    for path in sorted([*SOURCE_DIR.iterdir(), HERE / "emulation.h", HERE / "harness.h"]):
        digest.update(path.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"{build}-{digest.hexdigest()[:16]}"
    if program.exists():
        return Build(program, None, program)
    text = folder / f"{program.name}-{os.getpid()}.cpp"
    text.write_text(source)
    unfinished = folder / f"{program.name}-{os.getpid()}"
    command = ["g++", "-std=c++17", "-Wall", "-Wno-unknown-pragmas", "-Wno-subobject-linkage"]
    command += ["-D__CUDA_NO_HALF_CONVERSIONS__=0", *FLAGS[build]]
    command += [
        "-I",
        str(HERE),
        "-I",
        str(SOURCE_DIR),
        "-isystem",
        str(headers),
        str(text),
        "-o",
        str(unfinished),
    ]
    with unfinished.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    return Build(program, process, unfinished)


@dataclass
class Build:
    """A build that is under way or done."""

    program: Path
    process: "subprocess.Popen[bytes] | None"
    unfinished: Path

    def stop(self) -> None:
        """End a build that nobody waited for."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def finish(self) -> Path:
        """Return the program once it is built."""
        if self.process is not None:
            assert self.process.wait() == 0, self.unfinished.with_suffix(".log").read_text()[:8000]
            self.unfinished.rename(self.program)
            self.process = None
        return self.program


def find_compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which("g++")


@dataclass
class EmulatedRunner:
    """Runs launches in a child process; ``seed`` chooses one of the legal orders of events."""

    build: Build
    limits: DeviceLimits = H200
    seed: int = 0
    conflicts: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _process: "subprocess.Popen[bytes] | None" = None

    def run(self, launch: Launch) -> None:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        self.seed += 1
        try:
            process.stdin.write(_encoded(launch, self.seed))
            process.stdin.flush()
            self._read_conflicts(launch.spec.name, process.stdout)
            for argument in launch.arguments:
                if isinstance(argument, Written):
                    _put_bytes(argument.tensor, _read(process.stdout, _extent_bytes(argument.tensor)))
        except (BrokenPipeError, EOFError):
            raise EmulationFailed(self._last_words()) from None

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._stderr.close()
            self._process = None

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            program = self.build.finish()
            self._stderr = (program.parent / f"{program.name}-{os.getpid()}.stderr").open("w+b")
            self._process = subprocess.Popen(
                [str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, **SANITIZER_OPTIONS},
            )
        return self._process

    def _read_conflicts(self, name: str, source: IO[bytes]) -> None:
        (count,) = struct.unpack("<I", _read(source, 4))
        for _ in range(count):
            (length,) = struct.unpack("<I", _read(source, 4))
            what = _read(source, length).decode()
            width, passes = struct.unpack("<2I", _read(source, 8))
            key = (name, what, width)
            self.conflicts[key] = max(self.conflicts.get(key, 0), passes)

    def _last_words(self) -> str:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        status = process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace")
        self._stderr.close()
        process.stdout.close()
        # What was not yet written into the pipe of the dead child goes nowhere.
        os.set_blocking(process.stdin.fileno(), False)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return f"status {status}: {words[:4000]}"


def _read(source: IO[bytes], size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise EOFError
    return data


def _encoded(launch: Launch, seed: int) -> bytes:
    name = launch.spec.name.encode()
    parts = [struct.pack("<I", len(name)), name]
    parts.append(struct.pack("<6I", *launch.grid, launch.spec.threads, 1, 1))
    parts.append(struct.pack("<2QI", launch.shared_bytes, seed, len(launch.arguments)))
    parts += [_encoded_argument(argument) for argument in launch.arguments]
    return b"".join(parts)


def _encoded_argument(argument: Argument) -> bytes:
    if argument is None:
        return struct.pack("<IQ", 3, 0)
    if isinstance(argument, np.generic):
        return struct.pack("<IQ", 0, argument.nbytes) + argument.tobytes()
    if isinstance(argument, Written):
        return _encoded_buffer(2, argument.tensor)
    return _encoded_buffer(1, argument)


def _encoded_buffer(kind: int, tensor: torch.Tensor) -> bytes:
    data = _bytes(tensor).numpy().tobytes()
    return struct.pack("<IQ", kind, len(data)) + data


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a view's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    start = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole[start : start + _extent_bytes(tensor)]


def _put_bytes(tensor: torch.Tensor, data: bytes) -> None:
    if data:
        _bytes(tensor).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
