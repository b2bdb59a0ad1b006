"""Explaining a chain block by block: what is stored where, and since when and why the rest is not."""

from collections.abc import Mapping
from dataclasses import replace

from kvstore.directory import BlockEntry, Shelf
from kvstore.gone import Gone
from kvstore.keys import BlockKey, PrefixChain
from kvstore.miss import MissReason
from kvstore.results import BlockReport
from kvstore.state import State

MAX_SIBLINGS = 1000
"""Siblings are counted up to here."""


def explain(
    state: State,
    shelf: Shelf,
    chain: PrefixChain,
    *,
    found_below: Mapping[BlockKey, str],
    unknown: Mapping[BlockKey, MissReason],
) -> list[BlockReport]:
    """Report on every block of a chain.

    ``found_below`` are blocks a probe of the shared tiers found, ``unknown`` those of which it could not say.
    """
    reports: list[BlockReport] = []
    is_behind = False
    for index, key in enumerate(chain.keys):
        entry = shelf.entries.get(key)
        tiers = _tiers(state, entry, found_below.get(key))
        reason: MissReason | None = None
        if not tiers or shelf.is_stale:
            reason = MissReason.OTHER_EPOCH if shelf.is_stale else _why(state, shelf, key, unknown.get(key))
        siblings = 0 if is_behind or reason is None else _siblings(shelf, chain, index)
        gone = state.directory.gone.get(shelf.name(key)) if not tiers else None
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
    down = state.down_tiers()
    certain = [n for n in state.policies if entry is not None and n not in down and entry.is_ready(n)]
    return (*certain, *([probed] if probed and probed not in certain else []))


def _why(state: State, shelf: Shelf, key: BlockKey, trouble: MissReason | None) -> MissReason:
    entry = shelf.entries.get(key)
    if trouble is None and entry is not None and entry.fastest is not None:
        return MissReason.UNAVAILABLE  # in a tier that is down
    return trouble or state.directory.gone.why(shelf.name(key))


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
