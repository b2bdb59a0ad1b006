"""W-TinyLFU: a small window before a main part that only frequent blocks enter."""

from collections.abc import Iterator
from zlib import crc32

from kvstore.policy.blockwise import BlockwisePolicy, Queue
from kvstore.policy.protocol import Offer
from kvstore.tier import StorageKey

_WINDOW_RATIO = 0.01
_PROTECTED_RATIO = 0.8
_ROWS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_MAX_COUNT = 15
_MIN_WIDTH = 1024
_SAMPLE_PER_BLOCK = 10


class Sketch:
    """How often keys came of late: a count-min sketch of small counters that are halved now and then."""

    def __init__(self) -> None:
        self._rows = [bytearray(_MIN_WIDTH) for _ in _ROWS]
        self._shift = 32 - _MIN_WIDTH.bit_length() + 1
        self._num_added = 0

    def add(self, block: StorageKey) -> None:
        """Count one use."""
        seed = crc32(block)
        least = self.count(block)
        if least < _MAX_COUNT:
            for row, factor in zip(self._rows, _ROWS, strict=True):
                index = ((seed * factor) & 0xFFFFFFFF) >> self._shift
                if row[index] == least:
                    row[index] += 1
        self._num_added += 1
        if self._num_added >= _SAMPLE_PER_BLOCK * len(self._rows[0]):
            self._num_added //= 2
            halves = bytes(value // 2 for value in range(256))
            self._rows = [row.translate(halves) for row in self._rows]

    def count(self, block: StorageKey) -> int:
        """Estimate how often a key was added."""
        seed, shift = crc32(block), self._shift
        return min(
            row[((seed * factor) & 0xFFFFFFFF) >> shift]
            for row, factor in zip(self._rows, _ROWS, strict=True)
        )

    def fit(self, num_blocks: int) -> None:
        """Be wide enough for so many stored blocks; every counter is kept."""
        while len(self._rows[0]) < num_blocks and self._shift > 1:
            # The indices are the high bits of a product: each counter splits into two neighbours.
            self._rows = [bytearray(value for value in row for _ in (0, 1)) for row in self._rows]
            self._shift -= 1


class WTinyLfuPolicy(BlockwisePolicy):
    """W-TinyLFU (Einziger et al., ACM TOS 2017): 1 % window, 99 % segmented LRU behind a frequency filter."""

    may_refuse = True

    def __init__(self, capacity_bytes: int = 0) -> None:
        super().__init__(capacity_bytes)
        self._window, self._probation, self._protected = Queue(), Queue(), Queue()
        self._sketch = Sketch()

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield, of the window's excess and the main part's least, the one that comes less often.

        What is refused of an offer is its end, also where a block before that comes less often.
        """
        limit_bytes = _WINDOW_RATIO * self._capacity_bytes
        window = self._with_offer(offer)
        main = self._in_main()
        size_bytes = 0 if offer is None else offer.size_bytes * len(offer.blocks)
        excess_bytes = self._window.used_bytes + size_bytes - limit_bytes
        entrant, victim = next(window, None), next(main, None)
        entered: list[StorageKey] = []
        refusable = reversed(() if offer is None else offer.blocks)
        while entrant is not None or victim is not None:
            if victim is None or (
                entrant is not None and excess_bytes > 0 and not self._wins(entrant, victim)
            ):
                assert entrant is not None
                excess_bytes -= entrant[1]
                yield entrant[0] if entrant[0] in self._window else next(refusable)
                entrant = next(window, None)
                continue
            yield victim[0]
            victim = next(main, None)
            if entrant is not None and excess_bytes > 0:
                excess_bytes -= entrant[1]
                if entrant[0] in self._window:
                    entered.append(entrant[0])
                entrant = next(window, None)
        # Those of the window that would have entered the main part come last.
        yield from entered

    def _wins(self, entrant: tuple[StorageKey, int], victim: tuple[StorageKey, int]) -> bool:
        return self._sketch.count(entrant[0]) > self._sketch.count(victim[0])

    def _with_offer(self, offer: Offer | None) -> Iterator[tuple[StorageKey, int]]:
        yield from self._window.items()
        if offer is not None:
            for block in reversed(offer.blocks):
                yield block, offer.size_bytes

    def _in_main(self) -> Iterator[tuple[StorageKey, int]]:
        yield from self._probation.items()
        yield from self._protected.items()

    def offer(self, offer: Offer, *, now_s: float) -> None:
        """Count what comes, stored or not."""
        for block in offer.blocks:
            if block not in self._sizes:
                self._sketch.add(block)

    def _add(self, block: StorageKey, size_bytes: int) -> None:
        self._sketch.fit(len(self._sizes))
        self._window.append(block, size_bytes)
        while self._window.used_bytes > _WINDOW_RATIO * self._capacity_bytes and len(self._window) > 1:
            self._probation.append(*self._window.pop())

    def _use(self, block: StorageKey) -> None:
        self._sketch.add(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif self._probation.discard(block):
            self._protected.append(block, self._sizes[block])
            while self._protected.used_bytes > _PROTECTED_RATIO * self._capacity_bytes:
                self._probation.append(*self._protected.pop())
        else:
            self._protected.move_to_end(block)

    def _drop(self, block: StorageKey, size_bytes: int, *, is_evicted: bool) -> None:
        if not self._window.discard(block) and not self._probation.discard(block):
            self._protected.discard(block)
