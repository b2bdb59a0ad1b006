"""What rank 0 asks its followers, and what they answer.

A request goes to every follower; each answers it once, in any order among requests. Passes do not travel
here: see ``wire.Pass``.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.miss import MissReason
from kvstore.tier import ReadStatus
from kvstore_engine_adapter.tensor_parallel.wire import Message


@dataclass(frozen=True, slots=True)
class Load(Message):
    """Load a rank's share of a model; answered by ``Loaded``. ``cache_folder`` empty: none."""

    rank: int
    size: int
    model: str
    dtype: str
    device: str
    threads: int
    cache_folder: str


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """The digest of the files that were loaded."""

    digest: str


@dataclass(frozen=True, slots=True)
class Open(Message):
    """Get pages, join the other ranks at ``rendezvous``, open the store's client (address empty: none)."""

    rendezvous: str
    patience_s: float
    num_pages: int
    block_tokens: int
    max_tokens: int
    compiled_folder: str
    store: str
    attention_backend: str
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """Find the row counts whose rows have the same bits in any company; answered by ``Ladder``."""

    max_rows: int


@dataclass(frozen=True, slots=True)
class Ladder(Message):
    """Numbers of rows that a pass may have. From rank 0: compute passes with these from now on."""

    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class KnowNamespace(Message):
    """A namespace whose blocks will be asked for; ``layout`` are a KVLayout's fields in their order."""

    model: str
    layout: Sequence[object]
    weights: str
    tokenizer: str
    adapter: str
    rope: str
    tenant_salt: bytes
    epoch: int

    @classmethod
    def of(cls, namespace: Namespace) -> "KnowNamespace":
        """Return the message that tells of a namespace."""
        return cls(
            namespace.model,
            astuple(namespace.layout),
            namespace.weights,
            namespace.tokenizer,
            namespace.adapter,
            namespace.rope,
            namespace.tenant_salt,
            namespace.epoch,
        )

    def namespace(self) -> Namespace:
        """Return the namespace.

        Raises:
            InvalidLayout: it is none.
        """
        return Namespace(
            self.model,
            KVLayout(*self.layout),  # type: ignore[arg-type]  # it checks its fields itself
            self.weights,
            self.tokenizer,
            self.adapter,
            self.rope,
            self.tenant_salt,
            self.epoch,
        )


@dataclass(frozen=True, slots=True)
class Probe(Message):
    """Say which leading blocks have your part in the store; answered by ``Probed``."""

    namespaces: Sequence[bytes]
    keys: Sequence[bytes]
    patience_s: float


@dataclass(frozen=True, slots=True)
class Probed(Message):
    """The tier of each leading block that was found, and why the next was not (empty: it is not there)."""

    tiers: Sequence[str]
    reason: str


@dataclass(frozen=True, slots=True)
class Read(Message):
    """Read your parts of blocks into pages; answered by ``Outcomes`` when none of it will be written to."""

    namespaces: Sequence[bytes]
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    depths: Sequence[int]
    slots: Sequence[int]
    patience_s: float


@dataclass(frozen=True, slots=True)
class Write(Message):
    """Write your parts of blocks from pages; answered by ``Outcomes`` when none of it will be read."""

    namespaces: Sequence[bytes]
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    depths: Sequence[int]
    slots: Sequence[int]
    patience_s: float


@dataclass(frozen=True, slots=True)
class Outcomes(Message):
    """A ReadStatus or WriteStatus per block, and a MissReason or nothing for each."""

    statuses: Sequence[str]
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class Drop(Message):
    """Ask the store to forget your parts of blocks."""

    namespaces: Sequence[bytes]
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Answer."""


@dataclass(frozen=True, slots=True)
class Close(Message):
    """Close the store's client and end."""


@dataclass(frozen=True, slots=True)
class Done(Message):
    """It is done."""


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """It could not be done; ``why`` is one line for people."""

    why: str


def nothing_of(message: Message) -> Message | None:
    """Return the answer to a request of the store that came to nothing; None if it is no such request.

    Whatever fails there is a miss, and nothing that an engine would end for.
    """
    match message:
        case Probe():
            return Probed([], MissReason.UNAVAILABLE.value)
        case Read() | Write():
            # The word is the same among the statuses of reads and of writes.
            return Outcomes([ReadStatus.UNAVAILABLE.value] * len(message.keys), [""] * len(message.keys))
        case Drop():
            return Done()
        case _:
            return None
