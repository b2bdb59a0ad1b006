"""The benchmark of the data plane: it runs, what it says adds up, and its page shows its figures."""

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET  # its usual name
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
BENCHMARKS = CHECKOUT / "benchmarks"
PAGE = CHECKOUT / "docs" / "data_plane.md"
KEYS = {
    "peer",
    "op",
    "block_bytes",
    "batch",
    "gb_per_s",
    "ratio_to_memcpy",
    "p50_us",
    "p99_us",
    "cpu_s_per_gb",
}

if not BENCHMARKS.is_dir():
    pytest.skip("the benchmarks are not beside the tests", allow_module_level=True)

sys.path.insert(0, str(BENCHMARKS))
from measure import asked, page, plots  # noqa: E402
from measure.clients import ClientEnded, clients_of, in_rounds  # noqa: E402
from measure.figures import Bench, Figures  # noqa: E402
from measure.record import Record  # noqa: E402


@pytest.fixture(scope="module")
def record():
    return Record.read(PAGE.with_suffix(".json"))


def run(*words, **environment):
    command = [sys.executable, str(BENCHMARKS / "data_plane.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run of everything with as little as possible, which writes a page of its own."""
    copy = tmp_path_factory.mktemp("docs") / "page.md"
    shutil.copy(PAGE, copy)
    words = ["--block-bytes", "8192", "--set-bytes", "1", "--rounds", "1", "--peers", "redis,lmdb,files"]
    return copy, run(*words, "--json", "--page", str(copy))


@pytest.mark.timeout(600)
def test_it_runs_end_to_end(small_run):
    _, done = small_run

    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert all(row.keys() >= KEYS for row in last["results"])
    seen = {(row["peer"], row["op"], row["batch"]) for row in last["results"]}
    assert seen >= {
        *((peer, op, batch) for peer in ("kvstore", "redis", "lmdb", "files") for op in ("put", "fetch_into")
          for batch in (1, 64)),
        *(("kvstore", op, batch) for op in ("view", "fetch_into_unchecked") for batch in (1, 64, 1024)),
        ("memcpy", "copy", 1), ("memcpy", "copy", 64), ("bare", "round_trip_and_copy", 1),
        ("kvstore", "match_6250", 6250), ("kvstore", "exists_1000", 1000), ("redis", "match_6250", 6250),
        ("kvstore", "match_6250_beside_2", 6250), ("bare", "round_trip_beside_2", 1),
        ("kvstore", "chain_of_array", 6250),
    }  # fmt: skip


@pytest.mark.timeout(600)
def test_a_run_writes_its_page(small_run):
    copy, done = small_run
    made = Record.read(copy.with_suffix(".json"))

    assert made.line() == done.stdout.splitlines()[-1]
    assert copy.read_text() == page.with_tables(PAGE.read_text(), made)
    assert {path.name for path in copy.parent.glob("*.svg")} == {
        path.name for path in PAGE.parent.glob("data_plane_*.svg")
    }


def test_the_page_says_what_its_figures_say(record):
    assert PAGE.read_text() == page.with_tables(PAGE.read_text(), record), (
        "run benchmarks/data_plane.py --figures docs/data_plane.json --page docs/data_plane.md"
    )


def test_every_claim_of_the_page_was_measured(record):
    assert [line.what for line in asked.lines(record) if line.is_reached is None] == []


def test_a_page_without_a_place_for_a_table_is_refused(record):
    with pytest.raises(ValueError, match="no table asked"):
        page.with_tables(PAGE.read_text().replace("begin asked", "begin"), record)


def test_plots_are_svg_with_text_that_needs_no_ground_of_its_own(record, tmp_path):
    paths = plots.draw(record, tmp_path)

    for path in paths:
        words = {text.strip() for at in ET.parse(path).iter() for text in [at.text or ""]}
        assert {"kvstore", "redis", "lmcache", "2 MiB", "fetch_into, one block at a time"} <= words
        assert "#ffffff" not in path.read_text()
        assert "#000000" not in path.read_text()


def test_the_committed_plots_show_the_peers_of_the_figures(record):
    peers = {row["peer"] for row in record.results} - {"bare"}

    for name in ("data_plane_speed.svg", "data_plane_latency.svg"):
        words = {(at.text or "").strip() for at in ET.parse(PAGE.with_name(name)).iter()}
        assert peers <= words


def test_a_peer_that_is_not_installed_is_left_out_with_the_remedy(tmp_path):
    nowhere = str(tmp_path / "python")

    done = run("--peers", "lmcache", "--parts", "chain", "--rounds", "1", "--json",
               KVSTORE_BENCH_LMCACHE_PYTHON=nowhere)  # fmt: skip

    assert done.returncode == 0
    assert "peer lmcache is left out" in done.stderr
    assert "lmcache" in json.loads(done.stdout.splitlines()[-1])["left_out"]


def test_every_script_is_described():
    described = (BENCHMARKS / "README.md").read_text()

    assert [path.name for path in BENCHMARKS.glob("*.py") if f"`{path.name}`" not in described] == []


def test_an_unknown_peer_is_refused():
    done = run("--peers", "redis,radish")

    assert done.returncode == 2
    assert "no peer radish" in done.stderr


@pytest.mark.timeout(300)
def test_a_store_that_breaks_down_is_left_out_and_the_others_go_on():
    bench = Bench()

    def turn(client):
        if client.name == "files":
            client.tell("time", "no such operation")
        bench.note(bench.figures(client.name, "put", 4096, 1), *client.tell("time", "put"))
        client.tell("remove")

    with clients_of(bench, ["files", "kvstore"], 4096, 1, 1) as clients:
        in_rounds(bench, clients, turn, 2)

    assert bench.failed.keys() == {"files"}
    assert [(row["peer"], row["calls"]) for row in bench.rows()] == [("kvstore", 4)]


@pytest.mark.timeout(300)
def test_the_own_store_may_not_break_down():
    bench = Bench()

    with clients_of(bench, ["kvstore"], 4096, 1, 1) as clients, pytest.raises(ClientEnded):
        in_rounds(bench, clients, lambda client: client.tell("time", "no such operation"), 1)


def test_a_row_compares_medians_and_tells_the_range_of_its_rounds():
    memcpy = Figures("memcpy", "copy", 1000, 2, rounds=[[1e-6, 1e-6, 9e-6], [3e-6]])
    at = Figures("kvstore", "put", 1000, 2, rounds=[[4e-6, 2e-6, 4e-6], [4e-6]], cpu_s=8e-6)

    row = at.row(memcpy, None)

    assert row["ratio_to_memcpy"] == 0.5
    assert (row["ratio_low"], row["ratio_high"]) == (0.25, 0.75)
    assert row["gb_per_s"] == 0.5
    assert row["cpu_s_per_gb"] == 1.0
    assert (row["overhead_us"], row["overhead_us_per_block"]) == (2.0, 1.0)
    assert (row["p50_us"], row["p99_us"], row["calls"]) == (4.0, 4.0, 4)


@pytest.mark.parametrize(
    ("seen", "is_least", "is_reached", "text"),
    [
        (0.8, True, True, "0.80"),
        (0.7, True, False, "0.70"),
        (0.7, False, True, "0.70"),
        (None, True, None, "not measured"),
    ],
)
def test_a_claim_is_held_against_its_bound(seen, is_least, is_reached, text):
    line = asked.Bound(0.75, is_least=is_least).line("put", seen)

    assert (line.is_reached, line.seen) == (is_reached, text)
