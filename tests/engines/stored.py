"""What scenarios ask a store, and what they do to it."""

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore import KVStore, Part
from tests.store_process import StoreProcess


def address(store: StoreProcess) -> str:
    """Return a store's address as a connector takes it."""
    return f"unix:{store.socket_path}"


def await_blocks(store: StoreProcess, count: int, *, patience_s: float = 60.0) -> bool:
    """Wait until a store has so many blocks: saves are made in the background. Says whether it has them."""
    until_s = time.monotonic() + patience_s
    with KVStore.connect(store.socket_path) as client:
        while time.monotonic() < until_s:
            if client.stats()["tiers"]["dram"]["blocks"] >= count:
                return True
            time.sleep(0.02)
    return False


def corrupt_blocks(store: StoreProcess) -> int:
    """Return how many blocks a store has found damaged."""
    with KVStore.connect(store.socket_path) as client:
        return sum(client.stats()["corrupt_blocks"].values())


def page_hashes(prompt: Sequence[int], *, page: int = 32) -> list[bytes]:
    """Return SGLang's hashes of a prompt's full pages: each of the digest before it and its own tokens."""
    found: list[bytes] = []
    before = b""
    for start in range(0, len(prompt) // page * page, page):
        tokens = b"".join(token.to_bytes(4, "little") for token in prompt[start : start + page])
        before = hashlib.sha256(before + tokens).digest()
        found.append(before)
    return found


def drop_pages(
    store: StoreProcess, prompts: Sequence[Sequence[int]], *, part: Part | None = None, first: int = 0
) -> int:
    """Have a store forget SGLang's pages from page first on; returns of how many it had any."""
    with KVStore.connect(store.socket_path) as client:
        return sum(
            client.drop(namespace.chain_of_hashes(page_hashes(prompt))[first:], part=part)
            for namespace in map(client.open_namespace, client.namespaces())
            for prompt in prompts
        )


@contextmanager
def stuttering(store: StoreProcess, *, away_s: float = 0.06, there_s: float = 0.01) -> Iterator[None]:
    """Have a store stand still most of the time."""
    ended = threading.Event()

    def stutter() -> None:
        while not ended.wait(there_s):
            store.pause()
            time.sleep(away_s)
            store.resume()

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
