"""What one thread does with one connection for one question about records in Redis.

Keys. A record is one value, ``<prefix>:r1:{<tenant>}:<digest>``; beside it a tenant has an index, a hash
``<prefix>:r1:{<tenant>}:index`` with the entry of each record under its digest, and under ``used`` what they
count for together. The braces keep them on one node of a cluster.

Changes are transactions (WATCH, MULTI, EXEC, no scripts): a record's value and its place in the index change
together, and only if nobody else touched the value meanwhile. Whoever changes only the index touches the
value too, so that a put that has read the index before is repeated.

In step. Behind each batch of commands goes a PING with a token, and its replies count when the token comes
back in its place. A connection whose server said something unexpected is not used again: it may watch keys.
"""

import itertools
from collections.abc import Sequence

from kvstore.records import MAX_TTL_S
from kvstore_tiers.record_format import (
    HEAD_BYTES,
    MAX_STORED_BYTES,
    StoredRecord,
    charge_bytes,
    tombstone,
)
from kvstore_tiers.record_shared import (
    COPY_LIFE_S,
    Result,
    SharedEnd,
    SharedEntries,
    SharedFound,
    SharedNames,
    SharedReplies,
    SharedStatus,
    StoreRequest,
    entry_or_none,
    head_or_none,
    seen_version,
)
from kvstore_tiers.remote_session import Tally
from kvstore_tiers.resp import ErrorReply, Piece, RespConnection, RespReply, command
from kvstore_tiers.resp_stream import RespFault

INDEX_MS = int((MAX_TTL_S + 86_400) * 1000)
"""How long an index is kept after the last put: longer than any record."""

_MARK_SLACK_MS = 3_600_000
_MARK_MS = int(COPY_LIFE_S * 1000) + _MARK_SLACK_MS
"""How long a mark of a dropped record stays: longer than any copy of it may be served."""

NEAR_BYTES = 64 << 20
"""With less than this left of a quota, puts of a tenant go one at a time: none may pass it together."""

MAX_REMOVED = 64
"""Records that one transaction removes."""

_SMALL_BYTES = 64 << 10
_SCAN_COUNT = b"256"
_SCAN_BYTES = 4 << 20
_USED = b"used"
_UNAVAILABLE_CODES = frozenset({"LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOAUTH", "BUSY"})
_REFUSES_WRITES_CODES = frozenset({"READONLY", "NOREPLICAS", "MISCONF"})
_ASKING = command(b"ASKING")
_tokens = itertools.count(1)


class Answered(Exception):
    """The server refused, or pointed elsewhere: noted in result and tally; there is no more to do."""


class Exchange:
    """One connection on behalf of one question."""

    def __init__(
        self,
        connection: RespConnection,
        tally: Tally,
        result: Result,
        *,
        deadline_s: float,
        is_asking: bool = False,
    ) -> None:
        self._connection = connection
        self._tally = tally
        self._result = result
        self._deadline_s = deadline_s
        self._is_asking = is_asking

    def ask(self, commands: Sequence[Sequence[Piece]], *, max_bytes: int = _SMALL_BYTES) -> list[RespReply]:
        """Send commands, in their wire form, and return their replies. Raises RespFault."""
        token = b"fence-r%d" % next(_tokens)
        pieces: list[Piece] = []
        for words in commands:
            pieces += [_ASKING, *words] if self._is_asking else words
        self._connection.send([*pieces, command(b"PING", token)], deadline_s=self._deadline_s)
        replies: list[RespReply] = []
        for _ in commands:
            if self._is_asking:
                self._connection.read_simple(deadline_s=self._deadline_s)
            replies.append(self._connection.read_reply(max_bytes=max_bytes, deadline_s=self._deadline_s))
            self._tally.was_answered = True
        self._connection.read_fence(token, deadline_s=self._deadline_s)
        return replies

    def need(self, commands: Sequence[Sequence[Piece]], *, max_bytes: int = _SMALL_BYTES) -> list[RespReply]:
        """The same, where an error is the end.

        Raises:
            Answered: one of the replies is an error.
            RespFault: as ``ask``.
        """
        replies = self.ask(commands, max_bytes=max_bytes)
        for reply in replies:
            if isinstance(reply, ErrorReply):
                self.refuse(reply)
        return replies

    def refuse(self, reply: ErrorReply) -> None:
        """Take down what an error says. Raises Answered."""
        tally = self._tally
        tally.is_doubtful = True
        self._result.problem = f"the server answers {_printable(reply.text)}"
        if tally.redirected(0, reply):
            raise Answered
        if reply.code in _REFUSES_WRITES_CODES:
            tally.refuses_writes = True
        elif reply.code in _UNAVAILABLE_CODES:
            tally.fault = reply.fault
        elif isinstance(self._result, SharedEnd):
            self._result.status = SharedStatus.REFUSED
        raise Answered

    def forget_watches(self) -> None:
        """Watch nothing any more."""
        self.need([[command(b"UNWATCH")]])


