"""Damage to what a running store holds in memory."""

import mmap
from pathlib import Path

from kvstore.arena_view import ArenaFormat
from tests.store_process import StoreProcess


def damage_memory(store: StoreProcess) -> None:
    """Change one byte in each 4 KiB of all slots of its arena."""
    capacity_bytes = store.settings.dram_bytes
    start = ArenaFormat(capacity_bytes=capacity_bytes, instance=bytes(16)).slots_offset
    for link in Path(f"/proc/{store.process.pid}/fd").iterdir():
        if str(link.readlink()).startswith("/memfd:"):
            with link.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                for at in range(start, min(len(memory), start + capacity_bytes), 4096):
                    memory[at] ^= 0xFF
