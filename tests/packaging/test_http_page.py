"""docs/http.md: its commands print what is shown, its tables say what the code says."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from kvstore.http.limits import MAX_KEYS, Limits
from kvstore.http.protocol import MAX_HEADER_BYTES, MAX_HEADERS, MAX_LINE_BYTES
from kvstore.http.refusal import ErrorCode
from kvstore.http.routes import ROUTES
from kvstore.http.storing import _WINDOW_BLOCKS, _WINDOW_BYTES
from tests.http.guarded_process import GuardedProcess
from tests.packaging.test_readme import Shell

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
STAND_IN = Path(__file__).parents[1] / "http" / "curl_stand_in.py"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not beside the tests")


def steps():
    text = "".join(re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S))
    found = re.findall(r"^\$ ((?:.*\n)(?:> .*\n)*)((?:(?!\$ ).*\n)*)", text, re.M)
    return [(command.replace("\n> ", "\n").removesuffix("\n"), shown) for command, shown in found]


@pytest.fixture(params=["curl", "stand-in"])
def shell(request, tmp_path, monkeypatch):
    """A shell with curl, or with Python in its place."""
    if request.param == "curl" and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    if request.param == "stand-in":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "curl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{STAND_IN}" "$@"\n')
        (tmp_path / "bin" / "curl").chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "home").mkdir()
    made = Shell(tmp_path / "home")
    yield made
    made.end()


def test_the_commands_print_what_is_shown(shell, tmp_path):
    with GuardedProcess(tmp_path, {}) as server:
        for command, shown in steps():
            told = command.replace("8470", str(server.port))
            # What curl prints has no line end of its own.
            printed = shell.tell(f"{told} | sed -e '$a\\'" if shown else told)
            assert printed == shown, command


def rows(heading):
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| (.+?) \|$", section, re.M)
    return [[cell.strip() for cell in row.split("|")] for row in table[1:] if not row.startswith("--")]


def test_every_route_is_in_the_table_with_its_scope():
    def scope(route):
        if route.scope is not None:
            return route.scope.value
        return "" if route.is_public else "any key"

    assert [(cells[0], cells[1]) for cells in rows("Requests")] == [
        (f"`{route.method} {route.path}`", scope(route)) for route in ROUTES
    ]


def test_every_code_is_in_the_table_with_its_status():
    assert [(cells[0], int(cells[1])) for cells in rows("Errors")] == [
        (f"`{code.value}`", code.status) for code in ErrorCode
    ]


def test_the_limits_are_those_of_the_code():
    limits = Limits()
    told = {cells[0]: cells[1] for cells in rows("Limits")}
    assert told["requests under way of one key"].startswith(f"{limits.max_requests} ")
    assert told["leases of one caller"] == str(limits.max_leases)
    assert told["request line; one header; all headers"] == (
        f"{MAX_LINE_BYTES} bytes; {MAX_HEADER_BYTES} bytes; {MAX_HEADERS}"
    )
    assert told["header of a request"].startswith(f"{limits.header_s:g} s")
    assert told["connection without a request"] == (
        f"{limits.header_s:g} s for the first, {limits.idle_s:g} s after another"
    )
    assert told["body"] == (
        f"{limits.stall_s:g} s between two pieces, {limits.body_bytes_per_s} bytes a second beyond the first"
        f" {limits.stall_s:g} s"
    )
    assert told["answer that is not read"] == f"{limits.stall_s:g} s"
    assert told["JSON"] == f"{limits.max_json_bytes >> 20} MiB"
    assert told["payloads of a fetch or store"] == f"{MAX_KEYS} blocks, {limits.max_batch_bytes >> 30} GiB"
    assert told["slots of a store that are being written"] == (
        f"{_WINDOW_BLOCKS} blocks, {_WINDOW_BYTES >> 20} MiB"
    )
