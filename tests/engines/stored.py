"""What scenarios ask a store."""

import time

from kvstore import KVStore
from tests.store_process import StoreProcess


def address(store: StoreProcess) -> str:
    """Return a store's address as a connector takes it."""
    return f"unix:{store.socket_path}"


def await_blocks(store: StoreProcess, count: int) -> None:
    """Wait until a store has so many blocks: saves are made in the background."""
    until_s = time.monotonic() + 30
    with KVStore.connect(store.socket_path) as client:
        while time.monotonic() < until_s:
            if client.stats()["tiers"]["dram"]["blocks"] >= count:
                return
            time.sleep(0.02)


def corrupt_blocks(store: StoreProcess) -> int:
    """Return how many blocks a store has found damaged."""
    with KVStore.connect(store.socket_path) as client:
        return sum(client.stats()["corrupt_blocks"].values())
