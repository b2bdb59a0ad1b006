"""Traffic: what replicas send to a store, so that every tier is hit and missed."""

import contextlib
import random
import threading

import numpy as np

from kvstore import KVLayout, KVStore, Namespace

BLOCK_BYTES = 16 << 10
LAYOUT = KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=16)
SPACE = Namespace(model="llama-3-8b", layout=LAYOUT)
TURN_BLOCKS = 4


def conversation(number: int, turns: int):
    """The chain of a conversation; all begin with the same system prompt of one turn."""
    tokens = list(range(TURN_BLOCKS * 16))
    tokens += [number * 100_000 + at for at in range((turns - 1) * TURN_BLOCKS * 16)]
    return SPACE.chain(tokens)


class Traffic:
    """Conversations that go on turn by turn, some often and some seldom, until it is stopped."""

    def __init__(self, address, *, conversations: int = 80, pause_s: float = 0.01, seed: int = 1) -> None:
        self._address = address
        self._conversations = conversations
        self._pause_s = pause_s
        self._random = random.Random(seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self.requests = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join(60)

    def _run(self):
        turns: dict[int, int] = {}
        block = np.arange(BLOCK_BYTES, dtype=np.uint32).astype(np.uint8)
        while not self._is_over.is_set():
            # Whatever the store does, a replica goes on.
            with contextlib.suppress(Exception), KVStore.connect(self._address) as store:
                store.open_namespace(SPACE)
                while not self._is_over.is_set():
                    self._turn(store, turns, block)
                    self._is_over.wait(self._pause_s)
            self._is_over.wait(0.1)

    def _turn(self, store, turns, block):
        number = min(int(self._random.paretovariate(0.7)), self._conversations)
        turns[number] = turns.get(number, 0) % 12 + 1
        chain = conversation(number, turns[number])
        found = len(store.get(chain))
        store.put(chain, [block] * len(chain))
        self.requests += 1
        assert found <= len(chain)
