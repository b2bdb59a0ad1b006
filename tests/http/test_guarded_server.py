"""``kvstore serve`` with keys and TLS: who gets in while the files change, and what it never shows."""

import json
import shutil
import ssl
import subprocess
import sys
import threading

import pytest

from kvstore.auth import Scope
from kvstore.drill.redis_server import RedisServer
from kvstore.drill.store_process import wait_until
from kvstore.keyring_file import add_key, create_keyring, remove_key
from tests.http.guarded_process import WAIT_S, GuardedProcess
from tests.http.http_store import layout_fields
from tests.process_facts import command_line, listening_ports
from tests.tiers.certificates import Authority

ALL = frozenset(Scope)
LAYOUT = layout_fields()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificates(authority):
    """Two of the server, and one of a client."""
    return [authority.sign(name, alternative="IP:127.0.0.1") for name in ("one", "two", "client")]


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    create_keyring(path)
    return path


@pytest.fixture
def tls(tmp_path, certificates):
    folder = tmp_path / "tls"
    folder.mkdir()
    install(folder, certificates[0])
    return folder


def install(folder, certificate):
    shutil.copy(certificate.cert, folder / "tls.crt")
    shutil.copy(certificate.key, folder / "tls.key")


def trusting(authority, shown=None):
    context = ssl.create_default_context(cafile=authority.own.cert)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


def name_shown(server, context):
    client = server.connect(context)
    try:
        client.connect()
        subject = client.sock.getpeercert()["subject"]
    finally:
        client.close()
    return dict(item for group in subject for item in group)["commonName"]


class Load:
    """Clients on threads that ask again and again until told to stop."""

    def __init__(self, ask, num=4):
        self.answers = []
        self._stop = threading.Event()
        self._ask = ask
        self._threads = [threading.Thread(target=self._run) for _ in range(num)]

    def _run(self):
        while not self._stop.is_set():
            self.answers.append(self._ask())

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_keys_change_under_load_without_a_refused_request(tmp_path, keys):
    key = add_key(keys, "engine", tenant="acme", scopes=ALL)
    with (
        GuardedProcess(tmp_path, {"api_keys": f"file:{keys}"}) as server,
        Load(lambda: server.ask("/v1/identity", key)[0]) as load,
    ):
        for number in range(2):
            new = add_key(keys, f"new-{number}", tenant="other", scopes=ALL)
            assert wait_until(lambda new=new: server.ask("/v1/identity", new)[0] == 200, WAIT_S)
            remove_key(keys, f"new-{number}")
            assert wait_until(lambda new=new: server.ask("/v1/identity", new)[0] != 200, WAIT_S)
        keys.write_text("damaged")
        assert wait_until(lambda: "cannot be used, so what was loaded stays" in server.log, WAIT_S)

    assert set(load.answers) == {200}


def test_certificates_change_under_load_without_a_failed_request(
    tmp_path, keys, tls, authority, certificates
):
    key = add_key(keys, "engine", tenant="acme", scopes=ALL)
    context = trusting(authority)
    http = {"api_keys": f"file:{keys}", "tls_folder": tls}
    with GuardedProcess(tmp_path, http) as server:
        standing = server.connect(context)
        assert server.ask("/v1/identity", key, connection=standing)[0] == 200
        with Load(lambda: server.ask("/v1/identity", key, context=context)[0], num=2) as load:
            for certificate, name in ((certificates[1], "two"), (certificates[0], "one")):
                install(tls, certificate)
                assert wait_until(lambda name=name: name_shown(server, context) == name, WAIT_S)
        same = server.ask("/v1/identity", key, connection=standing)
        standing.close()

    assert same[0] == 200
    assert set(load.answers) == {200}


def test_a_client_needs_both_its_certificate_and_its_key(tmp_path, keys, tls, authority, certificates):
    key = add_key(keys, "engine", tenant="acme", scopes=ALL)
    shutil.copy(authority.own.cert, tls / "ca.crt")
    with_certificate, without = trusting(authority, certificates[2]), trusting(authority)
    http = {"api_keys": f"file:{keys}", "tls_folder": tls}
    with GuardedProcess(tmp_path, http) as server:
        assert server.ask("/v1/identity", key, context=with_certificate)[0] == 200
        assert server.ask("/v1/identity", context=with_certificate)[0] == 401
        assert server.ask("/v1/identity", key, context=without)[0] == 0
        assert server.ask("/healthz", context=without)[0] == 0
        assert server.ask("/v1/identity", key)[0] == 0


