"""Requests of the protocol: what a client may ask of a server or tell it."""

import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from kvstore.errors import InvalidLayout, InvalidRequest, ProtocolMismatch
from kvstore.hints import Hints
from kvstore.keys import KEY_BYTES, Namespace, NamespaceDigest
from kvstore.layout import MAX_BLOCK_BYTES, KVLayout
from kvstore.message_fields import (
    MAX_TIMEOUT_US,
    U32,
    U64,
    ChainRef,
    ChainRequest,
    EmptyMessage,
    KeySet,
    Values,
    byte_string,
    check_positions,
    count_fields,
    hints_from_wire,
    hints_to_wire,
    integer,
    pack_columns,
    text,
    unused_from_wire,
    unused_to_wire,
)
from kvstore.policy_plan import MAX_PLAN_CHARS
from kvstore.tenant import TenantId
from kvstore.wire import MAX_KEYS, WireValue


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a client: who it is."""

    KIND: ClassVar[int] = 1
    pid: int

    def to_wire(self) -> Values:
        """Return the pid."""
        return (self.pid,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked greeting."""
        count_fields(values, 1, "hello")
        return cls(integer(values[0], 0, U32, "pid"))


@dataclass(frozen=True, slots=True)
class OpenNamespace:
    """Make a namespace usable on this connection."""

    KIND: ClassVar[int] = 2
    namespace: Namespace

    def to_wire(self) -> Values:
        """Return the namespace's fields and then its layout's."""
        space, at = self.namespace, self.namespace.layout
        return (
            space.model,
            space.weights,
            space.tokenizer,
            space.adapter,
            space.rope,
            space.tenant_salt,
            space.epoch,
            at.dtype,
            at.num_layers,
            at.block_tokens,
            at.num_kv_heads,
            at.head_dim,
            at.kv_planes,
            at.order,
        )

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked namespace; one that cannot exist breaks the protocol."""
        count_fields(values, 14, "open_namespace")
        model, weights, tokenizer, adapter, rope, salt, epoch, *shape = values
        dtype, layers, tokens, heads, dim, planes, order = shape
        try:
            layout = KVLayout(
                dtype=text(dtype, "dtype", limit=32),
                num_layers=integer(layers, 1, 0xFFFF, "num_layers"),
                block_tokens=integer(tokens, 1, 0xFFFF, "block_tokens"),
                num_kv_heads=integer(heads, 1, 0xFFFF, "num_kv_heads"),
                head_dim=integer(dim, 1, MAX_BLOCK_BYTES, "head_dim"),
                kv_planes=integer(planes, 1, 0xFFFF, "kv_planes"),
                order=text(order, "order", limit=64),
            )
            namespace = Namespace(
                model=text(model, "model", limit=4096),
                layout=layout,
                weights=text(weights, "weights", limit=4096),
                tokenizer=text(tokenizer, "tokenizer", limit=4096),
                adapter=text(adapter, "adapter", limit=4096),
                rope=text(rope, "rope", limit=4096),
                tenant_salt=byte_string(salt, "tenant_salt", high=4096),
                epoch=integer(epoch, 0, (1 << 63) - 1, "epoch"),
            )
        except InvalidLayout as error:
            raise ProtocolMismatch(f"message: {error}") from error
        return cls(namespace)


@dataclass(frozen=True, slots=True)
class Match(ChainRequest):
    """How many leading blocks are stored?"""

    KIND: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Fetch(ChainRequest):
    """Make the longest stored prefix ready in arena slots and lease it."""

    KIND: ClassVar[int] = 4
    TAKES_HINTS: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Release:
    """End a lease. Not answered. ``corrupt``: position of the first block whose bytes were wrong."""

    KIND: ClassVar[int] = 5
    lease: int
    corrupt: ChainRef | None = None

    def to_wire(self) -> Values:
        """Return the lease and, if there was one, the corrupt block."""
        return (self.lease, None if self.corrupt is None else self.corrupt.to_wire())

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked message."""
        count_fields(values, 2, "release")
        lease, corrupt = integer(values[0], 0, U64, "lease"), values[1]
        if corrupt is None:
            return cls(lease)
        if not isinstance(corrupt, tuple) or len(corrupt) != ChainRef.FIELDS:
            raise ProtocolMismatch("message: a corrupt block is not named by a chain")
        try:
            return cls(lease, ChainRef.from_wire(corrupt))
        except InvalidRequest as error:  # nobody waits for an answer that could say so
            raise ProtocolMismatch(f"message: {error}") from error


