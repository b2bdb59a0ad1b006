"""RecordMethods and AsyncRecordMethods: what clients of every kind offer about records."""

from typing import Protocol, TypeVar

from kvstore.client_calls import Call
from kvstore.record_calls import RecordCalls
from kvstore.records import MAX_LISTED_RECORDS, Record, RecordInfo, RecordKey, RecordLookup, RecordWrite
from kvstore.transfer import Buffer

T = TypeVar("T")


class _Client(Protocol):
    """What the methods stand on."""

    _record_calls: RecordCalls

    def _run(self, call: Call[T]) -> T: ...


class _AsyncClient(Protocol):
    """What the asynchronous methods stand on."""

    _record_calls: RecordCalls

    async def _run(self, call: Call[T]) -> T: ...


class RecordMethods:
    """Records of a blocking client."""

    def put_record(
        self: _Client,
        collection: str,
        name: str,
        value: Buffer,
        *,
        ttl_s: float | None = None,
        if_version: int | None = None,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> RecordWrite:
        """Store up to 1 MiB under a name, until ``ttl_s`` seconds are over (None: the longest, 30 days).

        With ``if_version`` only if that is the record's version now; 0: only if there is none. STORED means
        that it stays: it is durable, and seen by every replica, as the store's tiers allow. An outage is an
        outcome, never an exception; where that is doubtful, read the record before going on. ``tenant_salt``
        is that of the tenant whose record it is, as in a Namespace; over HTTP the server knows it.

        Raises:
            InvalidRequest: the value is too long, a name has another form, or the client is read-only.
        """
        key = RecordKey(collection, name, tenant_salt)
        return self._run(
            self._record_calls.put(key, value, ttl_s=ttl_s, if_version=if_version, timeout_s=timeout_s)
        )

    def get_record(
        self: _Client,
        collection: str,
        name: str,
        *,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> Record | None:
        """Return a record; None if there is none, for a reason that the store counts.

        Raises:
            ServerUnavailable, TierUnavailable: it is not known whether there is one.
        """
        key = RecordKey(collection, name, tenant_salt)
        return self._run(self._record_calls.get(key, timeout_s=timeout_s)).record

    def look_up_record(
        self: _Client,
        collection: str,
        name: str,
        *,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> RecordLookup:
        """Return a record, or why there is none. Raises as ``get_record``."""
        key = RecordKey(collection, name, tenant_salt)
        return self._run(self._record_calls.get(key, timeout_s=timeout_s))

    def drop_record(
        self: _Client,
        collection: str,
        name: str,
        *,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> bool:
        """Forget a record, on every replica; whether there was one.

        Raises:
            ServerUnavailable, TierUnavailable: it is not known whether it is gone.
        """
        key = RecordKey(collection, name, tenant_salt)
        return self._run(self._record_calls.drop(key, timeout_s=timeout_s))

    def list_records(
        self: _Client,
        collection: str,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = MAX_LISTED_RECORDS,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> list[RecordInfo]:
        """Return the records of a collection whose names begin with ``prefix``, by name, at most ``limit``.

        ``after`` goes on behind the last name of the listing before.

        Raises:
            ServerUnavailable, TierUnavailable: it is not known which there are.
        """
        return self._run(
            self._record_calls.listing(
                collection,
                prefix=prefix,
                after=after,
                limit=limit,
                tenant_salt=tenant_salt,
                timeout_s=timeout_s,
            )
        )


class AsyncRecordMethods:
    """Records of an asynchronous client."""

    async def put_record(
        self: _AsyncClient,
        collection: str,
        name: str,
        value: Buffer,
        *,
        ttl_s: float | None = None,
        if_version: int | None = None,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> RecordWrite:
        """Store up to 1 MiB under a name, until ``ttl_s`` seconds are over (None: the longest, 30 days).

        With ``if_version`` only if that is the record's version now; 0: only if there is none. STORED means
        that it stays: it is durable, and seen by every replica, as the store's tiers allow. An outage is an
        outcome, never an exception; where that is doubtful, read the record before going on. ``tenant_salt``
        is that of the tenant whose record it is, as in a Namespace; over HTTP the server knows it.

        Raises:
            InvalidRequest: the value is too long, a name has another form, or the client is read-only.
        """
        key = RecordKey(collection, name, tenant_salt)
        return await self._run(
            self._record_calls.put(key, value, ttl_s=ttl_s, if_version=if_version, timeout_s=timeout_s)
        )

    async def get_record(
        self: _AsyncClient,
        collection: str,
        name: str,
        *,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> Record | None:
        """Return a record; None if there is none, for a reason that the store counts.

        Raises:
            ServerUnavailable, TierUnavailable: it is not known whether there is one.
        """
        key = RecordKey(collection, name, tenant_salt)
        return (await self._run(self._record_calls.get(key, timeout_s=timeout_s))).record

    async def look_up_record(
        self: _AsyncClient,
        collection: str,
        name: str,
        *,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> RecordLookup:
        """Return a record, or why there is none. Raises as ``get_record``."""
        key = RecordKey(collection, name, tenant_salt)
        return await self._run(self._record_calls.get(key, timeout_s=timeout_s))

    async def drop_record(
        self: _AsyncClient,
        collection: str,
        name: str,
        *,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> bool:
        """Forget a record, on every replica; whether there was one.

        Raises:
            ServerUnavailable, TierUnavailable: it is not known whether it is gone.
        """
        key = RecordKey(collection, name, tenant_salt)
        return await self._run(self._record_calls.drop(key, timeout_s=timeout_s))

    async def list_records(
        self: _AsyncClient,
        collection: str,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = MAX_LISTED_RECORDS,
        tenant_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> list[RecordInfo]:
        """Return the records of a collection whose names begin with ``prefix``, by name, at most ``limit``.

        ``after`` goes on behind the last name of the listing before.

        Raises:
            ServerUnavailable, TierUnavailable: it is not known which there are.
        """
        return await self._run(
            self._record_calls.listing(
                collection,
                prefix=prefix,
                after=after,
                limit=limit,
                tenant_salt=tenant_salt,
                timeout_s=timeout_s,
            )
        )
