"""Blocks used where they lie in the arena: verified before they are seen, summed after they were written.

Both block for the time of the checksums and release the GIL meanwhile.
"""

from collections.abc import Callable, Sequence

from kvstore.checksum import checksum
from kvstore.errors import InvalidRequest, ProtocolMismatch
from kvstore.messages import LentSlot, ReadySlot, WrittenSlot
from kvstore.transfer import ReadEnd, SlotReader


def verify_slots(
    arena: SlotReader, slots: Sequence[ReadySlot], length_bytes: int, should_stop: Callable[[], bool]
) -> tuple[int, ReadEnd]:
    """Return how many leading leased slots hold their blocks' bytes, and why not more.

    The generation is looked at after the checksum: until then the bytes were those of the lease.
    """
    for count, slot in enumerate(slots):
        if should_stop():
            return count, ReadEnd.STOPPED
        found = checksum(arena.slot(slot.offset, length_bytes))
        if arena.generation(slot.offset) != slot.generation:
            return count, ReadEnd.STALE
        if found != slot.checksum:
            return count, ReadEnd.DAMAGED
    return len(slots), ReadEnd.ALL


def require_slots(arena: SlotReader, offsets: Sequence[int], length_bytes: int) -> None:
    """Raise ProtocolMismatch if a slot that the server named does not lie in the arena."""
    try:
        for offset in offsets:
            arena.generation(offset)
            arena.slot(offset, length_bytes)
    except InvalidRequest as error:
        raise ProtocolMismatch(f"answer: {error}") from error


def are_current(arena: SlotReader, slots: Sequence[ReadySlot]) -> bool:
    """Whether every slot is still in the generation in which it was leased."""
    return all(arena.generation(slot.offset) == slot.generation for slot in slots)


def sum_slots(
    arena: SlotReader, slots: Sequence[LentSlot], length_bytes: int, should_stop: Callable[[], bool]
) -> list[WrittenSlot]:
    """Return the leading lent slots, with the checksums of what was written into them."""
    written: list[WrittenSlot] = []
    for slot in slots:
        if should_stop() or arena.generation(slot.offset) != slot.generation:
            break
        digest = checksum(arena.slot(slot.offset, length_bytes))
        written.append(WrittenSlot(slot.position, slot.offset, slot.generation, digest))
    return written
