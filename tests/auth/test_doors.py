"""Doors: how the configuration opens and closes them, and what is refused at the start."""

import logging
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.auth import LOCAL, Scope
from kvstore.config import Config
from kvstore.config_sections import HttpConfig
from kvstore.config_values import is_loopback
from kvstore.doors import Doors
from kvstore.drill.store_process import wait_until
from kvstore.errors import InvalidConfig, Unauthorized
from kvstore.gate import Shown
from kvstore.keyring_file import add_key, create_keyring, remove_key
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from tests.tiers.certificates import Authority

WAIT_S = 30.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority")).sign("store", alternative="IP:127.0.0.1")


@pytest.fixture
def tls_folder(tmp_path, certificate):
    made = tmp_path / "tls"
    made.mkdir()
    shutil.copy(certificate.cert, made / "tls.crt")
    shutil.copy(certificate.key, made / "tls.key")
    return made


@pytest.fixture
def keys(tmp_path):
    made = tmp_path / "keys"
    create_keyring(made)
    return made


def bearing(key):
    return Shown(authorization=(f"Bearer {key}",), peer="127.0.0.1")


def http(**values):
    return Config.from_dict({"http": values}).http


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:0.0.0.0", False),
        ("10.0.0.1", False),
        ("169.254.1.1", False),
        ("fe80::1", False),
    ],
)
def test_only_loopback_addresses_are_local(host, is_local):
    assert is_loopback(host) == is_local


@pytest.mark.parametrize("listen", ["0.0.0.0:8470", "[::]:8470", "10.0.0.1:8470", "[2001:db8::1]:0"])
@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "set api_keys and tls_folder too"),
        ({"api_keys": "env:KEYS"}, "set tls_folder too"),
        ({"tls_folder": "/tls"}, "set api_keys too"),
    ],
)
def test_off_loopback_keys_and_tls_are_required(listen, given, missing):
    with pytest.raises(InvalidConfig, match=missing):
        http(listen=listen, **given)


def test_doors_check_again_what_the_configuration_checks():
    with pytest.raises(InvalidConfig, match="set api_keys and tls_folder too, or listen"):
        Doors.make(HttpConfig(listen="0.0.0.0:0"))


@pytest.mark.parametrize("listen", ["localhost:8470", "*:8470", ":8470", "store.example:8470", "8470"])
def test_names_are_no_addresses_to_listen_on(listen):
    with pytest.raises(InvalidConfig, match="expected an IP address and a port"):
        http(listen=listen)


def test_off_loopback_keys_and_tls_together_are_enough(keys, tls_folder):
    config = http(listen="0.0.0.0:0", api_keys=f"file:{keys}", tls_folder=str(tls_folder))

    doors = Doors.make(config)

    assert isinstance(doors.tls(), ssl.SSLContext)
    with pytest.raises(Unauthorized):
        doors.gate.admit(Shown(host=("127.0.0.1",)), None)


def test_on_loopback_nothing_is_required():
    doors = Doors.make(HttpConfig())

    assert doors.tls is None
    assert doors.gate.admit(Shown(host=("127.0.0.1",)), Scope.ADMIN) is LOCAL


def test_on_loopback_keys_are_asked_for_where_there_are_some(keys):
    doors = Doors.make(http(api_keys=f"file:{keys}"))

    with pytest.raises(Unauthorized):
        doors.gate.admit(Shown(host=("127.0.0.1",)), None)


def test_keys_come_from_the_environment(keys):
    key = add_key(keys, "engine", tenant="acme", scopes=frozenset(Scope))

    doors = Doors.make(http(api_keys="env:KEYS"), {"KEYS": keys.read_text()})

    assert doors.gate.admit(bearing(key), Scope.WRITE).tenant == "acme"


def test_keys_that_are_added_and_removed_are_taken_up_while_it_runs(keys):
    doors = Doors.make(http(api_keys=f"file:{keys}"))
    doors.start()
    try:
        key = add_key(keys, "engine", tenant="acme", scopes=frozenset({Scope.READ}))
        assert wait_until(lambda: is_let_in(doors, key), WAIT_S)

        remove_key(keys, "engine")
        assert wait_until(lambda: not is_let_in(doors, key), WAIT_S)
    finally:
        doors.stop()
        doors.stop()


