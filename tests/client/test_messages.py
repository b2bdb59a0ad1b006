"""Frames and messages: golden bytes, round trips, and hostile input."""

import json
import random
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, ProtocolMismatch
from kvstore.hints import Hints
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import KVLayout, Part
from kvstore.message_fields import hints_to_wire
from kvstore.messages import (
    AdvanceEpoch,
    Answer,
    AskSizes,
    ChainRef,
    ChangePolicy,
    Check,
    Commit,
    Count,
    Demote,
    Done,
    Drop,
    DropRecord,
    Erase,
    Exists,
    Failed,
    FailureCode,
    Fetch,
    FilledSlots,
    Flush,
    GetRecord,
    Hello,
    HelloReader,
    KeySet,
    LeaseChain,
    Leased,
    Lent,
    LentSlot,
    ListNamespaces,
    ListRecords,
    Match,
    MatchAndLease,
    Matched,
    NoteHints,
    NoteReads,
    OpenNamespace,
    Peek,
    Ping,
    Prefetch,
    Presence,
    PutRecord,
    Ready,
    ReadySlot,
    RecordFound,
    RecordWritten,
    Release,
    Renew,
    Renewed,
    Report,
    ReportDamage,
    Request,
    Reserve,
    ReturnSlots,
    Seen,
    Stats,
    Store,
    Stored,
    TierNames,
    UnusedSlot,
    Welcome,
    Why,
    WrittenSlot,
    decode_answer,
    decode_request,
    decode_traced,
    encode_message,
)
from kvstore.miss import MissReason
from kvstore.records import (
    Record,
    RecordAbsence,
    RecordKey,
    RecordLookup,
    RecordOutcome,
    RecordPlace,
    RecordPut,
    RecordWrite,
)
from kvstore.tenant import TenantId
from kvstore.tracing import TraceContext
from kvstore.wire import (
    MAX_BODY_BYTES,
    MAX_KEYS,
    TRACED,
    Frame,
    FrameDecoder,
    WireValue,
    decode_body,
    encode_frame,
)

GOLDEN = json.loads((Path(__file__).parent / "golden_frames.json").read_text())

_DIGEST = NamespaceDigest(bytes(range(32)))
_KEYS = (BlockKey(b"\x01" * 32), BlockKey(b"\x02" * 32))
_CHAIN = ChainRef(PrefixChain(_DIGEST, _KEYS, 16))
_TAIL = ChainRef(PrefixChain(_DIGEST, _KEYS, 16, 5, BlockKey(b"\x03" * 32)), Part(0, 2, 1, 3))

_RECORD = RecordKey("sessions", "resp_1", b"\x00salt")

_HINTS = Hints(ends_session=True, next_use_s=1.5, priority=-2, output_tokens=300)

