"""What lookups and puts return; a miss is a result and always has a reason."""

from dataclasses import dataclass
from typing import NewType

from kvstore.miss import MissReason
from kvstore.tier import Slot

LeaseId = NewType("LeaseId", int)
"""Handle of one lease."""

Owner = NewType("Owner", int)
"""Who holds leases and reserved slots: one client connection, or one request of an engine."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many leading blocks are stored, and where.

    ``tiers`` names, for each of the ``blocks`` leading blocks, the fastest tier with a READY copy.
    ``reason`` says why the block after them missed; None when every block is stored.
    """

    blocks: int
    tiers: tuple[str, ...]
    reason: MissReason | None


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """One block, ready in a slot of the top tier and leased there.

    ``checksum`` is the payload's xxh3-64, None only for a vram copy that never left the device.
    ``origin`` is the tier that held it when it was asked for.
    """

    slot: Slot
    generation: int
    length_bytes: int
    checksum: int | None
    origin: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """The leading blocks that a fetch made ready, under one lease (None when there are none)."""

    blocks: tuple[FetchedBlock, ...]
    lease: LeaseId | None
    reason: MissReason | None


@dataclass(frozen=True, slots=True)
class ReservedSlot:
    """A slot lent to a writer. ``index`` is the block's position in the chain that was asked for."""

    index: int
    slot: Slot
    generation: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots for the blocks that are not stored, as far as there was room; ``present`` blocks are stored."""

    slots: tuple[ReservedSlot, ...]
    present: int


@dataclass(frozen=True, slots=True)
class PutResult:
    """How many blocks of a put were stored, were there already, or were dropped for want of room."""

    stored: int
    present: int
    dropped: int
