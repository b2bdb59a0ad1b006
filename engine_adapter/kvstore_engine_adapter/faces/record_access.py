"""RecordAccess: the records of one owner, as sessions and stored responses use them.

A store's own client offers the records of a Records protocol; an engine without a store keeps them in memory.
"""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.records import (
    MAX_LISTED_RECORDS,
    MAX_RECORD_BYTES,
    Record,
    RecordInfo,
    RecordOutcome,
    RecordWrite,
)
from kvstore_engine_adapter.faces.api_error import ApiError

logger = logging.getLogger(__name__)

COLLECTIONS = SESSIONS, TURNS, RESPONSES = "engine.sessions", "engine.turns", "engine.responses"
"""Collections of the heads of sessions, of their turns, and of stored responses."""

_GETS_AT_ONCE = 32
_USAGE_KNOWN_FOR_S = 10.0
_MAX_OWNERS = 4096
_RENEWAL_RATIO = 1.25  # an answer takes time between the use of a history and what refers to it then
_RETRY_AFTER_S = 1


class Records(Protocol):
    """What sessions need of a store's client; see ``kvstore.record_clients``."""

    async def put_record(
        self,
        collection: str,
        name: str,
        value: bytes,
        *,
        ttl_s: float | None = None,
        if_version: int | None = None,
        tenant_salt: bytes = b"",
    ) -> RecordWrite:
        """Store a value; an outage is an outcome."""

    async def get_record(self, collection: str, name: str, *, tenant_salt: bytes = b"") -> Record | None:
        """Return a record. Raises ServerUnavailable, TierUnavailable."""

    async def drop_record(self, collection: str, name: str, *, tenant_salt: bytes = b"") -> bool:
        """Forget a record. Raises ServerUnavailable, TierUnavailable."""

    async def list_records(
        self,
        collection: str,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = MAX_LISTED_RECORDS,
        tenant_salt: bytes = b"",
    ) -> list[RecordInfo]:
        """Return the records of a collection by name. Raises ServerUnavailable, TierUnavailable."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose request it is. ``salt`` separates its records from those of others.

    ``block_salt`` separates its blocks; empty: they are those of whoever runs the engine.
    """

    name: str
    salt: bytes
    block_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """``ttl_s``: how long a session or response stays after its last use; ``quota_bytes``: of one owner."""

    ttl_s: float = 86_400.0
    quota_bytes: int = 64 << 20


