"""Records between processes: real stores and clients, one winner per version, nothing lost by a kill."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import KVStore
from kvstore.drill.store_process import StoreProcess, StoreSettings
from tests.redis_server import RedisServer
from tests.store_process import MIB

TIMES = 25


def store_in(folder: Path, redis: RedisServer | None) -> StoreProcess:
    folder.mkdir()
    url = "" if redis is None else redis.url
    return StoreProcess(folder, StoreSettings(ssd_bytes=2 * MIB, ssd_folder=folder / "ssd", redis_url=url))


@pytest.mark.parametrize("kind", ["one store", "two stores"])
def test_of_many_processes_one_wins_each_version(tmp_path: Path, redis: RedisServer, kind: str) -> None:
    names = ("a",) if kind == "one store" else ("a", "b")
    stores = [store_in(tmp_path / name, redis if len(names) > 1 else None) for name in names]
    try:
        for store in stores:
            store.start()
        with KVStore.connect(stores[0].socket_path, timeout_s=20) as client:
            first = client.put_record("c", "n", b"0")
            assert first.is_stored, first
            workers = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.records.counting_worker", path, str(TIMES)],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for path in [str(store.socket_path) for store in stores] * (4 // len(stores))
            ]
            replaced = [line for worker in workers for line in worker.communicate()[0].split()]

            assert [worker.returncode for worker in workers] == [0] * 4
            record = client.get_record("c", "n")
        assert record is not None
        assert int(record.value) == len(replaced) == len(set(replaced)) == 4 * TIMES
    finally:
        for store in stores:
            store.kill()


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_killed_and_started_again_a_store_has_what_it_acknowledged(
    tmp_path: Path, redis: RedisServer, kind: str
) -> None:
    store = store_in(tmp_path / "a", redis if kind == "shared" else None)
    versions: dict[str, int] = {}
    try:
        for round_ in range(3):
            store.start()
            with KVStore.connect(store.socket_path, timeout_s=20) as client:
                for name, version in versions.items():
                    record = client.get_record("c", name)
                    assert record is not None
                    assert (record.version, record.value) == (version, name.encode())
                for number in range(20):
                    name = f"n{round_}-{number}"
                    versions[name] = client.put_record("c", name, name.encode(), if_version=0).version
            store.kill()
    finally:
        store.kill()


def test_a_client_outlives_a_restart_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    store = store_in(tmp_path / "a", None)
    store.start()
    try:
        with KVStore.connect(store.socket_path, timeout_s=2) as client:
            first = client.put_record("c", "n", b"1", if_version=0)
            store.pause()
            write = client.put_record("c", "n", b"2", if_version=first.version, timeout_s=0.2)
            store.resume()
            assert (write.outcome.value, write.is_doubtful) == ("unavailable", True)
            record = client.get_record("c", "n", timeout_s=20)
            assert record is not None
            assert record.value in (b"1", b"2")
            store.kill()
            store.start()
            again = client.get_record("c", "n", timeout_s=20)
            assert again is not None
            assert again.value == b"2" or again == record or again.version == record.version
    finally:
        store.kill()


def test_erasing_a_tenant_on_one_node_takes_its_records_from_all(tmp_path: Path, redis: RedisServer) -> None:
    keys = tmp_path / "keys"
    keys.write_text("aa" * 32 + "\n")
    keys.chmod(0o600)
    stores = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        settings = StoreSettings(
            ssd_bytes=2 * MIB, ssd_folder=tmp_path / name / "ssd", redis_url=redis.url, master_keys=keys
        )
        stores.append(StoreProcess(tmp_path / name, settings))
    try:
        for store in stores:
            store.start()
        with (
            KVStore.connect(stores[0].socket_path, timeout_s=20) as one,
            KVStore.connect(stores[1].socket_path, timeout_s=20) as other,
        ):
            first = one.put_record("c", "n", b"of ann", tenant_salt=b"ann")
            assert other.put_record(
                "c", "n", b"of ann, later", if_version=first.version, tenant_salt=b"ann"
            ).is_stored
            one.put_record("c", "n", b"of bob", tenant_salt=b"bob")

            report = one.erase_tenant(b"ann", timeout_s=30)

            assert (report.is_complete, report.keys, report.records) == (True, 1, 1)
            for client in (one, other):
                assert client.look_up_record("c", "n", tenant_salt=b"ann").record is None
                assert client.list_records("c", tenant_salt=b"ann") == []
                found = client.get_record("c", "n", tenant_salt=b"bob")
                assert found is not None
                assert found.value == b"of bob"
            assert one.put_record("c", "n", b"anew", if_version=0, tenant_salt=b"ann").is_stored
            while other.stats()["encryption"]["erased_tenants"] == 0:
                pass
            again = other.get_record("c", "n", tenant_salt=b"ann")
            assert again is not None
            assert again.value == b"anew"
            assert [client.check() for client in (one, other)] == [[], []]
    finally:
        for store in stores:
            store.kill()
