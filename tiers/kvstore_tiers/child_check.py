"""Running a check in a child process, which dies in the store's stead, and is told none of its secrets."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PASSED_ON = ("PATH", "HOME", "TMPDIR", "TZ")
_PASSED_ON_PREFIXES = ("PYTHON", "LD_", "LC_", "LANG", "COVERAGE_")


def run_check(
    module: str, words: Sequence[str], *, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> "subprocess.CompletedProcess[bytes]":
    """Run a module with these arguments, and return how it ended.

    It gets what Python needs of the environment, and no more: secrets that lie there would be readable in its
    memory, and in the core dump of a child that dies as it is meant to.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *words],
        capture_output=True,
        timeout=timeout_s,
        check=False,
        env=bare_environment(environ),
    )


def bare_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that holds no secrets."""
    return {
        name: value
        for name, value in environ.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
