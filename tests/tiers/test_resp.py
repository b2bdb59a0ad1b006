"""RespConnection on a socket pair: fences, values read in place, quiet and late streams."""

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.checksum import RunningChecksum, checksum
from kvstore_tiers.resp import BulkReply, BulkStatus, ErrorReply, RespConnection
from kvstore_tiers.resp_stream import RespFault


@pytest.fixture
def pair() -> Iterator[tuple[RespConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = RespConnection(ours, timeout_s=0.2, clock=time.monotonic)
    yield connection, theirs
    connection.close()
    theirs.close()


Pair = tuple[RespConnection, socket.socket]


def within(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize("data", [b"$3\r\nabd\r\n", b"$-1\r\n", b"$4\r\nabcd\r\n", b"+PONG\r\n", b":1\r\n"])
def test_a_fence_that_is_not_ours_is_a_fault(pair: Pair, data: bytes) -> None:
    connection, server = pair
    server.sendall(data)
    with pytest.raises(RespFault):
        connection.read_fence(b"abc", deadline_s=within(1))


@pytest.mark.parametrize("data", [b"$3\r\nabc\r\n", b"-NOPERM this user\r\n"])
def test_a_fence_that_is_ours_passes(pair: Pair, data: bytes) -> None:
    connection, server = pair
    server.sendall(data)
    connection.read_fence(b"abc", deadline_s=within(1))


def test_bytes_that_nobody_asked_for_and_the_end_are_not_quiet(pair: Pair) -> None:
    connection, server = pair
    assert connection.is_quiet()
    server.sendall(b"+")
    assert not connection.is_quiet()
    server.close()
    assert not connection.is_quiet()


@pytest.mark.alone
def test_silence_is_measured_from_the_last_byte(pair: Pair) -> None:
    connection, server = pair
    server.sendall(b"$10\r\nabc")
    target = memoryview(bytearray(10))
    with pytest.raises(RespFault) as caught:
        connection.read_bulk_into([target], deadline_s=within(5))
    assert caught.value.silent_s is not None
    assert 0.15 < caught.value.silent_s < 1


@pytest.mark.alone
def test_a_stream_that_trickles_past_the_deadline_is_late_but_not_silent(pair: Pair) -> None:
    connection, server = pair
    stop = threading.Event()

    def trickle() -> None:
        server.sendall(b"$1000\r\n")
        while not stop.wait(0.005):
            server.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began_s = time.monotonic()
    with pytest.raises(RespFault) as caught:
        connection.read_bulk_into([memoryview(bytearray(1000))], deadline_s=within(0.1))
    stop.set()
    thread.join()
    assert time.monotonic() - began_s < 0.5
    assert caught.value.is_timeout


def test_a_peer_that_does_not_read_ends_a_send_in_time(pair: Pair) -> None:
    connection, _ = pair
    with pytest.raises(RespFault) as caught:
        connection.send([bytes(8 << 20)], deadline_s=within(5))
    assert caught.value.is_timeout


def test_a_value_goes_into_several_targets_and_its_rest_is_read_over(pair: Pair) -> None:
    connection, server = pair
    server.sendall(b"$8\r\nabcdefgh\r\n+next\r\n")
    first, second = memoryview(bytearray(2)), memoryview(bytearray(3))
    reply = connection.read_bulk_into([first, second], deadline_s=within(1))
    assert reply == BulkReply(BulkStatus.WRONG_LENGTH, 8)
    assert bytes(first) + bytes(second) == b"abcde"
    assert connection.read_simple(deadline_s=within(1)) == "next"


# Waking late, over TCP


@pytest.fixture
def tcp_pair() -> Iterator[tuple[RespConnection, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    connection = RespConnection(ours, timeout_s=0.6, clock=time.monotonic)
    yield connection, theirs
    connection.close()
    theirs.close()


LARGE = 4 << 20


def test_a_large_value_comes_whole_and_is_summed_on_its_way(tcp_pair: Pair) -> None:
    connection, server = tcp_pair
    data = random.Random(1).randbytes(LARGE + 10)
    sending = threading.Thread(target=server.sendall, args=(b"$%d\r\n%s\r\n+next\r\n" % (len(data), data),))
    sending.start()
    head, body, total = bytearray(10), bytearray(LARGE), RunningChecksum()
    reply = connection.read_bulk_into(
        [memoryview(head), memoryview(body)], deadline_s=within(30), total=total
    )
    sending.join()
    assert reply == BulkReply(BulkStatus.COMPLETE, len(data))
    assert head + body == data
    assert total.value == checksum(data[10:])
    assert connection.read_simple(deadline_s=within(5)) == "next"
    assert connection.is_quiet()


def test_the_last_bytes_of_a_value_are_waited_for_however_few_they_are(tcp_pair: Pair) -> None:
    connection, server = tcp_pair
    pieces = [b"$300000\r\n" + b"a" * 299_990, b"b" * 9, b"c", b"\r", b"\n"]

    def send() -> None:
        for piece in pieces:
            server.sendall(piece)
            time.sleep(0.02)

    sending = threading.Thread(target=send)
    sending.start()
    body = bytearray(300_000)
    reply = connection.read_bulk_into([memoryview(body)], deadline_s=within(30))
    sending.join()
    assert reply == BulkReply(BulkStatus.COMPLETE, 300_000)
    assert body[-11:] == b"abbbbbbbbbc"


@pytest.mark.alone
def test_a_stream_of_few_bytes_at_a_time_is_not_taken_for_silence(tcp_pair: Pair) -> None:
    connection, server = tcp_pair
    stop = threading.Event()

    def trickle() -> None:
        server.sendall(b"$%d\r\n" % LARGE)
        while not stop.wait(0.02):
            server.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began_s = time.monotonic()
    with pytest.raises(RespFault) as caught:
        connection.read_bulk_into([memoryview(bytearray(LARGE))], deadline_s=within(2))
    lasted_s = time.monotonic() - began_s
    stop.set()
    thread.join()
    assert lasted_s > 1.5
    assert caught.value.silent_s is not None
    assert caught.value.silent_s < 0.6


def test_a_few_bytes_and_then_silence_end_after_the_timeout(tcp_pair: Pair) -> None:
    connection, server = tcp_pair
    server.sendall(b"$%d\r\nabc" % LARGE)
    began_s = time.monotonic()
    with pytest.raises(RespFault) as caught:
        connection.read_bulk_into([memoryview(bytearray(LARGE))], deadline_s=within(30))
    assert time.monotonic() - began_s < 10
    assert caught.value.silent_s is not None
    assert caught.value.silent_s > 0.5


def test_a_server_that_closes_in_the_middle_of_a_value_is_noticed_at_once(tcp_pair: Pair) -> None:
    connection, server = tcp_pair
    server.sendall(b"$%d\r\nabc" % LARGE)
    server.close()
    with pytest.raises(RespFault, match="closed the connection"):
        connection.read_bulk_into([memoryview(bytearray(LARGE))], deadline_s=within(30))


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"+OK\r\n", "OK"),
        (b":-7\r\n", -7),
        (b"$3\r\na\r\n\r\n", b"a\r\n"),
        (b"$0\r\n\r\n", b""),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"_\r\n", None),
        (b"-ERR no\r\n", ErrorReply("ERR no")),
        (b"*0\r\n", []),
        (b"*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n:1\r\n", [b"0", [b"a", 1]]),
        (b"*2\r\n+OK\r\n-ERR x\r\n", ["OK", ErrorReply("ERR x")]),
    ],
)
def test_a_reply_of_any_kind_is_read(pair: Pair, data: bytes, reply: object) -> None:
    connection, server = pair
    server.sendall(data)

    assert connection.read_reply(max_bytes=1000, deadline_s=within(1)) == reply
    assert connection.is_quiet()


@pytest.mark.parametrize(
    "data",
    [
        b"$1001\r\n",
        b"*100\r\n",
        b"$-2\r\n",
        b"*-2\r\n",
        b"$x\r\n",
        b"$3\r\nabcde\r\n",
        b"!3\r\nabc\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b"*1\r\n" * 5 + b":1\r\n",
        b"*3\r\n" + b"$400\r\n" + b"x" * 400 + b"\r\n" + b"$600\r\n",
    ],
)
def test_a_reply_that_is_longer_or_of_another_kind_is_a_fault(pair: Pair, data: bytes) -> None:
    connection, server = pair
    server.sendall(data)

    with pytest.raises(RespFault):
        connection.read_reply(max_bytes=1000, deadline_s=within(1))
