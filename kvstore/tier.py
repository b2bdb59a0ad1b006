"""Tier: a place that holds copies of blocks; the header every stored copy carries; the two tier protocols.

A tier does I/O and nothing else: it never evicts, retries or decides by itself. ``Tier`` is a place that
blocks are written to and read from by name (ssd, remote, a sidecar). ``SlotTier`` is a place with slots that
engines or clients use in position (vram page slots, dram arena slots). ``BlockManager`` owns all state above
them.
"""

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, Protocol, runtime_checkable

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock, InvalidLayout
from kvstore.hints import Hints
from kvstore.keys import KEY_BYTES, BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason

ALIGNMENT_BYTES = 4096
"""Alignment and size granule of arena slots and slab slots (O_DIRECT, DMA)."""


def slot_bytes(length_bytes: int) -> int:
    """Return the size of the slot that a payload of that length lies in."""
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Medium(enum.Enum):
    """What a tier is made of."""

    VRAM = "vram"
    DRAM = "dram"
    SSD = "ssd"
    REMOTE = "remote"
    STORE = "store"


StorageKey = NewType("StorageKey", bytes)
"""The 72 bytes (key, part, namespace) under which copies are filed, as they stand in a header.

A key that an honest client made covers its namespace; one that somebody names as they like does not.
"""

STORAGE_KEY_BYTES = 72
"""Its size."""


class BlockId(NamedTuple):
    """What one stored copy is a copy of: a part of the block of that key, in that namespace."""

    namespace: NamespaceDigest
    part: Part
    key: BlockKey

    @property
    def storage_key(self) -> StorageKey:
        """The name under which tiers file it."""
        return StorageKey(self.key + self.part.pack() + self.namespace)

    @classmethod
    def of_storage_key(cls, name: StorageKey) -> "BlockId":
        """Return the id that a name was made of."""
        key, part, namespace = name[:KEY_BYTES], name[KEY_BYTES:-KEY_BYTES], name[-KEY_BYTES:]
        return cls(NamespaceDigest(namespace), Part.unpack(part), BlockKey(key))


_HEADER = struct.Struct("<4sHHI32s8s32s32s32sIQ")
_HEADER_START = struct.Struct("<4sHH")
_HEADER_MAGIC = b"KVBH"
_HEADER_CRC = struct.Struct("<Q")
HEADER_BYTES = 192
"""Size of a packed header of a copy in the clear, zero-padded."""

SEAL_BYTES = 56
"""Size of what a header says of the encryption of its copy."""

SEALED_HEADER_BYTES = _HEADER.size + SEAL_BYTES + _HEADER_CRC.size
"""Size of a packed header of an encrypted copy."""

_VERSION_OF_SIZE = {HEADER_BYTES: 1, SEALED_HEADER_BYTES: 2}


