"""``kvstore records`` against a real server: what it prints, and how it ends."""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.drill import store_process as drill_store
from kvstore.drill.store_process import StoreSettings
from tests.redis_server import free_port
from tests.store_process import StoreProcess

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KVSTORE_SOCKET", str(store.socket_path))

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = main(["records", *arguments])
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return call


def test_a_record_is_put_read_listed_and_dropped(run: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"a value")

    status, printed, _ = run("put", "one", "n", "--in", str(source), "--ttl", "60", "--json")
    put = json.loads(printed)
    assert (status, put["outcome"]) == (0, "stored")
    status, printed, _ = run("get", "one", "n", "--out", str(out), "--json")
    got = json.loads(printed)
    assert (status, got["version"], got["is_current"]) == (0, put["version"], True)
    assert out.read_bytes() == b"a value"
    assert 0 < got["expires_in_s"] <= 60
    status, printed, _ = run("list", "one", "--json")
    assert [record["name"] for record in json.loads(printed)["records"]] == ["n"]
    assert run("drop", "one", "n")[:2] == (0, "forgotten\n")
    assert run("drop", "one", "n")[:2] == (1, "there was none\n")
    status, printed, _ = run("get", "one", "n", "--out", str(out), "--json")
    assert (status, json.loads(printed)) == (1, {"reason": "dropped", "removed": str(out)})
    assert not out.exists()


def test_a_value_goes_through_pipes(run: Run) -> None:
    assert run("put", "pipes", "n", stdin=b"\x00 bytes")[0] == 0

    status, printed, aside = run("get", "pipes", "n")

    assert (status, printed) == (0, "\x00 bytes")
    assert aside.startswith("7 bytes, version ")


def test_a_conflict_says_the_present_version(run: Run) -> None:
    version = json.loads(run("put", "cas", "n", "--json", stdin=b"1")[1])["version"]

    status, printed, _ = run("put", "cas", "n", "--if-version", "0", stdin=b"2")
    gone = run("put", "cas", "none", "--if-version", "7", stdin=b"2")
    on = run("put", "cas", "n", "--if-version", str(version), stdin=b"3")

    assert (status, printed) == (1, f"not stored: conflict, it has version {version}\n")
    assert gone[:2] == (1, "not stored: conflict, there is none\n")
    assert on[0] == 0


def test_a_listing_of_more_than_a_page_is_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        run("put", "pages", f"n{number}", stdin=b"x")
    monkeypatch.setattr("kvstore.cli.records_command.MAX_LISTED_RECORDS", 2)

    status, printed, _ = run("list", "pages")
    _, three, _ = run("list", "pages", "--limit", "3")
    _, some, _ = run("list", "pages", "--prefix", "n4")

    assert status == 0
    assert [line.split()[0] for line in printed.splitlines()] == [f"n{number}" for number in range(5)]
    assert len(three.splitlines()) == 3
    assert len(some.splitlines()) == 1


def test_a_salt_names_the_tenant(run: Run, tmp_path: Path) -> None:
    salt = tmp_path / "salt"
    salt.write_bytes(b"salt of ann")
    run("put", "salted", "n", "--salt-file", str(salt), stdin=b"x")

    assert run("get", "salted", "n")[0] == 1
    assert run("get", "salted", "n", "--salt-file", str(salt))[0] == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["get", "c", "../n"], "its name"),
        (["list", "a/b"], "its collection"),
        (["list", "c", "--limit", "0"], "--limit"),
        (["get", "c", "n", "--json"], "--out -"),
        (["put", "c", "n", "--ttl", "0"], "ttl_s"),
        (["put", "c", "n", "--if-version", "-1"], "if_version"),
    ],
)
def test_bad_input_is_one_line(run: Run, words: list[str], complaint: str) -> None:
    status, printed, said = run(*words)

    assert (status, printed) == (2, "")
    assert complaint in said


def test_what_the_store_does_not_know_has_a_status_of_its_own(run: Run, tmp_path: Path) -> None:
    settings = StoreSettings(redis_url=f"redis://127.0.0.1:{free_port()}/0")
    with drill_store.StoreProcess(tmp_path, settings) as alone:
        where = ["--store", str(alone.socket_path), "--timeout", "1"]
        ended = [
            run("get", "c", "n", *where),
            run("put", "c", "n", *where, stdin=b"x"),
            run("drop", "c", "n", *where),
            run("list", "c", *where),
        ]

    assert [status for status, _, _ in ended] == [3] * 4
    assert "records: " in ended[0][2]


def test_a_listing_says_what_a_change_of_the_configuration_left(run: Run, tmp_path: Path) -> None:
    keys = tmp_path / "master.keys"
    keys.write_text("ab" * 32)
    keys.chmod(0o600)
    plain = StoreSettings(ssd_bytes=16 << 20, ssd_folder=tmp_path / "ssd")
    sealed = replace(plain, master_keys=keys)

    def started(settings: StoreSettings) -> drill_store.StoreProcess:
        return drill_store.StoreProcess(tmp_path, settings)

    with started(sealed) as first:
        run("put", "c", "n", "--store", str(first.socket_path), stdin=b"a secret")
    with started(plain) as second:
        where = ["--store", str(second.socket_path)]
        _, _, listed = run("list", "c", *where)
        _, reason, _ = run("get", "c", "n", *where, "--out", str(tmp_path / "out"), "--json")
        run("put", "c", "m", *where, stdin=b"in the clear")
    with started(sealed) as third:
        where = ["--store", str(third.socket_path)]
        values = [run("get", "c", name, *where)[1] for name in ("n", "m")]

    assert listed == "1 records are encrypted: not readable without [encryption]\n"
    assert json.loads(reason)["reason"] == "unreadable"
    assert values == ["a secret", "in the clear"]


def test_without_a_server_the_status_says_so(run: Run, tmp_path: Path) -> None:
    status, _, said = run("get", "c", "n", "--store", str(tmp_path / "nothing"))

    assert status == 3
    assert said.startswith("kvstore: ")
