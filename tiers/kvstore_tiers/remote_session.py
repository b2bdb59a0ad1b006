"""What one thread does with one connection for one call of the remote tier: pipelined GET, SET, EXISTS, DEL.

Each function takes a share of a call's requests, numbered by their place in the call, and fills in the
outcome of each, so that what was answered before a fault counts. Where a cluster's node says that another one
has the block, the outcome stays open and ``Tally.redirects`` says where to ask. All raise RespFault, after
which the connection must be closed.

In step. A GET's value names its block, and is verified. The replies to SET, EXISTS and DEL name nothing, so
behind each batch of them goes a PING with a token, and they count when the token comes back in its place.
"""

import itertools
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field

from kvstore.checksum import RunningChecksum
from kvstore.errors import CorruptBlock
from kvstore.shared_records import SHARED_RECORDS
from kvstore.tier import (
    HEADER_BYTES,
    SEALED_HEADER_BYTES,
    BlockHeader,
    BlockId,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    WriteRequest,
    WriteStatus,
    stored_header_bytes,
)
from kvstore_tiers.resp import BulkReply, BulkStatus, ErrorReply, Piece, RespConnection, command
from kvstore_tiers.resp_stream import RespFault

_MIN_WINDOW, _MAX_WINDOW, _WINDOW_BYTES = 4, 64, 2 << 20
_PROBE_WINDOW = 256
_UNAVAILABLE_CODES = frozenset({"LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOAUTH", "BUSY"})
_REFUSES_WRITES_CODES = frozenset({"READONLY", "NOREPLICAS", "MISCONF"})

NUM_SLOTS = 16_384
"""Hash slots of a cluster."""

PORT_MAX = 65_535

_ASKING = command(b"ASKING")
_tokens = itertools.count(1)


@dataclass(frozen=True, slots=True)
class KeyNames:
    """Names blocks on the server, and says how long they live there (``ttl_s`` None: no limit).

    A block's name has all that tells it from others, so that whoever may only name blocks of one namespace
    reaches none of another, not even by EXISTS, SET or DEL, whose replies are no proof of what is there.
    Records that are no blocks keep to names that no block has.
    """

    prefix: str
    ttl_s: float | None = None

    def of(self, block: BlockId) -> bytes:
        """Return the server's key: ``<prefix>:2:<namespace>:<key>:<part>``, each in hex.

        That of a shared record is ``<prefix>:1:<key>:<part>``.
        """
        key, part = block.key.hex(), block.part.pack().hex()
        if block.namespace in SHARED_RECORDS:
            return f"{self.prefix}:1:{key}:{part}".encode()
        return f"{self.prefix}:2:{block.namespace.hex()}:{key}:{part}".encode()

    def set_pieces(self, request: WriteRequest) -> list[Piece]:
        """Return a SET of header and payload in the wire form, the payload in place."""
        length = request.header.length_bytes
        key = self.of(request.header.block)
        options = [b"NX"] if request.only_if_absent else []
        if self.ttl_s is not None:
            options += [b"PX", b"%d" % max(1, int(1000 * self.ttl_s))]
        header = request.header.pack()
        head = b"*%d\r\n$3\r\nSET\r\n%s$%d\r\n" % (3 + len(options), _bulk(key), len(header) + length)
        return [head + header, request.buffer[:length], b"\r\n" + b"".join(map(_bulk, options))]


