"""The consistency check of a manager: every invariant, and a sample of payload checksums."""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.checksum import checksum
from kvstore.directory import BlockEntry, Copy, CopyState
from kvstore.miss import MissReason
from kvstore.state import State
from kvstore.tier import ALIGNMENT_BYTES, Medium, ReadStatus, Tier

_READ_TIMEOUT_S = 5.0


async def check_manager(state: State, *, sample_blocks: int) -> list[str]:
    """Return one line per violated invariant.

    The structural part runs without an await and sees one moment. The sample then reads up to
    ``sample_blocks`` blocks of each certain tier; a damaged one is dropped and reported.
    """
    problems = [
        *_slots_balance(state),
        *_copies_are_sound(state),
        *_listed_are_ready(state),
        *_policies_agree(state),
        *_counters_balance(state),
    ]
    sample = [entry for entry, _ in _top_copies(state)]
    problems += await check_top_copies(state, sample[:sample_blocks])
    for tier in state.lower:
        if not tier.is_shared:
            problems += await _check_lower_sample(state, tier, sample_blocks)
    return problems


def _slots_balance(state: State) -> Iterator[str]:
    granule = ALIGNMENT_BYTES if state.top.medium is Medium.DRAM else 1
    known = [entry.length_bytes for entry, _ in _top_copies(state)]
    lent = [lent.length_bytes for lent in state.leases.lent_slots()]
    expected = sum(-(-length // granule) * granule for length in (*known, *lent))
    if expected != state.top.used_bytes:
        yield (
            f"{state.top.name}: {state.top.used_bytes} bytes of slots are in use, "
            f"but blocks and lent slots account for {expected}"
        )
    slots = [copy.slot for _, copy in _top_copies(state)]
    if len(set(slots)) != len(slots):
        yield f"{state.top.name}: a slot belongs to two blocks"


def _copies_are_sound(state: State) -> Iterator[str]:
    for entry in state.directory.entries():
        name = entry.key.hex()[:12]
        if entry.leases and state.top.name not in entry.copies:
            yield f"block {name}: leased, but not in {state.top.name}"
        if entry.leases < 0 or entry.holds < 0:
            yield f"block {name}: negative count of leases or holds"
        is_needed = entry.copies or entry.is_kept or entry.loading is not None or any(entry.children.values())
        if not is_needed:
            yield f"block {name}: an entry without copies that nobody needs"
        if entry.shelf.fastest.get(entry.key) != entry.fastest:
            yield f"block {name}: its shelf names another fastest tier than its entry"
        if not _is_generation_sound(state, entry.copies.get(state.top.name)):
            yield f"block {name}: its slot in {state.top.name} has another generation"


def _listed_are_ready(state: State) -> Iterator[str]:
    listing, top = state.directory.listing, state.top.name
    if listing is None:
        return
    for entry in state.directory.entries():
        found = listing.listed(entry.name)
        if found is None:
            continue
        copy = entry.copies.get(top)
        if entry.shelf.is_stale or copy is None or not entry.is_ready(top):
            yield f"block {entry.key.hex()[:12]}: clients find it in {top} without asking, and may not"
        elif found != (copy.slot, copy.generation, copy.checksum):
            yield f"block {entry.key.hex()[:12]}: clients find it in {top} elsewhere than it is"


def _policies_agree(state: State) -> Iterator[str]:
    for tier, policy in state.policies.items():
        num_known = 0
        for entry in state.directory.entries():
            is_known = entry.name in policy
            num_known += is_known
            copy = entry.copies.get(tier)
            if copy is not None and copy.state is CopyState.DROPPING:
                continue  # on its way out of both
            if entry.is_ready(tier) != is_known:
                name = entry.key.hex()[:12]
                yield f"block {name}: its state in {tier} and the order of its policy disagree"
        if num_known != len(policy):
            yield f"{tier}: its policy orders {len(policy)} blocks, and {num_known} of them are known"


def _is_generation_sound(state: State, copy: Copy | None) -> bool:
    if copy is None or copy.slot is None or copy.generation is None:
        return True
    return copy.generation == state.top.generation(copy.slot)


def _counters_balance(state: State) -> Iterator[str]:
    for name, lookups in (("match", state.counters.match), ("fetch", state.counters.fetch)):
        if not lookups.is_balanced:
            yield f"{name}: hits and misses do not add up to {lookups.lookups} lookups"


def _top_copies(state: State) -> list[tuple[BlockEntry, Copy]]:
    top = state.top.name
    return [(entry, entry.copies[top]) for entry in state.directory.entries() if top in entry.copies]


async def check_top_copies(state: State, entries: Sequence[BlockEntry]) -> list[str]:
    """Compare READY copies in the top tier with their checksums; damaged ones are dropped and reported."""
    problems: list[str] = []
    for entry in entries:
        state.counters.checked_blocks += 1
        copy = entry.copies.get(state.top.name)
        if copy is None or copy.slot is None or copy.checksum is None or copy.state is not CopyState.READY:
            continue
        length = entry.length_bytes
        with state.holding() as held:
            state.hold(entry, held)
            async with state.top.reading([copy.slot], length) as buffers:
                found = await asyncio.to_thread(checksum, buffers[0][:length])
            if found != copy.checksum and copy.state is CopyState.READY:
                problems.append(_corrupt(state, state.top.name, entry))
                state.quarantine_top(entry)
    return problems


async def _check_lower_sample(state: State, tier: Tier, sample_blocks: int) -> list[str]:
    stored = [entry for entry in state.directory.entries() if entry.is_ready(tier.name)]
    problems: list[str] = []
    for entry in stored[:sample_blocks]:
        state.counters.checked_blocks += 1
        if not entry.is_ready(tier.name):
            continue
        buffer = _aligned_buffer(entry.length_bytes)
        with state.holding() as held:
            state.hold(entry, held)
            (outcome,) = await tier.read(
                [entry.read_request(buffer)], deadline_s=state.clock() + _READ_TIMEOUT_S
            )
            is_bad = outcome.status in _BAD and outcome.reason is not MissReason.ERASED
            if is_bad and entry.is_ready(tier.name):
                problems.append(_corrupt(state, tier.name, entry, outcome.status.value))
                state.forget_copy(entry, tier.name, MissReason.CORRUPT)
    return problems


_BAD = (ReadStatus.CORRUPT, ReadStatus.MISMATCH, ReadStatus.ABSENT)


def _corrupt(state: State, tier: str, entry: BlockEntry, what: str = "corrupt") -> str:
    state.counters.corrupt[tier] += 1
    return f"block {entry.key.hex()[:12]}: its copy in {tier} is {what}; dropped"


def _aligned_buffer(length_bytes: int) -> memoryview:
    padded = -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = np.empty(padded + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + padded].data