class RecordAccess:
    """Reads and writes JSON records of owners, and keeps to their quota.

    Records that others refer to are written for twice the promised time, and again when they are used and not
    much more than the promise is left: so they outlast what refers to them without a write at each use.
    """

    def __init__(
        self, records: Records, limits: SessionLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._records = records
        self._clock = clock
        self.limits = limits
        self._used: OrderedDict[bytes, tuple[float, int]] = OrderedDict()

    async def get(self, owner: Owner, collection: str, name: str) -> Record | None:
        """Return a record, None if there is none.

        Raises:
            ApiError: 503: it is not known whether there is one.
        """
        try:
            return await self._records.get_record(collection, name, tenant_salt=owner.salt)
        except KVStoreError as error:
            raise unavailable(error) from error

    async def get_all(self, owner: Owner, collection: str, names: Sequence[str]) -> list[Record | None]:
        """Return several records. Raises as ``get``."""
        found: list[Record | None] = []
        for start in range(0, len(names), _GETS_AT_ONCE):
            part = names[start : start + _GETS_AT_ONCE]
            found += await asyncio.gather(*(self.get(owner, collection, name) for name in part))
        return found

    async def put(
        self, owner: Owner, collection: str, name: str, value: bytes, *, if_version: int
    ) -> RecordWrite:
        """Store a value if the record has that version, and the owner's quota allows it.

        A session's head stays for the promised time, everything else for twice that. The outcome is STORED,
        CONFLICT, or UNAVAILABLE and doubtful.

        Raises:
            ApiError: 429 the quota is used up; 503 it was not stored; 400 the value is too long.
        """
        if len(value) > MAX_RECORD_BYTES:
            raise ApiError(
                400,
                f"session: a turn of {len(value)} bytes cannot be kept, the limit is {MAX_RECORD_BYTES}",
                code="session_too_long",
            )
        if not await self.has_room(owner, len(value)):
            raise _over_quota(f"sessions and responses of this key may take {self.limits.quota_bytes} bytes")
        write = await self._put(owner, collection, name, value, if_version)
        if write.outcome is RecordOutcome.QUOTA:
            raise _over_quota(write.problem)
        if write.outcome is RecordOutcome.STORED:
            self._count(owner, len(value))
        elif write.outcome is not RecordOutcome.CONFLICT and not write.is_doubtful:
            raise unavailable(write.problem)
        return write

    async def keep(
        self, owner: Owner, collection: str, names: Sequence[str], found: Sequence[Record]
    ) -> None:
        """Have records that were used stay for the promised time. What fails is tried at their next use."""
        due = [
            (name, record)
            for name, record in zip(names, found, strict=True)
            if record.expires_in_s < _RENEWAL_RATIO * self.limits.ttl_s
        ]
        for name, record in due:
            write = await self._put(owner, collection, name, record.value, record.version)
            if not write.is_stored:
                logger.warning("sessions: a record in use was not renewed: %s", write.outcome.value)

    async def drop(self, owner: Owner, collection: str, name: str) -> bool:
        """Forget a record; whether there was one. Raises as ``get``."""
        try:
            self._used.pop(owner.salt, None)
            return await self._records.drop_record(collection, name, tenant_salt=owner.salt)
        except KVStoreError as error:
            raise unavailable(error) from error

    async def page(
        self, owner: Owner, collection: str, *, after: str = "", limit: int = MAX_LISTED_RECORDS
    ) -> list[RecordInfo]:
        """Return an owner's records by name. Raises as ``get``; ApiError 400 for an impossible ``after``."""
        try:
            return await self._records.list_records(
                collection, after=after, limit=limit, tenant_salt=owner.salt
            )
        except InvalidRequest as error:
            raise ApiError(400, str(error), param="after") from error
        except KVStoreError as error:
            raise unavailable(error) from error

    async def list_all(self, owner: Owner, collection: str) -> list[RecordInfo]:
        """Return all of an owner's records in a collection. Raises as ``get``."""
        found: list[RecordInfo] = []
        while True:
            page = await self.page(owner, collection, after=found[-1].name if found else "")
            found += page
            if len(page) < MAX_LISTED_RECORDS:
                return found

    async def has_room(self, owner: Owner, more_bytes: int) -> bool:
        """Whether an owner's records may take some more bytes. Raises as ``get``."""
        quota = self.limits.quota_bytes
        known = self._used.get(owner.salt)
        if known is not None and known[0] > self._clock() and known[1] + more_bytes <= quota:
            return True
        # Other replicas write and drop too, and what has expired counts no more: look before refusing.
        used = sum([info.value_bytes for name in COLLECTIONS for info in await self.list_all(owner, name)])
        self._used[owner.salt] = (self._clock() + _USAGE_KNOWN_FOR_S, used)
        self._used.move_to_end(owner.salt)
        if len(self._used) > _MAX_OWNERS:
            self._used.popitem(last=False)
        return used + more_bytes <= quota

    def _count(self, owner: Owner, more_bytes: int) -> None:
        known = self._used.get(owner.salt)
        if known is not None:
            self._used[owner.salt] = (known[0], known[1] + more_bytes)

    async def _put(
        self, owner: Owner, collection: str, name: str, value: bytes, if_version: int
    ) -> RecordWrite:
        try:
            return await self._records.put_record(
                collection,
                name,
                value,
                ttl_s=self.limits.ttl_s if collection == SESSIONS else 2 * self.limits.ttl_s,
                if_version=if_version,
                tenant_salt=owner.salt,
            )
        except KVStoreError as error:
            raise unavailable(error) from error


def encode(value: dict[str, object]) -> bytes:
    """Return the bytes of a record."""
    return json.dumps({"format": 1} | value, ensure_ascii=False, separators=(",", ":")).encode()


def decode(record: Record, what: str) -> dict[str, object]:
    """Return what a record holds.

    Raises:
        ApiError: 500: it is damaged, or of a later version.
    """
    try:
        value = json.loads(record.value)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("format") != 1:
        raise damaged(what)
    return value


def damaged(what: str) -> ApiError:
    """Return the error of a record that cannot be understood."""
    logger.error("sessions: the record of %s is damaged, or of a later version", what)
    return ApiError(
        500,
        f"{what}: its record is damaged, or of a later version of this server",
        kind="server_error",
        code="session_damaged",
    )


def unavailable(problem: object) -> ApiError:
    """Return the error of records that cannot be reached now."""
    return ApiError(
        503,
        f"sessions are unavailable: {problem}: try again",
        kind="server_error",
        code="sessions_unavailable",
        retry_after_s=_RETRY_AFTER_S,
    )


def _over_quota(problem: str) -> ApiError:
    return ApiError(
        429,
        f"quota: {problem}: delete sessions or responses",
        kind="insufficient_quota",
        code="insufficient_quota",
    )
