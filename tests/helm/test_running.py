"""The rendered commands and files with the real programs: the store, its probes, its end, and Redis."""

import itertools
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore import KVLayout, KVStore, Namespace
from kvstore.client_state import Timeouts
from kvstore.drill.redis_server import redis_obstacle
from tests.helm.chart import store_container
from tests.helm.installed import PASSWORD, Installed

MIB = 1 << 20
NAMES = ["--model", "m", "--block-tokens", "4", "--block-bytes", "4096", "--tokens", "1,2,3,4,5,6,7,8"]

NAMESPACE = Namespace(model="load", layout=KVLayout.opaque(block_bytes=4096, block_tokens=4))

pytestmark = [
    pytest.mark.skipif(bool(redis_obstacle()), reason=redis_obstacle()),
    # A dozen commands in a row, each an interpreter's start, on a machine that may be busy.
    pytest.mark.timeout(300),
]

VALUES = {
    # A busy machine may be slow: no write is given up for it.
    "config": {
        "tiers": {
            "dram": {"capacity_bytes": "16MiB", "staging_bytes": "1MiB"},
            "remote": {"timeout_s": 30},
        },
    },
    "ssd": {"enabled": True, "capacityBytes": "8MiB"},
    "redis": {"bundled": {"maxmemoryBytes": "64MiB"}},
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    # The socket's path may be 107 bytes long.
    release = Installed(tmp_path_factory.mktemp("k"), VALUES)
    with release.redis() as process:
        release.redis_process = process
        yield release


def exec_command(installed, probe):
    return store_container(installed.pod)[probe]["exec"]["command"]


def test_the_release_passes_its_own_test(installed):
    with installed.store():
        (container,) = installed.pod["containers"]
        done = installed.run(container["command"])

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("sound\n")


def test_the_liveness_command_fails_without_a_store(installed):
    with installed.store():
        alive = installed.run(exec_command(installed, "livenessProbe"))
    dead = installed.run(exec_command(installed, "livenessProbe"))

    assert (alive.returncode, dead.returncode) == (0, 3)


def test_nothing_that_was_put_is_lost_by_a_restart(installed):
    payload, copy = (installed.folder / "tmp" / name for name in ("payload", "copy"))
    payload.write_bytes(np.random.default_rng(5).bytes(2 * 4096))
    with installed.store() as process:
        put = installed.run(["kvstore", "put", *NAMES, "--in", "/tmp/payload"])
        hook = installed.run(store_container(installed.pod)["lifecycle"]["preStop"]["exec"]["command"])
    with installed.store():
        get = installed.run(["kvstore", "get", *NAMES, "--out", "/tmp/copy"])

    assert [at.returncode for at in (put, hook, get)] == [0, 0, 0], (put, hook, get)
    assert process.returncode == 0
    assert copy.read_bytes() == payload.read_bytes()


def test_the_hook_ends_while_redis_hangs(installed):
    (installed.folder / "tmp" / "block").write_bytes(bytes(8192))
    put = ["kvstore", "put", *NAMES, "--in", "/tmp/block"]
    with installed.store():
        # The namespace is open by this, so that the next put asks Redis for nothing.
        first = installed.run([*put, "--weights", "w"])
        installed.redis_process.send_signal(signal.SIGSTOP)
        try:
            second = installed.run([*put, "--weights", "w", "--tokens", "9,9,9,9,8,8,8,8"])
            hook = installed.run(["kvstore", "flush", "--timeout", "1"])
        finally:
            installed.redis_process.send_signal(signal.SIGCONT)

    assert (first.returncode, second.returncode) == (0, 0), second
    # Which of both depends on whether the store has given up on Redis by then.
    assert (hook.returncode, hook.stdout) in {(0, "flushed\n"), (1, "not in time\n")}, hook


class Load(threading.Thread):
    """Puts chains of four blocks until it is told to stop; ``stored`` are those that the store took whole."""

    def __init__(self, socket_path):
        super().__init__()
        self.socket_path = socket_path
        self.is_told_to_stop = threading.Event()
        self.has_begun = threading.Event()
        self.stored = []

    def run(self):
        with connected(self.socket_path) as client:
            namespace = client.open_namespace(NAMESPACE)
            for number in itertools.count():
                chain = namespace.chain(range(number, number + 16))
                if client.put(chain, payloads(number)).stored == 4:
                    self.stored.append(number)
                if number % 20 == 19:  # a queue that overflows drops writes, which is no loss by the update
                    client.flush()
                    self.has_begun.set()
                if self.is_told_to_stop.is_set():
                    return


def connected(socket_path):
    patient = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=60)
    return KVStore.connect(socket_path, timeouts=patient)


def payloads(number):
    return [np.random.default_rng([number, position]).bytes(4096) for position in range(4)]


def test_a_rolling_update_under_load_loses_nothing(installed, tmp_path_factory):
    values = VALUES | {"ssd": {"enabled": False}}
    old, new = (
        Installed(tmp_path_factory.mktemp("k"), values, redis_port=installed.redis_port) for _ in range(2)
    )
    hook = store_container(old.pod)["lifecycle"]["preStop"]["exec"]["command"]
    with new.store():
        with old.store():
            load = Load(old.socket_path)
            load.start()
            load.has_begun.wait(60)
            hooked = old.run(hook)  # as the pod's end begins, while its replica still works
            load.is_told_to_stop.set()
            load.join()  # then the replica ends, and after it the sidecar
        with connected(new.socket_path) as client:
            namespace = client.open_namespace(NAMESPACE)
            chains = {number: namespace.chain(range(number, number + 16)) for number in load.stored}
            found = {number: [bytes(at) for at in client.get(chain)] for number, chain in chains.items()}

    assert hooked.returncode == 0
    assert len(load.stored) > 20
    assert found == {number: payloads(number) for number in load.stored}


def test_the_process_stays_within_what_its_limit_leaves_it(installed):
    with installed.store() as process:
        installed.run(["kvstore", "check"])
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        limit = int(store_container(installed.pod)["resources"]["limits"]["memory"])

    assert peak_kib * 1024 < limit


def ask(port, *lines):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stream:
        replies = stream.makefile("rb")
        for line in lines:
            stream.sendall(line + b"\r\n")
            last = replies.readline()
        return last


@pytest.mark.parametrize(
    "command",
    [b'EVAL "return 1" 0', b"CONFIG GET *", b"KEYS *", b"FLUSHALL", b"GET other:1", b"ACL LIST"],
)
def test_the_stores_user_may_do_nothing_but_keep_blocks(installed, command):
    login = b'AUTH kvstore "' + PASSWORD.encode() + b'"'

    assert ask(installed.redis_port, login, b"SET kvstore:x 1") == b"+OK\r\n"
    assert ask(installed.redis_port, login, command).startswith(b"-NOPERM")


def test_nobody_gets_into_redis_without_a_password(installed):
    assert ask(installed.redis_port, b"GET kvstore:x").startswith(b"-NOAUTH")
    assert ask(installed.redis_port, b"AUTH kvstore wrong").startswith(b"-WRONGPASS")
    assert ask(installed.redis_port, b"AUTH probe x", b"GET kvstore:x").startswith(b"-NOPERM")
    assert ask(installed.redis_port, b"AUTH probe x", b"PING") == b"+PONG\r\n"
