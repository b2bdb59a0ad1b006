"""A process full of clients that connect, work and die at random, until it is killed or told to end."""

import hashlib
import json
import random
import sys
import threading

import numpy as np
import numpy.typing as npt

from kvstore import KVLayout, KVStore, Lease, Namespace, PrefixChain, Reservation, Timeouts

BLOCK_BYTES = 8192
CHURN_SPACE = Namespace("churn", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4))
_TIMES = Timeouts(match_s=20, fetch_s=20, put_s=20, control_s=20)
_SEQUENCES = 512


def payload(key: bytes) -> npt.NDArray[np.uint8]:
    """What the block of a key holds."""
    return np.frombuffer(hashlib.sha256(key).digest() * (BLOCK_BYTES // 32), np.uint8)


class ChurningClient:
    """One client with what it happens to hold."""

    def __init__(self, path: str, choose: random.Random) -> None:
        self.store = KVStore.connect(path, timeouts=_TIMES, is_read_only=choose.random() < 0.2)
        self.store.open_namespace(CHURN_SPACE)
        self._is_read_only = self.store._is_read_only
        self._choose = choose
        self._leases: list[Lease] = []
        self._reservations: list[Reservation] = []

    def work(self) -> int:
        """Make one call at random; returns how many blocks had wrong bytes."""
        chain = self._chain()
        verb = self._choose.choice(("put", "get", "match", "lease", "exists", "reserve", "release", "drop"))
        if verb in ("put", "reserve", "drop") and self._is_read_only:
            verb = "get"
        wrong: int = getattr(self, f"_{verb}")(chain)
        return wrong

    def die(self) -> None:
        """End with whatever it holds, sometimes giving it back before."""
        if self._choose.random() < 0.3:
            for lease in self._leases:
                lease.release()
        self.store.close()

    def _chain(self) -> PrefixChain:
        start = self._choose.randrange(_SEQUENCES) * 1000
        return CHURN_SPACE.chain(range(start, start + 4 * self._choose.randint(1, 8)))

    def _put(self, chain: PrefixChain) -> int:
        for _ in range(self._choose.randint(1, 3)):  # from the second on there may be slots lent ahead
            self.store.put(chain, [payload(key) for key in chain.keys])
            chain = self._chain()
        return 0

    def _get(self, chain: PrefixChain) -> int:
        blocks = self.store.get(chain)
        return sum(
            not np.array_equal(block, payload(key)) for key, block in zip(chain.keys, blocks, strict=False)
        )

    def _match(self, chain: PrefixChain) -> int:
        if self._choose.random() < 0.5:
            self._leases.append(self.store.match(chain, lease=True).lease)
        else:
            self.store.match(chain)
        return 0

    def _lease(self, chain: PrefixChain) -> int:
        lease = self.store.lease(chain)
        self._leases.append(lease)
        copies = [np.frombuffer(view, np.uint8).copy() for view in self.store.view(lease)]
        if not lease.is_valid():
            return 0
        return sum(
            not np.array_equal(copy, payload(key)) for key, copy in zip(chain.keys, copies, strict=False)
        )

    def _exists(self, chain: PrefixChain) -> int:
        self.store.exists(chain)
        return 0

    def _reserve(self, chain: PrefixChain) -> int:
        blocks = self.store.reserve(chain)
        end = self._choose.random()
        if end < 0.2:
            self._reservations.append(blocks)
            return 0
        for block in blocks:
            block.array[:] = payload(block.key)
        blocks.commit() if end < 0.8 else blocks.abandon()
        return 0

    def _release(self, _: PrefixChain) -> int:
        if self._leases:
            lease = self._leases.pop(self._choose.randrange(len(self._leases)))
            lease.renew() if self._choose.random() < 0.3 else lease.release()
        return 0

    def _drop(self, chain: PrefixChain) -> int:
        if self._choose.random() < 0.2:
            self.store.drop(chain)
        return 0


def main(path: str, num_clients: int, seed: int) -> None:
    """Churn until stdin ends, then say what was done and seen."""
    choose = random.Random(seed)
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    clients: list[ChurningClient] = []
    lives = calls = wrong = 0
    while not is_over.is_set():
        if len(clients) < num_clients:
            clients.append(ChurningClient(path, choose))
            lives += 1
        at = choose.randrange(len(clients))
        wrong += clients[at].work()
        calls += 1
        if choose.random() < 0.02:
            clients.pop(at).die()
    sys.stdout.write(json.dumps({"lives": lives, "calls": calls, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
