"""Records: small named values that a store keeps until their time is over, and what calls about them return.

A record is data of record, unlike a block: what was acknowledged stays until its time is over or somebody
drops it. See docs/records.md for the rules.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.errors import InvalidRequest

MAX_RECORD_BYTES = 1 << 20
"""Longest value of a record."""

MAX_TTL_S = 30 * 86_400.0
"""Longest time that a record is kept after it was put; also that of one that names none."""

MIN_TTL_S = 0.001
"""Shortest such time."""

MAX_LISTED_RECORDS = 1000
"""Records that one listing names at most."""

MAX_VERSION = (1 << 53) - 1
"""Highest version of a record: every JSON parser holds it exactly."""

TOKEN_BYTES = 16
"""Length of the name of one write."""

COLLECTION_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._~:@-]{0,199}$"
PREFIX_PATTERN = "^([A-Za-z0-9][A-Za-z0-9._~:@-]{0,199})?$"
_COLLECTION, _NAME, _PREFIX = (
    re.compile(pattern.removeprefix("^").removesuffix("$"))
    for pattern in (COLLECTION_PATTERN, NAME_PATTERN, PREFIX_PATTERN)
)


class RecordOutcome(enum.Enum):
    """How a put ended; nothing but STORED changed the record."""

    STORED = "stored"
    """It is stored: read by every replica where there is a remote tier, and durable as that says."""

    CONFLICT = "conflict"
    """The record has another version than was named."""

    QUOTA = "quota"
    """The tenant's records would take more than its share."""

    FULL = "full"
    """The disk, the memory for records, or the remote server has no room."""

    UNAVAILABLE = "unavailable"
    """It could not be done, or not in time; ``is_doubtful`` says whether it may have happened."""


class RecordPlace(enum.Enum):
    """Where a record was read, or stored, that is which copy of it."""

    REMOTE = "remote"
    SSD = "ssd"
    MEMORY = "memory"


class RecordAbsence(enum.Enum):
    """Why there is no record. A closed set."""

    NEVER_SEEN = "never_seen"
    """Nobody put it, or it is so long gone that nothing is known of it."""

    EXPIRED = "expired"
    DROPPED = "dropped"
    CORRUPT = "corrupt"
    """Its bytes did not agree with their checksum or seal; they were removed."""

    ERASED = "erased"
    """Its tenant was erased: the key that it was encrypted under is gone."""

    LOST = "lost"
    """The remote server has lost it: evicted, or restarted or failed over without it."""

    UNREADABLE = "unreadable"
    """It is encrypted and this store's are not, or the other way round."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read.

    ``version`` names this state of it: it changes with every put. ``is_current`` says that it was read where
    the versions are decided. False: that place does not answer, or has lost the record, and this is the copy
    of one node, which others may have gone beyond.
    """

    value: bytes
    version: int
    expires_in_s: float
    place: RecordPlace
    is_current: bool = True


@dataclass(frozen=True, slots=True)
class RecordLookup:
    """A record, or why there is none: exactly one of the two is given."""

    record: Record | None
    reason: RecordAbsence | None = None


@dataclass(frozen=True, slots=True)
class RecordWrite:
    """How a put ended.

    ``version`` is the record's: the new one when STORED, the present one (0: there is none) after a CONFLICT,
    else 0. ``is_doubtful``: the put may have happened, or may yet. ``problem`` is a clause for people.
    """

    outcome: RecordOutcome
    version: int = 0
    place: RecordPlace | None = None
    is_doubtful: bool = False
    problem: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether the record is what was put."""
        return self.outcome is RecordOutcome.STORED


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What a listing says of a record."""

    name: str
    version: int
    value_bytes: int
    expires_in_s: float
    is_current: bool = True

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready form."""
        return {
            "name": self.name,
            "version": self.version,
            "value_bytes": self.value_bytes,
            "expires_in_s": round(self.expires_in_s, 3),
            "is_current": self.is_current,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "RecordInfo":
        """Return it from its JSON-ready form.

        Raises:
            KeyError, TypeError, ValueError: it is not that form.
        """
        version, value_bytes = data["version"], data["value_bytes"]
        expires_in_s, is_current = data["expires_in_s"], data["is_current"]
        if not isinstance(version, int) or not isinstance(value_bytes, int):
            raise TypeError("version or value_bytes is no integer")
        if not isinstance(expires_in_s, int | float) or not isinstance(is_current, bool):
            raise TypeError("expires_in_s is no number, or is_current no truth")
        return cls(str(data["name"]), version, value_bytes, float(expires_in_s), is_current)


@dataclass(frozen=True, slots=True)
class RecordKey:
    """What a record is named by. ``tenant_salt`` is that of a namespace: empty for what belongs to no tenant.

    Raises:
        InvalidRequest: collection or name has another form.
    """

    collection: str
    name: str
    tenant_salt: bytes = b""

    def __post_init__(self) -> None:
        require_collection(self.collection)
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(
                "record: its name is not 1 to 200 letters, digits and . _ ~ : @ -, of which the first is a"
                " letter or digit"
            )


@dataclass(frozen=True, slots=True)
class RecordPut:
    """One put: a value for a record. ``token`` names it: the same one again is the same put.

    ``if_version``: only if that is the record's version; 0: only if there is none.

    Raises:
        InvalidRequest: the value is too long, or version, time or token are out of range.
    """

    key: RecordKey
    value: bytes
    ttl_s: float
    if_version: int | None
    token: bytes

    def __post_init__(self) -> None:
        if len(self.value) > MAX_RECORD_BYTES:
            raise InvalidRequest(f"record: {len(self.value)} bytes, limit {MAX_RECORD_BYTES}")
        require_ttl(self.ttl_s)
        if self.if_version is not None and not 0 <= self.if_version <= MAX_VERSION:
            raise InvalidRequest(f"record: if_version is {self.if_version}, expected 0 to {MAX_VERSION}")
        if len(self.token) != TOKEN_BYTES:
            raise InvalidRequest(f"record: the token of a put has {TOKEN_BYTES} bytes")


def require_collection(text: str) -> str:
    """Return the name of a collection if it is one. Raises InvalidRequest."""
    if not _COLLECTION.fullmatch(text):
        raise InvalidRequest(
            "record: its collection is not 1 to 64 letters, digits, dots, dashes and underscores, beginning"
            " with a letter or digit"
        )
    return text


def require_prefix(text: str, what: str = "prefix") -> str:
    """Return the beginning of names if it can be one. Raises InvalidRequest."""
    if not _PREFIX.fullmatch(text):
        raise InvalidRequest(f"record: {what} cannot be the beginning of a name")
    return text


def require_limit(limit: int) -> int:
    """Return how many records to list if that may be asked. Raises InvalidRequest."""
    if not 1 <= limit <= MAX_LISTED_RECORDS:
        raise InvalidRequest(f"record: limit is {limit}, expected 1 to {MAX_LISTED_RECORDS}")
    return limit


def require_ttl(ttl_s: float) -> float:
    """Return a time to live if it is in range. Raises InvalidRequest."""
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"record: ttl_s is {ttl_s!r}, expected {MIN_TTL_S:g} to {MAX_TTL_S:.0f} seconds")
    return ttl_s