def read_record(exchange: Exchange, names: SharedNames, record_id: bytes, found: SharedFound) -> None:
    """Read a record, its time left, and its entry. Raises Answered, RespFault."""
    key = names.of(record_id)
    data, left, entry, now = exchange.need(
        [
            [command(b"GET", key)],
            [command(b"PTTL", key)],
            [command(b"HGET", names.index, record_id)],
            [command(b"TIME")],
        ],
        max_bytes=MAX_STORED_BYTES + _SMALL_BYTES,
    )
    found.data, found.entry = _bytes_or_none(data), _bytes_or_none(entry)
    found.left_ms, found.now_ms = _int(left), _time_ms(now)
    found.is_known = True


def store_record(exchange: Exchange, names: SharedNames, request: StoreRequest, end: SharedEnd) -> None:
    """Store a record if the present one is the expected one. Raises Answered, RespFault."""
    head, key, index = request.record.head, names.of(request.record.head.id), names.index
    _, data, entry, used = exchange.need(
        [
            [command(b"WATCH", key)],
            [command(b"GETRANGE", key, b"0", b"%d" % (HEAD_BYTES - 1))],
            [command(b"HGET", index, head.id)],
            [command(b"HGET", index, _USED)],
        ]
    )
    present = head_or_none(_bytes_or_none(data))
    if present is not None and not present.is_dropped and present.token == head.token:
        end.status, end.version = SharedStatus.OK, present.version
        return exchange.forget_watches()
    end.version = seen_version(present)
    if end.version != request.expected:
        end.status = SharedStatus.CHANGED
        return exchange.forget_watches()
    more_bytes = charge_bytes(head.stored_bytes) - _charge(_bytes_or_none(entry))
    if more_bytes > 0 and _int_text(used) + more_bytes > request.quota_bytes - NEAR_BYTES:
        _, used = exchange.need([[command(b"WATCH", index)], [command(b"HGET", index, _USED)]])
        if _int_text(used) + more_bytes > request.quota_bytes:
            end.status = SharedStatus.QUOTA
            return exchange.forget_watches()
    changes: list[Sequence[Piece]] = [
        _set_pieces(key, request.record, head.ttl_ms),
        [command(b"HSET", index, head.id, request.record.entry)],
        [command(b"HINCRBY", index, _USED, b"%d" % more_bytes)],
        [command(b"PEXPIRE", index, b"%d" % INDEX_MS)],
    ]
    if _execute(exchange, changes, end):
        end.version = head.version
    return None


