"""PoolStore: the pages of one host pool in the store: found, loaded and saved, in the caller's thread.

SGLang calls from threads of its own: one asks, one loads, one saves, and its scheduler waits for none of them
longer than its prefetch policy says. So each call here may wait for the store, up to its deadline.
A store that does not answer is not asked for a while (``StoreBreaker``, one for all calls of an engine).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from kvstore.client import KVStore
from kvstore.keys import PrefixChain
from kvstore.miss import MissReason
from kvstore_engine_adapter.counts import Counts
from kvstore_engine_adapter.prefix_lookups import LATE, STORE_AWAY
from kvstore_engine_adapter.sglang.identity import PoolIdentity
from kvstore_engine_adapter.sglang.options import BackendOptions
from kvstore_engine_adapter.sglang.pages import HostPages, Payload
from kvstore_engine_adapter.store_breaker import StoreBreaker

T = TypeVar("T")

_WINDOW_BYTES = 16 << 20
_MAX_KEYS = 4096
_BYTE_S = 5e-9


class PoolStore:
    """One pool's pages in one store. Calls may come from any thread; none raises what a store can cause."""

    def __init__(
        self,
        client: KVStore,
        identity: PoolIdentity,
        pages: HostPages,
        options: BackendOptions,
        *,
        breaker: StoreBreaker,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pages = pages
        self._client = client
        self._identity = identity
        self._options = options
        self._breaker = breaker
        self._counts = counts
        self._clock = clock

    def find(self, hashes: Sequence[str], before: Sequence[str] | None = None) -> int:
        """Return how many leading pages are stored.

        ``hashes`` are SGLang's, hexadecimal; ``before`` those of all pages before them, None: not known.
        """
        if not self._may_ask(len(hashes)):
            return 0
        self._counts.add("lookups")
        until_s = self._clock() + self._options.lookup_deadline_ms / 1000
        found = 0
        chain = self._chain(hashes, before)
        while found < len(chain):
            left_s = until_s - self._clock()
            if left_s <= 0:
                self._counts.add(f"miss_{LATE}")
                break
            asked = chain[found : found + _MAX_KEYS]
            match = self._ask(partial(self._client.match, asked, part=self._identity.part, timeout_s=left_s))
            found += match.blocks
            if match.blocks < len(asked):
                self._counts.add(f"miss_{_text(match.reason)}")
                break
        self._counts.add("found_pages", found)
        return found

    def find_each(self, hashes: Sequence[str]) -> list[bool]:
        """Say for each page whether it is stored."""
        if not self._may_ask(len(hashes)):
            return [False] * len(hashes)
        self._counts.add("lookups")
        until_s = self._clock() + self._options.lookup_deadline_ms / 1000
        chain = self._chain(hashes, None)
        there: list[bool] = []
        while len(there) < len(chain):
            left_s = until_s - self._clock()
            if left_s <= 0:
                self._counts.add(f"miss_{LATE}")
                break
            asked = chain[len(there) : len(there) + _MAX_KEYS]
            there += self._ask(
                partial(self._client.exists, asked, part=self._identity.part, timeout_s=left_s)
            )
        self._counts.add("found_pages", sum(there))
        return there + [False] * (len(chain) - len(there))

    def load(
        self,
        hashes: Sequence[str],
        write: Callable[[int, Payload], None],
        before: Sequence[str] | None = None,
    ) -> int:
        """Call ``write`` with the position and the checked bytes of leading pages; returns of how many.

        The bytes are the caller's until ``write`` returns.
        """
        if not self._may_ask(len(hashes)):
            return 0
        size_bytes = self.pages.page_bytes
        until_s = self._clock() + self._options.load_deadline_ms / 1000 + len(hashes) * size_bytes * _BYTE_S
        step = max(1, min(len(hashes), _WINDOW_BYTES // size_bytes, _MAX_KEYS))
        buffer = np.empty((step, size_bytes), np.uint8)
        chain, loaded = self._chain(hashes, before), 0
        while loaded < len(chain):
            left_s = until_s - self._clock()
            if left_s <= 0:
                self._counts.add(f"load_{LATE}")
                break
            asked = chain[loaded : loaded + step]
            rows = list(buffer[: len(asked)])
            result = self._ask(
                partial(self._client.fetch_into, asked, rows, part=self._identity.part, timeout_s=left_s)
            )
            for at in range(result.blocks):
                write(loaded + at, buffer[at])
            loaded += result.blocks
            if result.blocks < len(asked):
                self._counts.add(f"load_{_text(result.reason)}")
                break
        self._counts.add("loaded_pages", loaded)
        self._counts.add("failed_pages", len(chain) - loaded)
        return loaded

    def load_each(self, hashes: Sequence[str], write: Callable[[int, Payload], None]) -> list[bool]:
        """Load pages that need not follow one another; says of each whether ``write`` was called."""
        done = [False] * len(hashes)

        def write_one(at: int, payload: Payload) -> None:
            write(at, payload)
            done[at] = True

        start = 0
        while start < len(hashes):
            loaded = self.load(hashes[start:], _shifted(write_one, start))
            start += loaded + 1
        return done

    def save(
        self, hashes: Sequence[str], payloads: Sequence[Payload], before: Sequence[str] | None = None
    ) -> list[bool]:
        """Store pages; says of each whether it is stored now."""
        if self._options.is_read_only:
            return [True] * len(hashes)
        if any(payload.nbytes != self.pages.page_bytes for payload in payloads):
            self._counts.add("refused_pages", len(hashes))
            return [False] * len(hashes)
        if not self._may_ask(len(hashes)):
            self._counts.add("dropped_pages", len(hashes))
            return [False] * len(hashes)
        size_bytes = len(hashes) * self.pages.page_bytes
        timeout_s = self._options.save_deadline_ms / 1000 + size_bytes * _BYTE_S
        chain, part = self._chain(hashes, before), self._identity.part
        result = self._ask(partial(self._client.put, chain, list(payloads), part=part, timeout_s=timeout_s))
        self._counts.add("saved_pages", result.stored)
        self._counts.add("present_pages", result.present)
        self._counts.add("dropped_pages", result.dropped)
        doubtful = set(result.doubtful)
        return [at not in doubtful for at in range(len(hashes))]

    def _may_ask(self, num_pages: int) -> bool:
        if not num_pages:
            return False
        if self._breaker.may_ask():
            return True
        self._counts.add(f"miss_{STORE_AWAY}")
        return False

    def _ask(self, call: Callable[[], T]) -> T:
        """Make a call, and learn from it whether the store is there.

        The reason of a miss would not say: it may be that of a slower tier behind a store that has answered.
        Another thread's failure in the meantime counts too, for it is the same store's.
        """
        before = self._num_unanswered()
        result = call()
        self._breaker.note(is_away=self._num_unanswered() > before)
        return result

    def _num_unanswered(self) -> int:
        stats = self._client.client_stats()
        return stats.timeouts + stats.unavailable

    def _chain(self, hashes: Sequence[str], before: Sequence[str] | None) -> PrefixChain:
        """Name pages. The page before them, where it is known, is the parent of the first."""
        known = bytes.fromhex
        if not before:
            return self._identity.namespace.chain_of_hashes([known(one) for one in hashes])
        whole = self._identity.namespace.chain_of_hashes([known(one) for one in (before[-1], *hashes)])
        return PrefixChain(whole.namespace, whole.keys[1:], whole.block_tokens, len(before), whole.keys[0])


def _shifted(write: Callable[[int, Payload], None], start: int) -> Callable[[int, Payload], None]:
    return lambda at, payload: write(start + at, payload)


def _text(reason: MissReason | None) -> str:
    return "unknown" if reason is None else reason.value
