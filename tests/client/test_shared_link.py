"""The connection that threads of a blocking client share: answers by id, late ones given back, its end."""

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore import shared_link as shared_link_module
from kvstore.errors import ProtocolMismatch, ServerUnavailable, TimedOut
from kvstore.messages import (
    Answer,
    ChainRef,
    Count,
    Done,
    Leased,
    Lent,
    LentSlot,
    Ping,
    ReadySlot,
    Release,
    Request,
    Reserve,
    ReturnSlots,
    TierNames,
    UnusedSlot,
    Welcome,
    decode_request,
    encode_message,
)
from kvstore.messages import LeaseChain as LeaseRequest
from kvstore.shared_link import SharedLink
from kvstore.wire import FrameDecoder
from tests.client.conftest import NAMESPACE

ABOUT = ChainRef(NAMESPACE.chain(range(8)))
LEASED = Leased(7, 1_000_000, 64 << 10, (ReadySlot(4096, 1, 1),), TierNames.of(["dram"]), None)
LENT = Lent((LentSlot(1, 8192, 3),), 0)
LONG_S = 30.0


class Peer:
    """The server's end: reads requests, answers what it is told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(LONG_S)
        self._decoder = FrameDecoder()

    def next_request(self) -> tuple[int, Request]:
        while (frame := self._decoder.next_frame()) is None:
            data = self.sock.recv(65536)
            assert data
            self._decoder.feed(data)
        return frame.request_id, decode_request(frame)

    def answer(self, request_id: int, answer: Answer) -> None:
        self.sock.sendall(encode_message(answer, request_id))


@pytest.fixture
def ends() -> Iterator[tuple[SharedLink, Peer]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = SharedLink(ours, Welcome(bytes(16), 0, 2), None)
    yield link, Peer(theirs)
    link.close()
    theirs.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as running:
        yield running


def _soon() -> float:
    return time.monotonic() + LONG_S


def test_two_threads_get_their_own_answers_in_whatever_order(
    ends: tuple[SharedLink, Peer], pool: ThreadPoolExecutor
) -> None:
    link, peer = ends
    first = pool.submit(link.ask, Ping(), _soon())
    one, _ = peer.next_request()
    second = pool.submit(link.ask, Ping(), _soon())
    two, _ = peer.next_request()

    peer.answer(two, Count(2))
    assert second.result(LONG_S) == Count(2)
    assert not first.done()
    peer.answer(one, Count(1))
    assert first.result(LONG_S) == Count(1)


@pytest.mark.parametrize(
    ("request_", "answer", "given_back"),
    [
        (LeaseRequest(ABOUT, 1000), LEASED, Release(7)),
        (Reserve(ABOUT, 1000), LENT, ReturnSlots((UnusedSlot(8192, 3),))),
    ],
    ids=["lease", "slots"],
)
def test_what_a_late_answer_lends_is_given_back_by_the_next_who_reads(
    ends: tuple[SharedLink, Peer],
    pool: ThreadPoolExecutor,
    request_: Request,
    answer: Answer,
    given_back: Request,
) -> None:
    link, peer = ends
    with pytest.raises(TimedOut):
        link.ask(request_, time.monotonic())
    late, _ = peer.next_request()
    peer.answer(late, answer)

    ping = pool.submit(link.ask, Ping(), _soon())
    peer.answer(peer.next_request()[0], Done())

    assert ping.result(LONG_S) == Done()
    assert peer.next_request()[1] == given_back


def test_an_interrupted_caller_gives_back_what_came_for_it(
    ends: tuple[SharedLink, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, peer = ends

    def interrupted(self: SharedLink, is_done: object, deadline_s: float) -> None:
        if self._waiting:
            peer.answer(peer.next_request()[0], LENT)
            self._read_once(deadline_s)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SharedLink, "_wait_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.ask(Reserve(ABOUT, 1000), _soon())

    assert peer.next_request()[1] == ReturnSlots((UnusedSlot(8192, 3),))


def test_an_interrupt_that_may_have_lost_bytes_of_the_stream_ends_the_link(
    ends: tuple[SharedLink, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, peer = ends

    def interrupted(self: SharedLink, data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SharedLink, "_take_in", interrupted)
    peer.sock.sendall(encode_message(Done(), 1)[:5])
    with pytest.raises(KeyboardInterrupt):
        link.ask(Ping(), _soon())

    assert link.is_lost
    with pytest.raises(ServerUnavailable):
        link.ask(Ping(), _soon())


@pytest.mark.parametrize("said", [encode_message(Done(), 999), os.urandom(64)], ids=["another id", "noise"])
def test_whoever_waits_learns_of_a_broken_protocol_and_the_link_is_lost(
    ends: tuple[SharedLink, Peer], pool: ThreadPoolExecutor, said: bytes
) -> None:
    link, peer = ends
    waiting = [pool.submit(link.ask, Ping(), _soon()) for _ in range(2)]
    for _ in range(2):
        peer.next_request()
    peer.sock.sendall(said)

    for call in waiting:
        with pytest.raises(ProtocolMismatch):
            call.result(LONG_S)
    assert link.is_lost
    with pytest.raises(ServerUnavailable):
        link.ask(Ping(), _soon())


def test_the_end_of_the_stream_ends_every_call(
    ends: tuple[SharedLink, Peer], pool: ThreadPoolExecutor
) -> None:
    link, peer = ends
    waiting = [pool.submit(link.ask, Ping(), _soon()) for _ in range(2)]
    for _ in range(2):
        peer.next_request()
    peer.sock.close()

    for call in waiting:
        with pytest.raises(ServerUnavailable):
            call.result(LONG_S)
    assert link.is_lost


def test_closing_ends_a_call_under_way(ends: tuple[SharedLink, Peer], pool: ThreadPoolExecutor) -> None:
    link, peer = ends
    call = pool.submit(link.ask, Ping(), _soon())
    peer.next_request()
    link.close()

    with pytest.raises(ServerUnavailable):
        call.result(LONG_S)
    assert peer.sock.recv(1) == b""


def test_a_silent_server_is_given_up(ends: tuple[SharedLink, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_link_module, "_SILENCE_S", 0.0)
    link, _ = ends

    with pytest.raises(TimedOut):
        link.ask(Ping(), time.monotonic() + 0.01)

    assert link.is_lost


def test_a_request_beyond_those_under_way_waits_for_room_and_no_longer_than_its_time(
    ends: tuple[SharedLink, Peer], pool: ThreadPoolExecutor
) -> None:
    link, peer = ends
    waiting = [pool.submit(link.ask, Ping(), _soon()) for _ in range(2)]
    ids = [peer.next_request()[0] for _ in range(2)]

    with pytest.raises(TimedOut, match="under way"):
        link.ask(Ping(), time.monotonic() + 0.05)
    third = pool.submit(link.ask, Ping(), _soon())
    peer.answer(ids[0], Done())
    peer.answer(ids[1], Done())
    peer.answer(peer.next_request()[0], Count(3))

    assert [call.result(LONG_S) for call in waiting] == [Done(), Done()]
    assert third.result(LONG_S) == Count(3)


def test_what_the_server_does_not_read_yet_is_sent_later(
    ends: tuple[SharedLink, Peer], pool: ThreadPoolExecutor
) -> None:
    link, peer = ends
    slots = ReturnSlots(tuple(UnusedSlot(at, at) for at in range(10_000)))
    for _ in range(8):
        link.tell(slots)
    ping = pool.submit(link.ask, Ping(), _soon())

    for _ in range(8):
        assert peer.next_request()[1] == slots
    peer.answer(peer.next_request()[0], Done())

    assert ping.result(LONG_S) == Done()


def test_a_server_that_reads_nothing_is_given_up(ends: tuple[SharedLink, Peer]) -> None:
    link, _ = ends
    slots = ReturnSlots(tuple(UnusedSlot(at, at) for at in range(10_000)))
    while not link.is_lost:
        link.tell(slots)

    with pytest.raises(ServerUnavailable):
        link.ask(Ping(), _soon())


def test_a_forked_child_uses_it_for_nothing(ends: tuple[SharedLink, Peer]) -> None:
    link, peer = ends
    pid = os.fork()
    if pid == 0:
        link.tell(Release(1))
        try:
            link.ask(Ping(), _soon())
        except ServerUnavailable:
            is_lost = link.is_lost
            link.close()
            os._exit(0 if is_lost else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    link.tell(Release(2))
    assert peer.next_request()[1] == Release(2)
    assert not link.is_lost