def drop_record(exchange: Exchange, names: SharedNames, record_id: bytes, end: SharedEnd) -> None:
    """Put a mark in a record's place that says that it is gone. Raises Answered, RespFault.

    The mark stays as long as any node may have a copy that it would serve.
    """
    key, index = names.of(record_id), names.index
    _, data, left, entry = exchange.need(
        [
            [command(b"WATCH", key)],
            [command(b"GETRANGE", key, b"0", b"%d" % (HEAD_BYTES - 1))],
            [command(b"PTTL", key)],
            [command(b"HGET", index, record_id)],
        ]
    )
    present, charge = _bytes_or_none(data) or b"", _charge(_bytes_or_none(entry))
    head = head_or_none(present)
    is_there = bool(present) and (head is None or not head.is_dropped)
    if not is_there and not charge:
        end.status = SharedStatus.OK
        return exchange.forget_watches()
    life_ms = min(max(_int(left), 0) + _MARK_SLACK_MS, _MARK_MS)
    mark = tombstone(record_id)
    changes = [_set_pieces(key, mark, life_ms), *_index_removal(index, [record_id], charge)]
    if _execute(exchange, changes, end):
        end.count = int(is_there)
    return None


def discard_record(
    exchange: Exchange, names: SharedNames, record_id: bytes, seen: bytes, end: SharedEnd
) -> None:
    """Remove what cannot be read, if it is still what was seen. Raises Answered, RespFault."""
    key, index = names.of(record_id), names.index
    _, data, entry = exchange.need(
        [[command(b"WATCH", key)], [command(b"GET", key)], [command(b"HGET", index, record_id)]],
        max_bytes=MAX_STORED_BYTES + _SMALL_BYTES,
    )
    if _bytes_or_none(data) != seen:
        end.status = SharedStatus.ABORTED
        return exchange.forget_watches()
    charge = _charge(_bytes_or_none(entry))
    _execute(exchange, [[command(b"DEL", key)], *_index_removal(index, [record_id], charge)], end)
    return None


def remove_records(
    exchange: Exchange,
    names: SharedNames,
    wanted: Sequence[tuple[bytes, bytes]],
    end: SharedEnd,
    *,
    only_absent: bool,
) -> None:
    """Put marks in place of records whose entry is the one given.

    With ``only_absent`` those whose value is gone only leave the index. Raises Answered, RespFault.
    """
    index, ids = names.index, [record_id for record_id, _ in wanted]
    keys = [names.of(record_id) for record_id in ids]
    _, *exist, entries = exchange.need(
        [
            [command(b"WATCH", *keys)],
            *([command(b"EXISTS", key)] for key in keys),
            [command(b"HMGET", index, *ids)],
        ],
        max_bytes=_SCAN_BYTES,
    )
    found = entries if isinstance(entries, list) else []
    if len(found) != len(ids):
        raise RespFault("unexpected reply to HMGET")
    chosen = [
        (key, record_id, entry)
        for key, (record_id, entry), is_there, present in zip(keys, wanted, exist, found, strict=True)
        if present == entry and not (only_absent and is_there == 1)
    ]
    if not chosen:
        end.status = SharedStatus.OK
        return exchange.forget_watches()
    changes: list[Sequence[Piece]] = []
    for key, record_id, _ in chosen:
        if only_absent:
            # SET touches the value for whoever watches it, also where there is none.
            changes += [[command(b"SET", key, b"")], [command(b"DEL", key)]]
        else:
            changes.append(_set_pieces(key, tombstone(record_id), _MARK_MS))
    charge = sum(_charge(entry) for _, _, entry in chosen)
    changes += _index_removal(index, [record_id for _, record_id, _ in chosen], charge)
    if _execute(exchange, changes, end):
        end.count = len(chosen)
    return None


def read_index(exchange: Exchange, names: SharedNames, found: SharedEntries) -> None:
    """Read all entries of an index. Raises Answered, RespFault."""
    cursor = b"0"
    while True:
        reply, now = exchange.need(
            [[command(b"HSCAN", names.index, cursor, b"COUNT", _SCAN_COUNT)], [command(b"TIME")]],
            max_bytes=_SCAN_BYTES,
        )
        match reply:
            case [bytes(cursor), list(items)]:
                pairs = zip(items[::2], items[1::2], strict=False)
            case _:
                raise RespFault("unexpected reply to HSCAN")
        for name, value in pairs:
            if isinstance(name, bytes) and isinstance(value, bytes) and name != _USED:
                found.entries[name] = value, entry_or_none(value)
        found.now_ms = _time_ms(now)
        if cursor == b"0":
            found.is_known = True
            return