class BlockHeader(NamedTuple):
    """What travels with every stored copy: who it is, what its bytes look like, and their checksum.

    ``parent`` is the key before it in its chain (the namespace digest for block 0) and ``depth`` its index
    there. ``length_bytes`` counts payload bytes; ``checksum`` is the xxh3-64 of the bytes stored. ``seal``
    is empty for a copy in the clear; for an encrypted one it holds 56 bytes that tiers pass on unread.
    """

    block: BlockId
    parent: BlockKey
    depth: int
    layout: bytes
    length_bytes: int
    checksum: int
    seal: bytes = b""

    @property
    def packed_bytes(self) -> int:
        """Size of the stored form."""
        return SEALED_HEADER_BYTES if self.seal else HEADER_BYTES

    def pack(self) -> bytes:
        """Return the stored form: 192 bytes, 224 if sealed, ending in an xxh3-64 over those before it."""
        size = self.packed_bytes
        fields = _HEADER.pack(
            _HEADER_MAGIC,
            _VERSION_OF_SIZE[size],
            size,
            self.length_bytes,
            self.block.key,
            self.block.part.pack(),
            self.block.namespace,
            self.parent,
            self.layout,
            self.depth,
            self.checksum,
        )
        body = (fields + self.seal).ljust(size - _HEADER_CRC.size, b"\0")
        return body + _HEADER_CRC.pack(checksum(body))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> "BlockHeader":
        """Return the header in 192 or 224 stored bytes.

        Raises:
            CorruptBlock: wrong size, magic, version, checksum, or an impossible part.
        """
        data = bytes(data)
        expected = _VERSION_OF_SIZE.get(len(data))
        if expected is None:
            raise CorruptBlock(f"header: {len(data)} bytes, expected {HEADER_BYTES} or {SEALED_HEADER_BYTES}")
        body = data[: -_HEADER_CRC.size]
        (crc,) = _HEADER_CRC.unpack(data[-_HEADER_CRC.size :])
        magic, version, size, length, key, part, namespace, parent, layout, depth, payload_sum = (
            _HEADER.unpack(body[: _HEADER.size])
        )
        if magic != _HEADER_MAGIC or version != expected or size != len(data):
            raise CorruptBlock(f"header: magic {magic!r} version {version} size {size} are not this format")
        if crc != checksum(body):
            raise CorruptBlock("header: its own checksum does not match")
        try:
            block = BlockId(NamespaceDigest(namespace), Part.unpack(part), BlockKey(key))
        except InvalidLayout as error:
            raise CorruptBlock(f"header: {error}") from error
        seal = body[_HEADER.size :] if len(data) == SEALED_HEADER_BYTES else b""
        return cls(block, BlockKey(parent), depth, layout, length, payload_sum, seal)


def stored_header_bytes(data: bytes | bytearray | memoryview) -> int | None:
    """Return the size that the first bytes of a stored header give it; None if they begin none."""
    if len(data) < _HEADER_START.size:
        return None
    magic, version, size = _HEADER_START.unpack_from(data)
    return size if magic == _HEADER_MAGIC and _VERSION_OF_SIZE.get(size) == version else None


class ReadStatus(enum.Enum):
    """How the read of one copy ended; everything but OK is a miss."""

    OK = "ok"
    ABSENT = "absent"
    CORRUPT = "corrupt"
    MISMATCH = "mismatch"
    TIMED_OUT = "timed_out"
    UNAVAILABLE = "unavailable"


class WriteStatus(enum.Enum):
    """How the write of one copy ended. NOT_ADMITTED: the tier's write budget says not yet."""

    OK = "ok"
    NOT_ADMITTED = "not_admitted"
    FULL = "full"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read one copy into ``buffer``.

    ``buffer`` is writable and at least ``length_bytes`` long; one from an arena is 4096-byte aligned and
    padded to a multiple of 4096. The tier may write anywhere in it, also when the read fails. ``parent``
    and ``depth`` place the block in its chain, for tiers that pass a request on; None if that is not known.
    ``is_sealed`` asks for an encrypted copy, as it is stored: one in the clear is then a MISMATCH, as an
    encrypted one is without it.
    """

    block: BlockId
    layout: bytes
    length_bytes: int
    buffer: memoryview
    parent: BlockKey | None = None
    depth: int = 0
    is_sealed: bool = False

    def wants(self, header: BlockHeader) -> bool:
        """Whether a stored header is exactly that of what is asked for."""
        return (
            header.block == self.block
            and header.layout == self.layout
            and header.length_bytes == self.length_bytes
            and bool(header.seal) == self.is_sealed
        )


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """Result of one ReadRequest; ``header`` is given exactly when the status is OK.

    ``origin`` is the name of the tier the bytes came from; a sidecar seen as a tier reports its own tiers,
    and the ``reason`` of its miss.
    """

    status: ReadStatus
    header: BlockHeader | None = None
    origin: str = ""
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Write one copy: ``buffer[: header.length_bytes]`` under ``header.block``.

    ``buffer`` is readable until the write returns; one from an arena is aligned and padded as for reads.
    ``only_if_absent`` is for shared tiers: they answer REFUSED if there is a value under that name.
    ``is_summed`` False: the header's checksum is not known yet. That is for a SummingTier alone.
    """

    header: BlockHeader
    buffer: memoryview
    only_if_absent: bool = False
    is_summed: bool = True


