"""What the clients ask over HTTP, and how answers are read; no connections here.

Each function returns a request, or reads an answer into the result that the call has in every client. An
answer that is not of the documented form raises ProtocolMismatch.
"""

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kvstore.calls import MALFORMED, FetchResult
from kvstore.checksum import checksum
from kvstore.errors import InvalidRequest, ProtocolMismatch
from kvstore.fetch_calls import BufferSource
from kvstore.hints import Hints
from kvstore.holding_calls import Grant
from kvstore.http_link import HttpAnswer, HttpRequest, Piece, json_object
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import KVLayout, Part
from kvstore.message_fields import U64
from kvstore.miss import MissReason
from kvstore.results import BlockReport, EraseReport, PrefixMatch, PutResult
from kvstore.transfer import Bytes

T = TypeVar("T")

_LEASE_NAME = re.compile("[0-9a-f]{32}")
_HEAD_LENGTH = struct.Struct("<I")
_HEAD_MAX_BYTES = 1 << 20
_MAX_TIMEOUT_S = 60.0
_PAYLOAD_TYPE = {"Content-Type": "application/octet-stream"}


class UnknownLease(InvalidRequest):
    """The server does not know the lease: it has ended, or never was this caller's."""


class _NoArena:
    """What a lease over HTTP has in place of shared memory: nothing of it can be looked at."""

    def slot(self, offset: int, length_bytes: int) -> memoryview:
        """Refuse."""
        raise InvalidRequest("lease: over HTTP there is no shared memory")

    def slot_array(self, offset: int, length_bytes: int) -> Bytes:
        """Refuse."""
        raise InvalidRequest("lease: over HTTP there is no shared memory")

    def slot_arrays(self, offsets: Sequence[int], length_bytes: int) -> list[Bytes]:
        """Refuse."""
        raise InvalidRequest("lease: over HTTP there is no shared memory")

    def memory(self, offsets: Sequence[int], length_bytes: int) -> memoryview:
        """Refuse."""
        raise InvalidRequest("lease: over HTTP there is no shared memory")

    def generation(self, offset: int) -> int:
        """Refuse."""
        raise InvalidRequest("lease: over HTTP there is no shared memory")

    def generations(self, offsets: Sequence[int]) -> list[int]:
        """Refuse."""
        raise InvalidRequest("lease: over HTTP there is no shared memory")


class _NoConnection:
    """A lease over HTTP is the caller's, and ends with no connection."""

    @property
    def is_lost(self) -> bool:
        """False."""
        return False


_NO_CONNECTION = _NoConnection()


def chain_values(
    chain: PrefixChain, part: Part | None, hints: Hints | None = None
) -> dict[str, Any]:  # Any: JSON
    """Return the members of a request that name blocks and their place in their sequence, and its hints."""
    values = key_values(chain.namespace, chain.keys, part)
    if chain.parent is not None:
        values |= {"start": chain.start, "parent": chain.parent.hex()}
    if hints is not None:
        values["hints"] = hints.as_dict()
    return values


def key_values(
    namespace: NamespaceDigest, keys: Sequence[BlockKey], part: Part | None
) -> dict[str, Any]:  # Any: JSON
    """Return the members of a request that name blocks, but not their place in a sequence."""
    values: dict[str, Any] = {"namespace": namespace.hex(), "keys": [key.hex() for key in keys]}
    if part is not None:
        values["part"] = list(part)
    return values


def timed(values: Mapping[str, Any], remaining_s: float) -> dict[str, Any]:  # Any: JSON
    """Return these members with the time that the store may take: a little less than is left."""
    left_s = remaining_s - min(0.002, remaining_s / 4)
    return {**values, "timeout_s": round(min(_MAX_TIMEOUT_S, max(0.0, left_s)), 6)}


def open_request(namespace: Namespace, *, is_public: bool) -> HttpRequest:
    """Ask to open a namespace."""
    values: dict[str, Any] = asdict(namespace)  # Any: JSON
    salt = values.pop("tenant_salt")
    if salt:
        values["tenant_salt"] = salt.hex()
    if is_public:
        values["public"] = True
    return HttpRequest.of_json("POST", "/v1/namespaces", values)


