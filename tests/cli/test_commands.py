"""The command line against a real server: what it prints, and how it ends."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import cli, wire
from kvstore.cli import main
from tests.store_process import MIB, StoreProcess

NAMES = ["--model", "m", "--block-tokens", "4", "--block-bytes", "4096"]
TOKENS = ["--tokens", ",".join(map(str, range(12)))]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KVSTORE_SOCKET", str(store.socket_path))

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    path = tmp_path / "payload"
    path.write_bytes(np.random.default_rng(3).bytes(3 * 4096))
    return path


def test_blocks_that_were_put_are_matched_and_come_back_exactly(
    run: Run, payload: Path, tmp_path: Path
) -> None:
    names = [*NAMES, *TOKENS, "--weights", "w1", "--json"]
    out = tmp_path / "out"

    put = run("put", *names, "--in", str(payload))
    again = run("put", *names, "--in", str(payload))
    match = run("match", *names)
    get = run("get", *names, "--out", str(out))

    assert (put[0], json.loads(put[1])) == (0, {"stored": 3, "present": 0, "dropped": 0, "reason": None})
    assert json.loads(again[1]) == {"stored": 0, "present": 3, "dropped": 0, "reason": None}
    assert match[0] == 0
    assert json.loads(match[1]) == {"blocks": 3, "of": 3, "tiers": ["dram"] * 3, "reason": None}
    assert (get[0], json.loads(get[1])["blocks"]) == (0, 3)
    assert out.read_bytes() == payload.read_bytes()


def test_a_longer_sequence_finds_the_stored_prefix(run: Run, payload: Path, tmp_path: Path) -> None:
    run("put", *NAMES, *TOKENS, "--in", str(payload))
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(list(range(20))))
    out = tmp_path / "out"

    status, printed, _ = run("get", *NAMES, "--tokens-file", str(tokens), "--out", str(out))

    assert (status, printed) == (0, "3 of 5 blocks (3 dram); the next one: never_seen\n")
    assert out.read_bytes() == payload.read_bytes()


@pytest.mark.parametrize("command", ["match", "get"])
def test_nothing_stored_is_status_one_and_writes_no_file(run: Run, tmp_path: Path, command: str) -> None:
    out = tmp_path / "out"
    names = [*NAMES, "--tokens", "900,901,902,903", "--json"]

    status, printed, _ = run(command, *names, *(["--out", str(out)] if command == "get" else []))

    assert status == 1
    assert json.loads(printed)["reason"] == "never_seen"
    assert not out.exists()


def test_nothing_stored_removes_the_file_of_an_earlier_get_and_says_so(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"of another prompt")
    names = [*NAMES, "--tokens", "900,901,902,903", "--out", str(out)]

    status, printed, _ = run("get", *names)

    assert (status, printed) == (1, f"0 of 1 blocks; the next one: never_seen; removed {out}\n")
    assert list(tmp_path.iterdir()) == []
    assert "removed" not in json.loads(run("get", *names, "--json")[1])


def test_blocks_replace_a_file_whole_and_keep_its_mode_and_links(
    run: Run, payload: Path, tmp_path: Path
) -> None:
    run("put", *NAMES, *TOKENS, "--in", str(payload))
    out, link = tmp_path / "out", tmp_path / "link"
    out.write_bytes(bytes(1 << 20))
    out.chmod(0o640)
    link.symlink_to(out)
    reading = out.open("rb")

    status, _, _ = run("get", *NAMES, *TOKENS, "--out", str(link))

    with reading:
        assert reading.read() == bytes(1 << 20)
    assert (status, out.read_bytes()) == (0, payload.read_bytes())
    assert out.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out", "payload"]


def test_a_device_is_written_to_and_never_replaced_or_removed(run: Run, payload: Path) -> None:
    run("put", *NAMES, *TOKENS, "--in", str(payload))

    assert run("get", *NAMES, *TOKENS, "--out", "/dev/null")[0] == 0
    assert run("get", *NAMES, "--tokens", "900,901,902,903", "--out", "/dev/null")[0] == 1
    assert Path("/dev/null").is_char_device()


def test_a_result_that_cannot_be_written_leaves_the_file_as_it_was(
    run: Run, payload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("put", *NAMES, *TOKENS, "--in", str(payload))
    out = tmp_path / "out"
    out.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)

    assert run("get", *NAMES, *TOKENS, "--out", str(out))[0] == 2
    assert out.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "payload"]


@pytest.mark.parametrize(
    "other", [["--weights", "x"], ["--adapter", "x"], ["--epoch", "1"], ["--salt-file", "SALT"]]
)
def test_another_namespace_does_not_see_the_blocks(
    run: Run, payload: Path, tmp_path: Path, other: list[str]
) -> None:
    salt = tmp_path / "salt"
    salt.write_bytes(b"secret")
    run("put", *NAMES, *TOKENS, "--in", str(payload))

    status, _, _ = run("match", *NAMES, *TOKENS, *[str(salt) if word == "SALT" else word for word in other])

    assert status == 1


def test_a_shaped_layout_names_its_blocks(run: Run, tmp_path: Path) -> None:
    names = ["--model", "shaped", "--block-tokens", "4", "--dtype", "float16", "--layers", "2"]
    names += ["--kv-heads", "1", "--head-dim", "8", "--tokens", "1,2,3,4"]
    path = tmp_path / "p"
    path.write_bytes(bytes(2 * 2 * 4 * 8 * 2))

    assert run("put", *names, "--in", str(path))[0] == 0
    assert run("match", *names)[0] == 0


def test_payloads_come_from_stdin_and_go_to_stdout(store: StoreProcess, payload: Path) -> None:
    command = [sys.executable, "-m", "kvstore.cli"]
    names = [*NAMES, "--tokens", "5,6,7,8", "--store", str(store.socket_path)]
    data = payload.read_bytes()[:4096]

    put = subprocess.run([*command, "put", *names], input=data, capture_output=True, check=True)
    get = subprocess.run([*command, "get", *names, "--out", "-"], capture_output=True, check=True)

    assert put.stdout == b"1 stored, 0 present before, 0 dropped\n"
    assert get.stdout == data
    assert get.stderr == b"1 of 1 blocks (1 dram)\n"


def test_blocks_that_find_no_room_are_status_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(bytes(5 * 4 * MIB))
    names = ["--model", "big", "--block-tokens", "1", "--block-bytes", str(4 * MIB), "--tokens", "1,2,3,4,5"]

    status, printed, _ = run("put", *names, "--in", str(path), "--timeout", "1", "--json")

    assert status == 1
    assert json.loads(printed)["dropped"] >= 1


def test_stats_and_check_speak_to_people_and_programs(run: Run) -> None:
    assert "tiers.dram.capacity_bytes" in run("stats")[1]
    assert json.loads(run("stats", "--json")[1])["tiers"]["dram"]["medium"] == "dram"
    assert run("check") == (0, "sound\n", "")
    assert json.loads(run("check", "--json")[1]) == {"ok": True, "violations": []}


def test_a_flush_says_whether_all_is_written(run: Run) -> None:
    assert run("flush") == (0, "flushed\n", "")
    assert json.loads(run("flush", "--json")[1]) == {"flushed": True}


@pytest.mark.parametrize("command", [["stats"], ["check"], ["flush"], ["match", *NAMES, *TOKENS]])
def test_without_a_server_the_status_is_three(run: Run, tmp_path: Path, command: list[str]) -> None:
    status, printed, complaint = run(*command, "--store", str(tmp_path / "none.sock"))

    assert (status, printed) == (3, "")
    assert complaint.startswith("kvstore: server at ")
    assert complaint.count("\n") == 1


BAD = {
    "no command": [],
    "unknown command": ["fetch"],
    "unknown option": ["stats", "--colour"],
    "no model": ["match", *TOKENS, "--block-bytes", "4096"],
    "no layout": ["match", "--model", "m", *TOKENS],
    "half a layout": ["match", "--model", "m", *TOKENS, "--dtype", "float16", "--layers", "2"],
    "both layouts": ["match", *NAMES, *TOKENS, "--dtype", "float16"],
    "uneven block": ["match", "--model", "m", *TOKENS, "--block-tokens", "3", "--block-bytes", "4"],
    "bad token": ["match", *NAMES, "--tokens", "1,x"],
    "big token": ["match", *NAMES, "--tokens", "1,2,3,4294967296"],
    "negative token": ["match", *NAMES, "--tokens", "1,2,3,-4"],
    "no full block": ["match", *NAMES, "--tokens", "1,2"],
    "no tokens file": ["match", *NAMES, "--tokens-file", "/nonexistent"],
    "bad epoch": ["match", *NAMES, *TOKENS, "--epoch", "-1"],
    "no salt file": ["match", *NAMES, *TOKENS, "--salt-file", "/nonexistent"],
    "bad address": ["match", *NAMES, *TOKENS, "--store", "ftp://host"],
    "long address": ["match", *NAMES, *TOKENS, "--store", "/" + "x" * 200],
    "bad time": ["stats", "--timeout", "0"],
    "time is no number": ["stats", "--timeout", "nan"],
    "bad sample": ["check", "--sample", "-1"],
    "no out": ["get", *NAMES, *TOKENS],
    "json and stdout": ["get", *NAMES, *TOKENS, "--json", "--out", "-"],
    "no payload": ["put", *NAMES, *TOKENS, "--in", "/nonexistent"],
    "payload size": ["put", *NAMES, *TOKENS, "--in", __file__],
    "no config": ["serve", "--config", "/nonexistent"],
    "out is a folder": ["put", *NAMES, *TOKENS, "--in", "/"],
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_bad_input_is_status_two_and_a_clear_line(run: Run, arguments: list[str]) -> None:
    status, printed, complaint = run(*arguments)

    assert (status, printed) == (2, "")
    assert complaint.splitlines()[-1].startswith("kvstore")
    assert "Traceback" not in complaint


@pytest.mark.parametrize(
    "content", [b"[1, 2", b"\xff\xfe", b'[1, "2"]', b"[true, 1, 2, 3]", b"{}", b"[" * 9999]
)
def test_a_tokens_file_that_is_no_list_of_integers_is_refused(
    run: Run, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)

    assert run("match", *NAMES, "--tokens-file", str(path))[0] == 2


def test_a_socket_path_that_is_too_long_stops_the_start(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "store.toml"
    path.write_text(f'[server]\nsocket = "/{"x" * 120}"\n[tiers.dram]\ncapacity_bytes = {MIB}\n')

    status, _, complaint = run("serve", "--config", str(path))

    assert status == 2
    assert "107" in complaint


def test_a_second_server_on_a_live_socket_stops_with_status_two(run: Run, store: StoreProcess) -> None:
    status, _, complaint = run("serve", "--config", str(store.socket_path.parent / "store.toml"))

    assert status == 2
    assert "another server answers" in complaint


def test_help_lists_every_command_and_loads_none(run: Run) -> None:
    program = (
        "import sys; from kvstore.cli import main; main(['--help']);"
        "print([name for name in sys.modules if name.startswith('kvstore.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert all(command.name in done.stdout for command in cli.COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_every_command_has_help_of_its_own(run: Run, command: str) -> None:
    status, printed, _ = run(command, "--help")

    assert status == 0
    assert printed.startswith(f"usage: kvstore {command}")


def test_version_speaks_to_people_and_programs(run: Run) -> None:
    assert run("version")[1].startswith("kvstore ")
    assert json.loads(run("version", "--json")[1])["protocol"] == wire.VERSION


def test_a_command_whose_module_is_absent_is_one_clear_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("engine", "kvstore.cli.absent", "absent"),))

    assert run("engine") == (2, "", "kvstore: engine: this installation does not have the command\n")


def test_a_reader_that_leaves_early_gets_no_traceback(store: StoreProcess) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kvstore.cli", "stats", "--store", str(store.socket_path)]

    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)

    assert done.stderr == b""
    assert done.returncode == 1


def test_why_tells_where_a_prompt_went_on_differently(run: Run, payload: Path) -> None:
    names = [*NAMES, "--weights", "why"]
    run("put", *names, *TOKENS, "--in", str(payload))

    status, out, _ = run("why", *names, "--tokens", "0,1,2,3,4,5,6,7,9,9,9,9", "--json")

    told = json.loads(out)
    assert (status, told["first_miss"]) == (1, 2)
    assert told["blocks"][1]["tiers"] == ["dram"]
    assert (told["blocks"][2]["reason"], told["blocks"][2]["siblings"]) == ("never_seen", 1)


def test_why_finds_the_same_tokens_under_a_namespace_that_differs(run: Run, payload: Path) -> None:
    run("put", *NAMES, *TOKENS, "--weights", "there", "--model", "elsewhere", "--in", str(payload))

    status, out, _ = run("why", *NAMES, *TOKENS, "--weights", "here", "--model", "elsewhere")

    assert status == 1
    assert "not served: other_namespace" in out
    assert "3 blocks under another namespace: weights 'here' here, 'there' there" in out


def test_why_of_a_stored_prompt_is_status_zero(run: Run, payload: Path) -> None:
    names = [*NAMES, *TOKENS, "--weights", "all"]
    run("put", *names, "--in", str(payload))

    status, out, _ = run("why", *names)

    assert status == 0
    assert out.startswith("3 of 3 blocks are stored as a prefix")


def test_dropped_blocks_are_gone_and_why_says_so(run: Run, payload: Path) -> None:
    names = [*NAMES, *TOKENS, "--weights", "dropped"]
    run("put", *names, "--in", str(payload))

    assert run("drop", *names)[:2] == (0, "3 dropped\n")
    assert run("drop", *names)[:2] == (1, "0 dropped\n")
    assert "not served: dropped, gone from dram" in run("why", *names)[1]


def test_a_store_without_a_tier_below_demotes_nothing(run: Run, payload: Path) -> None:
    names = [*NAMES, *TOKENS, "--weights", "demoted"]
    run("put", *names, "--in", str(payload))

    assert run("demote", *names, "--json")[:2] == (1, '{"demoted": 0}\n')


def test_an_advanced_epoch_serves_nothing_that_was_stored_before(run: Run, payload: Path) -> None:
    names = [*NAMES, *TOKENS, "--model", "trained"]
    run("put", *names, "--in", str(payload))

    assert run("epoch", "--model", "trained", "--advance")[:2] == (0, "epoch 1\n")

    assert run("match", *names)[0] == 1
    assert "other_epoch" in run("why", *names)[1]
    again = run("put", *names, "--in", str(payload))
    assert again[:2] == (1, "0 stored, 0 present before, 3 dropped: other_epoch\n")
    assert run("put", *names, "--epoch", "1", "--in", str(payload))[0] == 0


def test_a_model_whose_name_is_no_text_is_refused_with_one_line(run: Run) -> None:
    status, out, err = run("epoch", "--model", "\udcff", "--advance")
    assert (status, out) == (2, "")
    assert err == "kvstore: model: must be text of at most 4096 bytes\n"


def test_the_name_of_a_file_that_is_no_text_can_be_printed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "kvstore.cli", "keys", "init", os.fsencode(tmp_path) + b"/\xff"]
    made = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (made.returncode, made.stderr) == (0, b"")
    assert b"\\udcff" in made.stdout


def test_a_policy_is_changed_everywhere_in_a_tier_or_for_a_namespace(run: Run) -> None:
    digest = "0a" * 32

    told = [
        run("policy", "lru", "--tier", "dram", "--namespace", digest),
        run("policy", "arc", "--namespace", digest),
        run("policy", "gittins"),
    ]

    assert told == [
        (0, f"gittins, {digest}=lru; gittins before\n", ""),
        (0, f"gittins, {digest}=arc; gittins, {digest}=lru before\n", ""),
        (0, f"gittins; gittins, {digest}=arc before\n", ""),
    ]
    assert run("policy", "arc", "--namespace", digest)[0] == 0
    assert run("policy", "default", "--namespace", digest)[:2] == (
        0,
        f"gittins; gittins, {digest}=arc before\n",
    )
    assert run("policy", "default")[0] == 2
    assert run("policy", "lru", "--tier", "nowhere")[0] == 2
    assert "64 hex digits" in run("policy", "lru", "--namespace", "0a")[2]