@dataclass(frozen=True, slots=True)
class TierHealth:
    """Whether a tier is worth asking now, and if not, why (one clause for people)."""

    is_up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a shared tier answers about blocks: for each the tier that holds it, or None.

    ``reason`` says why the first None is one, where the tier knows more than that the block is not there.
    ``unknown`` says so of single blocks, by their place; without it ``reason`` holds for every None.
    ``num_known`` is given by a tier that stopped early: behind that many blocks a None says nothing.
    """

    tiers: list[str | None]
    reason: MissReason | None = None
    unknown: Mapping[int, MissReason] = field(default_factory=dict)
    num_known: int | None = None


class Tier(Protocol):
    """A place that blocks are written to and read from by name.

    Every method runs on the manager's event loop and must not block it. All of them return results per
    block; none raises for a fault of the medium after ``open``. ``deadline_s`` is an instant of
    ``time.monotonic()``. ``read`` returns only when nothing will touch the buffers any more: a caller with
    less patience stops waiting and keeps the buffers until then. Tasks may be cancelled at any await.
    """

    @property
    def name(self) -> str:
        """The tier's name in configuration, metrics and messages: ``ssd``."""

    @property
    def medium(self) -> Medium:
        """What it is made of."""

    @property
    def is_shared(self) -> bool:
        """True if others change its content: presence is asked by ``probe``, never remembered as certain."""

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes it may hold; 0 if it bounds itself (a shared tier)."""

    @property
    def used_bytes(self) -> int:
        """Bytes of its capacity in use, slot padding included; 0 for a shared tier."""

    def health(self) -> TierHealth:
        """Return whether reads and writes are worth trying now."""

    async def open(self) -> None:
        """Make the tier usable.

        A shared tier opens also when its server is absent, and heals later.

        Raises:
            TierUnavailable: the medium cannot be used: message with folder or address, cause and remedy.
        """

    async def close(self) -> None:
        """Finish what is under way, make it durable, and let go of the medium. Idempotent."""

    async def scan(self) -> Sequence[BlockHeader]:
        """Return what it holds, least recently used first. Empty for a shared tier."""

    def open_namespace(self, namespace: Namespace) -> None:
        """Learn of a namespace before blocks of it are moved. Idempotent; most tiers need not know it."""

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """Say which blocks are here. May stop at the first that is not."""

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Read copies; each is verified (key, part, namespace, layout, length, checksum) before OK."""

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Write copies; a present one is replaced. OK means readable from now on, and durable on ssd."""

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Forget copies, and return how many were here, as far as that is known; absent ones are ignored.

        Their space is usable when this returns.
        """

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Note a use of copies, for recency across restarts. Cheap; may be batched or lost in a crash."""

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``count`` more copies of that length fit now without a drop."""


@dataclass(frozen=True, slots=True)
class TierNews:
    """Copies that came to light in a tier, and copies that are lost, though nobody wrote or dropped them.

    ``num_foreign`` copies of an earlier run were in a format that this version does not read: let go of.
    """

    found: Sequence[BlockHeader] = ()
    lost: Sequence[BlockHeader] = ()
    num_foreign: int = 0


@runtime_checkable
class CountingTier(Protocol):
    """What a Tier is too that counts what happens in it."""

    @property
    def counters(self) -> dict[str, int]:
        """Events so far, by names that are the tier's own."""


@runtime_checkable
class SummingTier(Protocol):
    """What a Tier is too that sums payloads as it copies them, so that nobody need sum them before."""

    @property
    def sums_payloads(self) -> bool:
        """Whether it takes requests that are not summed."""


