"""What one thread does with one connection for one call of the remote tier: pipelined GET, SET, EXISTS, DEL.

Each function takes a share of a call's requests and fills in the outcome of each as its reply comes, so that
what was answered before a fault counts. All raise RespFault, after which the connection must be closed.
"""

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.tier import (
    HEADER_BYTES,
    BlockHeader,
    BlockId,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    WriteRequest,
    WriteStatus,
)
from kvstore_tiers.resp import BulkReply, BulkStatus, ErrorReply, Piece, RespConnection, RespFault, command

_WINDOW = 4
_PROBE_WINDOW = 256
_UNAVAILABLE_CODES = frozenset(
    {
        "LOADING",
        "CLUSTERDOWN",
        "MASTERDOWN",
        "READONLY",
        "NOREPLICAS",
        "MISCONF",
        "TRYAGAIN",
        "NOAUTH",
        "BUSY",
    }
)


@dataclass(frozen=True, slots=True)
class KeyNames:
    """Names blocks on the server, and says how long they live there (``ttl_s`` None: no limit)."""

    prefix: str
    ttl_s: float | None = None

    def of(self, block: BlockId) -> bytes:
        """Return the server's key: ``<prefix>:1:<key hex>:<part hex>``."""
        return f"{self.prefix}:1:{block.key.hex()}:{block.part.pack().hex()}".encode()

    def set_pieces(self, request: WriteRequest) -> list[Piece]:
        """Return a SET of header and payload in the wire form, the payload in place."""
        length = request.header.length_bytes
        key = self.of(request.header.block)
        expiry = (
            b"" if self.ttl_s is None else b"$2\r\nPX\r\n" + _bulk(b"%d" % max(1, int(1000 * self.ttl_s)))
        )
        head = b"*%d\r\n$3\r\nSET\r\n%s$%d\r\n" % (5 if expiry else 3, _bulk(key), HEADER_BYTES + length)
        return [head + request.header.pack(), request.buffer[:length], b"\r\n" + expiry]


@dataclass(slots=True)
class Tally:
    """What a share saw of the server.

    ``fault`` is a clause for people. ``silent_s`` is how long the server said nothing before a timeout.
    ``is_late`` says that time ran out, also where that is nobody's fault.
    """

    was_answered: bool = False
    fault: str = ""
    silent_s: float = 0.0
    is_late: bool = False

    def note(self, fault: RespFault, *, counts_from_s: float) -> None:
        """Take a fault down; a timeout is one of the server only after so long a silence."""
        self.is_late = fault.is_timeout
        self.silent_s = fault.silent_s or 0.0
        if not fault.is_timeout or self.silent_s >= counts_from_s:
            self.fault = str(fault)


def read_share(
    connection: RespConnection,
    names: KeyNames,
    requests: Sequence[tuple[int, ReadRequest]],
    outcomes: MutableSequence[ReadOutcome | None],
    *,
    tally: Tally,
    origin: str,
    deadline_s: float,
) -> None:
    """GET each request's value, verify it, and delete those that are damaged."""
    damaged: list[BlockId] = []

    def ask(position: int) -> None:
        connection.send([command(b"GET", names.of(requests[position][1].block))], deadline_s=deadline_s)

    def take(position: int) -> None:
        index, request = requests[position]
        header = bytearray(HEADER_BYTES)
        payload = request.buffer[: request.length_bytes]
        reply = connection.read_bulk_into([memoryview(header), payload], deadline_s=deadline_s)
        tally.was_answered = True
        if isinstance(reply, ErrorReply):
            is_other = reply.code == "WRONGTYPE"
            tally.fault = "" if is_other else f"the server answers {reply.code}"
            outcomes[index] = ReadOutcome(ReadStatus.MISMATCH if is_other else ReadStatus.UNAVAILABLE)
            return
        outcomes[index] = _verified(request, header, reply, origin)
        if outcomes[index] == ReadOutcome(ReadStatus.CORRUPT):
            damaged.append(request.block)

    _pipeline(len(requests), ask, take)
    drop_share(connection, names, damaged, tally=tally, deadline_s=deadline_s)


