"""``kvstore engine`` as a process: ready line, answers, signals, bad input, and a real store behind it."""

import json
import signal
import time
import urllib.error
import urllib.request

import pytest

from kvstore.cli import main
from kvstore.errors import ServerUnavailable
from kvstore_engine_adapter import serve_engine
from tests.engine.engine_process import TEXT, Process, engine

SLACK_S = 8.0
"""What a busy machine may add to a process's end."""


@pytest.fixture
def refused(capsys):
    """Run a command in this process, to its exit status and its one line on stderr."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.count("\n") == 1, errors
        return status, errors

    return run


def test_an_engine_serves_until_sigterm_and_ends_with_0(tiny_gguf):
    with engine(tiny_gguf) as process:
        assert process.event["url"].startswith("http://127.0.0.1:")
        assert process.ask()["matched_tokens"] == 0
        assert process.ask()["matched_tokens"] > 0
        assert process.stop() == (0, "")


def test_engines_share_blocks_through_a_store_and_answer_alike(tiny_gguf, tmp_path):
    config = tmp_path / "store.toml"
    config.write_text(
        f'[server]\nsocket = "{tmp_path}/s"\nlog_level = "error"\n[tiers.dram]\ncapacity_bytes = "32MiB"\n'
        'staging_bytes = "4MiB"\n'
    )
    with Process("serve", "--config", config, "--json"):
        with engine(tiny_gguf, "--store", tmp_path / "s") as first:
            wanted = first.ask()
            assert first.stop() == (0, "")
        with engine(tiny_gguf, "--store", tmp_path / "s") as second:
            found = second.ask()
    assert found["tiers"].keys() == {"dram"}
    assert found["matched_tokens"] == found["prompt_tokens"] // 16 * 16
    assert found["output_tokens"] == wanted["output_tokens"]


def test_an_engine_whose_store_is_absent_answers_all_the_same(tiny_gguf, tmp_path):
    with engine(tiny_gguf, "--store", tmp_path / "nobody") as process:
        started_s = time.monotonic()
        assert process.ask()["matched_tokens"] == 0
        assert time.monotonic() - started_s < 10
        assert process.ask()["tiers"].keys() == {"vram"}
        faults = process.stats()["store_faults"]
        assert sum(faults[name] for name in faults if name.startswith("match_missed/")) > 0
        assert sum(faults[name] for name in faults if name.startswith("write_dropped/store/")) > 0
        assert "store: no answer" in process.child.stderr.readline()


def test_a_store_that_is_stopped_and_goes_on_is_in_the_log(tiny_gguf, tmp_path):
    config = tmp_path / "store.toml"
    config.write_text(
        f'[server]\nsocket = "{tmp_path}/s"\nlog_level = "error"\n[tiers.dram]\ncapacity_bytes = "32MiB"\n'
        'staging_bytes = "4MiB"\n'
    )
    with (
        Process("serve", "--config", config, "--json") as store,
        engine(tiny_gguf, "--store", tmp_path / "s", "--grace", 1) as process,
    ):
        process.ask()
        store.child.send_signal(signal.SIGSTOP)
        assert "store: no answer" in process.child.stderr.readline()
        store.child.send_signal(signal.SIGCONT)
        assert "store: it answers again" in process.child.stderr.readline()
        store.child.send_signal(signal.SIGSTOP)
        process.ask()
        started_s = time.monotonic()
        assert process.stop()[0] == 0
        assert time.monotonic() - started_s < 1 + 1 + SLACK_S


@pytest.mark.parametrize("size", [("--num-blocks", 8), ("--kv-cache-bytes", 8 * 6144)])
def test_the_context_announced_and_enforced_is_what_the_vram_tier_holds(tiny_gguf, size):
    with Process("engine", "--model", tiny_gguf, "--port", 0, *size) as process:
        assert process.event["context_tokens"] == 128
        with pytest.raises(urllib.error.HTTPError) as refusal:
            process.ask()
        with refusal.value as answer:
            assert "the context is 128 " in json.load(answer)["error"]["message"]


def first_token_of_a_stream(process):
    """Ask for a long answer; return the response whose first token has been read."""
    data = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "stream": True, "seed": 1}
    request = urllib.request.Request(
        f"{process.event['url']}/v1/chat/completions", data=json.dumps(data).encode()
    )
    response = urllib.request.urlopen(request, timeout=30)
    while b'"content": "' not in (line := response.readline()) or b'"content": ""' in line:
        assert line
    return response


def test_a_stream_under_way_at_sigterm_ends_with_an_error_event_within_the_grace(tiny_gguf):
    with Process("engine", "--model", tiny_gguf, "--port", 0, "--grace", 0) as process:
        with first_token_of_a_stream(process) as response:
            started_s = time.monotonic()
            process.child.send_signal(signal.SIGTERM)
            lines = [line for line in response.read().split(b"\n") if line]
        assert process.child.wait(timeout=30) == 0
        assert time.monotonic() - started_s < 1 + SLACK_S
    error = json.loads(lines[-1].removeprefix(b"data: "))["error"]
    assert error["code"] == "overloaded"
    assert "is stopping" in error["message"]


def test_a_stream_that_ends_within_the_grace_is_whole(tiny_gguf):
    with engine(tiny_gguf, "--grace", 30) as process:
        with first_token_of_a_stream(process) as response:
            process.child.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        started_s = time.monotonic()
        assert process.child.wait(timeout=30) == 0
        assert time.monotonic() - started_s < 1 + SLACK_S


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--port", "x", "'x' is not a whole number from 0 to 65535"),
        ("--port", "65536", "'65536' is not a whole number from 0 to 65535"),
        ("--port", "", "'' is not a whole number from 0 to 65535"),
        ("--block-tokens", "0", "'0' is not a whole number from 1 to 65535"),
        ("--block-tokens", "1.5", "'1.5' is not a whole number from 1 to 65535"),
        ("--max-model-len", "1", "'1' is not a whole number of at least 2"),
        ("--num-blocks", "-3", "'-3' is not a whole number of at least 1"),
        ("--num-blocks", "1_000", "'1_000' is not a whole number of at least 1"),
        ("--kv-cache-bytes", "1GiB", "'1GiB' is not a whole number of at least 1"),
        ("--kv-cache-bytes", "9" * 5000, "is not a whole number of at least 1"),
        ("--threads", "4096", "'4096' is not a whole number from 1 to 1024"),
        ("--max-num-seqs", "0", "'0' is not a whole number from 1 to 4096"),
        ("--session-quota-bytes", "0", "'0' is not a whole number of at least 1"),
        ("--session-ttl", "0", "'0' is no number of seconds from 1 to 1296000"),
        ("--gpu-memory-utilization", "1.5", "'1.5' is no share from 0.01 to 1"),
        ("--api-keys", "sk-12345", "does not say where the secret is (value not shown)"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_option_and_its_range(capsys, option, value, message):
    assert main(["engine", "--model", "m", f"{option}={value}"]) == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: " in complaint
    assert message in complaint


@pytest.mark.parametrize("grace", ["-1", "nan", "inf", "soon"])
def test_a_grace_that_is_no_time_is_refused(tiny_gguf, capsys, grace):
    assert main(["engine", "--model", str(tiny_gguf), f"--grace={grace}"]) == 2
    assert "is no number of seconds from 0 to 3600" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nonexistent/model.gguf"], "no such file or folder"),
        (["--store", "x", "--no-reuse"], "exclude each other"),
        (["--host", "0.0.0.0"], "is not loopback"),
        (["--host", "0.0.0.0", "--api-key", "k"], "give --tls-folder, or listen on 127.0.0.1"),
        (["--tls-folder", "/nonexistent"], "tls.crt or tls.key cannot be read"),
        (["--api-key", "a b"], "printable ASCII characters without spaces"),
        (["--api-key", "k", "--api-key-file", "/nonexistent"], "exclude each other"),
        (["--api-key-file", "/nonexistent"], "No such file"),
        (["--api-keys", "file:/nonexistent"], "No such file"),
        (["--api-keys", "file:/x", "--tenant-salt-file", "/y"], "exclude each other"),
        (["--tensor-parallel-size", "3"], "which 3 ranks cannot share evenly: give 1, 2"),
        (["--gpu-memory-utilization", "0.9"], "give --kv-cache-bytes"),
        (["--host", "example.org"], "is no IP address"),
        (["--device", "cuda"], "no CUDA device"),
        (["--max-model-len", "99999"], "the model allows"),
        (["--kv-cache-bytes", "10"], "6144 bytes holds 0: give at least 2"),
        (["--num-blocks", "1"], "--num-blocks 1, in blocks of 6144 bytes holds 1: give at least 2"),
        (["--num-blocks", "8", "--max-model-len", "129"], "8 blocks of 16 tokens hold 128: lower it"),
        (["--num-blocks", "1000000000000"], "lower the number of blocks"),
        (["--block-tokens", "65535", "--dtype", "float32"], "lower block_tokens"),
        (["--tenant-salt-file", "/nonexistent/salt"], "No such file"),
        (["--store", "/" + "x" * 200], "x" * 20),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(tiny_gguf, refused, options, message):
    status, errors = refused("engine", "--model", tiny_gguf, "--port", 0, *options)
    assert status == 2
    assert message in errors


def test_no_failure_ends_it_with_a_status_that_its_help_does_not_name(tiny_gguf, refused, monkeypatch):
    async def failing(*_):
        raise ServerUnavailable("no server")

    monkeypatch.setattr(serve_engine, "serve_engine", failing)
    assert refused("engine", "--model", tiny_gguf) == (2, "kvstore: no server\n")


def test_a_port_in_use_is_one_line_and_exit_status_2(tiny_gguf, refused):
    with engine(tiny_gguf) as process:
        port = process.event["url"].rsplit(":", 1)[1]
        status, errors = refused("engine", "--model", tiny_gguf, "--port", port)
    assert status == 2
    assert "cannot be used" in errors


def test_a_salt_that_is_too_short_is_refused(tiny_gguf, tmp_path, refused):
    (tmp_path / "salt").write_bytes(b"short")
    status, errors = refused("engine", "--model", tiny_gguf, "--tenant-salt-file", tmp_path / "salt")
    assert status == 2
    assert "5 bytes" in errors


def test_an_empty_model_is_one_line_and_exit_status_2(tmp_path, refused):
    (tmp_path / "empty.gguf").touch()
    status, errors = refused("engine", "--model", tmp_path / "empty.gguf", "--port", 0)
    assert status == 2
    assert "the file is empty: fetch it again" in errors


def test_a_truncated_model_is_one_line_and_exit_status_2(tiny_gguf, tmp_path, refused):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:-100])
    status, errors = refused("engine", "--model", cut, "--port", 0)
    assert status == 2
    assert "cut short" in errors