REQUESTS: dict[str, Request] = {
    "fetch_hinted": Fetch(_CHAIN, 50_000, _HINTS),
    "reserve_hinted": Reserve(_TAIL, 50_000, Hints(is_one_off=True)),
    "peek_hinted": Peek(_CHAIN, 50_000, _HINTS),
    "lease_chain_hinted": LeaseChain(_CHAIN, 50_000, _HINTS),
    "change_policy": ChangePolicy("s3-fifo"),
    "note_hints": NoteHints(_TAIL, _HINTS),
    "note_reads": NoteReads(_TAIL),
    "note_reads_hinted": NoteReads(_CHAIN, _HINTS),
    "hello": Hello(1234),
    "open_namespace": OpenNamespace(
        Namespace(
            model="org/model:\u00fc",
            layout=KVLayout("bfloat16", 4, 16, 2, 64),
            weights="sha256:ab",
            tokenizer="t",
            adapter="lora",
            rope="theta=1e5",
            tenant_salt=b"\x00\xff",
            epoch=9,
        )
    ),
    "match": Match(_CHAIN, 50_000),
    "fetch": Fetch(_TAIL, 50_000),
    "peek": Peek(_TAIL, 50_000),
    "release": Release(7),
    "release_corrupt": Release(7, _TAIL),
    "reserve": Reserve(_CHAIN, 1),
    "commit": Commit(_CHAIN, (WrittenSlot(0, 4096, 1, 2**64 - 1), WrittenSlot(1, 8192, 3, 4))),
    "commit_ahead": Commit(_CHAIN, (WrittenSlot(1, 8192, 3, 4),), 2),
    "store": Store(_CHAIN, FilledSlots((4096, 8192), (1, 3), (2**64 - 1, 4)), 2),
    "store_hinted": Store(_TAIL, FilledSlots((4096, 8192), (1, 3), (2, 4)), 0, _HINTS),
    "return_slots": ReturnSlots((UnusedSlot(4096, 1),)),
    "prefetch": Prefetch(_CHAIN, 0),
    "drop": Drop(_CHAIN, 0),
    "stats": Stats(),
    "check": Check(64, 5_000_000),
    "flush": Flush(1_000_000),
    "ping": Ping(),
    "why": Why(_CHAIN, 50_000),
    "demote": Demote(_TAIL, 50_000),
    "advance_epoch": AdvanceEpoch("org/model"),
    "list_namespaces": ListNamespaces(),
    "ask_sizes": AskSizes(None),
    "ask_sizes_of_namespace": AskSizes(_DIGEST),
    "erase_tenant": Erase(TenantId(bytes(range(32))), None),
    "erase_namespace": Erase(None, _DIGEST),
    "exists": Exists(KeySet(_DIGEST, (*_KEYS, _KEYS[0])), 50_000),
    "exists_part": Exists(KeySet(_DIGEST, _KEYS, Part(0, 2, 1, 3)), 50_000),
    "lease_chain": LeaseChain(_TAIL, 50_000),
    "match_and_lease": MatchAndLease(_CHAIN, 50_000),
    "renew": Renew(2**64 - 1),
    "report_damage": ReportDamage(_TAIL),
    "hello_reader": HelloReader(1234),
    "put_record": PutRecord(RecordPut(_RECORD, b"value", 60.0, 2**53 - 1, bytes(range(16))), 50_000),
    "put_record_always": PutRecord(RecordPut(_RECORD, b"", 0.001, None, bytes(16)), 0),
    "get_record": GetRecord(_RECORD, 50_000),
    "drop_record": DropRecord(_RECORD, 50_000),
    "list_records": ListRecords(b"", "sessions", "resp", "resp_1", 1000, 50_000),
}
ANSWERS: dict[str, Answer] = {
    "welcome": Welcome(bytes(16), 1 << 30, 32),
    "done": Done(),
    "count": Count(3),
    "matched": Matched(TierNames.of(["dram", "dram", "ssd"]), MissReason.NEVER_SEEN),
    "matched_whole": Matched(TierNames.of([]), None),
    "ready": Ready(
        9, 64, (ReadySlot(4096, 1, 2), ReadySlot(8192, 3, 4)), TierNames.of(["ssd", "dram"]), None
    ),
    "ready_none": Ready(None, 0, (), TierNames.of([]), MissReason.TIMED_OUT),
    "lent": Lent((LentSlot(1, 4096, 5),), 1),
    "lent_none": Lent((), 0, MissReason.OTHER_EPOCH),
    "report": Report(b"{}"),
    "presence": Presence(b"\x05\x80"),
    "leased": Leased(
        9, 30_000_000, 64, (ReadySlot(4096, 1, 2),), TierNames.of(["dram", "ssd"]), MissReason.EVICTED
    ),
    "leased_none": Leased(None, 0, 0, (), TierNames.of(["dram"]), None, MissReason.QUOTA),
    "renewed": Renewed(30_000_000),
    "seen": Seen(64, (ReadySlot(4096, 1, 2), ReadySlot(8192, 3, 4)), "dram"),
    "stored": Stored(2, slots=(UnusedSlot(4096, 1), UnusedSlot(8192, 3)), lent_us=30_000_000),
    "stored_in_part": Stored(1, b"\x01\x00\x02", MissReason.NOT_ADMITTED),
    "record_written": RecordWritten(RecordWrite(RecordOutcome.STORED, 2**53 - 1, RecordPlace.SSD)),
    "record_unwritten": RecordWritten(
        RecordWrite(RecordOutcome.UNAVAILABLE, is_doubtful=True, problem="no answer in time")
    ),
    "record_found": RecordFound(RecordLookup(Record(b"value", 5, 60.0, RecordPlace.REMOTE, False))),
    "record_absent": RecordFound(RecordLookup(None, RecordAbsence.EXPIRED)),
    "failed": Failed(FailureCode.INVALID_REQUEST, "no such namespace"),
}


def _frame(data: bytes) -> Frame:
    decoder = FrameDecoder(data)
    frame = decoder.next_frame()
    assert frame is not None
    assert decoder.pending_bytes == 0
    return frame


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_its_golden_frame_and_comes_back_equal(name: str) -> None:
    data = encode_message(REQUESTS[name], 42)

    assert data.hex() == GOLDEN[name]
    assert _frame(data).request_id == 42
    assert decode_request(_frame(data)) == REQUESTS[name]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_its_golden_frame_and_comes_back_equal(name: str) -> None:
    data = encode_message(ANSWERS[name], 42)

    assert data.hex() == GOLDEN[name]
    assert decode_answer(_frame(data)) == ANSWERS[name]


