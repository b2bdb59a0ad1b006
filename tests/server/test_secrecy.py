"""What a running server leaves where others could read it."""

import os
import resource
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from kvstore import KVStore
from kvstore.drill.store_process import StoreProcess, StoreSettings
from tests.process_facts import arena_flags, command_line, listening_ports

MIB = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    settings = StoreSettings(ssd_bytes=2 * MIB, ssd_folder=folder / "ssd")
    before = os.umask(0)
    try:
        with StoreProcess(folder, settings) as running:
            yield running
    finally:
        os.umask(before)


def test_a_server_writes_no_core_dump(store):
    assert resource.prlimit(store.process.pid, resource.RLIMIT_CORE) == (0, 0)


def test_the_arena_is_in_no_core_dump_of_the_server(store):
    flags = arena_flags(store.process.pid)

    assert flags
    assert all("dd" in mapping for mapping in flags)


def test_the_arena_is_in_no_core_dump_of_a_client(store):
    with KVStore.connect(str(store.socket_path)) as client:
        client.ping()
        flags = arena_flags(os.getpid())

    assert flags
    assert all("dd" in mapping for mapping in flags)


def test_everything_on_disk_is_its_users_alone_whatever_the_umask(store):
    made = [path for path in store.folder.rglob("*") if path.name not in ("store.log", "store.toml")]
    open_to_others = [
        path for path in made if stat.S_IMODE(path.lstat().st_mode) & 0o077 and path.parent == store.folder
    ]
    names = {path.name for path in made}

    assert {"kv.sock", "ssd"} <= names
    assert open_to_others == []
    slabs = [path for path in made if path.is_file()]
    assert slabs
    assert {stat.S_IMODE(path.stat().st_mode) for path in slabs} == {0o600}


def test_a_server_without_an_http_section_listens_on_no_network(store):
    assert listening_ports(store.process.pid) == set()


def test_the_process_list_shows_no_secret(store):
    words = command_line(store.process.pid)

    assert words[0] == sys.executable
    assert [word for word in words if word.startswith("--")] == ["--config", "--json"]


def heard_by_another_user(socket_path):
    """Connect as the user nobody, from a child, and return what the server says."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(socket_path)
            os.write(writing, stranger.recv(1000))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        heard = pipe.read()
    os.waitpid(child, 0)
    return heard


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away_even_where_the_socket_lets_it_connect():
    with tempfile.TemporaryDirectory() as name, StoreProcess(Path(name), StoreSettings()) as store:
        Path(name).chmod(0o755)
        store.socket_path.chmod(0o666)

        heard = heard_by_another_user(str(store.socket_path))

    assert b"it belongs to user 0, not to user 65534" in heard
