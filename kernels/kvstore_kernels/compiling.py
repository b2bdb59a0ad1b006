"""Compilers of the CUDA sources, and KernelBinaries, which keeps what they make."""

import hashlib
import importlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvstore.errors import KVStoreError
from kvstore_kernels.binary_cache import BinaryCache
from kvstore_kernels.cuda_headers import NEEDED, find_cuda_headers
from kvstore_kernels.launching import SOURCE_DIR, KernelSpec

STANDARD = "-std=c++17"


class KernelsUnavailable(KVStoreError):
    """The kernels cannot be compiled or run here: no compiler, no device, or an error that it reports."""


class Compiler(Protocol):
    """Makes device code (cubin) of CUDA C++."""

    @property
    def version(self) -> str:
        """Name and version; a part of what identifies a binary."""

    def compile(self, source: str, architecture: str) -> bytes:
        """Return the cubin.

        Args:
            source: one translation unit; it includes files of this package and CUDA's number headers.
            architecture: such as ``sm_90``.

        Raises:
            KernelsUnavailable: the source does not compile.
        """


class NvrtcCompiler:
    """NVRTC by CuPy's low-level module; needs no driver and no device."""

    def __init__(self, headers: Path) -> None:
        self._headers = headers

    @property
    def version(self) -> str:
        """Name and version."""
        return "nvrtc {}.{}".format(*_nvrtc().getVersion())

    def compile(self, source: str, architecture: str) -> bytes:
        """Return the cubin; see Compiler."""
        nvrtc = _nvrtc()
        options = (STANDARD, f"-arch={architecture}", f"-I{SOURCE_DIR}", f"-I{self._headers}")
        program = nvrtc.createProgram(source, "kernel.cu", (), ())
        try:
            nvrtc.compileProgram(program, options)
            return bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelsUnavailable(f"NVRTC for {architecture}: {error}: {log[:2000]}") from error
        finally:
            nvrtc.destroyProgram(program)


class NvccCompiler:
    """nvcc as a child process, for compiling ahead of time."""

    def __init__(self, nvcc: Path, headers: Path) -> None:
        self._nvcc = nvcc
        self._headers = headers

    @property
    def version(self) -> str:
        """Name and version."""
        lines = self._run(["--version"]).stdout.strip().splitlines()
        return f"nvcc {lines[-1]}" if lines else "nvcc"

    def compile(self, source: str, architecture: str) -> bytes:
        """Return the cubin; see Compiler."""
        return self.compile_with_report(source, architecture)[0]

    def compile_with_report(self, source: str, architecture: str) -> tuple[bytes, str]:
        """Return the cubin, and what the assembler says about registers and spills.

        Raises:
            KernelsUnavailable: the source does not compile.
        """
        with tempfile.TemporaryDirectory() as folder:
            text, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
            text.write_text(source)
            includes = ["-I", str(SOURCE_DIR), "-I", str(self._headers)]
            arguments = [STANDARD, "-cubin", f"-arch={architecture}", "-Xptxas", "-v", *includes]
            done = self._run([*arguments, str(text), "-o", str(cubin)])
            if done.returncode:
                raise KernelsUnavailable(f"nvcc for {architecture}: {done.stderr[:2000]}")
            return cubin.read_bytes(), done.stderr

    def _run(self, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
        try:
            return subprocess.run(
                [str(self._nvcc), *arguments],
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise KernelsUnavailable(f"nvcc: {error}") from error


class KernelBinaries:
    """Cubins of specs for one architecture: from the cache, else compiled and put there.

    A binary is identified by the sources, CUDA's headers, the spec, the architecture and the compiler; one
    that was put there ahead of time (see `keep_ahead`) by the sources, the spec and the architecture alone.
    """

    def __init__(self, compiler: Compiler | None, cache: BinaryCache | None, architecture: str) -> None:
        self._compiler = compiler
        self._cache = cache
        self._architecture = architecture
        self._sources = _digest_of(sorted(SOURCE_DIR.iterdir()))
        self._headers = _digest_of([find_cuda_headers() / name for name in NEEDED]) if compiler else b""

    def get(self, spec: KernelSpec) -> bytes:
        """Return the cubin of one spec.

        Raises:
            KernelsUnavailable: it does not compile, or it is not in the cache and there is no compiler.
        """
        for key in self._keys(spec):
            binary = self._cache.read(key) if self._cache else None
            if binary is not None:
                return binary
        if self._compiler is None:
            raise KernelsUnavailable(
                f"{spec.name} for {self._architecture}: not compiled ahead of time, and there is no NVRTC: "
                "pip install 'tiered-kvstore[gpu]'"
            )
        binary = self._compiler.compile(translation_unit([spec]), self._architecture)
        if self._cache:
            self._cache.write(self._keys(spec)[-1], binary)
        return binary

    def keep_ahead(self, spec: KernelSpec) -> bool:
        """Compile one spec now, for machines that have no compiler; False if it could not be stored.

        Raises:
            KernelsUnavailable: it does not compile, or there is no compiler.
        """
        if self._compiler is None or self._cache is None:
            raise KernelsUnavailable("compiling ahead of time needs a compiler and a cache")
        binary = self._compiler.compile(translation_unit([spec]), self._architecture)
        return self._cache.write(self._keys(spec)[0], binary)

    def _keys(self, spec: KernelSpec) -> list[str]:
        parts = [self._sources, translation_unit([spec]).encode(), self._architecture.encode()]
        if self._compiler is None:
            return [_key(parts)]
        return [_key(parts), _key([*parts, self._headers, self._compiler.version.encode()])]


def translation_unit(specs: Sequence[KernelSpec]) -> str:
    """Source that holds the kernels of these specs."""
    lines: list[str] = []
    for spec in specs:
        lines += spec.lines()
        lines.append(f'#include "{spec.source}"')
        lines += [f"#undef {name}" for name in ("KERNEL_NAME", *(name for name, _ in spec.macros))]
    return "\n".join(lines) + "\n"


def default_cache() -> BinaryCache:
    """The cache in the user's home."""
    return BinaryCache(Path.home() / ".cache" / "kvstore" / "kernels")


def open_nvrtc() -> NvrtcCompiler:
    """Return the run-time compiler.

    Raises:
        KernelsUnavailable: CuPy or NVRTC is not installed.
        CudaHeadersMissing: no headers.
    """
    compiler = NvrtcCompiler(find_cuda_headers())
    try:
        _ = compiler.version
    except (ImportError, RuntimeError, OSError) as error:
        raise KernelsUnavailable(f"NVRTC: {error}: pip install 'tiered-kvstore[gpu]'") from error
    return compiler


def _nvrtc() -> Any:  # CuPy ships no types
    """CuPy's low-level module; it is optional and takes a second to import."""
    return importlib.import_module("cupy.cuda").nvrtc


def _digest_of(paths: Sequence[Path]) -> bytes:
    """One digest of the files' names and contents."""
    return hashlib.sha256(
        b"".join(path.name.encode() + hashlib.sha256(path.read_bytes()).digest() for path in paths)
    ).digest()


def _key(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()
