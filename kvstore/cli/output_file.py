"""The file a command writes its result to: replaced whole, or gone; never half new or left from before."""

import contextlib
import os
import stat
from pathlib import Path


def replace_output(path: str, data: memoryview) -> None:
    """Write a file aside and rename it over ``path``; a device or a pipe there is written to as it is.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    if mode is not None and not stat.S_ISREG(mode):
        with target.open("wb") as file:
            file.write(data)
        return
    aside = target.with_name(f".kvstore-get.{os.getpid()}.new")
    try:
        with aside.open("xb") as file:
            file.write(data)
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
        aside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def remove_output(path: str) -> bool:
    """Remove the regular file at ``path``; False if there is none.

    Raises:
        OSError: it cannot be removed.
    """
    target = Path(os.path.realpath(path))
    mode = None if path == "-" else _mode(target)
    if mode is None or not stat.S_ISREG(mode):
        return False
    target.unlink()
    return True


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