@dataclass(frozen=True, slots=True)
class Reserve(ChainRequest):
    """Lend arena slots for the blocks that are not stored."""

    KIND: ClassVar[int] = 6
    TAKES_HINTS: ClassVar[bool] = True


class WrittenSlot(NamedTuple):
    """A reserved slot after writing: position in the chain, where it is, and its bytes' xxh3-64."""

    position: int
    offset: int
    generation: int
    checksum: int


_WRITTEN = struct.Struct("<IQQQ")


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish written slots as blocks of the chain, and give them back.

    With ``ahead`` the answer is `Stored`, and brings so many slots for the next put if they can be spared.
    """

    KIND: ClassVar[int] = 7
    about: ChainRef
    slots: tuple[WrittenSlot, ...]
    ahead: int = 0

    def to_wire(self) -> Values:
        """Return the chain's values, one record per slot, and how many are wanted ahead, if any."""
        records = b"".join([_WRITTEN.pack(*slot) for slot in self.slots])
        return (*self.about.to_wire(), records, *((self.ahead,) if self.ahead else ()))

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request; positions grow and lie in the chain."""
        ahead = 0
        if len(values) == ChainRef.FIELDS + 2:
            *_, last = values
            values, ahead = values[:-1], integer(last, 1, MAX_KEYS, "slots ahead")
        count_fields(values, ChainRef.FIELDS + 1, "commit")
        about = ChainRef.from_wire(values[:-1])
        size = _WRITTEN.size
        blob = byte_string(values[-1], "slots", high=len(about.chain) * size, step=size)
        slots = tuple(map(WrittenSlot._make, _WRITTEN.iter_unpack(blob)))
        check_positions([slot.position for slot in slots], len(about.chain))
        return cls(about, slots, ahead)


@dataclass(frozen=True, slots=True)
class FilledSlots:
    """Slots that were lent ahead, after writing: where each is, and its bytes' xxh3-64. All are as many.

    They go from the one who wrote them to the one who files them as columns: no slot costs an object.
    """

    offsets: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets)

    def to_wire(self) -> bytes:
        """Return one record per slot."""
        return pack_columns(self.offsets, self.generations, self.checksums)

    @classmethod
    def from_wire(cls, value: WireValue, count: int) -> Self:
        """Return the slots in exactly ``count`` records. Raises ProtocolMismatch for anything else."""
        size = count * _FILLED_BYTES
        fields = struct.unpack(f"<{3 * count}Q", byte_string(value, "slots", low=size, high=size))
        return cls(fields[0::3], fields[1::3], fields[2::3])


_FILLED_BYTES = 24


@dataclass(frozen=True, slots=True)
class Store:
    """Store a chain whose blocks were written into slots lent ahead, one slot for each block, in its order.

    Whatever becomes of the blocks, the slots are the client's no more. ``ahead``: how many it would like for
    its next put.
    """

    KIND: ClassVar[int] = 35
    about: ChainRef
    slots: FilledSlots
    ahead: int = 0
    hints: Hints | None = None

    def to_wire(self) -> Values:
        """Return the chain's values, one record per slot, the number, and the hints if there are any."""
        hints = () if self.hints is None else (hints_to_wire(self.hints),)
        return (*self.about.to_wire(), self.slots.to_wire(), self.ahead, *hints)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request; there is a slot for each block, and none is named twice."""
        hints = None
        if len(values) == ChainRef.FIELDS + 3:
            *_, last = values
            values, hints = values[:-1], hints_from_wire(last)
        count_fields(values, ChainRef.FIELDS + 2, "store")
        about = ChainRef.from_wire(values[:-2])
        slots = FilledSlots.from_wire(values[-2], len(about.chain))
        if len(set(slots.offsets)) < len(slots):
            raise ProtocolMismatch("message: a slot is named twice")
        return cls(about, slots, integer(values[-1], 0, MAX_KEYS, "slots ahead"), hints)


@dataclass(frozen=True, slots=True)
class ReturnSlots:
    """Give reserved slots back unwritten. Not answered."""

    KIND: ClassVar[int] = 8
    slots: tuple[tuple[int, int], ...]

    def to_wire(self) -> Values:
        """Return one record per slot."""
        return (unused_to_wire(self.slots),)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked message."""
        count_fields(values, 1, "return_slots")
        return cls(unused_from_wire(values[0]))


