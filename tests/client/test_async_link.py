"""One connection of the asyncio client: what an answer lends that nobody takes, and connections that end."""

import asyncio

import pytest

from kvstore.async_link import AsyncLink
from kvstore.errors import ServerUnavailable
from kvstore.messages import (
    Answer,
    ChainRef,
    Fetch,
    LeaseChain,
    Leased,
    Lent,
    LentSlot,
    Ping,
    Ready,
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
from kvstore.wire import FrameDecoder
from tests.client.conftest import NAMESPACE

ABOUT = ChainRef(NAMESPACE.chain(range(8)))
READY = Ready(7, 64 << 10, (ReadySlot(4096, 1, 1),), TierNames.of(["dram"]), None)
LEASED = Leased(8, 1_000_000, 64 << 10, (ReadySlot(4096, 1, 1),), TierNames.of(["dram"]), None)
LENT = Lent((LentSlot(1, 8192, 3),), 0)


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self._sent = FrameDecoder()

    def write(self, data: "bytes | bytearray | memoryview") -> None:
        self._sent.feed(bytes(data))

    def is_closing(self) -> bool:
        return False

    def sent(self) -> list[Request]:
        """What was written since it was last asked."""
        requests = []
        while (frame := self._sent.next_frame()) is not None:
            requests.append(decode_request(frame))
        return requests


def _link(max_in_flight: int = 32) -> tuple[AsyncLink, Wire]:
    link, wire = AsyncLink(None, Welcome(bytes(16), 0, max_in_flight), None), Wire()  # type: ignore[arg-type]
    link.connection_made(wire)
    return link, wire


def _receive(link: AsyncLink, data: bytes) -> None:
    link.get_buffer(-1)[: len(data)] = data
    link.buffer_updated(len(data))


async def _asked(link: AsyncLink, request: Request) -> "asyncio.Task[Answer]":
    task = asyncio.create_task(link.ask(request, asyncio.get_running_loop().time() + 30))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(
    ("request_", "answer", "given_back"),
    [
        (Fetch(ABOUT, 1000), READY, Release(7)),
        (LeaseChain(ABOUT, 1000), LEASED, Release(8)),
        (Reserve(ABOUT, 1000), LENT, ReturnSlots((UnusedSlot(8192, 3),))),
    ],
    ids=["fetch", "lease", "slots"],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["in the same tick", "later"])
async def test_what_an_answer_lends_to_a_cancelled_caller_is_given_back(
    request_: Request, answer: Answer, given_back: Request, is_late: bool
) -> None:
    link, wire = _link()
    task = await _asked(link, request_)
    if is_late:
        task.cancel()
        await asyncio.sleep(0)
    _receive(link, encode_message(answer, 1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert wire.sent() == [request_, given_back]


async def test_a_call_that_waits_for_room_fails_at_once_when_the_connection_is_lost() -> None:
    link, wire = _link(max_in_flight=1)
    first, second = await _asked(link, Ping()), await _asked(link, Ping())
    assert wire.sent() == [Ping()]

    link.connection_lost(None)

    async with asyncio.timeout(5):
        for task in (first, second):
            with pytest.raises(ServerUnavailable, match="connection lost"):
                await task
