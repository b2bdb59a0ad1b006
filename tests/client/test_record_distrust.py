"""What clients make of answers about records that are not as they should be."""

import json
import socket
from collections.abc import Callable

import pytest

from kvstore import KVStore, RecordOutcome, Timeouts
from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock, InvalidRequest, KVStoreError, ProtocolMismatch, ServerUnavailable
from tests.client.scripted_http import answering, reply, requested

PATIENT = Timeouts(fetch_s=10, put_s=10, control_s=10)
WRITE = {"outcome": "stored", "version": 5, "place": "memory", "is_doubtful": False, "problem": ""}
GOOD = {
    "ETag": '"5"',
    "KVStore-Checksum": f"{checksum(b'value'):016x}",
    "KVStore-Place": "memory",
    "KVStore-Current": "true",
    "KVStore-Expires-In": "5.5",
}

Answer = Callable[[socket.socket], None]


def value_with(**headers: str | None) -> Answer:
    """Answer with a value, and headers of which some are changed or (None) left out."""
    told = {**GOOD, **{name.replace("_", "-"): text for name, text in headers.items()}}

    def answer(stream: socket.socket) -> None:
        name = requested(stream)
        lines = "".join(f"{key}: {text}\r\n" for key, text in told.items() if text is not None)
        stream.sendall(b"HTTP/1.1 200 X\r\nContent-Length: 5\r\n" + lines.encode() + name + b"\r\nvalue")

    return answer


def refusal(status: int, body: object) -> Answer:
    return reply(json.dumps(body).encode(), status=status)


def nameless(status: int, body: object) -> Answer:
    """An answer with an error that something between client and server sent."""
    data = json.dumps(body).encode()

    def answer(stream: socket.socket) -> None:
        requested(stream)
        stream.sendall(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    return answer


def error(code: str, **more: object) -> dict[str, object]:
    return {"error": {"code": code, "message": "no"}, **more}


def test_a_good_answer_is_taken() -> None:
    with answering(value_with()) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        record = client.get_record("c", "n")

    assert record is not None
    assert (record.value, record.version, record.expires_in_s, record.is_current) == (b"value", 5, 5.5, True)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (value_with(KVStore_Checksum="0" * 16), CorruptBlock),
        (value_with(KVStore_Checksum=None), CorruptBlock),
        (value_with(ETag=None), ProtocolMismatch),
        (value_with(ETag='"0"'), ProtocolMismatch),
        (value_with(KVStore_Place="moon"), ProtocolMismatch),
        (value_with(KVStore_Expires_In="nan"), ProtocolMismatch),
        (value_with(KVStore_Expires_In="-1"), ProtocolMismatch),
        (refusal(404, error("no_record", reason="because")), ProtocolMismatch),
        (refusal(404, error("no_record")), ProtocolMismatch),
        (refusal(404, {"reason": "expired"}), ServerUnavailable),
        (refusal(404, [1]), ServerUnavailable),
        (refusal(404, error("not_found")), ProtocolMismatch),
        (nameless(404, error("no_record", reason="expired")), KVStoreError),
        (refusal(503, error("unavailable")), ServerUnavailable),
    ],
)
def test_no_record_is_made_of_an_answer_that_is_in_doubt(answer: Answer, kind: type[KVStoreError]) -> None:
    with (
        answering(answer) as url,
        KVStore.connect(url, timeouts=PATIENT) as client,
        pytest.raises(kind),
    ):
        client.get_record("c", "n")


@pytest.mark.parametrize(
    "answer",
    [
        refusal(200, {**WRITE, "outcome": "perhaps"}),
        refusal(200, {**WRITE, "version": True}),
        refusal(200, {**WRITE, "version": -1}),
        refusal(200, {"outcome": "stored"}),
        refusal(412, error("conflict")),
        refusal(503, error("unavailable")),
        nameless(412, error("conflict", **WRITE)),
        nameless(503, {"gateway": "down"}),
        lambda stream: None,
    ],
)
def test_a_put_whose_end_is_not_clear_is_in_doubt_and_raises_nothing(answer: Answer) -> None:
    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        try:
            write = client.put_record("c", "n", b"value")
        except InvalidRequest:
            return  # it says that the request made no sense, so nothing was done

    assert (write.outcome, write.is_doubtful) == (RecordOutcome.UNAVAILABLE, True)


def test_a_refusal_says_how_the_put_ended() -> None:
    told = error("conflict", **{**WRITE, "outcome": "conflict", "version": 9, "place": None})
    with answering(refusal(412, told)) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        write = client.put_record("c", "n", b"value", if_version=5)

    assert (write.outcome, write.version, write.is_doubtful) == (RecordOutcome.CONFLICT, 9, False)


@pytest.mark.parametrize("body", [{}, {"records": 1}, {"records": [1]}, {"records": [{"name": "n"}]}])
def test_a_listing_of_another_form_is_none(body: object) -> None:
    with (
        answering(refusal(200, body)) as url,
        KVStore.connect(url, timeouts=PATIENT) as client,
        pytest.raises(ProtocolMismatch),
    ):
        client.list_records("c")


def test_without_a_server_a_put_is_an_outcome_and_the_rest_raises() -> None:
    with KVStore.connect("http://127.0.0.1:1", timeout_s=0.2) as client:
        assert client.put_record("c", "n", b"x").outcome is RecordOutcome.UNAVAILABLE
        for call in (client.get_record, client.drop_record):
            with pytest.raises(ServerUnavailable):
                call("c", "n")
        with pytest.raises(ServerUnavailable):
            client.list_records("c")


def test_a_read_only_client_changes_no_record() -> None:
    with KVStore.connect("http://127.0.0.1:1", is_read_only=True) as client:
        with pytest.raises(InvalidRequest, match="read-only"):
            client.put_record("c", "n", b"x")
        with pytest.raises(InvalidRequest, match="read-only"):
            client.drop_record("c", "n")