def is_let_in(doors, key):
    try:
        return bool(doors.gate.admit(bearing(key), None))
    except Unauthorized:
        return False


def test_a_pipe_in_place_of_the_keyring_does_not_hold_up_what_comes_after_it(keys):
    key = add_key(keys, "engine", tenant="acme", scopes=frozenset({Scope.READ}))
    doors = Doors.make(http(api_keys=f"file:{keys}"))
    whole = keys.read_text()
    keys.unlink()
    os.mkfifo(keys, 0o600)
    doors.refresh()
    assert is_let_in(doors, key)

    keys.unlink()
    keys.write_text("".join(line for line in whole.splitlines(True) if not line.startswith("key ")))
    doors.refresh()

    assert not is_let_in(doors, key)


@pytest.mark.parametrize("content", [None, "", "junk", "secret aa"])
def test_a_keyring_that_cannot_be_used_leaves_the_keys_in_force(keys, content):
    key = add_key(keys, "engine", tenant="acme", scopes=frozenset({Scope.READ}))
    doors = Doors.make(http(api_keys=f"file:{keys}"))
    if content is None:
        keys.unlink()
    else:
        keys.write_text(content)

    doors.refresh()

    assert is_let_in(doors, key)
    assert not is_let_in(doors, "kvs_other")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read"),
        ("", "is empty"),
        ("junk", "line 1: expected"),
        ("# none", "has no line 'secret"),
    ],
)
def test_keys_that_cannot_be_used_stop_the_start(tmp_path, content, complaint):
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)

    with pytest.raises(InvalidConfig, match=rf"\[http\] api_keys: file:{path}.*{complaint}"):
        Doors.make(http(api_keys=f"file:{path}"))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_keys_that_others_may_write_are_refused(keys, mode):
    keys.chmod(mode)

    with pytest.raises(InvalidConfig, match="others may write to it: chmod 600"):
        Doors.make(http(api_keys=f"file:{keys}"))


def test_keys_that_others_may_read_are_warned_of(keys, caplog):
    keys.chmod(0o644)

    Doors.make(http(api_keys=f"file:{keys}"))

    assert "others may read it" in caplog.text


def test_public_models_come_from_the_configuration():
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=16, dtype="float16")
    tenancy = Doors.make(http(public_models=["llama"])).tenancy

    assert tenancy.claim(LOCAL, Namespace("llama", layout), is_public=True).tenant_salt == b""


@pytest.mark.parametrize("value", ["kvs_planted", "planted", "file:planted", "env:", "env:a b", 7])
def test_a_key_in_place_of_its_place_is_refused_and_not_shown(value):
    with pytest.raises(InvalidConfig, match=r"\[http\] api_keys: does not say where") as caught:
        http(api_keys=value)

    assert "planted" not in str(caught.value)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_a_server_that_anybody_could_reach_does_not_start(tmp_path, listen):
    config = tmp_path / "store.toml"
    config.write_text(
        f'[server]\nsocket = "{tmp_path / "kv.sock"}"\n[tiers.dram]\ncapacity_bytes = "1MiB"\n'
        f'[http]\nlisten = "{listen}"\n'
    )

    ended = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "serve", "--config", config],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert f"{listen} is reached from the network, which needs API keys and TLS" in ended.stderr
    assert "set api_keys and tls_folder too, or listen on 127.0.0.1" in ended.stderr
    assert not Path(tmp_path / "kv.sock").exists()


def test_how_many_keys_there_are_is_logged_and_nothing_of_them(keys, caplog):
    key = add_key(keys, "engine", tenant="acme", scopes=frozenset(Scope))
    with caplog.at_level(logging.DEBUG):
        Doors.make(http(api_keys=f"file:{keys}"))

    assert "1 keys" in caplog.text
    secret = keys.read_text().split("secret ")[1][:64]
    assert not [planted for planted in (key, secret) if planted in caplog.text]
