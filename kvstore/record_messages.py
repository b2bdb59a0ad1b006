"""Messages of the protocol about records. A value travels in the frame: it is small, unlike a block."""

from dataclasses import dataclass
from typing import ClassVar, Self

from kvstore.errors import ProtocolMismatch
from kvstore.message_fields import (
    MAX_TIMEOUT_US,
    Values,
    byte_string,
    count_fields,
    integer,
    text,
)
from kvstore.records import (
    MAX_LISTED_RECORDS,
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    MAX_VERSION,
    TOKEN_BYTES,
    Record,
    RecordAbsence,
    RecordKey,
    RecordLookup,
    RecordOutcome,
    RecordPlace,
    RecordPut,
    RecordWrite,
    require_collection,
    require_prefix,
)
from kvstore.wire import WireValue

_MAX_SALT_BYTES = 4096
_MAX_TTL_US = int(MAX_TTL_S * 1e6)
_NAME_FIELDS = 3


def _key_to_wire(key: RecordKey) -> Values:
    return (key.tenant_salt, key.collection, key.name)


def _key_from_wire(values: Values) -> RecordKey:
    salt, collection, name = values
    return RecordKey(
        text(collection, "collection"),
        text(name, "name"),
        byte_string(salt, "tenant_salt", high=_MAX_SALT_BYTES),
    )


def _timeout(value: WireValue) -> int:
    return integer(value, 0, MAX_TIMEOUT_US, "timeout")


def _flag(value: WireValue, what: str) -> bool:
    return bool(integer(value, 0, 1, what))


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Store a value under a name."""

    KIND: ClassVar[int] = 27
    put: RecordPut
    timeout_us: int

    def to_wire(self) -> Values:
        """Return the record's name, the value, and the conditions."""
        put = self.put
        ttl_us = int(put.ttl_s * 1e6)
        return (*_key_to_wire(put.key), put.value, ttl_us, put.if_version, put.token, self.timeout_us)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request.

        Raises:
            InvalidRequest: what it names can be no record.
        """
        count_fields(values, _NAME_FIELDS + 5, "put_record")
        value, ttl_us, version, token, timeout = values[_NAME_FIELDS:]
        put = RecordPut(
            _key_from_wire(values[:_NAME_FIELDS]),
            byte_string(value, "value", high=MAX_RECORD_BYTES),
            integer(ttl_us, 1, _MAX_TTL_US, "ttl") / 1e6,
            None if version is None else integer(version, 0, MAX_VERSION, "version"),
            byte_string(token, "token", low=TOKEN_BYTES, high=TOKEN_BYTES),
        )
        return cls(put, _timeout(timeout))


@dataclass(frozen=True, slots=True)
class _AboutRecord:
    """A request about one record, within ``timeout_us`` microseconds."""

    key: RecordKey
    timeout_us: int

    def to_wire(self) -> Values:
        """Return the record's name and the time."""
        return (*_key_to_wire(self.key), self.timeout_us)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request.

        Raises:
            InvalidRequest: what it names can be no record.
        """
        count_fields(values, _NAME_FIELDS + 1, cls.__name__)
        return cls(_key_from_wire(values[:_NAME_FIELDS]), _timeout(values[-1]))


@dataclass(frozen=True, slots=True)
class GetRecord(_AboutRecord):
    """Read a record."""

    KIND: ClassVar[int] = 28


@dataclass(frozen=True, slots=True)
class DropRecord(_AboutRecord):
    """Forget a record."""

    KIND: ClassVar[int] = 29


@dataclass(frozen=True, slots=True)
class ListRecords:
    """Name the records of a collection, in the order of their names, from behind ``after``."""

    KIND: ClassVar[int] = 30
    tenant_salt: bytes
    collection: str
    prefix: str
    after: str
    limit: int
    timeout_us: int

    def to_wire(self) -> Values:
        """Return the fields in order."""
        return (self.tenant_salt, self.collection, self.prefix, self.after, self.limit, self.timeout_us)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked request.

        Raises:
            InvalidRequest: no collection, or no record, can be named so.
        """
        count_fields(values, 6, "list_records")
        salt, collection, prefix, after, limit, timeout = values
        return cls(
            byte_string(salt, "tenant_salt", high=_MAX_SALT_BYTES),
            require_collection(text(collection, "collection")),
            require_prefix(text(prefix, "prefix")),
            require_prefix(text(after, "after"), "after"),
            integer(limit, 1, MAX_LISTED_RECORDS, "limit"),
            _timeout(timeout),
        )


@dataclass(frozen=True, slots=True)
class RecordWritten:
    """Answer to PutRecord."""

    KIND: ClassVar[int] = 0x800C
    write: RecordWrite

    def to_wire(self) -> Values:
        """Return the fields in order; words for what is one of a set."""
        write = self.write
        place = None if write.place is None else write.place.value
        return (write.outcome.value, write.version, place, int(write.is_doubtful), write.problem)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 5, "record_written")
        outcome, version, place, is_doubtful, problem = values
        return cls(
            RecordWrite(
                _outcome(outcome),
                integer(version, 0, MAX_VERSION, "version"),
                None if place is None else _place(place),
                _flag(is_doubtful, "is_doubtful"),
                text(problem, "a problem"),
            )
        )


@dataclass(frozen=True, slots=True)
class RecordFound:
    """Answer to GetRecord: the record, or why there is none."""

    KIND: ClassVar[int] = 0x800D
    found: RecordLookup

    def to_wire(self) -> Values:
        """Return the record's fields, or nils, and the reason."""
        record, reason = self.found.record, self.found.reason
        if record is None:
            return (None, None, None, None, None, None if reason is None else reason.value)
        left_us = int(record.expires_in_s * 1e6)
        return (record.value, record.version, left_us, record.place.value, int(record.is_current), None)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 6, "record_found")
        value, version, left_us, place, is_current, reason = values
        if (value is None) != (reason is not None):
            raise ProtocolMismatch("message: either a record is given or why there is none")
        if value is None:
            return cls(RecordLookup(None, _absence(reason)))
        record = Record(
            byte_string(value, "value", high=MAX_RECORD_BYTES),
            integer(version, 1, MAX_VERSION, "version"),
            integer(left_us, 0, _MAX_TTL_US, "time left") / 1e6,
            _place(place),
            _flag(is_current, "is_current"),
        )
        return cls(RecordLookup(record))


def _outcome(value: WireValue) -> RecordOutcome:
    try:
        return RecordOutcome(text(value, "an outcome", limit=32))
    except ValueError as error:
        raise ProtocolMismatch("message: unknown outcome of a put") from error


def _place(value: WireValue) -> RecordPlace:
    try:
        return RecordPlace(text(value, "a place", limit=32))
    except ValueError as error:
        raise ProtocolMismatch("message: unknown place of a record") from error


def _absence(value: WireValue) -> RecordAbsence:
    try:
        return RecordAbsence(text(value, "a reason", limit=32))
    except ValueError as error:
        raise ProtocolMismatch("message: unknown reason of an absence") from error