def write_share(
    connection: RespConnection,
    names: KeyNames,
    requests: Sequence[tuple[int, WriteRequest]],
    statuses: MutableSequence[WriteStatus | None],
    *,
    tally: Tally,
    deadline_s: float,
) -> None:
    """SET each request's value."""

    def ask(position: int) -> None:
        connection.send(names.set_pieces(requests[position][1]), deadline_s=deadline_s)

    def take(position: int) -> None:
        reply = connection.read_simple(deadline_s=deadline_s)
        tally.was_answered = True
        if isinstance(reply, ErrorReply):
            status = _write_status(reply)
            if status is WriteStatus.UNAVAILABLE:
                tally.fault = f"the server answers {reply.code}"
        elif reply == "OK":
            status = WriteStatus.OK
        else:
            raise RespFault(f"unexpected reply {reply!r} to SET")
        statuses[requests[position][0]] = status

    _pipeline(len(requests), ask, take)


def probe_share(
    connection: RespConnection,
    names: KeyNames,
    blocks: Sequence[BlockId],
    found: MutableSequence[str | None],
    *,
    tally: Tally,
    origin: str,
    deadline_s: float,
) -> None:
    """EXISTS for each block, in windows, up to the window with the first absent one."""
    for start in range(0, len(blocks), _PROBE_WINDOW):
        window = range(start, min(start + _PROBE_WINDOW, len(blocks)))
        asked = b"".join(command(b"EXISTS", names.of(blocks[index])) for index in window)
        connection.send([asked], deadline_s=deadline_s)
        for index in window:
            reply = connection.read_simple(deadline_s=deadline_s)
            tally.was_answered = True
            if isinstance(reply, ErrorReply):
                tally.fault = f"the server answers {reply.code}"
            elif reply not in (0, 1):
                raise RespFault(f"unexpected reply {reply!r} to EXISTS")
            found[index] = origin if reply == 1 else None
        if found[window[-1]] is None or None in found[start : window[-1]]:
            return


def drop_share(
    connection: RespConnection,
    names: KeyNames,
    blocks: Sequence[BlockId],
    *,
    tally: Tally,
    deadline_s: float,
) -> None:
    """DEL each block."""
    for start in range(0, len(blocks), _PROBE_WINDOW):
        window = blocks[start : start + _PROBE_WINDOW]
        connection.send([command(b"DEL", names.of(block)) for block in window], deadline_s=deadline_s)
        for _ in window:
            reply = connection.read_simple(deadline_s=deadline_s)
            tally.was_answered = True
            if isinstance(reply, ErrorReply):
                tally.fault = f"the server answers {reply.code}"
            elif not isinstance(reply, int):
                raise RespFault(f"unexpected reply {reply!r} to DEL")


def _pipeline(count: int, ask: Callable[[int], None], take: Callable[[int], None]) -> None:
    """Keep a few requests ahead of the replies."""
    asked = 0
    for position in range(count):
        while asked < min(count, position + _WINDOW):
            ask(asked)
            asked += 1
        take(position)


def _verified(request: ReadRequest, data: bytearray, reply: BulkReply, origin: str) -> ReadOutcome:
    if reply.status is BulkStatus.ABSENT:
        return ReadOutcome(ReadStatus.ABSENT)
    try:
        header = BlockHeader.unpack(data)
    except CorruptBlock:
        return ReadOutcome(ReadStatus.CORRUPT)
    if HEADER_BYTES + header.length_bytes != reply.length_bytes:
        return ReadOutcome(ReadStatus.CORRUPT)
    asked = (request.block, request.layout, request.length_bytes)
    if asked != (header.block, header.layout, header.length_bytes):
        return ReadOutcome(ReadStatus.MISMATCH)
    if checksum(request.buffer[: request.length_bytes]) != header.checksum:
        return ReadOutcome(ReadStatus.CORRUPT)
    return ReadOutcome(ReadStatus.OK, header, origin)


def _write_status(reply: ErrorReply) -> WriteStatus:
    if reply.code == "OOM":
        return WriteStatus.FULL
    return WriteStatus.UNAVAILABLE if reply.code in _UNAVAILABLE_CODES else WriteStatus.REFUSED


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)
