"""How much memory there is left for this process, by the system and by its control group."""

from pathlib import Path

_RESERVED_BYTES = 64 << 20


def memory_room_bytes() -> int | None:
    """Return the smaller of the two; None where neither is known."""
    known = [room for room in (available_bytes(), cgroup_room_bytes()) if room is not None]
    return min(known, default=None)


def available_bytes() -> int | None:
    """Return what the system can still give, None where that is not known."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 - _RESERVED_BYTES
    return None


def cgroup_room_bytes() -> int | None:
    """Return the room under the memory limit of the own control group (version 2), None without a limit."""
    try:
        name = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[2].lstrip("/")
        folder = Path("/sys/fs/cgroup") / name
        limit = (folder / "memory.max").read_text().strip()
        current = int((folder / "memory.current").read_text())
        parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = int(parts.get("inactive_file", 0))
    except (OSError, IndexError, ValueError):
        return None
    return None if limit == "max" else int(limit) - current + reclaimable
