"""What lookups and puts return; a miss is a result and always has a reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from kvstore.keys import BlockKey
from kvstore.miss import MissReason
from kvstore.tier import Slot, StorageKey

LeaseId = NewType("LeaseId", int)
"""Handle of one lease."""

Owner = NewType("Owner", int)
"""Who holds leases and reserved slots: one client connection, or one request of an engine."""

_MAX_COUNT = (1 << 64) - 1


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
class MatchedLease:
    """What is stored of a chain, and of that the leading blocks in the top tier, under one lease.

    ``lease_reason`` says why the next block, which is in the top tier too, is not leased; None if there is
    no such block.
    """

    match: PrefixMatch
    blocks: tuple[FetchedBlock, ...]
    lease: LeaseId | None
    lease_reason: MissReason | None = None


class ReservedSlot(NamedTuple):
    """A slot lent to a writer. ``position`` is the block's in the chain that was asked for."""

    position: int
    slot: Slot
    generation: int


class Published(NamedTuple):
    """How many blocks were ``stored``; of the others, ``late`` came after the time their slots were lent for.

    The rest was stored already, or the namespace's epoch has ended.
    """

    stored: int
    late: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots for the blocks that are not stored, as far as there was room; ``present`` blocks are stored.

    Each slot is for ``length_bytes``. ``reason`` says why there is none for the first block that has none.
    """

    slots: tuple[ReservedSlot, ...]
    present: int
    length_bytes: int = 0
    reason: MissReason | None = None


class Admitted(NamedTuple):
    """What is to become of the blocks of a put whose bytes lie in slots already, by position in its chain.

    Those that are neither ``missing`` are stored; the first ``num_admitted`` of ``missing`` may be published.
    ``reason`` says why the next may not. ``names`` are those of the blocks that may.
    """

    missing: list[int]
    num_admitted: int
    reason: MissReason | None = None
    names: Sequence[StorageKey] = ()


@dataclass(frozen=True, slots=True)
class PutResult:
    """How many blocks of a put were stored, were there already, or were dropped for want of room.

    ``doubtful`` are the positions in the chain of all blocks that are not known to be stored: every dropped
    one, and those of which the server does not say which of them it dropped. ``reason`` says why blocks were
    dropped, of several reasons the first; it does not count when results are compared.
    """

    stored: int
    present: int
    dropped: int
    doubtful: tuple[int, ...] = ()
    reason: MissReason | None = field(default=None, compare=False)


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

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "BlockReport":
        """Return the report in its JSON-ready form.

        Raises:
            KeyError, TypeError, ValueError: it is not that form.
        """
        tiers, reason, gone_s = data["tiers"], data["reason"], data.get("gone_s")
        if not isinstance(tiers, list):
            raise TypeError("tiers is not a list")
        return cls(
            index=_count(data["index"]),
            key=BlockKey(bytes.fromhex(str(data["key"]))),
            tiers=tuple(str(tier) for tier in tiers),
            reason=None if reason is None else MissReason(reason),
            is_leased=bool(data.get("is_leased", False)),
            gone_tier=str(data.get("gone_from", "")),
            gone_s=None if gone_s is None else _seconds(gone_s),
            pressed_by=str(data.get("pressed_by", "")),
            siblings=_count(data.get("siblings", 0)),
        )


@dataclass(frozen=True, slots=True)
class EraseReport:
    """What erasing a tenant came to.

    ``keys`` counts the keys destroyed here, ``blocks`` the blocks forgotten, by tier: of a shared tier those
    that this node knew to be there, whose ciphertext stays until it goes by itself. ``leased_blocks`` are
    still in memory, matched by nobody, and are overwritten when their leases end. ``problems`` names the
    places that still have, or may have, the key: each is tried again until it takes the erasure. ``records``
    counts the records that were removed.
    """

    keys: int
    blocks: Mapping[str, int]
    leased_blocks: int = 0
    problems: tuple[str, ...] = ()
    records: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the key is gone everywhere."""
        return not self.problems

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready form."""
        return {
            "is_complete": self.is_complete,
            "keys": self.keys,
            "blocks": dict(self.blocks),
            "leased_blocks": self.leased_blocks,
            "problems": list(self.problems),
            "records": self.records,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "EraseReport":
        """Return the report in its JSON-ready form.

        Raises:
            KeyError, TypeError, ValueError: it is not that form.
        """
        blocks, problems = data["blocks"], data["problems"]
        if not isinstance(blocks, Mapping) or not isinstance(problems, list):
            raise TypeError("blocks is not an object, or problems not a list")
        return cls(
            keys=_count(data["keys"]),
            blocks={str(tier): _count(count) for tier, count in blocks.items()},
            leased_blocks=_count(data["leased_blocks"]),
            problems=tuple(str(problem) for problem in problems),
            records=int(str(data.get("records", 0))),
        )


def _count(value: object) -> int:
    # bool is an int in Python but not in JSON.
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError("not a count")
    return value


def _seconds(value: object) -> float:
    # An integer may have hundreds of digits, and then it is no float.
    if type(value) not in (int, float) or not 0 <= value <= _MAX_COUNT:  # type: ignore[operator]  # a number
        raise ValueError("not a number of seconds")
    return float(value)  # type: ignore[arg-type]  # a number


def first_difference(reports: Sequence[BlockReport]) -> int | None:
    """Return the position of the first block that is not served, or None."""
    return next((i for i, report in enumerate(reports) if report.reason is not None), None)
