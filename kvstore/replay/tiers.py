"""Several tiers, fastest first, without payloads: what leaves one is written to the next.

A block that is found below is offered to the top like one just computed, and its copy below stays. A victim
of one tier is written to the next if that lacks it, which may refuse or evict in turn; what leaves the last
is gone. All tiers learn of every use, whichever of them served it. ``BlockManager`` does the same.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.policy import Hint, Offer, PolicyCache
from kvstore.tier import StorageKey


class TierSize(NamedTuple):
    """A tier of a replay: its name and how many blocks it holds."""

    name: str
    blocks: int


class TieredCache:
    """Tiers of which each has a policy of its own.

    ``parents`` gives each block's parent, None for the first of a chain; ``size_bytes`` is every block's.
    """

    def __init__(
        self,
        caches: Sequence[PolicyCache],
        parents: Mapping[StorageKey, StorageKey | None],
        *,
        size_bytes: int = 1,
    ) -> None:
        self._caches = caches
        self._parents = parents
        self._size_bytes = size_bytes
        self.hit_blocks = [0] * len(caches)
        self.written_blocks = [0] * len(caches)

    def serve(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint) -> int:
        """Serve a request, and return how many leading blocks were stored in any tier."""
        num_hits = self._count_hits(blocks)
        for cache in self._caches[1:]:
            cache.touch(blocks[:num_hits], now_s=now_s, hint=hint)
            if num_hits < len(blocks):
                parent = blocks[num_hits - 1] if num_hits else None
                cache.pass_by(Offer(blocks[num_hits:], self._size_bytes, parent, hint), now_s=now_s)
        served = self._caches[0].serve(blocks, size_bytes=self._size_bytes, now_s=now_s, hint=hint)
        self.written_blocks[0] += len(served.written)
        leaving: Sequence[StorageKey] = [*served.refused[::-1], *served.evicted]
        for level in range(1, len(self._caches)):
            leaving = self._write_down(level, leaving, now_s, hint)
        return num_hits

    def _count_hits(self, blocks: Sequence[StorageKey]) -> int:
        for at, block in enumerate(blocks):
            level = next((level for level, cache in enumerate(self._caches) if block in cache), None)
            if level is None:
                return at
            self.hit_blocks[level] += 1
        return len(blocks)

    def _write_down(
        self, level: int, leaving: Sequence[StorageKey], now_s: float, hint: Hint
    ) -> list[StorageKey]:
        """Write what a tier lacks of the blocks that leave the one above; returns what leaves this one."""
        cache = self._caches[level]
        gone: list[StorageKey] = []
        for run in self._runs([block for block in leaving if block not in cache]):
            served = cache.store(
                run, size_bytes=self._size_bytes, now_s=now_s, parent=self._parents[run[0]], hint=hint
            )
            self.written_blocks[level] += len(served.written)
            gone += [*served.refused[::-1], *served.evicted]
        return gone

    def _runs(self, leaving: Sequence[StorageKey]) -> list[list[StorageKey]]:
        """Cut blocks that leave children first into pieces of chains, each in chain order."""
        runs: list[list[StorageKey]] = []
        for block in leaving:
            if runs and self._parents[runs[-1][-1]] == block:
                runs[-1].append(block)
            else:
                runs.append([block])
        return [run[::-1] for run in runs]
