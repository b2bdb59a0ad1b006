"""Explaining a chain block by block: what is stored where, and since when and why the rest is not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.directory import BlockEntry, Gone, Shelf
from kvstore.keys import BlockKey, PrefixChain
from kvstore.miss import MissReason
from kvstore.state import State

MAX_SIBLINGS = 1000
"""Siblings are counted up to here."""


@dataclass(frozen=True, slots=True)
class BlockReport:
    """What is known of one block of a chain.

    ``tiers`` have a READY copy. Of one that is stored nowhere, ``reason`` says why; ``gone_tier``,
    ``gone_s`` (seconds ago) and ``pressed_by`` (first 12 hex digits of the namespace that needed the room)
    are known if it was stored before. ``siblings`` are stored blocks with the same parent: where there are
    some, another prompt went on differently from here.
    """

    index: int
    key: BlockKey
    tiers: tuple[str, ...]
    reason: MissReason | None
    is_leased: bool = False
    gone_tier: str = ""
    gone_s: float | None = None
    pressed_by: str = ""
    siblings: int = 0

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready form; fields that say nothing are left out."""
        report: dict[str, object] = {
            "index": self.index,
            "key": self.key.hex(),
            "tiers": list(self.tiers),
            "reason": None if self.reason is None else self.reason.value,
        }
        if self.is_leased:
            report["is_leased"] = True
        if self.gone_s is not None:
            report |= {"gone_from": self.gone_tier, "gone_s": round(self.gone_s, 3)}
        if self.pressed_by:
            report["pressed_by"] = self.pressed_by
        if self.siblings:
            report["siblings"] = self.siblings
        return report


def explain(
    state: State,
    shelf: Shelf,
    chain: PrefixChain,
    *,
    found_below: dict[BlockKey, str],
    trouble: MissReason | None,
) -> list[BlockReport]:
    """Report on every block of a chain.

    ``found_below`` are blocks a probe of the shared tiers found, ``trouble`` why such a probe could not say.
    """
    reports: list[BlockReport] = []
    is_behind = False
    for index, key in enumerate(chain.keys):
        entry = shelf.entries.get(key)
        tiers = _tiers(state, entry, found_below.get(key))
        reason: MissReason | None = None
        if not tiers or shelf.is_stale:
            reason = MissReason.OTHER_EPOCH if shelf.is_stale else _why(state, shelf, key, trouble)
        siblings = 0 if is_behind or reason is None else _siblings(shelf, chain, index)
        gone = state.directory.gone(shelf.name(key)) if not tiers else None
        report = BlockReport(
            index=chain.start + index,
            key=key,
            tiers=tiers,
            reason=reason,
            is_leased=entry is not None and entry.leases > 0,
            siblings=siblings,
        )
        reports.append(report if gone is None else _with_gone(state, report, gone))
        is_behind = is_behind or reason is not None
    return reports


def _tiers(state: State, entry: BlockEntry | None, probed: str | None) -> tuple[str, ...]:
    certain = [name for name in state.policies if entry is not None and entry.is_ready(name)]
    return (*certain, *([probed] if probed and probed not in certain else []))


def _why(state: State, shelf: Shelf, key: BlockKey, trouble: MissReason | None) -> MissReason:
    gone = state.directory.why_gone(shelf.name(key))
    return trouble if trouble is not None and gone is MissReason.NEVER_SEEN else gone


def _siblings(shelf: Shelf, chain: PrefixChain, index: int) -> int:
    parent = chain.keys[index - 1] if index else chain.parent or BlockKey(chain.namespace)
    depth = chain.start + index
    found = 0
    for entry in shelf.entries.values():
        found += entry.parent == parent and entry.depth == depth and bool(entry.copies)
        if found == MAX_SIBLINGS:
            break
    return found


def _with_gone(state: State, report: BlockReport, gone: Gone) -> BlockReport:
    pressed_by = "" if gone.by is None else gone.by.hex()[:12]
    return replace(report, gone_tier=gone.tier, gone_s=state.clock() - gone.at_s, pressed_by=pressed_by)


def first_difference(reports: Sequence[BlockReport]) -> int | None:
    """Return the position of the first block that is not served, or None."""
    return next((i for i, report in enumerate(reports) if report.reason is not None), None)
