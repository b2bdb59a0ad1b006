"""Damage to what a running store holds in memory."""

import time

from kvstore.arena_link import ArenaCache
from kvstore.arena_view import ArenaFormat
from kvstore.link import Link, unix_dial
from kvstore.requests import Ping
from tests.store_process import StoreProcess


def damage_memory(store: StoreProcess) -> None:
    """Change one byte in each 4 KiB of all slots, as a client that has gone mad might."""
    deadline_s = time.monotonic() + 30
    link = Link.open(unix_dial(store.socket_path), ArenaCache(), deadline_s)
    link.ask(Ping(), deadline_s)
    assert link.arena is not None
    assert link.arena.writing is not None
    capacity_bytes = store.settings.dram_bytes + store.settings.staging_bytes
    start = ArenaFormat(capacity_bytes=capacity_bytes, instance=bytes(16)).slots_offset
    for offset in range(start, start + capacity_bytes, 4096):
        link.arena.writing.slot(offset, 1)[0] ^= 0xFF
    link.close()
