"""A server at its limit of address space (``ulimit -v``): it does not flood its log, and goes on later."""

import contextlib
import json
import resource
import signal
import socket
from pathlib import Path

import pytest

from kvstore import KVStore
from kvstore.drill.store_process import Footprint, wait_until
from kvstore.errors import KVStoreError
from tests.client.conftest import NAMESPACE, PATIENT
from tests.redis_server import free_port
from tests.store_process import StoreProcess

LARGE = json.dumps(
    {"namespace": NAMESPACE.digest.hex(), "keys": [f"{at:064x}" for at in range(9000)]}
).encode()
REQUEST = (
    b"POST /v1/match HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE
)


def _mapped_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmSize" in line]
    return int(line.split()[1]) << 10


def _ask_much(store: StoreProcess) -> None:
    """Large requests over both faces; how they end does not matter."""
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", store.settings.http_port), timeout=2)
                stack.enter_context(sock).sendall(REQUEST)
    with KVStore.connect(store.socket_path, timeout_s=0.5) as client:
        client.open_namespace(NAMESPACE)
        client.match(NAMESPACE.chain(range(36_000)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("spare_bytes", [0, 1 << 20])
def test_a_server_that_is_out_of_memory_logs_little_and_goes_on_afterwards(
    tmp_path: Path, spare_bytes: int
) -> None:
    with StoreProcess(tmp_path, http_port=free_port()) as store:
        pid = store.process.pid
        with KVStore.connect(store.socket_path, timeouts=PATIENT) as client:
            client.open_namespace(NAMESPACE)
            client.match(NAMESPACE.chain(range(32)))
            before = Footprint.of(pid)
            most_bytes = _mapped_bytes(pid) + spare_bytes
            resource.prlimit(pid, resource.RLIMIT_AS, (most_bytes, resource.RLIM_INFINITY))
            with contextlib.suppress(OSError, KVStoreError, ProcessLookupError):
                for _ in range(40):
                    _ask_much(store)
                resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        log = (tmp_path / "store.log").read_text()
        assert "MemoryError" in log
        assert log.count("Traceback") < 200  # of 800 requests and more
        if not store.is_running:
            # CPython ends itself when it runs out of memory while it makes a MemoryError, and extensions
            # crash on a NULL of malloc: then a new process has to do.
            assert store.process.returncode in (-signal.SIGABRT, -signal.SIGSEGV), store.last_words()
            store.kill()
            store.start()
            pid = store.process.pid
        assert wait_until(lambda: Footprint.of(pid).descriptors <= before.descriptors, 60)
        with KVStore.connect(store.url, timeouts=PATIENT) as client:
            client.ping()
        with KVStore.connect(store.socket_path, timeouts=PATIENT) as client:
            assert client.check(1000) == []
            stats = client.stats()
            assert (stats["owners"], stats["live_leases"]) == (1, 0)
