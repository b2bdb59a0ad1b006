"""The connections of clients over HTTP: whose answer is whose, forks, and more calls than threads."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, KVStore, MissReason, PrefixChain
from kvstore.drill.store_process import wait_until
from kvstore.errors import TimedOut
from tests.client.conftest import NAMESPACE, PATIENT
from tests.client.scripted_http import answering, requested
from tests.redis_server import free_port
from tests.store_process import StoreProcess

pytestmark = pytest.mark.usefixtures("namespace")


@pytest.fixture
def http_store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path, http_port=free_port()) as running:
        yield running


def test_the_answer_to_another_request_is_not_taken(chain: PrefixChain) -> None:
    body = b'{"blocks": 1, "tiers": ["dram"], "reason": "never_seen"}'

    def answer(stream: socket.socket) -> None:
        head = requested(stream) + f"Content-Length: {len(body)}\r\n\r\n".encode()
        stream.sendall(b"HTTP/1.1 200 OK\r\n" + head + body)
        requested(stream)
        stream.sendall(b"HTTP/1.1 200 OK\r\n" + head + body)

    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        assert client.match(chain[:2]).blocks == 1
        assert client.match(chain[2:4]).blocks == 0
        assert client.client_stats().protocol_errors == 1


def test_a_child_forked_while_a_thread_reads_an_answer_is_not_held(chain: PrefixChain) -> None:
    begun, ended = threading.Event(), threading.Event()

    def answer(stream: socket.socket) -> None:
        stream.sendall(b"HTTP/1.1 200 OK\r\n" + requested(stream) + b"Content-Length: 99\r\n\r\n")
        begun.set()
        ended.wait(60)

    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        reader = threading.Thread(target=client.match, args=(chain,), kwargs={"timeout_s": 60})
        reader.start()
        begun.wait(30)
        time.sleep(0.2)  # until it reads
        child = os.fork()
        if not child:
            os._exit(client.match(chain, timeout_s=0.1).blocks)
        status = 0

        def has_ended() -> bool:
            nonlocal status
            done, status = os.waitpid(child, os.WNOHANG)
            return done == child

        if not wait_until(has_ended, 30):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 0
        ended.set()
        reader.join()


async def test_a_call_waits_for_a_free_thread_no_longer_than_its_time(chain: PrefixChain) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        client = await AsyncKVStore.connect(url, timeouts=PATIENT)
        client._state.open_namespace(NAMESPACE)
        slow = [asyncio.create_task(client.get(chain, timeout_s=60)) for _ in range(20)]
        await asyncio.sleep(0.1)
        assert (await client.match(chain, timeout_s=0.05)).reason is MissReason.TIMED_OUT
        with pytest.raises(TimedOut):
            await client.ping(timeout_s=0.05)
        assert not any(call.done() for call in slow)
        await client.close()
        assert await asyncio.gather(*slow) == [[]] * 20


async def test_a_call_cancelled_at_once_makes_no_other_a_miss(
    http_store: StoreProcess, chain: PrefixChain, payloads: np.ndarray
) -> None:
    async with await AsyncKVStore.connect(http_store.url, timeouts=PATIENT) as client:
        await client.open_namespace(NAMESPACE)
        await client.put(chain, payloads)
        for _ in range(100):
            cancelled = [asyncio.create_task(client.get(chain)) for _ in range(4)]
            asked = asyncio.create_task(client.match(chain))
            await asyncio.sleep(0)
            for call in cancelled:
                call.cancel()
            assert (await asked).blocks == 8
            await asyncio.gather(*cancelled, return_exceptions=True)
        assert client.client_stats().protocol_errors == 0