TRACED_REQUESTS: dict[str, Request] = {
    "ping_traced": Ping(),
    "fetch_traced": Fetch(_CHAIN, 50_000),
    "fetch_hinted_traced": Fetch(_CHAIN, 50_000, _HINTS),
}
_TRACE = TraceContext(bytes(range(1, 17)), bytes(range(17, 25)))


@pytest.mark.parametrize("name", TRACED_REQUESTS)
def test_a_traced_request_has_its_golden_frame_and_comes_back_with_its_span(name: str) -> None:
    data = encode_message(TRACED_REQUESTS[name], 42, trace=_TRACE)

    assert data.hex() == GOLDEN[name]
    assert decode_traced(_frame(data)) == (TRACED_REQUESTS[name], _TRACE)


def test_a_request_that_is_not_traced_comes_back_without_a_span() -> None:
    assert decode_traced(_frame(encode_message(Ping(), 42))) == (Ping(), None)


def test_a_trace_of_zeros_is_none() -> None:
    data = encode_frame(Ping.KIND | TRACED, 42, (bytes(25),))

    assert decode_traced(_frame(data)) == (Ping(), None)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Ping.KIND, ()),
        (Ping.KIND, (bytes(24),)),
        (Ping.KIND, (bytes(26),)),
        (Ping.KIND, ("x" * 25,)),
        (Ping.KIND, (None,)),
        (Ping.KIND, (1, b"\x01" * 25)),
        (4000, (b"\x01" * 25,)),
    ],
)
def test_a_malformed_trace_is_refused(kind: int, values: tuple[WireValue, ...]) -> None:
    with pytest.raises(ProtocolMismatch):
        decode_traced(_frame(encode_frame(kind | TRACED, 42, values)))


def test_a_server_of_before_refuses_a_traced_request_and_is_never_sent_one() -> None:
    with pytest.raises(ProtocolMismatch):
        decode_request(_frame(encode_message(Ping(), 42, trace=_TRACE)))


def test_there_is_a_golden_frame_for_every_kind_and_none_for_others() -> None:
    assert set(GOLDEN) == {*REQUESTS, *ANSWERS, *TRACED_REQUESTS}


@pytest.mark.parametrize(
    "hints",
    [
        None,
        (),
        (0, None, 0),
        (4, None, 0, None),
        (-1, None, 0, None),
        (True, None, 0, None),
        (0, -1, 0, None),
        (0, 10**12, 0, None),
        (0, None, 5, None),
        (0, None, -5, None),
        (0, None, None, None),
        (0, None, 0, -1),
        (0, None, 0, "many"),
    ],
)
def test_hints_that_are_none_break_the_protocol(hints: Any) -> None:
    values = (*_CHAIN.to_wire(), 50_000, hints)

    with pytest.raises(ProtocolMismatch):
        decode_request(_frame(encode_frame(Fetch.KIND, 1, values)))


def test_a_request_that_uses_no_blocks_takes_no_hints() -> None:
    frame = _frame(encode_frame(Match.KIND, 1, (*_CHAIN.to_wire(), 50_000, hints_to_wire(_HINTS))))

    with pytest.raises(ProtocolMismatch, match="8 fields"):
        decode_request(frame)


def test_answers_are_no_requests_and_requests_no_answers() -> None:
    for request in REQUESTS.values():
        with pytest.raises(ProtocolMismatch, match="unknown answer kind"):
            decode_answer(_frame(encode_message(request, 1)))
    for answer in ANSWERS.values():
        with pytest.raises(ProtocolMismatch, match="unknown request kind"):
            decode_request(_frame(encode_message(answer, 1)))


keys = st.binary(min_size=32, max_size=32)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
parts = st.builds(
    lambda a, b, c, d: Part(a, a + b, c, c + d),
    *[st.integers(0, 1000) if at % 2 == 0 else st.integers(1, 1000) for at in range(4)],
)


@st.composite
def chains(draw: st.DrawFn) -> ChainRef:
    """A chain of up to 20 keys, at the start of its sequence or not, whole blocks or parts."""
    start = draw(u32)
    parent = BlockKey(draw(keys)) if start else None
    blocks = tuple(BlockKey(key) for key in draw(st.lists(keys, max_size=20, unique=True)))
    namespace = NamespaceDigest(draw(keys))
    return ChainRef(
        PrefixChain(namespace, blocks, draw(st.integers(1, 65535)), start, parent), draw(st.none() | parts)
    )