@dataclass(frozen=True, slots=True)
class Prefetch(ChainRequest):
    """Load stored leading blocks into the top tier, without a lease."""

    KIND: ClassVar[int] = 9


@dataclass(frozen=True, slots=True)
class Drop(ChainRequest):
    """Forget every copy of these blocks that is not leased."""

    KIND: ClassVar[int] = 10


@dataclass(frozen=True, slots=True)
class Stats(EmptyMessage):
    """Ask for counters and occupancy."""

    KIND: ClassVar[int] = 11


@dataclass(frozen=True, slots=True)
class Check:
    """Verify the store's invariants and a sample of checksums, as far as time allows."""

    KIND: ClassVar[int] = 12
    sample_blocks: int
    timeout_us: int

    def to_wire(self) -> Values:
        """Return the sample's size and the time."""
        return (self.sample_blocks, self.timeout_us)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, 2, "check")
        return cls(
            integer(values[0], 0, 1_000_000, "sample_blocks"),
            integer(values[1], 0, MAX_TIMEOUT_US, "timeout"),
        )


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until what was put has been written through."""

    KIND: ClassVar[int] = 13
    timeout_us: int

    def to_wire(self) -> Values:
        """Return the time."""
        return (self.timeout_us,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, 1, "flush")
        return cls(integer(values[0], 0, MAX_TIMEOUT_US, "timeout"))


@dataclass(frozen=True, slots=True)
class Ping(EmptyMessage):
    """Is anybody there?"""

    KIND: ClassVar[int] = 14


@dataclass(frozen=True, slots=True)
class Why(ChainRequest):
    """Explain the blocks of a chain one by one."""

    KIND: ClassVar[int] = 15


@dataclass(frozen=True, slots=True)
class Demote(ChainRequest):
    """Write blocks to a tier below and take them out of the top tier."""

    KIND: ClassVar[int] = 16


@dataclass(frozen=True, slots=True)
class AdvanceEpoch:
    """End the present epoch of a model."""

    KIND: ClassVar[int] = 17
    model: str

    def to_wire(self) -> Values:
        """Return the model."""
        return (self.model,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, 1, "advance_epoch")
        return cls(text(values[0], "model", limit=4096))


@dataclass(frozen=True, slots=True)
class ListNamespaces(EmptyMessage):
    """Ask for the namespaces that clients opened; salts are not told."""

    KIND: ClassVar[int] = 18


@dataclass(frozen=True, slots=True)
class Exists:
    """Which of these blocks, in any order, are stored?"""

    KIND: ClassVar[int] = 19
    about: KeySet
    timeout_us: int

    def to_wire(self) -> Values:
        """Return the keys' values and the time."""
        return (*self.about.to_wire(), self.timeout_us)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, KeySet.FIELDS + 1, "exists")
        return cls(KeySet.from_wire(values[:-1]), integer(values[-1], 0, MAX_TIMEOUT_US, "timeout"))


@dataclass(frozen=True, slots=True)
class LeaseChain(ChainRequest):
    """Make the longest stored prefix ready in arena slots and lease it for longer than one copy."""

    KIND: ClassVar[int] = 20
    TAKES_HINTS: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class MatchAndLease(ChainRequest):
    """How many leading blocks are stored? Lease those of them that lie in arena slots already."""

    KIND: ClassVar[int] = 21


@dataclass(frozen=True, slots=True)
class Renew:
    """Have a lease last its full time again, from now."""

    KIND: ClassVar[int] = 22
    lease: int

    def to_wire(self) -> Values:
        """Return the lease."""
        return (self.lease,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, 1, "renew")
        return cls(integer(values[0], 0, U64, "lease"))


