"""RecordCalls: the calls of a client about records, decided but not made, as ClientCalls are about blocks."""

import os

from kvstore.calls import Plan, Session, ask_for, load_list, server_timeout_us
from kvstore.client_calls import Call
from kvstore.client_state import ClientState
from kvstore.errors import InvalidRequest, KVStoreError, ProtocolMismatch
from kvstore.messages import (
    Count,
    DropRecord,
    GetRecord,
    ListRecords,
    PutRecord,
    RecordFound,
    RecordWritten,
    Report,
)
from kvstore.records import (
    MAX_TTL_S,
    TOKEN_BYTES,
    RecordInfo,
    RecordKey,
    RecordLookup,
    RecordOutcome,
    RecordPut,
    RecordWrite,
    require_collection,
    require_limit,
    require_prefix,
)
from kvstore.transfer import Buffer


class RecordCalls:
    """Checks the arguments of calls about records, and makes calls of them."""

    def __init__(self, state: ClientState, *, is_read_only: bool = False) -> None:
        self._state = state
        self._is_read_only = is_read_only

    def put(
        self,
        key: RecordKey,
        value: Buffer,
        *,
        ttl_s: float | None,
        if_version: int | None,
        timeout_s: float | None,
    ) -> Call[RecordWrite]:
        """Store a value under a name."""
        put = self.named_put(key, value, ttl_s=ttl_s, if_version=if_version)
        return Call(
            lambda session: _put_plan(session, put),
            self.deadline_s(timeout_s, self._state.timeouts.put_s),
            None,
            self.unknown_end,
        )

    def get(self, key: RecordKey, *, timeout_s: float | None) -> Call[RecordLookup]:
        """Read a record."""
        return Call(
            lambda session: _get_plan(session, key),
            self.deadline_s(timeout_s, self._state.timeouts.fetch_s),
        )

    def drop(self, key: RecordKey, *, timeout_s: float | None) -> Call[bool]:
        """Forget a record."""
        self.refuse_if_read_only()
        return Call(
            lambda session: _drop_plan(session, key),
            self.deadline_s(timeout_s, self._state.timeouts.control_s),
        )

    def listing(
        self,
        collection: str,
        *,
        prefix: str,
        after: str,
        limit: int,
        tenant_salt: bytes,
        timeout_s: float | None,
    ) -> Call[list[RecordInfo]]:
        """Name the records of a collection."""
        require_collection(collection)
        require_prefix(prefix)
        require_prefix(after, "after")
        require_limit(limit)

        def plan(session: Session) -> Plan[list[RecordInfo]]:
            request = ListRecords(tenant_salt, collection, prefix, after, limit, server_timeout_us(session))
            answer = yield from ask_for(request, Report)
            return read_infos(load_list(answer.json))

        return Call(plan, self.deadline_s(timeout_s, self._state.timeouts.control_s))

    def named_put(
        self, key: RecordKey, value: Buffer, *, ttl_s: float | None, if_version: int | None
    ) -> RecordPut:
        """Return a put with a token of its own.

        Raises:
            InvalidRequest: the client is read-only, the value no contiguous buffer, or as ``RecordPut``.
        """
        self.refuse_if_read_only()
        try:
            data = bytes(memoryview(value).cast("B"))
        except TypeError as error:
            raise InvalidRequest(f"record: its value is no contiguous buffer: {error}") from error
        ttl = MAX_TTL_S if ttl_s is None else ttl_s
        return RecordPut(key, data, ttl, if_version, os.urandom(TOKEN_BYTES))

    def unknown_end(self, error: KVStoreError) -> RecordWrite:
        """Return what a put comes to whose answer is not known."""
        self._state.note_away(error)
        return RecordWrite(RecordOutcome.UNAVAILABLE, is_doubtful=True, problem=str(error)[:500])

    def refuse_if_read_only(self) -> None:
        """Raise InvalidRequest if the client may change nothing."""
        if self._is_read_only:
            raise InvalidRequest("client: it is read-only: connect without is_read_only to change the store")

    def deadline_s(self, timeout_s: float | None, default_s: float) -> float:
        """Return the instant at which a call must be over. Raises InvalidRequest for a negative time."""
        return self._state.deadline_s(timeout_s, default_s)


def read_infos(items: list[object]) -> list[RecordInfo]:
    """Return the records that an answer names. Raises ProtocolMismatch for another form."""
    try:
        return [RecordInfo.from_dict(item) for item in items]  # type: ignore[arg-type]  # another type raises
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolMismatch(f"answer: a record in a listing is malformed: {error}") from error


def _put_plan(session: Session, put: RecordPut) -> Plan[RecordWrite]:
    answer = yield from ask_for(PutRecord(put, server_timeout_us(session)), RecordWritten)
    return answer.write


def _get_plan(session: Session, key: RecordKey) -> Plan[RecordLookup]:
    answer = yield from ask_for(GetRecord(key, server_timeout_us(session)), RecordFound)
    return answer.found


def _drop_plan(session: Session, key: RecordKey) -> Plan[bool]:
    answer = yield from ask_for(DropRecord(key, server_timeout_us(session)), Count)
    return answer.count > 0