@given(chains(), st.integers(0, 3_600_000_000), u64)
def test_every_chain_survives_the_wire(about: ChainRef, timeout_us: int, request_id: int) -> None:
    request = Fetch(about, timeout_us)

    frame = _frame(encode_message(request, request_id))

    assert frame.request_id == request_id
    assert decode_request(frame) == request


@given(st.lists(st.tuples(u64, u64, u64, st.sampled_from(["dram", "ssd", "remote"])), max_size=30))
def test_every_fetch_answer_survives_the_wire(blocks: list[tuple[int, int, int, str]]) -> None:
    answer = Ready(
        lease=5 if blocks else None,
        length_bytes=64,
        slots=tuple(ReadySlot(*block[:3]) for block in blocks),
        origins=TierNames.of([block[3] for block in blocks]),
        reason=MissReason.EVICTED,
    )

    assert decode_answer(_frame(encode_message(answer, 1))) == answer


@given(st.lists(st.integers(1, 300), max_size=20))
def test_frames_are_found_however_the_stream_is_cut(cuts: list[int]) -> None:
    frames = [
        encode_message(message, at) for at, message in enumerate([*REQUESTS.values(), *ANSWERS.values()])
    ]
    stream = b"".join(frames)
    decoder, found, at = FrameDecoder(), [], 0
    for cut in [*cuts, len(stream)]:
        decoder.feed(stream[at : at + cut])
        at += cut
        while (frame := decoder.next_frame()) is not None:
            found.append(frame.request_id)

    assert found == list(range(len(frames)))


@given(st.lists(st.integers(1, 300), max_size=20))
def test_frames_are_found_in_bytes_that_are_received_in_place(counts: list[int]) -> None:
    stream = b"".join(encode_message(message, at) for at, message in enumerate(REQUESTS.values()))
    decoder, found, at = FrameDecoder(), [], 0
    for count in [*counts, *[len(stream)] * 8]:
        space = decoder.space()
        assert len(space) > 0
        piece = stream[at : at + min(count, len(space))]
        space[: len(piece)] = piece
        decoder.received(len(piece))
        at += len(piece)
        while (frame := decoder.next_frame()) is not None:
            found.append(frame.request_id)

    assert found == list(range(len(REQUESTS)))


def test_a_decoder_makes_room_for_the_frame_it_waits_for_and_lets_it_go_again() -> None:
    large = encode_frame(99, 1, (bytes(200_000),))
    decoder = FrameDecoder()
    first = len(decoder.space())
    decoder.feed(large[:first])

    assert decoder.next_frame() is None
    assert len(decoder.space()) == len(large) - first
    decoder.feed(large[first:])
    assert decoder.next_frame() == Frame(99, 1, large[20:])
    assert len(decoder.space()) == first


@pytest.mark.parametrize("lengths", [[16], [32, 31], [33] * 65], ids=["short", "one of two", "many"])
def test_keys_that_are_not_as_long_as_a_digest_are_not_sent(lengths: list[int]) -> None:
    keys = tuple(BlockKey(bytes([at]) * length) for at, length in enumerate(lengths))
    digest = NamespaceDigest(bytes(32))

    with pytest.raises(InvalidRequest, match=r"chain: key \d+ of \d+ has \d+ bytes, expected 32"):
        ChainRef(PrefixChain(digest, keys, 4)).to_wire()
    with pytest.raises(InvalidRequest, match=r"keys: key \d+ of \d+ has \d+ bytes, expected 32"):
        KeySet(digest, keys).to_wire()


def test_a_chain_whose_keys_begin_alike_is_no_chain_that_names_a_block_twice() -> None:
    keys = tuple(BlockKey(bytes(8) + bytes([number]) * 24) for number in range(40))
    alike = ChainRef(PrefixChain(_DIGEST, keys, 16))

    assert decode_request(_frame(encode_message(Match(alike, 1), 1))) == Match(alike, 1)


def _decode_all(data: bytes) -> None:
    decoder = FrameDecoder(data)
    while (frame := decoder.next_frame()) is not None:
        for decode in (decode_request, decode_answer):
            try:
                decode(frame)
            except (ProtocolMismatch, InvalidRequest):
                continue


