"""Compiling the engine's C++ for the CPU it runs on, once per machine, compiler and source."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_COMPILERS = ("c++", "g++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
_COMPILE_S = 120.0
_CPU_FIELDS = ("flags", "Features", "model name")


def load_library(source: Path, folder: Path) -> ctypes.CDLL | None:
    """Return ``source`` compiled, from ``folder`` if it is there; None if that cannot be. Blocks for seconds.

    The vector types of the source are GCC's. Nothing is loaded from a folder that others can write to.
    """
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if compiler is None:
        logger.info(
            "engine: no C++ compiler (g++) is installed: attention runs through torch, which is slower"
        )
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(folder)
        target = folder / f"{source.stem}-{_fingerprint(source, compiler)}.so"
        if not target.exists():
            _compile(compiler, source, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr[-400:] if isinstance(error, subprocess.CalledProcessError) else error
        logger.warning(
            "engine: %s cannot be compiled: attention runs through torch, which is slower: %s",
            source.name,
            detail,
        )
        return None


def _compile(compiler: str, source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *_FLAGS, str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        made.replace(target)


def _refuse_shared(folder: Path) -> None:
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder}: it is another user's, or others may write to it: chmod go-w, or remove it")


def _fingerprint(source: Path, compiler: str) -> str:
    """Return what a compiled file is good for: this source, compiler and kind of CPU."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_COMPILE_S)
    sha = hashlib.sha256()
    for part in (source.read_bytes(), version.stdout, " ".join(_FLAGS).encode(), _cpu()):
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.hexdigest()[:32]


def _cpu() -> bytes:
    about = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for field in _CPU_FIELDS:
        about += [line for line in lines if line.split(":")[0].strip() == field][:1]
    return "\n".join(about).encode()
