"""What a blocking connection tells without waiting, while the server is behind with reading."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.link import Link
from kvstore.messages import (
    ChainRef,
    Done,
    NoteReads,
    Ping,
    Request,
    ReturnSlots,
    Stored,
    UnusedSlot,
    Welcome,
    decode_request,
    encode_message,
)
from kvstore.wire import LENDS_AHEAD, FrameDecoder

NOTE = NoteReads(
    ChainRef(Namespace("m", KVLayout.opaque(block_bytes=4096, block_tokens=4)).chain(range(64))), None
)
LONG_S = 60.0


class Server:
    """The other end, which reads when it is told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = FrameDecoder()

    def next_request(self) -> tuple[int, Request]:
        while (frame := self._decoder.next_frame()) is None:
            data = self.sock.recv(65536)
            assert data
            self._decoder.feed(data)
        return frame.request_id, decode_request(frame)


@pytest.fixture
def ends() -> Iterator[tuple[Link, Server]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    link = Link(ours, Welcome(bytes(16), 0, 2), None, LENDS_AHEAD)
    yield link, Server(theirs)
    link.close()
    theirs.close()


def _tell_until_refused(link: Link) -> int:
    num_told = 0
    while link.tell_if_heard(NOTE):
        num_told += 1
        assert num_told < 10_000
    return num_told


def test_what_a_server_behind_was_told_arrives_whole_before_the_next_request(
    ends: tuple[Link, Server],
) -> None:
    link, server = ends
    num_told = _tell_until_refused(link)
    assert link.is_clean
    got: list[Request] = []

    def serve() -> None:
        for _ in range(num_told):
            got.append(server.next_request()[1])
        request_id, request = server.next_request()
        got.append(request)
        server.sock.sendall(encode_message(Done(), request_id))

    serving = threading.Thread(target=serve)
    serving.start()
    answer = link.ask(Ping(), time.monotonic() + LONG_S)
    serving.join(LONG_S)

    assert answer == Done()
    assert got == [NOTE] * num_told + [Ping()]


def test_idle_slots_are_kept_while_a_server_is_too_far_behind_to_take_them_back(
    ends: tuple[Link, Server],
) -> None:
    link, _ = ends
    assert link.stock is not None
    slot = UnusedSlot(4096, 1)
    link.stock.add(4096, Stored(1, slots=(slot,), lent_us=1), link.stock.clock() - 10)
    _tell_until_refused(link)

    link.give_back_idle()

    assert link.is_clean
    assert link.stock.take_idle() == [slot]


def test_idle_slots_that_do_not_go_out_at_once_follow_later(ends: tuple[Link, Server]) -> None:
    link, server = ends
    assert link.stock is not None
    slot = UnusedSlot(4096, 1)
    link.stock.add(4096, Stored(1, slots=(slot,), lent_us=1), link.stock.clock() - 10)
    num_told = 0
    while not link._unsent:
        assert link.tell_if_heard(NOTE)
        num_told += 1

    link.give_back_idle()
    received = [server.next_request()[1] for _ in range(num_told - 1)]
    link.tell(NOTE)
    received += [server.next_request()[1] for _ in range(3)]

    assert received == [NOTE] * num_told + [ReturnSlots((slot,)), NOTE]


def test_who_only_tells_goes_on_when_the_server_has_caught_up(ends: tuple[Link, Server]) -> None:
    link, server = ends
    num_told = _tell_until_refused(link)
    link.stock = None
    sock = server.sock
    sock.setblocking(False)
    num_received, is_told_again = 0, False
    while not is_told_again:
        with contextlib.suppress(BlockingIOError):
            while True:
                assert server.next_request()[1] == NOTE
                num_received += 1
        is_told_again = link.tell_if_heard(NOTE)
        assert num_received <= num_told

    assert link.is_clean


def test_a_connection_in_doubt_tells_nothing_and_stays_in_doubt(ends: tuple[Link, Server]) -> None:
    link, _ = ends
    link.close()

    assert not link.tell_if_heard(NOTE)
    assert not link.is_clean
