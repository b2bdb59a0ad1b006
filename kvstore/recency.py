"""Uses: which blocks were used, told to the lower tiers that hold copies: their recency survives restarts."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from kvstore.directory import BlockEntry
from kvstore.hints import Hints
from kvstore.keys import PrefixChain
from kvstore.layout import Part
from kvstore.state import State
from kvstore.tier import HintedTier, StorageKey, Tier

_SAME_REQUEST_S = 60.0
"""How long after a fetch a put that goes on from there belongs to the same request."""

_MAX_REQUESTS = 4096
"""Fetches remembered for that; beyond that a put counts as a use of its own."""

_MAX_HINTS = 256
"""Hints remembered between two tellings, for tiers that take them."""

_MAX_NOTED_BLOCKS = 16_384
"""Uses remembered between two tellings; beyond that they are a sample, which an order of use can bear."""


class Uses:
    """Notes uses at the price of one append, and tells the tiers in batches."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._is_wanted = any(not tier.is_shared for tier in state.lower)
        self._noted: list[Sequence[BlockEntry]] = []
        self._num_noted = 0
        self._hinted: list[tuple[Tier, HintedTier]] = [
            (tier, tier) for tier in state.lower if isinstance(tier, HintedTier)
        ]
        self._hints: deque[tuple[PrefixChain, Hints, Part | None]] = deque(maxlen=_MAX_HINTS)
        self._requests: OrderedDict[StorageKey, float] = OrderedDict()

    def note(self, entries: Sequence[BlockEntry]) -> None:
        """Remember a use of the leading blocks of a chain."""
        if entries:
            last = entries[-1].name
            self._requests[last] = self._state.clock()
            self._requests.move_to_end(last)
            if len(self._requests) > _MAX_REQUESTS:
                self._requests.popitem(last=False)
        if self._is_wanted and entries and self._num_noted < _MAX_NOTED_BLOCKS:
            self._noted.append(entries)
            self._num_noted += len(entries)

    def note_hints(self, chain: PrefixChain, hints: Hints, part: Part | None) -> None:
        """Remember a hint for tiers that take them; the oldest are forgotten where there are too many."""
        if self._hinted:
            self._hints.append((chain, hints, part))

    def goes_on(self, names: Sequence[StorageKey]) -> bool:
        """Whether a put with these blocks stored is the rest of a request whose fetch was noted."""
        if not self._requests:
            return False
        for name in reversed(names):
            fetched_s = self._requests.pop(name, None)
            if fetched_s is not None:
                return self._state.clock() - fetched_s <= _SAME_REQUEST_S
        return False

    async def tell(self) -> None:
        """Tell each tier of the uses of its copies, the latest last, and each chain tail first."""
        noted, self._noted, self._num_noted = self._noted, [], 0
        # Each block at the place of its last use.
        latest = dict.fromkeys(entry for entries in reversed(noted) for entry in entries)
        order = list(reversed(latest))
        for tier in self._state.lower:
            if tier.is_shared:
                continue
            blocks = [entry.block for entry in order if entry.is_ready(tier.name)]
            if blocks:
                await tier.touch(blocks)
        await self._tell_hints()

    async def _tell_hints(self) -> None:
        """Pass hints on, and forget them where nobody hears them."""
        hints, self._hints = self._hints, deque(maxlen=_MAX_HINTS)
        for tier, told in self._hinted:
            if not tier.health().is_up:
                continue
            for chain, said, part in hints:
                if not await told.note_hints(chain, said, part=part):
                    break
