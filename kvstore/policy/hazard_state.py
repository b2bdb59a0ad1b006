"""What a gittins policy saves of what it learned, read with doubt: a file may say anything."""

import math

from kvstore.policy.hazards import NUM_AGES, ClassPath

STATE_VERSION = 1

_MAX_CLASSES = 4096
_MAX_BUCKET = 64
_MAX_AMOUNT = 1e15


def read_state(state: dict[str, object]) -> list[tuple[ClassPath, list[float], list[float]]]:
    """Return classes with uses and exposure by age.

    Raises:
        ValueError: it is not what was saved, or by another version.
    """
    classes = state.get("classes")
    if state.get("version") != STATE_VERSION or not isinstance(classes, list) or len(classes) > _MAX_CLASSES:
        raise ValueError("not the state of a gittins policy of this version")
    return [_read_class(saved) for saved in classes]


def _read_class(saved: object) -> tuple[ClassPath, list[float], list[float]]:
    if not isinstance(saved, list | tuple) or len(saved) != 3:
        raise ValueError("a class is not a path, uses and exposure")
    path, used, exposure_s = saved
    if not isinstance(path, list | tuple) or len(path) != 4:
        raise ValueError("a class has no path of four")
    if not all(type(part) is int and 0 <= part <= _MAX_BUCKET for part in path):
        raise ValueError("a path has a part that is none")
    return (path[0], path[1], path[2], path[3]), _amounts(used), _amounts(exposure_s)


def _amounts(saved: object) -> list[float]:
    if not isinstance(saved, list | tuple) or len(saved) != NUM_AGES:
        raise ValueError(f"not {NUM_AGES} ages")
    amounts = [float(amount) if type(amount) in (int, float) else math.nan for amount in saved]
    if not all(0 <= amount <= _MAX_AMOUNT for amount in amounts):
        raise ValueError("an age has no amount")
    return amounts
