"""free_port: ports for servers that are started a moment later, while others look for ports too."""

import socket
import subprocess
import sys

import pytest

from kvstore.drill import redis_server
from kvstore.drill.redis_server import free_port
from kvstore.drill.store_process import PartFailed

KERNELS_FIRST_PORT = 32_768
"""Linux's default, see ip_local_port_range in ip(7)."""


def test_free_ports_are_different_though_nobody_listens_on_them_yet() -> None:
    ports = [free_port() for _ in range(500)]

    assert len(set(ports)) == 500
    assert all(1024 <= port < KERNELS_FIRST_PORT for port in ports)


def test_two_processes_are_given_different_ports() -> None:
    code = "from kvstore.drill.redis_server import free_port\nfor _ in range(20): print(free_port())"

    told = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(2)]

    first, second = (set(one.stdout.split()) for one in told)
    assert len(first) == len(second) == 20
    assert not first & second


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_port = free_port()
    with socket.create_server(("127.0.0.1", taken_port)):
        monkeypatch.setattr(redis_server, "_ports", iter([taken_port, taken_port + 1]))
        monkeypatch.setattr(redis_server, "_FIRST_PORT", 0)
        monkeypatch.setattr(redis_server, "_NUM_PORTS", KERNELS_FIRST_PORT)

        assert free_port() == taken_port + 1


def test_without_a_free_port_it_is_said_which_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(redis_server, "_ports", iter([0, 1, 2]))
        monkeypatch.setattr(redis_server, "_FIRST_PORT", port)
        monkeypatch.setattr(redis_server, "_NUM_PORTS", 1)

        with pytest.raises(PartFailed, match=f"from {port} to {port} is free"):
            free_port()
