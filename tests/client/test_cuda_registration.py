"""Pinning for CUDA: which mappings, all or none, and for how long. CUDA itself is not tested here."""

from pathlib import Path

import pytest

from kvstore import KVStore, arena_link
from kvstore.arena_view import ArenaView
from kvstore.cuda_registration import REGISTERED, CudaRegistration, find_runtime
from kvstore_tiers.arena import Arena
from tests.client.conftest import PATIENT
from tests.store_process import StoreProcess


class NotingRuntime:
    """A runtime that notes what is pinned."""

    def __init__(self, *, refused_flags: int | None = None) -> None:
        self.pinned: dict[int, tuple[int, int]] = {}
        self._refused_flags = refused_flags

    def register(self, address: int, length_bytes: int, flags: int) -> int:
        if flags == self._refused_flags:
            return 801
        self.pinned[address] = (length_bytes, flags)
        return 0

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_read_only_mappings_are_pinned_as_such_and_whole() -> None:
    arena, runtime = Arena.create(1 << 20), NotingRuntime()
    reading = ArenaView.map(arena.fd)
    registration = CudaRegistration(runtime)

    assert registration.add([reading, arena.view]) == REGISTERED
    size = arena.view.format.total_bytes
    assert runtime.pinned == {reading.address: (size, 1 | 8), arena.view.address: (size, 1)}
    registration.end()
    registration.end()
    assert runtime.pinned == {}
    arena.close()


def test_a_mapping_that_is_refused_leaves_none_pinned() -> None:
    arena, runtime = Arena.create(1 << 20), NotingRuntime(refused_flags=1)

    said = CudaRegistration(runtime).add([ArenaView.map(arena.fd), arena.view])

    assert said == "cudaHostRegister refused with status 801"
    assert runtime.pinned == {}
    arena.close()


def test_a_client_pins_until_it_is_closed_or_its_server_restarts(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = NotingRuntime()
    monkeypatch.setattr(arena_link, "find_runtime", lambda: runtime)
    with KVStore.connect(store.socket_path, timeouts=PATIENT) as client:
        assert client.register_with_cuda() == REGISTERED
        first = set(runtime.pinned)
        assert client.register_with_cuda() == REGISTERED
        assert set(runtime.pinned) == first
        assert len(first) == 2

        store.kill()
        store.start()
        client.ping()
        assert runtime.pinned == {}
        assert client.register_with_cuda() == REGISTERED
    assert runtime.pinned == {}


def test_without_a_library_or_a_device_it_says_so() -> None:
    assert isinstance(find_runtime(), str) or Path("/dev/nvidia0").exists()