@runtime_checkable
class ChangingTier(Protocol):
    """What a Tier is too whose content changes without its owner, at its start or while it is open."""

    def take_news(self) -> TierNews:
        """Return what came or went since this was last asked; each once, least recently used first."""


@runtime_checkable
class HintedTier(Protocol):
    """What a Tier is too that decides itself what stays, and takes hints about that."""

    async def note_hints(self, chain: PrefixChain, hints: Hints, *, part: Part | None = None) -> bool:
        """Say more of the future of blocks; False if nobody heard it. Never raises for an outage."""


Slot = NewType("Slot", int)
"""Handle of one slot of a SlotTier: for dram its byte offset in the arena, for vram its page slot number."""


ListedBlock = tuple[StorageKey, Slot, int, int]
"""A READY block that is to be listed: its name, slot, checksum, and the slot's generation."""


class Listing(Protocol):
    """Where a SlotTier says which of its slots hold READY blocks, for others to look at; lossy."""

    def add_all(self, blocks: Iterable[ListedBlock], name_end: bytes, length_bytes: int) -> None:
        """List READY blocks of one part of a namespace, whose names have that end."""

    @property
    def wants_to_grow(self) -> bool:
        """Whether more blocks could be listed if it had more memory."""

    def grow(self) -> None:
        """Get a little more of it."""

    def listed(self, name: StorageKey) -> tuple[int, int, int] | None:
        """Return the slot, generation and checksum that a block is listed with; None: it is not."""

    def remove(self, name: StorageKey) -> None:
        """List a block no more."""

    def begin_era(self) -> None:
        """List nothing of what was listed."""


@runtime_checkable
class ListedTier(Protocol):
    """What a SlotTier is too whose blocks are listed."""

    listing: Listing


class SlotTier(Protocol):
    """A place with slots that are used in position: arena slots for clients, page slots for an engine.

    ``allocate`` and ``free`` are plain calls on the event loop's thread. A slot's generation grows whenever
    it is allocated or freed, so a reader that kept a stale slot can tell.
    """

    @property
    def name(self) -> str:
        """``vram`` or ``dram``."""

    @property
    def medium(self) -> Medium:
        """What it is made of."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots but those kept for staging."""

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated slots, padding and staging included: it may exceed the capacity."""

    async def open(self) -> None:
        """Get the memory. Raises TierUnavailable with the amount and the limit if it cannot be had."""

    async def close(self) -> None:
        """Give the memory back. Idempotent."""

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``allocate`` would succeed."""

    def allocate(self, length_bytes: int, count: int = 1) -> list[Slot]:
        """Take ``count`` slots of at least ``length_bytes`` each: all of them, or TierFull and none."""

    def has_staging_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``allocate_staging`` would succeed."""

    def allocate_staging(self, length_bytes: int, count: int = 1) -> list[Slot]:
        """Take ``count`` slots for loads, as ``allocate`` does but also of those kept for staging."""

    def free(self, slots: Sequence[Slot]) -> None:
        """Give slots back. A slot that is not allocated is our own mistake (AssertionError)."""

    def generation(self, slot: Slot) -> int:
        """Return the slot's generation."""

    def generations(self, slots: Sequence[Slot]) -> list[int]:
        """Return the generation of each of several slots."""

    def writing(
        self, slots: Sequence[Slot], length_bytes: int
    ) -> AbstractAsyncContextManager[list[memoryview]]:
        """Lend a writable host buffer per slot; on leaving, their bytes are in the slots.

        For dram the buffers are the slots. For vram they are staging memory, scattered on exit (in C order
        of the block layout). Waits when staging is short, never for anything else.
        """

    def reading(
        self, slots: Sequence[Slot], length_bytes: int
    ) -> AbstractAsyncContextManager[list[memoryview]]:
        """Lend a read-only host buffer per slot that holds the slot's bytes (gathered, for vram)."""