def opened_namespace(asked: Namespace, answer: HttpAnswer) -> Namespace:
    """Return the namespace that was opened: the one asked for, with its salt."""
    told = answer.json()
    try:
        salt = bytes.fromhex(_text(told, "tenant_salt"))
        opened = Namespace(
            **{
                name: getattr(asked, name) for name in Namespace.__dataclass_fields__ if name != "tenant_salt"
            },
            tenant_salt=salt,
        )
    except MALFORMED as error:
        raise ProtocolMismatch("http: the salt of a namespace is malformed") from error
    if opened.digest.hex() != told.get("namespace"):
        raise ProtocolMismatch("http: the server opened another namespace than was asked for")
    return opened


def read_match(chain: PrefixChain, answer: HttpAnswer) -> PrefixMatch:
    """Return how many leading blocks are stored, and where."""
    return _match(chain, answer.json())


def _match(chain: PrefixChain, told: Mapping[str, Any]) -> PrefixMatch:  # Any: JSON
    tiers = tuple(_texts(told, "tiers"))
    if len(tiers) != _count(told, "blocks") or len(tiers) > len(chain):
        raise ProtocolMismatch(f"http: {len(tiers)} blocks match a chain of {len(chain)}")
    return PrefixMatch(len(tiers), tiers, read_reason(told))


def read_leased_match(
    chain: PrefixChain, part: Part | None, answer: HttpAnswer, now_s: float
) -> tuple[PrefixMatch, Grant]:
    """Return what is stored, and the lease on the leading blocks of that which are in memory.

    ``now_s`` is when the lease was asked for: it lasts from then at least.
    """
    told = answer.json()
    found = _match(chain, told)
    name, reason = told.get("lease"), read_reason(told, "lease_reason") or found.reason
    if name is None:
        return found, Grant(chain[:0], part, reason)
    leased, lease_s = _count(told, "leased"), _seconds(told, "lease_s")
    if not isinstance(name, str) or not _LEASE_NAME.fullmatch(name) or leased > found.blocks:
        raise ProtocolMismatch("http: a lease is malformed")
    return found, Grant(
        chain[:leased],
        part,
        reason,
        lease=int(name, 16),
        tiers=found.tiers[:leased],
        deadline_s=now_s + lease_s,
        arena=_NoArena(),
        connection=_NO_CONNECTION,
    )


def lease_path(lease: int) -> str:
    """Return the path of a lease."""
    return f"/v1/leases/{lease:032x}"


def unless_ended(ask: Callable[[], T], otherwise: T) -> T:
    """Ask something of a lease; returns ``otherwise`` if the server does not know it any more."""
    try:
        return ask()
    except UnknownLease:
        return otherwise


def read_reason(told: Mapping[str, Any], name: str = "reason") -> MissReason | None:  # Any: JSON
    """Return the reason that an answer gives."""
    word = told.get(name)
    try:
        return None if word is None else MissReason(word)
    except ValueError as error:
        raise ProtocolMismatch("http: an unknown reason of a miss") from error


def read_count(name: str) -> Callable[[HttpAnswer], int]:
    """Return a reader of one number."""
    return lambda answer: _count(answer.json(), name)


def read_text(name: str) -> Callable[[HttpAnswer], str]:
    """Return a reader of one text."""
    return lambda answer: _text(answer.json(), name)


def read_erasure(answer: HttpAnswer) -> EraseReport:
    """Read what an erasure came to."""
    try:
        return EraseReport.from_dict(answer.json())
    except MALFORMED as error:
        raise ProtocolMismatch("http: the report of an erasure is malformed") from error


def read_seconds(name: str) -> Callable[[HttpAnswer], float]:
    """Return a reader of one duration."""
    return lambda answer: _seconds(answer.json(), name)


def read_nothing(answer: HttpAnswer) -> None:
    """Read an answer that says no more than that it came."""
    answer.json()


def read_flag(name: str) -> Callable[[HttpAnswer], bool]:
    """Return a reader of one truth."""
    return lambda answer: _flag(answer.json().get(name))