def read_decimal(text: str, *, limit: int) -> int | None:
    """Return the number that a server wrote in decimal digits; None for anything else or above the limit."""
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        return None
    return number if (number := int(text)) <= limit else None


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where a cluster's node says that a slot is (MOVED) or that this key may be (ASK).

    ``host`` is empty for the node's own host.
    """

    slot: int
    host: str
    port: int
    is_ask: bool

    @classmethod
    def parse(cls, reply: ErrorReply) -> "Redirect | None":
        """Return what ``MOVED 3999 127.0.0.1:6381`` says; None for another error."""
        words = reply.text.split(" ")
        if words[0] not in {"MOVED", "ASK"} or len(words) < 3:
            return None
        host, _, port_text = words[2].rpartition(":")
        slot = read_decimal(words[1], limit=NUM_SLOTS - 1)
        port = read_decimal(port_text, limit=PORT_MAX)
        return None if slot is None or not port else cls(slot, host, port, words[0] == "ASK")


@dataclass(slots=True)
class Tally:
    """What a share saw of the server.

    ``fault`` is a clause for people. ``is_late`` says that time ran out, also where that is nobody's fault;
    ``waited_s`` is how long the share took until then, and ``silent_s`` how long the server had said nothing.
    ``is_doubtful`` says that a reply was another block's or damaged: whatever the reason, the connection is
    not used again. ``refuses_writes`` says that the server serves, but is not the one to write to now.
    """

    was_answered: bool = False
    fault: str = ""
    silent_s: float = 0.0
    waited_s: float = 0.0
    is_late: bool = False
    refuses_writes: bool = False
    is_doubtful: bool = False
    redirects: dict[int, Redirect] = field(default_factory=dict)

    def redirected(self, index: int, reply: ErrorReply) -> bool:
        """Take down where to ask for a request instead, if that is what the error says."""
        redirect = Redirect.parse(reply)
        if redirect is not None:
            self.redirects[index] = redirect
        return redirect is not None

    def note(self, fault: RespFault) -> None:
        """Take a fault down; whether a silence is one of the server is judged by its length."""
        self.is_late = fault.is_timeout
        if fault.silent_s is None:
            self.fault = str(fault)
        else:
            self.silent_s = fault.silent_s


def read_share(
    connection: RespConnection,
    names: KeyNames,
    requests: Sequence[tuple[int, ReadRequest]],
    outcomes: MutableSequence[ReadOutcome | None],
    *,
    tally: Tally,
    origin: str,
    is_asking: bool,
    deadline_s: float,
) -> None:
    """GET each request's value, verify it, and delete those that are damaged."""
    damaged: list[tuple[int, BlockId]] = []

    asking = _ASKING if is_asking else b""

    def ask(positions: range) -> None:
        keys = (names.of(requests[position][1].block) for position in positions)
        connection.send([b"".join(asking + command(b"GET", key) for key in keys)], deadline_s=deadline_s)

    def take(position: int) -> None:
        index, request = requests[position]
        header = bytearray(SEALED_HEADER_BYTES if request.is_sealed else HEADER_BYTES)
        payload = request.buffer[: request.length_bytes]
        _take_asking(connection, is_asking, deadline_s)
        total = RunningChecksum()
        reply = connection.read_bulk_into([memoryview(header), payload], deadline_s=deadline_s, total=total)
        tally.was_answered = True
        if isinstance(reply, ErrorReply):
            outcomes[index] = _read_refusal(index, reply, tally)
            return
        outcome = outcomes[index] = _verified(request, header, reply, total, origin)
        if outcome.status is ReadStatus.CORRUPT:
            damaged.append((index, request.block))
        if outcome.status in (ReadStatus.CORRUPT, ReadStatus.MISMATCH):
            tally.is_doubtful = True

    _pipeline(len(requests), _window([request.length_bytes for _, request in requests]), ask, take)
    drop_share(connection, names, damaged, tally=tally, is_asking=is_asking, deadline_s=deadline_s)


def write_share(
    connection: RespConnection,
    names: KeyNames,
    requests: Sequence[tuple[int, WriteRequest]],
    statuses: MutableSequence[WriteStatus | None],
    *,
    tally: Tally,
    is_asking: bool,
    deadline_s: float,
) -> None:
    """SET each request's value."""
    found: list[WriteStatus | None] = []
    token = _new_token()

    def ask(positions: range) -> None:
        pieces: list[Piece] = []
        for position in positions:
            pieces += [_ASKING] if is_asking else []
            pieces += names.set_pieces(requests[position][1])
        if positions.stop == len(requests):
            pieces.append(command(b"PING", token))
        connection.send(pieces, deadline_s=deadline_s)

    def take(position: int) -> None:
        _take_asking(connection, is_asking, deadline_s)
        reply = connection.read_simple(deadline_s=deadline_s)
        tally.was_answered = True
        if isinstance(reply, ErrorReply):
            found.append(_write_refusal(requests[position][0], reply, tally))
        elif reply == "OK":
            found.append(WriteStatus.OK)
        elif reply is None and requests[position][1].only_if_absent:
            found.append(WriteStatus.REFUSED)
        else:
            raise RespFault(f"unexpected reply {reply!r} to SET")

    _pipeline(len(requests), _window([request.header.length_bytes for _, request in requests]), ask, take)
    if requests:
        connection.read_fence(token, deadline_s=deadline_s)
    for (index, _), status in zip(requests, found, strict=True):
        statuses[index] = status


def probe_share(
    connection: RespConnection,
    names: KeyNames,
    blocks: Sequence[tuple[int, BlockId]],
    found: MutableSequence[bool | None],
    *,
    tally: Tally,
    is_asking: bool,
    deadline_s: float,
) -> None:
    """EXISTS for each block, in windows, up to the window with the first absent one."""
    for start in range(0, len(blocks), _PROBE_WINDOW):
        window = blocks[start : start + _PROBE_WINDOW]
        replies = _each(connection, b"EXISTS", names, window, is_asking=is_asking, deadline_s=deadline_s)
        tally.was_answered = True
        for (index, _), reply in zip(window, replies, strict=True):
            if isinstance(reply, ErrorReply):
                if not tally.redirected(index, reply):
                    tally.fault = reply.fault
            else:
                found[index] = reply == 1
        if tally.fault or any(found[index] is False for index, _ in window):
            return