def test_http_listens_where_it_was_told_to_and_nowhere_else(tmp_path):
    with GuardedProcess(tmp_path, {}) as server:
        loopback = "0100007F"  # 127.0.0.1 as /proc/net/tcp writes it on a little-endian machine
        assert listening_ports(server.process.pid) == {(loopback, server.port)}


PASSWORD = "planted-redis-password"
BAD_KEY = "kvs_planted-bad-key"


@pytest.fixture
def redis(tmp_path):
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder, password=PASSWORD).start()
    yield server
    server.kill()


def kvstore(*words):
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def test_no_secret_is_in_anything_that_it_says(tmp_path, keys, tls, redis, authority):
    """Plant every kind of secret, go through good and bad requests at debug level, and look everywhere."""
    scopes = {"reader": {Scope.READ}, "all": ALL}
    texts = {
        name: add_key(keys, name, tenant="acme", scopes=frozenset(them)) for name, them in scopes.items()
    }
    (tmp_path / "password").write_text(PASSWORD)
    http = {"api_keys": f"file:{keys}", "tls_folder": tls}
    context = trusting(authority)
    prompt = list(range(987_650_001, 987_650_009))
    said = []
    with GuardedProcess(
        tmp_path, http, redis_url=redis.url, more=f'password = "file:{tmp_path}/password"\n'
    ) as server:
        key = texts["all"]
        opened = server.ask(
            "/v1/namespaces", key, method="POST", body={"model": "m", "layout": LAYOUT}, context=context
        )
        namespace = json.loads(opened[1])["namespace"]
        bodies = [
            {"namespace": namespace, "tokens": prompt},
            {"namespace": namespace, "tokens": prompt, "unknown": 1},
            {"namespace": "0" * 64, "tokens": prompt},
            {"model": "m", "layout": LAYOUT, "tenant_salt": "0f" * 32},
            b"\0junk",
        ]
        for path in ("/v1/match", "/v1/why", "/v1/fetch", "/v1/namespaces", "/v1/admin/epoch"):
            for body in bodies:
                for who in (key, texts["reader"], BAD_KEY, None):
                    answer = server.ask(path, who, method="POST", body=body, context=context)
                    said.append(answer[1] if path != "/v1/namespaces" or answer[0] != 200 else "")
        for path in ("/v1/stats", "/metrics", "/v1/admin/namespaces", "/v1/identity", "/openapi.json"):
            said.append(server.ask(path, key, context=context)[1])
        said.append(str(server.ask("/v1/identity", key)))  # not TLS
        said += command_line(server.process.pid)
        store = ["--store", server.socket_path]
        said += [kvstore("stats", *store), kvstore("stats", "--json", *store), kvstore("check", *store)]
        config = tmp_path / "store.toml"
        said += [kvstore("config", "--config", config), kvstore("config", "--config", config, "--json")]
        said += [kvstore("keys", "list", keys), kvstore("keys", "list", keys, "--json")]
        keys.write_text(keys.read_text().replace("secret ", "secret x"))
        assert wait_until(lambda: "cannot be used" in server.log, WAIT_S)
        server.terminate()
        said.append(server.log)

    keyring_text = keys.read_text()
    secret = keyring_text.split("secret x")[1][:64]
    salt = bytes.fromhex(json.loads(opened[1])["tenant_salt"])
    planted = {
        "key": texts["all"],
        "other key": texts["reader"],
        "bad key": BAD_KEY,
        "digest": keyring_text.split()[-1],
        "secret": secret,
        "salt": salt.hex(),
        "salt's repr": repr(salt)[2:-1],
        "password": PASSWORD,
        "tls key": (tls / "tls.key").read_text().splitlines()[1],
        "token": str(prompt[0]),
    }
    whole = "\n".join(said)
    assert {name for name, text in planted.items() if text in whole} == set()
    assert "has no known API key" in whole
    assert "acme" not in server.log
