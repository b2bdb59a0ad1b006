"""Journal: what the store said is durable, so that a loss can be told from a counted eviction."""

import threading
from collections.abc import Callable, Collection, Iterable

from kvstore.keys import BlockKey, PrefixChain


class Journal:
    """Chains whose blocks the store acknowledged as durable, and what the drill itself did to them.

    A block is excused when the drill damaged its only durable copy: it may be a miss from then on, and still
    must never be wrong. ``position`` says how far a log had got that is kept beside. Thread-safe.
    """

    def __init__(self) -> None:
        self.position: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        self._durable: dict[BlockKey, PrefixChain] = {}
        self._noted_at: dict[BlockKey, int] = {}
        self._excused: set[BlockKey] = set()
        self._counted_evictions = 0

    def note_durable(self, chain: PrefixChain) -> None:
        """Remember that every block of a chain was acknowledged as durable."""
        position = self.position()
        with self._lock:
            self._durable[chain.keys[0]] = chain
            self._noted_at[chain.keys[0]] = position

    def note_evicted(self, count: int) -> None:
        """Remember how many durable blocks the store says it evicted, since the last call of ``settle``."""
        with self._lock:
            self._counted_evictions += count

    def excuse(self, keys: Iterable[BlockKey]) -> None:
        """Allow that these blocks are gone: the drill damaged them."""
        with self._lock:
            self._excused.update(keys)

    def is_excused(self, key: BlockKey) -> bool:
        """Whether the block may be gone."""
        with self._lock:
            return key in self._excused

    def excuse_all(self) -> None:
        """Allow that every block remembered so far is gone."""
        self.excuse([key for chain in self.durable_chains() for key in chain.keys])

    def forget(self, chain: PrefixChain) -> None:
        """Promise nothing about a chain any more."""
        with self._lock:
            self._durable.pop(chain.keys[0], None)
            self._excused.difference_update(chain.keys)

    def forget_after(self, position: int) -> None:
        """Promise nothing about chains that were acknowledged when the log was longer than that."""
        with self._lock:
            for key in [key for key in self._durable if self._noted_at[key] > position]:
                del self._durable[key]

    def durable_chains(self) -> list[PrefixChain]:
        """Return the chains that were acknowledged, oldest first."""
        with self._lock:
            return list(self._durable.values())

    @property
    def num_blocks(self) -> int:
        """Blocks remembered as durable."""
        return sum(map(len, self.durable_chains()))

    def settle(self, missing: Collection[BlockKey]) -> tuple[list[BlockKey], list[PrefixChain]]:
        """Return the missing blocks that nothing accounts for, and the chains with a missing block.

        Excused blocks are accounted for, and so are as many others as evictions were counted. Nothing is
        promised about those chains any more.
        """
        with self._lock:
            unexcused = [key for key in missing if key not in self._excused]
            lost = unexcused[self._counted_evictions :]
            self._counted_evictions = 0
            gone = set(missing)
            incomplete = [chain for chain in self._durable.values() if gone.intersection(chain.keys)]
            for chain in incomplete:
                del self._durable[chain.keys[0]]
            return lost, incomplete