@dataclass(frozen=True, slots=True)
class ReportDamage:
    """Say that blocks in the arena have wrong bytes; their lease goes on. Not answered."""

    KIND: ClassVar[int] = 23
    about: ChainRef

    def to_wire(self) -> Values:
        """Return the chain's values."""
        return self.about.to_wire()

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked message."""
        count_fields(values, ChainRef.FIELDS, "report_damage")
        try:
            return cls(ChainRef.from_wire(values))
        except InvalidRequest as error:  # nobody waits for an answer that could say so
            raise ProtocolMismatch(f"message: {error}") from error


@dataclass(frozen=True, slots=True)
class HelloReader(Hello):
    """First frame of a client that never writes: it is sent no descriptor that could be written to."""

    KIND: ClassVar[int] = 24


@dataclass(frozen=True, slots=True)
class Peek(ChainRequest):
    """As Fetch, but blocks that are all in the arena now are not leased: the reader's checks must do."""

    KIND: ClassVar[int] = 25
    TAKES_HINTS: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class NoteHints:
    """Say more of the future of stored blocks, without a use of them."""

    KIND: ClassVar[int] = 32
    about: ChainRef
    hints: Hints

    def to_wire(self) -> Values:
        """Return the chain's values and the hints."""
        return (*self.about.to_wire(), hints_to_wire(self.hints))

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, ChainRef.FIELDS + 1, "note_hints")
        return cls(ChainRef.from_wire(values[:-1]), hints_from_wire(values[-1]))


@dataclass(frozen=True, slots=True)
class NoteReads:
    """Take note that these blocks were found in the table of READY ones, and read; there is no answer."""

    KIND: ClassVar[int] = 34
    about: ChainRef
    hints: Hints | None = None

    def to_wire(self) -> Values:
        """Return the chain's values, and the hints if there are any."""
        values = self.about.to_wire()
        return values if self.hints is None else (*values, hints_to_wire(self.hints))

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        hints = None
        if len(values) == ChainRef.FIELDS + 1:
            *_, last = values
            values, hints = values[:-1], hints_from_wire(last)
        count_fields(values, ChainRef.FIELDS, "note_reads")
        return cls(ChainRef.from_wire(values), hints)


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """Give tiers or namespaces other policies, as the text of a plan says; blocks stay."""

    KIND: ClassVar[int] = 33
    plan: str

    def to_wire(self) -> Values:
        """Return the plan's text."""
        return (self.plan,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, 1, "change_policy")
        return cls(text(values[0], "policy", limit=MAX_PLAN_CHARS))


@dataclass(frozen=True, slots=True)
class Erase:
    """Destroy the key of a tenant, named by its id or by an open namespace of it, and forget its blocks."""

    KIND: ClassVar[int] = 26
    tenant: TenantId | None
    namespace: NamespaceDigest | None

    def to_wire(self) -> Values:
        """Return the two, of which one is nil."""
        return (self.tenant, self.namespace)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, 2, "erase")
        tenant, namespace = values
        if (tenant is None) == (namespace is None):
            raise ProtocolMismatch("message: erase names either a tenant or a namespace")
        if tenant is not None:
            return cls(TenantId(byte_string(tenant, "tenant", low=KEY_BYTES, high=KEY_BYTES)), None)
        digest = byte_string(namespace, "namespace", low=KEY_BYTES, high=KEY_BYTES)
        return cls(None, NamespaceDigest(digest))


@dataclass(frozen=True, slots=True)
class AskSizes:
    """What would the hit rate be at other sizes, over all lookups or over those in one namespace?"""

    KIND: ClassVar[int] = 31
    namespace: NamespaceDigest | None

    def to_wire(self) -> Values:
        """Return the digest or nil."""
        return (self.namespace,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request."""
        count_fields(values, 1, "ask_sizes")
        (namespace,) = values
        if namespace is None:
            return cls(None)
        return cls(NamespaceDigest(byte_string(namespace, "namespace", low=KEY_BYTES, high=KEY_BYTES)))