def read_flags(name: str, count: int) -> Callable[[HttpAnswer], list[bool]]:
    """Return a reader of as many truths."""

    def read(answer: HttpAnswer) -> list[bool]:
        flags = [_flag(item) for item in _list(answer.json(), name)]
        if len(flags) != count:
            raise ProtocolMismatch(f"http: {len(flags)} answers for {count} blocks")
        return flags

    return read


def read_texts(name: str) -> Callable[[HttpAnswer], list[str]]:
    """Return a reader of a list of texts."""
    return lambda answer: _texts(answer.json(), name)


def read_reports(answer: HttpAnswer) -> list[BlockReport]:
    """Return the reports on blocks."""
    try:
        return [BlockReport.from_dict(item) for item in _list(answer.json(), "blocks")]
    except MALFORMED as error:
        raise ProtocolMismatch("http: a block's report is malformed") from error


def read_namespaces(answer: HttpAnswer) -> list[Namespace]:
    """Return the namespaces that were listed."""
    try:
        listed = [
            {**item, "layout": KVLayout(**item["layout"])} for item in _list(answer.json(), "namespaces")
        ]
        # The digest is that with the salt, which is not told.
        return [
            Namespace(**{name: value for name, value in item.items() if name != "digest"}) for item in listed
        ]
    except MALFORMED as error:
        raise ProtocolMismatch("http: a namespace is malformed") from error


@dataclass(frozen=True, slots=True)
class FetchHead:
    """What stands before the payloads of a fetch."""

    blocks: int
    origins: tuple[str, ...]
    checksums: tuple[int, ...]
    reason: MissReason | None


def read_fetch_head(answer: HttpAnswer, *, length_bytes: int, most: int) -> FetchHead:
    """Read the head of a fetch's answer, and check that the payloads behind it are as many as it says."""
    (head_bytes,) = _HEAD_LENGTH.unpack(answer.exactly(_HEAD_LENGTH.size))
    if head_bytes > _HEAD_MAX_BYTES:
        raise ProtocolMismatch(f"http: a head of {head_bytes} bytes, limit {_HEAD_MAX_BYTES}")
    told = json_object(answer.exactly(head_bytes))
    blocks, origins, sums = _count(told, "blocks"), _texts(told, "origins"), _texts(told, "checksums")
    if not len(origins) == len(sums) == blocks <= most or _count(told, "length_bytes") != length_bytes:
        raise ProtocolMismatch("http: fetched blocks do not fit the request")
    if answer.length_bytes not in (None, blocks * length_bytes):
        raise ProtocolMismatch("http: as many payloads follow as the head does not say")
    try:
        checksums = tuple([int(text, 16) for text in sums])
    except ValueError as error:
        raise ProtocolMismatch("http: a checksum is malformed") from error
    return FetchHead(blocks, tuple(origins), checksums, read_reason(told))


def store_request(
    chain: PrefixChain,
    payloads: Sequence[Bytes],
    checksums: Sequence[int],
    *,
    part: Part | None,
    remaining_s: float,
    hints: Hints | None = None,
) -> HttpRequest:
    """Ask to store blocks; their payloads are sent in place."""
    values = chain_values(chain, part, hints)
    values["checksums"] = [f"{digest:016x}" for digest in checksums]
    head = json.dumps(timed(values, remaining_s)).encode()
    body: list[Piece] = [_HEAD_LENGTH.pack(len(head)) + head]
    body += [memoryview(payload) for payload in payloads if len(payload)]  # type: ignore[arg-type]  # arrays are buffers
    return HttpRequest("POST", "/v1/store", body, _PAYLOAD_TYPE)


def read_put(count: int) -> Callable[[HttpAnswer], PutResult]:
    """Return a reader of what became of ``count`` blocks."""

    def read(answer: HttpAnswer) -> PutResult:
        told = answer.json()
        stored, present, dropped = (_count(told, name) for name in ("stored", "present", "dropped"))
        doubtful = _list(told, "doubtful")
        are_places = all(
            isinstance(at, int) and not isinstance(at, bool) and 0 <= at < count for at in doubtful
        )
        if stored + present + dropped != count or not are_places:
            raise ProtocolMismatch(f"http: what became of {count} blocks does not add up")
        return PutResult(stored, present, dropped, tuple(sorted(set(doubtful))), read_reason(told))

    return read