@pytest.mark.parametrize("seed", range(20))
def test_a_mutated_frame_is_another_message_or_refused(seed: int) -> None:
    choose = random.Random(seed)
    originals = [encode_message(message, 1) for message in [*REQUESTS.values(), *ANSWERS.values()]]
    for _ in range(500):
        data = bytearray(choose.choice(originals))
        for _ in range(choose.randint(1, 4)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        if choose.random() < 0.3:
            del data[choose.randrange(len(data)) :]
        try:
            _decode_all(bytes(data))
        except ProtocolMismatch:
            continue


@given(st.binary(max_size=200), st.sampled_from([*range(32), *range(0x8000, 0x8010), 0x80FF, 0xFFFF]))
def test_any_body_is_a_message_or_refused(body: bytes, kind: int) -> None:
    for decode in (decode_request, decode_answer):
        try:
            decode(Frame(kind, 1, body))
        except (ProtocolMismatch, InvalidRequest):
            continue


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(st.lists(values, max_size=9), st.sampled_from([*range(1, 25), *range(0x8001, 0x800B), 0x80FF]))
def test_any_values_are_a_message_or_a_protocol_mismatch(body: list[object], kind: int) -> None:
    for decode in (decode_request, decode_answer):
        try:
            decode(Frame(kind, 1, msgpack.packb(body)))
        except ProtocolMismatch:
            continue


@pytest.mark.parametrize(
    "body",
    [
        b"",
        msgpack.packb(1),
        msgpack.packb({"a": 1}),
        msgpack.packb([{"a": 1}]),
        b"\x91\x82\xa1a\x01\xa1a\x02",
        msgpack.packb([msgpack.ExtType(1, b"x")]),
        b"\x91\xd6\xff\x00\x00\x00\x01",
        msgpack.packb([0] * 65),
        msgpack.packb(["x" * 4097]),
        msgpack.packb([1]) + b"\x00",
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xc6\xff\xff\xff\xff",
        b"\x91\xa2\xff\xfe",
        b"\xc1",
    ],
    ids=[
        "empty",
        "scalar",
        "map",
        "inner map",
        "duplicate keys",
        "extension",
        "timestamp",
        "long array",
        "long text",
        "rest",
        "deep",
        "array bomb",
        "bytes bomb",
        "bad utf-8",
        "reserved byte",
    ],
)
def test_a_body_that_breaks_the_bounds_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolMismatch):
        decode_body(body)


def test_a_prefix_of_another_version_or_magic_or_size_is_refused() -> None:
    good = encode_message(Ping(), 1)
    for bad, words in (
        (b"HTTP" + good[4:], "begins with"),
        (good[:4] + b"\x01\x00" + good[6:], "version 1"),
        (good[:16] + (MAX_BODY_BYTES + 1).to_bytes(4, "little"), "limit"),
    ):
        with pytest.raises(ProtocolMismatch, match=words):
            FrameDecoder(bad).next_frame()


def test_a_request_that_names_a_block_twice_is_invalid() -> None:
    twice = ChainRef(PrefixChain(_DIGEST, (*_KEYS, _KEYS[0]), 16))

    for request in (Match(twice, 1), Commit(twice, ())):
        with pytest.raises(InvalidRequest, match="names a block twice"):
            decode_request(_frame(encode_message(request, 1)))
    with pytest.raises(ProtocolMismatch, match="names a block twice"):
        decode_request(_frame(encode_message(Release(1, twice), 1)))


def test_a_body_above_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolMismatch, match="limit"):
        encode_frame(1, 1, (bytes(MAX_BODY_BYTES),))


def test_a_text_that_is_no_unicode_is_not_sent() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        encode_message(AdvanceEpoch("\ud800"), 1)


def test_a_text_that_is_no_unicode_is_not_taken() -> None:
    whole = encode_message(AdvanceEpoch("model"), 1)
    with pytest.raises(ProtocolMismatch):
        decode_request(_frame(whole.replace(b"model", b"a\xed\xa0\x80b")))


def test_a_request_with_the_most_keys_fits_and_one_more_is_refused() -> None:
    keys_blob = [BlockKey(at.to_bytes(32, "big")) for at in range(MAX_KEYS)]
    most = ChainRef(PrefixChain(_DIGEST, tuple(keys_blob), 16))

    assert decode_request(_frame(encode_message(Match(most, 1), 1))) == Match(most, 1)
    values_of_more = (_DIGEST, 16, 0, None, bytes(32 * (MAX_KEYS + 1)), b"", 1)
    with pytest.raises(ProtocolMismatch, match="keys"):
        decode_request(Frame(Match.KIND, 1, msgpack.packb(values_of_more)))


def test_keys_of_text_are_refused_before_they_are_sent() -> None:
    chain = PrefixChain(_DIGEST, (_KEYS[0], "k" * 32), 16)  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest, match="a key is no bytes"):
        ChainRef(chain).to_wire()
