"""What is asked of Redis about records, and answers that are not as they should be."""

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.tenant import tenant_of
from kvstore_tiers.record_remote_session import Exchange, remove_records
from kvstore_tiers.record_shared import SharedEnd, SharedNames, SharedStatus
from kvstore_tiers.remote_session import Tally
from kvstore_tiers.resp import RespConnection
from kvstore_tiers.resp_stream import RespFault
from tests.tiers.scripted_server import Answer, ScriptedServer

ONE = (bytes(32), b"an entry")
NAMES = SharedNames("kvstore", tenant_of(b"ann"))


@pytest.fixture
def scripted() -> Iterator[Callable[[Answer], ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def start(answer: Answer) -> ScriptedServer:
        servers.append(ScriptedServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@contextlib.contextmanager
def asked(server: ScriptedServer) -> Iterator[tuple[Exchange, SharedEnd]]:
    deadline_s, end = time.monotonic() + 20, SharedEnd()
    stream = socket.create_connection(("127.0.0.1", server.port))
    connection = RespConnection(stream, timeout_s=20, clock=time.monotonic)
    try:
        yield Exchange(connection, Tally(), end, deadline_s=deadline_s), end
    finally:
        connection.close()


def answering_hmget(reply: bytes) -> Answer:
    def answer(data: bytes) -> list[bytes]:
        fence = re.search(rb"fence-r\d+", data)
        if fence is None:
            return []
        echo = b"$%d\r\n%b\r\n" % (len(fence[0]), fence[0])
        return [b"+OK\r\n:0\r\n" + reply + echo] if b"HMGET" in data else [b"+OK\r\n" + echo]

    return answer


@pytest.mark.parametrize("reply", [b"*0\r\n", b"*2\r\n$-1\r\n$-1\r\n", b"$-1\r\n", b":1\r\n"])
def test_an_index_that_answers_for_more_or_fewer_records_is_a_fault(
    scripted: Callable[[Answer], ScriptedServer], reply: bytes
) -> None:
    with asked(scripted(answering_hmget(reply))) as (exchange, end), pytest.raises(RespFault):
        remove_records(exchange, NAMES, [ONE], end, only_absent=True)

    assert end.status is SharedStatus.UNKNOWN


def test_an_index_that_has_nothing_of_a_record_has_nothing_removed(
    scripted: Callable[[Answer], ScriptedServer],
) -> None:
    with asked(scripted(answering_hmget(b"*1\r\n$-1\r\n"))) as (exchange, end):
        remove_records(exchange, NAMES, [ONE], end, only_absent=True)

    assert (end.status, end.count) == (SharedStatus.OK, 0)
