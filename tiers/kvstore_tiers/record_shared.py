"""What is asked of records in Redis, and what comes of it; without a connection or a package for one."""

import enum
from dataclasses import dataclass, field

from kvstore.errors import CorruptBlock
from kvstore.tenant import TenantId
from kvstore_tiers.record_codec import Entry
from kvstore_tiers.record_format import RecordHead, StoredRecord, unpack_entry
from kvstore_tiers.resp import RespReply

COPY_LIFE_S = 86_400.0
"""How long a node may serve its copy of a record that it has not seen in Redis since."""


class SharedStatus(enum.Enum):
    """How a change ended.

    CHANGED: the record has another version than was expected. ABORTED: somebody touched it meanwhile; try
    again. REFUSED: the server does not let us. UNKNOWN: no answer; ``is_sent`` says whether it may be done.
    """

    OK = "ok"
    CHANGED = "changed"
    ABORTED = "aborted"
    QUOTA = "quota"
    FULL = "full"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class SharedEnd:
    """How a change ended, filled in while it runs. ``version`` is the record's then; ``count`` of removed."""

    status: SharedStatus = SharedStatus.UNKNOWN
    version: int = 0
    count: int = 0
    is_sent: bool = False
    problem: str = ""


@dataclass(slots=True)
class SharedFound:
    """What was read: the stored bytes, and milliseconds of the time left; the entry of the index.

    ``now_ms`` is the server's clock. ``is_known``: the server answered.
    """

    data: bytes | None = None
    left_ms: int = 0
    entry: bytes | None = None
    now_ms: int = 0
    is_known: bool = False
    problem: str = ""


@dataclass(slots=True)
class SharedEntries:
    """What an index holds: entries by digest, as stored and (None: damaged) unpacked.

    ``now_ms`` is the server's clock.
    """

    entries: dict[bytes, tuple[bytes, Entry | None]] = field(default_factory=dict)
    now_ms: int = 0
    is_known: bool = False
    problem: str = ""


@dataclass(slots=True)
class SharedReplies:
    """One reply per record asked for."""

    replies: list[RespReply] = field(default_factory=list)
    is_known: bool = False
    problem: str = ""


Result = SharedEnd | SharedFound | SharedEntries | SharedReplies


@dataclass(frozen=True, slots=True)
class SharedNames:
    """Names records of one tenant on the server."""

    prefix: str
    tenant: TenantId

    @property
    def index(self) -> bytes:
        """The key of the index."""
        return f"{self.prefix}:r1:{{{self.tenant.hex()}}}:index".encode()

    def of(self, record_id: bytes) -> bytes:
        """The key of a record."""
        return f"{self.prefix}:r1:{{{self.tenant.hex()}}}:{record_id.hex()}".encode()


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A record to store in place of the one with version ``expected`` (0: none that we could read)."""

    record: StoredRecord
    expected: int
    quota_bytes: int


def head_or_none(data: bytes | None) -> RecordHead | None:
    """Return the head that stored bytes begin with; None if there is none."""
    try:
        return None if not data else RecordHead.unpack(data)
    except CorruptBlock:
        return None


def entry_or_none(data: bytes) -> Entry | None:
    """Return head and name part of an entry; None if it is damaged."""
    try:
        return unpack_entry(data)
    except CorruptBlock:
        return None


def seen_version(head: RecordHead | None) -> int:
    """Return the version of a record, also of one that cannot be read here; 0 if there is none."""
    return 0 if head is None or head.is_dropped else head.version