class Fetching:
    """What a fetch has received so far; kept outside the call, so that a lost server does not lose it."""

    def __init__(self, note_corrupt: Callable[[], None], buffers: BufferSource, length_bytes: int) -> None:
        self._note_corrupt = note_corrupt
        self._buffers = buffers
        self._length_bytes = length_bytes
        self._origins: list[str] = []
        self._checksums: list[int] = []

    @property
    def blocks(self) -> int:
        """Leading blocks received and verified."""
        return len(self._checksums)

    def take(self, wanted: PrefixChain, start: int) -> Callable[[HttpAnswer], MissReason | None]:
        """Return a reader of the blocks from position ``start``; it says why they end early, if they do."""

        def read(answer: HttpAnswer) -> MissReason | None:
            head = read_fetch_head(answer, length_bytes=self._length_bytes, most=len(wanted))
            targets = self._buffers(start, start + head.blocks)
            for target, expected, origin in zip(targets, head.checksums, head.origins, strict=True):
                if len(target):
                    answer.read_into(memoryview(target))  # type: ignore[arg-type]  # an array is a buffer
                if checksum(target) != expected:
                    self._note_corrupt()
                    return MissReason.CORRUPT
                self._checksums.append(expected)
                self._origins.append(origin)
            return head.reason if head.blocks == len(wanted) else head.reason or MissReason.UNAVAILABLE

        return read

    def result(self, reason: MissReason | None) -> FetchResult:
        """Return the result of the call."""
        return FetchResult(self.blocks, tuple(self._origins), tuple(self._checksums), reason)


class Putting:
    """What a put has achieved so far; the rest counts as dropped."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._stored = 0
        self._present = 0
        self._doubtful: list[int] = []
        self._reason: MissReason | None = None
        self.num_known = 0
        self.has_dropped = False

    def note_present(self, count: int) -> None:
        """Note leading blocks that are stored already."""
        self.num_known += count
        self._present += count

    def note(self, result: PutResult, count: int) -> None:
        """Note what became of the next ``count`` blocks."""
        self._doubtful += [self.num_known + at for at in result.doubtful]
        self.num_known += count
        self._stored += result.stored
        self._present += result.present
        self.has_dropped = result.dropped > 0
        if result.reason is not None:
            self.note_reason(result.reason)

    def note_reason(self, reason: MissReason) -> None:
        """Note why a block was dropped; the first counts."""
        self._reason = self._reason or reason

    def result(self) -> PutResult:
        """Return the result of the call."""
        doubtful = (*self._doubtful, *range(self.num_known, self._blocks))
        dropped = self._blocks - self._stored - self._present
        reason = self._reason if dropped else None
        return PutResult(self._stored, self._present, dropped, doubtful, reason)


def sums_until_wrong(payloads: Sequence[Bytes], expected: Sequence[int] | None) -> list[int]:
    """Return the checksums of the leading payloads, up to the first that has another than is expected."""
    found: list[int] = []
    for index, payload in enumerate(payloads):
        digest = checksum(payload)
        if expected is not None and expected[index] != digest:
            break
        found.append(digest)
    return found


def _list(told: Mapping[str, Any], name: str) -> list[Any]:  # Any: JSON
    value = told.get(name)
    if not isinstance(value, list):
        raise ProtocolMismatch(f"http: {name} is no list")
    return value


def _texts(told: Mapping[str, Any], name: str) -> list[str]:  # Any: JSON
    return [str(item) for item in _list(told, name)]


def _text(told: Mapping[str, Any], name: str) -> str:  # Any: JSON
    value = told.get(name)
    if not isinstance(value, str):
        raise ProtocolMismatch(f"http: {name} is no text")
    return value


def _count(told: Mapping[str, Any], name: str) -> int:  # Any: JSON
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= U64:
        raise ProtocolMismatch(f"http: {name} is no count")
    return value


def _seconds(told: Mapping[str, Any], name: str) -> float:  # Any: JSON
    value = told.get(name)
    # An integer may have hundreds of digits, and then it is no float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= U64:
        raise ProtocolMismatch(f"http: {name} is no duration")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ProtocolMismatch("http: what should be true or false is not")
    return value
