"""Fetcher: counts what of a chain is stored, and makes it ready in the top tier, leased.

What needs no I/O has a form that answers at once, so that a server need not make a task for it.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TypeVar

from kvstore.directory import BlockEntry, Shelf
from kvstore.errors import KVStoreError
from kvstore.granting import Granter, ReadyCopies
from kvstore.hints import Hints
from kvstore.keys import BlockKey, PrefixChain
from kvstore.layout import Part
from kvstore.loading import Loader, Probed
from kvstore.miss import MissReason
from kvstore.results import Fetched, Owner, PrefixMatch
from kvstore.state import State

T = TypeVar("T")


class Fetcher:
    """Matches and fetches of one manager. ``note_fill``: the top tier has become fuller."""

    def __init__(self, state: State, loader: Loader, granter: Granter, note_fill: Callable[[], None]) -> None:
        self._state = state
        self._loader = loader
        self._granter = granter
        self._note_fill = note_fill
        self._may_ask = any(tier.is_shared for tier in state.lower)

    def match_at_once(self, chain: PrefixChain, *, part: Part | None = None) -> PrefixMatch | None:
        """Count the leading blocks that are stored; None if a shared tier has to be asked for some.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        if shelf.is_stale:
            return self._matched(chain, [], MissReason.OTHER_EPOCH)
        tiers, reason = self._leading_tiers(shelf, chain), None
        if len(tiers) < len(chain.keys):
            if self._may_ask:
                return None
            tiers, reason = self._walk(shelf, chain, Probed({}, {}, None))
        self._note_match(shelf, chain, len(tiers))
        return self._matched(chain, tiers, reason)

    async def match(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> PrefixMatch:
        """Count the leading blocks that are stored, and say where. No payload moves, and it is no use.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        at_once = self.match_at_once(chain, part=part)
        if at_once is not None:
            return at_once
        shelf = self._state.directory.shelf(chain.namespace, part)
        deadline_s = self._state.deadline_s(timeout_s)
        probed = await self._loader.probe(shelf, chain, deadline_s=deadline_s)
        tiers, reason = self._walk(shelf, chain, probed)
        self._note_match(shelf, chain, len(tiers))
        return self._matched(chain, tiers, reason)

    def _matched(self, chain: PrefixChain, tiers: Sequence[str], reason: MissReason | None) -> PrefixMatch:
        self._state.counters.match.count(len(chain.keys), tiers, reason, block_tokens=chain.block_tokens)
        return PrefixMatch(len(tiers), tuple(tiers), reason)

    def _leading_tiers(self, shelf: Shelf, chain: PrefixChain) -> Sequence[str]:
        """The tier of each leading block whose fastest certain copy is within reach."""
        fastest = _leading_values(shelf.fastest, chain.keys)
        down = self._state.down_tiers()
        if down:
            stop = next((at for at, tier in enumerate(fastest) if tier in down), len(fastest))
            return fastest[:stop]
        return fastest

    def _walk(self, shelf: Shelf, chain: PrefixChain, probed: Probed) -> tuple[list[str], MissReason | None]:
        """The tier of each leading block, and why the one after them is not stored."""
        tiers: list[str] = []
        down = self._state.down_tiers()
        for key in chain.keys:
            tier = self._certain_tier(shelf.entries.get(key), down)
            if tier is None and key in probed.found:
                tier = probed.found[key][1]
            if tier is None:
                return tiers, probed.trouble or self._why_not(shelf, key)
            tiers.append(tier)
        return tiers, None

    def _certain_tier(self, entry: BlockEntry | None, down: frozenset[str]) -> str | None:
        """The fastest tier that has a block for certain, or that it is on its way up from."""
        if entry is None:
            return None
        return self._state.fastest(entry, down) or (None if entry.loading is None else entry.loading_origin)

    def _why_not(self, shelf: Shelf, key: BlockKey) -> MissReason:
        entry = shelf.entries.get(key)
        is_down = entry is not None and entry.fastest is not None
        return MissReason.UNAVAILABLE if is_down else self._state.directory.gone.why(shelf.name(key))

    def fetch_at_once(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, hints: Hints | None = None
    ) -> ReadyCopies | None:
        """Lease a chain that is READY in the top tier as a whole; None if it is not, or may not be leased.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        entries = self._all_on_top(chain, part)
        ready = self._granter.ready(owner, entries, chain.block_tokens, hints) if entries else None
        if ready is not None:
            self._note_fetch(chain, part)
            self._note_found(chain, part, len(chain.keys))
        return ready

    def fetch_leading_at_once(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, hints: Hints | None = None
    ) -> Fetched:
        """Lease the leading blocks of a chain that are READY in the top tier now, however few.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        shelf = self._state.directory.shelf(chain.namespace, part)
        if shelf.is_stale:
            return Fetched((), None, MissReason.OTHER_EPOCH)
        fetched = self._granter.lease_leading(owner, shelf, chain, hints)
        if fetched.blocks:
            self._note_fetch(chain[: len(fetched.blocks)], part)
        self._note_found(chain, part, len(fetched.blocks))
        return fetched

    def peek_at_once(
        self, chain: PrefixChain, *, part: Part | None = None, hints: Hints | None = None
    ) -> ReadyCopies | None:
        """Find a chain that is READY in the top tier as a whole, and lease nothing; None if it is not.

        It is a use of the blocks. What the copies hold by the time it is read is the reader's to check.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        entries = self._all_on_top(chain, part)
        if not entries:
            return None
        self._state.afterwards.do(partial(self._note_peek, chain, part))
        return self._granter.seen(entries, chain.block_tokens, hints)

    def note_reads(self, chain: PrefixChain, *, part: Part | None = None, hints: Hints | None = None) -> None:
        """Take note that a client found these blocks READY in the top tier, and read them, without asking.

        It was so, whatever became of them meanwhile: they are hits. It is a use of those that are there.
        """
        top, entries = self._state.top.name, list[BlockEntry]()
        with contextlib.suppress(KVStoreError):  # the namespace was forgotten, and all that could be noted
            shelf = self._state.directory.shelf(chain.namespace, part)
            found = map(shelf.entries.get, chain.keys)
            entries = [entry for entry in found if entry is not None and entry.fastest == top]
            self._note_peek(chain, part)
        self._granter.note_told(entries, len(chain.keys), chain.block_tokens, hints)

    async def fetch(
        self,
        chain: PrefixChain,
        *,
        owner: Owner,
        part: Part | None = None,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> Fetched:
        """Make the longest stored prefix READY in slots of the top tier, leased to ``owner``.

        Returns by its timeout with what is ready then. The lease ends with ``release``, with
        ``release_owner``, or at its deadline (``lease_s`` of the settings).

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        deadline_s = state.deadline_s(timeout_s)
        shelf = state.directory.shelf(chain.namespace, part)
        if shelf.is_stale:
            state.counters.fetch.count(
                len(chain), [], MissReason.OTHER_EPOCH, block_tokens=chain.block_tokens
            )
            return Fetched((), None, MissReason.OTHER_EPOCH)
        self._note_fetch(chain, part)
        on_top = self._all_on_top(chain, part)
        if on_top is not None:
            origins = [state.top.name] * len(on_top)
            self._note_found(chain, part, len(on_top))
            return self._granter.fetched(owner, chain, on_top, origins, None, hints=hints)
        with state.holding() as held:
            origins, reason = await self._bring_up(shelf, chain, held, deadline_s)
            entries = [shelf.entries[key] for key in chain.keys[: len(origins)]]
            fetched = self._granter.fetched(owner, chain, entries, origins, reason, hints=hints)
        self._note_fill()
        self._note_found(chain, part, len(fetched.blocks))
        return fetched

    async def prefetch(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Load stored leading blocks into the top tier without a lease; returns how many are there.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        shelf = self._state.directory.shelf(chain.namespace, part)
        if shelf.is_stale:
            return 0
        with self._state.holding() as held:
            origins, _ = await self._bring_up(shelf, chain, held, self._state.deadline_s(timeout_s))
        self._note_fill()
        return len(origins)

    async def _bring_up(
        self, shelf: Shelf, chain: PrefixChain, held: list[BlockEntry], deadline_s: float
    ) -> tuple[list[str], MissReason | None]:
        """Locate, hold and load: (origins of the leading blocks that are READY on top, why not more)."""
        state = self._state
        located = self._loader.locate(shelf, chain, {})
        for item in located:
            state.hold(item.entry, held)
        reason = None
        if len(located) < len(chain):
            probed = await self._loader.probe(shelf, chain, deadline_s=deadline_s)
            before = len(located)
            located = self._loader.locate(shelf, chain, probed.found)
            for item in located[before:]:
                state.hold(item.entry, held)
            if len(located) < len(chain):
                reason = probed.trouble or self._why_not(shelf, chain.keys[len(located)])
        num_ready, load_reason = await self._loader.load(shelf, located, held, deadline_s=deadline_s)
        return [item.origin for item in located[:num_ready]], load_reason or reason

    def _note_match(self, shelf: Shelf, chain: PrefixChain, num_hits: int) -> None:
        state = self._state
        if state.size_curve is not None:
            state.size_curve.note_match(shelf, chain, num_hits=num_hits)
        if state.branches is not None:
            state.branches.note_match(shelf, chain, num_hits)

    def _note_found(self, chain: PrefixChain, part: Part | None, num_hits: int) -> None:
        branches = self._state.branches
        if branches is not None:
            branches.note_fetch(self._state.directory.shelf(chain.namespace, part), chain, num_hits)

    def _note_peek(self, chain: PrefixChain, part: Part | None) -> None:
        self._note_fetch(chain, part)
        self._note_found(chain, part, len(chain.keys))

    def _note_fetch(self, chain: PrefixChain, part: Part | None) -> None:
        curve = self._state.size_curve
        if curve is not None:
            curve.note_fetch(self._state.directory.shelf(chain.namespace, part), chain)

    def _all_on_top(self, chain: PrefixChain, part: Part | None) -> list[BlockEntry] | None:
        """Return the entries of a chain that is READY in the top tier as a whole, else None."""
        shelf = self._state.directory.shelf(chain.namespace, part)
        if shelf.is_stale:
            return None
        entries = _leading_values(shelf.entries, chain.keys)
        tiers = [entry.fastest for entry in entries]
        if tiers.count(self._state.top.name) < len(chain.keys):
            return None
        return list(entries)


def _leading_values(known: Mapping[BlockKey, T], keys: Sequence[BlockKey]) -> tuple[T, ...]:
    """Return what is known of the leading keys, up to the first of which nothing is.

    Of many keys in two thirds of the time of a look-up after the other (measured: 6250 of them, 2 cores).
    """
    if len(keys) < 2:
        return tuple([known[key] for key in keys if key in known])
    try:
        values: tuple[T, ...] = itemgetter(*keys)(known)
        return values
    except KeyError as error:
        return _leading_values(known, keys[: keys.index(error.args[0])])
