"""Clients of a store that has forgotten their namespace: they open it again, and nobody notices."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, KVLayout, KVStore, MissReason, Namespace, Timeouts
from kvstore.config import Config
from kvstore.errors import InvalidRequest, KVStoreError, NamespaceNotOpen, RejectedRequest
from kvstore.messages import Failed, FailureCode
from kvstore.running import serving
from kvstore.server import StoreServer
from kvstore.serving import Connection
from tests.client.facade import Face, SyncFace
from tests.store_process import MIB

PATIENT = Timeouts(match_s=10, fetch_s=10, put_s=10, control_s=10)
LAYOUT = KVLayout.opaque(block_bytes=4096, block_tokens=4)
NAMESPACE = Namespace("tiny", LAYOUT)
CHAIN = NAMESPACE.chain(range(8))
PAYLOADS = np.arange(8192, dtype=np.uint64).view(np.uint8)[:8192].reshape(2, 4096)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StoreServer]:
    config = Config.from_dict({"tiers": {"dram": {"capacity_bytes": 4 * MIB, "staging_bytes": MIB}}})
    async with serving(config, socket_path=tmp_path / "kv.sock") as running:
        yield running


@pytest.fixture(params=["sync", "async"])
async def face(request: pytest.FixtureRequest, server: StoreServer, tmp_path: Path) -> AsyncIterator[Face]:
    if request.param == "sync":
        with KVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as client:
            client.open_namespace(NAMESPACE)
            yield SyncFace(client)
    else:
        async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as connected:
            await connected.open_namespace(NAMESPACE)
            yield connected


def _forget(server: StoreServer) -> None:
    # The owner's own use keeps a namespace, so it is taken away behind the owner's back.
    server._manager._state.directory.forget_namespace(NAMESPACE.digest)
    with pytest.raises(NamespaceNotOpen):
        server._manager.commit(CHAIN[:0], [], owner=server._manager.new_owner())


@pytest.mark.parametrize("verb", ["match", "get", "prefetch", "drop", "put"])
async def test_a_forgotten_namespace_is_opened_again_by_the_call_that_needs_it(
    server: StoreServer, face: Face, verb: str
) -> None:
    assert (await face.match(CHAIN)).reason is MissReason.NEVER_SEEN
    _forget(server)

    if verb == "put":
        assert (await face.put(CHAIN, PAYLOADS)).stored == 2
        assert np.array_equal(np.stack(await face.get(CHAIN)), PAYLOADS)
    elif verb == "match":
        assert (await face.match(CHAIN)).reason is MissReason.NEVER_SEEN
    else:
        assert not await getattr(face, verb)(CHAIN)


async def test_a_store_that_forgets_the_namespace_every_time_is_a_miss(
    server: StoreServer, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_namespace = Connection._open_namespace

    def open_and_forget(connection, request):
        done = open_namespace(connection, request)
        _forget(server)
        return done

    monkeypatch.setattr(Connection, "_open_namespace", open_and_forget)

    assert (await face.match(CHAIN)).reason is MissReason.UNAVAILABLE
    assert (await face.put(CHAIN, PAYLOADS)).dropped == 2


@pytest.mark.parametrize("code", FailureCode)
def test_every_failure_comes_back_as_the_error_it_was(code: FailureCode) -> None:
    error = Failed(code, "why").to_error()

    assert isinstance(error, KVStoreError)
    if code is FailureCode.INVALID_LAYOUT:  # to a client, what the server calls invalid is one
        assert isinstance(error, RejectedRequest)
    elif code is not FailureCode.INTERNAL:
        assert Failed.of(error).code is code


def test_a_namespace_that_is_not_open_is_an_invalid_request_to_who_does_not_care() -> None:
    assert isinstance(Failed(FailureCode.NAMESPACE_NOT_OPEN, "").to_error(), InvalidRequest)
