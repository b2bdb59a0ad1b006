"""``kvstore erase`` and the client's call, against a real server."""

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import AsyncKVStore, KVStore, MissReason
from kvstore.auth import Scope
from kvstore.cli import main
from kvstore.drill.blocks import payloads_of
from kvstore.drill.store_process import MIB, StoreProcess, StoreSettings
from kvstore.errors import InvalidRequest
from kvstore.keyring_file import add_key, create_keyring, read_keyring
from kvstore.keys import Namespace, PrefixChain
from kvstore.results import EraseReport
from tests.encryption.node import ANN, BLOCK_BYTES, BOB, MASTER, files_in, plaintext_windows, space_of
from tests.redis_server import RedisServer, free_port

Run = Callable[..., tuple[int, str, str]]
ONE_KEY = {
    "is_complete": True,
    "keys": 1,
    "blocks": {"dram": 8, "ssd": 8},
    "leased_blocks": 0,
    "problems": [],
    "records": 0,
}


@contextlib.contextmanager
def serving(
    folder: Path, *, redis_url: str = "", http_port: int = 0, is_encrypted: bool = True
) -> Iterator[StoreProcess]:
    folder.mkdir(exist_ok=True)
    keys = folder / "master"
    keys.write_text(MASTER)
    settings = StoreSettings(
        dram_bytes=4 * MIB,
        ssd_bytes=4 * MIB,
        ssd_folder=folder / "ssd",
        redis_url=redis_url,
        http_port=http_port,
        master_keys=keys if is_encrypted else None,
    )
    with StoreProcess(folder, settings) as store:
        yield store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with serving(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KVSTORE_SOCKET", str(store.socket_path))

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def put(store: StoreProcess, space: Namespace) -> PrefixChain:
    """Store eight blocks, in every tier."""
    chain = space.chain(range(32))
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(space)
        result = client.put(chain, payloads_of(chain, BLOCK_BYTES), timeout_s=10)
        assert result.stored + result.present == 8
        assert client.flush(timeout_s=30)
    return chain


def matched(store: StoreProcess, space: Namespace) -> tuple[int, MissReason | None]:
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(space)
        found = client.match(space.chain(range(32)), timeout_s=10)
    return found.blocks, found.reason


def test_a_tenant_is_erased_by_its_salt(run: Run, store: StoreProcess, tmp_path: Path) -> None:
    put(store, ANN)
    put(store, BOB)
    (tmp_path / "salt").write_bytes(ANN.tenant_salt)

    status, out, _ = run("erase", "--salt-file", str(tmp_path / "salt"), "--json")

    assert (status, json.loads(out)) == (0, ONE_KEY)
    assert matched(store, ANN) == (0, MissReason.ERASED)
    assert matched(store, BOB) == (8, None)
    status, out, _ = run("erase", "--salt", BOB.tenant_salt.hex())
    assert (status, out) == (
        0,
        "1 keys destroyed\n8 blocks forgotten in dram\n8 blocks forgotten in ssd\n0 records removed\n",
    )


def test_a_tenant_is_erased_by_a_namespace_that_is_open(run: Run, store: StoreProcess) -> None:
    put(store, ANN)
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(ANN)
        client.match(ANN.chain(range(32)))
        status, out, _ = run("erase", "--namespace", ANN.digest.hex(), "--json")
    assert (status, json.loads(out)) == (0, ONE_KEY)
    assert matched(store, ANN) == (0, MissReason.ERASED)


def test_what_belongs_to_no_tenant_is_erased_too(run: Run, store: StoreProcess) -> None:
    put(store, space_of(b""))
    assert json.loads(run("erase", "--public", "--json")[1]) == ONE_KEY


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--salt", "00", "--public"],
        ["--salt", "secret"],
        ["carol"],
        ["carol", "--public"],
        ["../carol", "--api-keys", "/nonexistent"],
        ["carol", "--api-keys", "/nonexistent"],
        ["--namespace", "00"],
        ["--namespace", "00" * 32],
        ["--salt-file", "/nonexistent"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_that_shows_no_salt(run: Run, arguments: list[str]) -> None:
    status, out, err = run("erase", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kvstore: ")
    assert err.count("\n") == 1
    assert "secret" not in err


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    """A file of API keys, of a tenant whose blocks carry the salt that follows from its name."""
    path = tmp_path / "keys"
    create_keyring(path)
    add_key(path, "carol-1", tenant="carol", scopes=frozenset({Scope.READ}))
    return path


def test_a_tenant_is_erased_by_its_name(run: Run, store: StoreProcess, keyring: Path) -> None:
    carol = space_of(read_keyring(keyring).salt("carol"))
    put(store, carol)
    status, out, err = run("erase", "carol", "--api-keys", str(keyring), "--json")
    assert (status, json.loads(out), err) == (0, ONE_KEY, "")
    assert matched(store, carol) == (0, MissReason.ERASED)


def test_the_servers_configuration_says_where_the_api_keys_are(
    run: Run, store: StoreProcess, keyring: Path, tmp_path: Path
) -> None:
    put(store, space_of(read_keyring(keyring).salt("carol")))
    (tmp_path / "store.toml").write_text(f'[http]\napi_keys = "file:{keyring}"\n')
    status, out, _ = run("erase", "carol", "--config", str(tmp_path / "store.toml"), "--json")
    assert (status, json.loads(out)) == (0, ONE_KEY)


def test_a_tenant_without_keys_is_erased_all_the_same_with_a_remark(run: Run, keyring: Path) -> None:
    status, out, err = run("erase", "dave", "--api-keys", str(keyring))
    assert (status, out) == (0, "0 keys destroyed\n0 records removed\n")
    assert err == "kvstore: no API key is of tenant dave now\n"


async def test_over_http_an_administrator_erases(tmp_path: Path) -> None:
    with serving(tmp_path / "http", http_port=free_port()) as store:
        chain = put(store, ANN)
        address = f"http://127.0.0.1:{store.settings.http_port}"
        with KVStore.connect(address) as client:
            client.open_namespace(ANN)
            assert client.erase_tenant_of(ANN.digest) == EraseReport(1, {"dram": 8, "ssd": 8})
            assert client.match(chain).reason is MissReason.ERASED
            put(store, ANN)
            assert client.erase_tenant(ANN.tenant_salt).keys == 1
            with pytest.raises(InvalidRequest):
                client.erase_tenant_of(BOB.digest)
        async with await AsyncKVStore.connect(address) as client:
            assert await client.erase_tenant(ANN.tenant_salt) == EraseReport(0, {})


async def test_both_clients_erase(store: StoreProcess) -> None:
    put(store, ANN)
    async with await AsyncKVStore.connect(store.socket_path) as client:
        report = await client.erase_tenant(ANN.tenant_salt)
        again = await client.erase_tenant(ANN.tenant_salt)
    assert report == EraseReport(1, {"dram": 8, "ssd": 8})
    assert again == EraseReport(0, {})


def test_without_encryption_there_is_nothing_to_erase(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "plain", is_encrypted=False) as plain,
        KVStore.connect(plain.socket_path) as client,
    ):
        with pytest.raises(InvalidRequest, match="not configured"):
            client.erase_tenant(b"salt")
        assert client.stats()["encryption"] == {"is_on": False}


def test_an_erasure_that_redis_does_not_take_is_a_problem_and_is_told_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = RedisServer(tmp_path / "redis").start()
    try:
        with serving(tmp_path / "one", redis_url=redis.url) as one:
            put(one, ANN)
            redis.kill()
            status = main(
                ["erase", "--salt", ANN.tenant_salt.hex(), "--store", str(one.socket_path), "--json"]
            )
            printed = capsys.readouterr()
            assert status == 1
            assert json.loads(printed.out)["problems"][0] == "remote: does not take the erasure now"
            assert "tried on" in printed.err
    finally:
        redis.stop()


def test_a_killed_server_keeps_what_it_has_erased_erased(tmp_path: Path) -> None:
    with serving(tmp_path / "one") as one:
        chain = put(one, ANN)
        put(one, BOB)
        with KVStore.connect(one.socket_path) as client:
            client.erase_tenant(ANN.tenant_salt)
        one.kill()
        assert plaintext_windows(files_in(tmp_path / "one" / "ssd"), chain.keys) == 0
        one.start()
        assert matched(one, ANN)[0] == 0
        assert matched(one, BOB) == (8, None)


def test_a_process_can_become_undumpable() -> None:
    code = (
        "import ctypes; from kvstore.core_dumps import become_undumpable; become_undumpable();"
        " print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 1
