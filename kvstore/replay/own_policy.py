"""A policy of the user's own, from a Python file named on the command line: ``mine.py:Policy``."""

import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest


def load_class(where: str) -> Callable[..., Any]:  # Any: whatever the file has under that name
    """Run the file before the last colon and return what it calls by the name after it.

    Raises:
        InvalidRequest: there is no such file or name, it is no class, or the file fails.
    """
    path_text, _, name = where.rpartition(":")
    if not path_text or not name.isidentifier():
        raise InvalidRequest(f"--policy {where}: expected FILE.py:CLASS")
    path = Path(path_text)
    if not path.is_file():
        raise InvalidRequest(f"--policy {where}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"kvstore_own_policy_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"--policy {where}: {path} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script of the user's may end itself
        raise InvalidRequest(f"--policy {where}: {describe(error, path)}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise InvalidRequest(f"--policy {where}: {path} has no class {name}: {_classes(module)}")
    return found


def describe(error: BaseException, path: Path) -> str:
    """Say in one line what failed, and in which line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
    lines += [frame.lineno for frame in frames if Path(frame.filename) == path]
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    place = f"{path}:{lines[-1]}" if lines else str(path)
    return f"{place}: {type(error).__name__}: {error}"


def _classes(module: object) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, type) and name[0] != "_"]
    return f"its classes are {', '.join(names)}" if names else "it has no classes"
