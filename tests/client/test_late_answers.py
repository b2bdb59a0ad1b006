"""An answer that comes after a call's time is a counted miss on the data path of every client."""

import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncKVStore, Hints, KVStore, MissReason
from kvstore.link import Link
from kvstore.messages import INSTANCE_BYTES, Done, Ping, Welcome, encode_message
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT
from tests.client.facade import Face, SyncFace
from tests.redis_server import free_port
from tests.store_process import StoreProcess

CHAIN = NAMESPACE.chain(range(32))
NEW = NAMESPACE.chain(range(1000, 1032))
PAYLOADS = np.zeros((8, BLOCK_BYTES), np.uint8)
LATE_S = 0.05

DATA_PATH: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "match": ((CHAIN,), {}),
    "exists": ((CHAIN,), {}),
    "get": ((CHAIN,), {}),
    "get_block": ((CHAIN[:1],), {}),
    "fetch_into": ((CHAIN, np.zeros_like(PAYLOADS)), {}),
    "put": ((NEW, PAYLOADS), {}),
    "put_block": ((NEW[:1], PAYLOADS[0]), {}),
    "hint": ((CHAIN, Hints(ends_session=True)), {}),
    "prefetch": ((CHAIN,), {}),
    "lease": ((CHAIN,), {}),
    "reserve": ((NEW,), {}),
    "match_and_lease": ((CHAIN,), {"lease": True}),
}
OVER_HTTP = DATA_PATH.keys() - {"lease", "reserve", "match_and_lease"}
NOTHING: dict[str, Any] = {"get_block": None, "get": [], "put_block": False, "hint": False, "prefetch": 0}


@pytest.fixture(params=["sync", "async", "http", "async_http"])
async def served(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[StoreProcess, Face, bool]]:
    """A store that can be frozen, with CHAIN in it, and a client of it; is that over HTTP?"""
    is_http = "http" in request.param
    async with contextlib.AsyncExitStack() as opened:
        store = opened.enter_context(StoreProcess(tmp_path, http_port=free_port() if is_http else 0))
        address = store.url if is_http else store.socket_path
        face: Face
        if request.param.startswith("async"):
            face = await AsyncKVStore.connect(address, timeouts=PATIENT)
            await opened.enter_async_context(face)
        else:
            face = SyncFace(opened.enter_context(KVStore.connect(address, timeouts=PATIENT)))
        await face.open_namespace(NAMESPACE)
        assert (await face.put(CHAIN, PAYLOADS)).stored == 8
        if not is_http:  # leases have a connection of their own
            await (await face.lease(CHAIN)).release()
        yield store, face, is_http
        assert await face.check() == []


async def test_a_late_answer_is_a_miss_on_every_call_of_the_data_path(
    served: tuple[StoreProcess, Face, bool],
) -> None:
    store, face, is_http = served
    for name, (given, more) in DATA_PATH.items():
        if is_http and name not in OVER_HTTP:
            continue
        if not is_http:
            await face.advance_epoch("another model")  # no block is found without asking from here on
        await face.ping()
        call = getattr(face, "match" if name == "match_and_lease" else name)
        before = face.client_stats()
        store.pause()
        try:
            result = await call(*given, **more, timeout_s=LATE_S)
        finally:
            store.resume()
        after = face.client_stats()
        assert (name, after.timeouts + after.unavailable) == (name, before.timeouts + before.unavailable + 1)
        assert after.timeouts == before.timeouts + 1, name
        if name in NOTHING:
            assert result == NOTHING[name], name
        elif name == "exists":
            assert result == [False] * 8
        elif name == "reserve":
            assert len(result) == 0
        elif name == "put":
            assert (result.stored, result.reason) == (0, MissReason.TIMED_OUT)
        else:
            assert (name, result.blocks, result.reason) == (name, 0, MissReason.TIMED_OUT)
    # What it answered too late it lent to nobody, and it serves as before.
    assert (await face.match(CHAIN)).blocks == 8


def test_an_answer_that_came_in_time_is_taken_by_a_client_that_did_not_run_meanwhile() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(ours, Welcome(bytes(INSTANCE_BYTES), 0, 1), None)
        theirs.sendall(encode_message(Done(), 1))
        deadline_s = time.monotonic() + 1.0
        link._send = lambda data, deadline_s: time.sleep(1.1)  # type: ignore[method-assign]
        assert link.ask(Ping(), deadline_s) == Done()
