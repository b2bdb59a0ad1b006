"""RespConnection on a socket pair: fences, values read in place, quiet and late streams."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore_tiers.resp import BulkReply, BulkStatus, RespConnection, RespFault


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


def test_silence_is_measured_from_the_last_byte(pair: Pair) -> None:
    connection, server = pair
    server.sendall(b"$10\r\nabc")
    target = memoryview(bytearray(10))
    with pytest.raises(RespFault) as caught:
        connection.read_bulk_into([target], deadline_s=within(5))
    assert caught.value.silent_s is not None
    assert 0.15 < caught.value.silent_s < 1


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