def read_heads(exchange: Exchange, names: SharedNames, ids: Sequence[bytes], found: SharedReplies) -> None:
    """Read the head of each record. Raises Answered, RespFault."""
    end = b"%d" % (HEAD_BYTES - 1)
    found.replies = exchange.need(
        [[command(b"GETRANGE", names.of(record_id), b"0", end)] for record_id in ids]
    )
    found.is_known = True


def read_times(exchange: Exchange, names: SharedNames, ids: Sequence[bytes], found: SharedReplies) -> None:
    """Read the milliseconds left of each record; negative where there is none. Raises Answered, RespFault."""
    found.replies = exchange.need([[command(b"PTTL", names.of(record_id))] for record_id in ids])
    found.is_known = True


def _execute(exchange: Exchange, changes: Sequence[Sequence[Piece]], end: SharedEnd) -> bool:
    """Run a transaction; whether it was done. Raises Answered, RespFault."""
    end.is_sent = True
    _, *queued, done = exchange.ask([[command(b"MULTI")], *changes, [command(b"EXEC")]])
    end.is_sent = False
    if isinstance(done, list):
        end.status = SharedStatus.OK
        failed = next((reply for reply in done if isinstance(reply, ErrorReply)), None)
        if failed is not None:
            end.problem = f"of a transaction the server answers {_printable(failed.text)}"
        return True
    if done is None:
        end.status = SharedStatus.ABORTED
        return False
    errors = [reply for reply in (*queued, done) if isinstance(reply, ErrorReply)]
    if any("OOM" in error.text for error in errors):
        end.status = SharedStatus.FULL
        # The transaction is discarded, and with it all watches.
        return False
    if not errors:
        raise RespFault("unexpected reply to EXEC")
    exchange.refuse(errors[0])
    return False


def _set_pieces(key: bytes, record: StoredRecord, life_ms: int) -> list[Piece]:
    """Return a SET of a record in the wire form, its body in place."""
    entry, life = record.entry, b"%d" % max(1, life_ms)
    length = len(entry) + len(record.body)
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, length)
    return [head + entry, record.body, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(life), life)]


def _index_removal(index: bytes, ids: Sequence[bytes], charge: int) -> list[list[Piece]]:
    return [
        [command(b"HDEL", index, *ids)],
        [command(b"HINCRBY", index, _USED, b"%d" % -charge)],
    ]


def _charge(entry: bytes | None) -> int:
    """Return what the record of an entry counts for; of a damaged entry that is not known."""
    head = head_or_none(entry)
    return 0 if head is None else charge_bytes(head.stored_bytes)


def _bytes_or_none(reply: RespReply) -> bytes | None:
    if reply is None or isinstance(reply, bytes):
        return reply
    raise RespFault("unexpected reply where a value belongs")


def _int(reply: RespReply) -> int:
    if isinstance(reply, int):
        return reply
    raise RespFault("unexpected reply where a number belongs")


def _int_text(reply: RespReply) -> int:
    text = _bytes_or_none(reply) or b"0"
    digits = text.removeprefix(b"-")
    return int(text) if digits.isdigit() and len(digits) < 20 else 0


def _time_ms(reply: RespReply) -> int:
    match reply:
        case [bytes(seconds), bytes(micros)] if seconds.isdigit() and micros.isdigit():
            return int(seconds) * 1000 + int(micros) // 1000
    raise RespFault("unexpected reply to TIME")


def _printable(text: str) -> str:
    return "".join(letter for letter in text[:80] if letter.isprintable())