def drop_share(
    connection: RespConnection,
    names: KeyNames,
    blocks: Sequence[tuple[int, BlockId]],
    *,
    tally: Tally,
    is_asking: bool,
    deadline_s: float,
    dropped: list[int] | None = None,
) -> None:
    """DEL each block; the places of those that were there are added to ``dropped``."""
    for start in range(0, len(blocks), _PROBE_WINDOW):
        window = blocks[start : start + _PROBE_WINDOW]
        replies = _each(connection, b"DEL", names, window, is_asking=is_asking, deadline_s=deadline_s)
        tally.was_answered = True
        for (index, _), reply in zip(window, replies, strict=True):
            if isinstance(reply, ErrorReply) and not tally.redirected(index, reply):
                tally.fault = reply.fault
            elif reply == 1 and dropped is not None:
                dropped.append(index)


def _each(
    connection: RespConnection,
    verb: bytes,
    names: KeyNames,
    blocks: Sequence[tuple[int, BlockId]],
    *,
    is_asking: bool,
    deadline_s: float,
) -> list[int | ErrorReply]:
    """Send one command per block and a fence behind them; returns the replies, 0 or 1 or an error each."""
    token = _new_token()
    asking = _ASKING if is_asking else b""
    asked = b"".join(asking + command(verb, names.of(block)) for _, block in blocks)
    connection.send([asked + command(b"PING", token)], deadline_s=deadline_s)
    replies: list[int | ErrorReply] = []
    for _ in blocks:
        _take_asking(connection, is_asking, deadline_s)
        reply = connection.read_simple(deadline_s=deadline_s)
        if not isinstance(reply, ErrorReply) and reply not in (0, 1):
            raise RespFault(f"unexpected reply {reply!r} to {verb.decode()}")
        assert isinstance(reply, int | ErrorReply)
        replies.append(reply)
    connection.read_fence(token, deadline_s=deadline_s)
    return replies


def _take_asking(connection: RespConnection, is_asking: bool, deadline_s: float) -> None:
    if is_asking:
        reply = connection.read_simple(deadline_s=deadline_s)
        if reply != "OK" and not isinstance(reply, ErrorReply):
            raise RespFault(f"unexpected reply {reply!r} to ASKING")


def _new_token() -> bytes:
    return b"fence-%d" % next(_tokens)


def _window(lengths: Sequence[int]) -> int:
    """Return how many requests to keep under way: a few large blocks, or small ones of as many bytes."""
    return min(_MAX_WINDOW, max(_MIN_WINDOW, _WINDOW_BYTES // max(1, max(lengths, default=1))))


def _pipeline(count: int, window: int, ask: Callable[[range], None], take: Callable[[int], None]) -> None:
    """Keep up to a window of requests ahead of the replies; of a large one a quarter is asked in one go."""
    asked, step = 0, window // 4
    for position in range(count):
        if asked < count and asked - position <= window - step:
            positions = range(asked, min(count, position + window))
            ask(positions)
            asked = positions.stop
        take(position)


def _verified(
    request: ReadRequest, data: bytearray, reply: BulkReply, total: RunningChecksum, origin: str
) -> ReadOutcome:
    if reply.status is BulkStatus.ABSENT:
        return ReadOutcome(ReadStatus.ABSENT)
    if stored_header_bytes(data) not in (None, len(data)):
        # Encrypted where a copy in the clear is wanted, or the other way round.
        return ReadOutcome(ReadStatus.MISMATCH)
    try:
        header = BlockHeader.unpack(data)
    except CorruptBlock:
        return ReadOutcome(ReadStatus.CORRUPT)
    if header.packed_bytes + header.length_bytes != reply.length_bytes:
        return ReadOutcome(ReadStatus.CORRUPT)
    if not request.wants(header):
        return ReadOutcome(ReadStatus.MISMATCH)
    if total.value != header.checksum:
        return ReadOutcome(ReadStatus.CORRUPT)
    return ReadOutcome(ReadStatus.OK, header, origin)


def _read_refusal(index: int, reply: ErrorReply, tally: Tally) -> ReadOutcome | None:
    if tally.redirected(index, reply):
        return None
    if reply.code == "WRONGTYPE":
        return ReadOutcome(ReadStatus.MISMATCH)
    tally.fault = reply.fault
    return ReadOutcome(ReadStatus.UNAVAILABLE)


def _write_refusal(index: int, reply: ErrorReply, tally: Tally) -> WriteStatus | None:
    if tally.redirected(index, reply):
        return None
    if reply.code == "OOM":
        return WriteStatus.FULL
    if reply.code not in _UNAVAILABLE_CODES | _REFUSES_WRITES_CODES:
        return WriteStatus.REFUSED
    if reply.code in _REFUSES_WRITES_CODES:
        tally.refuses_writes = True
    else:
        tally.fault = reply.fault
    return WriteStatus.UNAVAILABLE


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)
