"""``kvstore replay``: what it prints and draws, and how it ends."""

import json
import xml.etree.ElementTree as ET

import pytest

from kvstore.cli import main
from tests.replay.traces import write_mooncake

KEYS = {
    "policy", "capacity_blocks", "requests", "block_accesses", "hit_blocks", "hit_tokens", "written_blocks",
    "seconds",
}  # fmt: skip


@pytest.fixture
def replay(capsys, tmp_path):
    trace = write_mooncake(tmp_path / "trace.jsonl", tail_tokens=100)

    def call(*arguments):
        status = main(["replay", str(trace), *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def test_the_last_line_is_one_json_object(replay):
    status, out, err = replay("--policies", "lru,bound", "--capacities", "4,9", "--json")

    told = json.loads(out.splitlines()[-1])
    assert status == 0
    assert "policy" in err
    assert (told["format"], told["block_tokens"], told["unique_blocks"]) == ("mooncake", 512, 9)
    assert [(row["policy"], row["capacity_blocks"], row["hit_blocks"]) for row in told["results"]] == [
        ("lru", 4, 7), ("lru", 9, 8), ("bound", 4, 8), ("bound", 9, 8),
    ]  # fmt: skip
    assert all(row.keys() >= KEYS for row in told["results"])


def test_the_table_is_for_people(replay):
    status, out, _ = replay(
        "--policies", "lru", "--capacities", "4", "--block-bytes", "2MiB", "--prefill-tokens-per-s", "100"
    )

    head, _, columns, _, row = out.splitlines()
    assert status == 0
    assert "5 requests, 17 block accesses, 9 blocks of 512 tokens" in head
    assert columns.split("  ")[0] == "policy"
    # 7 of 17 blocks; nine blocks of 2 MiB are written; seven blocks are 3584 tokens.
    assert all(text in row for text in ("lru", "41.18%", "87.5%", "18.0 MiB", "35.8 s"))


def test_sizes_are_capacities_too(replay):
    arguments = ("--policies", "bound", "--capacities", "8MiB,4KiB", "--block-bytes", "4KiB", "--json")

    told = json.loads(replay(*arguments)[1])

    assert [row["capacity_blocks"] for row in told["results"]] == [1, 2048]
    assert told["results"][1]["written_bytes"] == 4 * 4096


def test_tiers_are_shown_one_by_one(replay):
    arguments = ("--policies", "lru", "--tiers", "dram=2,ssd=4", "--block-bytes", "10")

    told = json.loads(replay(*arguments, "--json")[1])

    assert told["results"][0]["tiers"] == [
        {"tier": "dram", "capacity_blocks": 2, "hit_blocks": 4, "written_blocks": 6, "written_bytes": 60},
        {"tier": "ssd", "capacity_blocks": 4, "hit_blocks": 3, "written_blocks": 10, "written_bytes": 100},
    ]
    assert "17.65%, 10 written" in replay(*arguments)[1]


def test_partly_filled_blocks_are_left_out_on_demand(replay):
    told = json.loads(replay("--policies", "lru", "--capacities", "9", "--full-blocks-only", "--json")[1])

    # Without the last block of each: 1 2; 1 2 (2 hits); 1 2 3 5 (2); 7; 1 2 4 (2).
    assert told["results"][0]["hit_blocks"] == 6
    assert told["results"][0]["block_accesses"] == 17


def test_curves_are_drawn_with_a_line_for_each_policy(replay, tmp_path):
    path = tmp_path / "curves.svg"

    status, _, _ = replay(
        "--policies", "lru,bound", "--capacities", "1,4,9", "--svg", str(path), "--lru-curve"
    )

    drawn = ET.fromstring(path.read_text())
    names = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert status == 0
    assert {"lru", "bound"} <= set(names)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_one_capacity_can_be_drawn(replay, tmp_path):
    path = tmp_path / "curves.svg"

    replay("--policies", "lru", "--capacities", "4", "--svg", str(path))

    assert ET.fromstring(path.read_text()) is not None


def test_the_curve_of_lru_has_every_capacity(replay):
    told = json.loads(replay("--policies", "lru", "--capacities", "4", "--lru-curve", "--json")[1])

    by_capacity = {point["capacity_blocks"]: point["hit_blocks"] for point in told["lru_curve"]}
    assert list(by_capacity) == list(range(1, 10))
    assert by_capacity[4] == 7
    assert told["lru_sizes"] == {"50%": 2, "90%": 8, "99%": 8}


def test_the_sizes_that_lru_needs_are_told(replay):
    out = replay("--policies", "lru", "--capacities", "4", "--lru-curve", "--block-bytes", "1KiB")[1]

    assert out.splitlines()[-1] == (
        "lru: of 8 hits that it has at any size, 50% with 2 (2.0 KiB), 90% with 8 (8.0 KiB), 99% with 8"
        " (8.0 KiB) blocks"
    )


def test_without_capacities_the_trace_says_them(replay):
    told = json.loads(replay("--policies", "lru", "--json")[1])

    assert [row["capacity_blocks"] for row in told["results"]] == [1, 2, 4, 9]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policies", "clock"], "policy 'clock' is unknown"),
        (["--policies", ","], "--policies names none"),
        (["--capacities", ","], "--capacities names none"),
        (["--capacities", "0"], "0 is 0 blocks, expected 1 to"),
        (["--capacities", "4GiB"], "a size needs --block-bytes"),
        (["--capacities", "4Gib", "--block-bytes", "1"], "expected bytes or text"),
        (["--tiers", "dram"], "'dram', expected NAME=SIZE"),
        (["--tiers", "dram=1,dram=2"], "names a tier twice"),
        (["--tiers", "dram=1", "--capacities", "1"], "leave out --capacities"),
        (["--tiers", "dram=1", "--svg", "x"], "leave out --tiers"),
        (["--block-bytes", "none"], "--block-bytes"),
        (["--prefill-tokens-per-s", "0"], "expected a number above 0"),
        (["--requests", "-1"], "expected a whole number from 1"),
        (["--format", "access-log"], "line 1: has no blocks"),
        (["--policy", "mine"], "expected FILE.py:CLASS"),
    ],
)
def test_bad_arguments_are_one_line(replay, arguments, said):
    status, out, err = replay("--policies", "lru", *arguments)

    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_policy_file_that_ends_itself_is_told(replay, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("raise SystemExit(0)\n")

    status, out, err = replay("--policy", f"{path}:Mine")

    assert (status, out) == (2, "")
    assert "mine.py:1: SystemExit" in err


def test_a_file_that_cannot_be_written_is_named(replay, tmp_path):
    status, _, err = replay("--policies", "lru", "--svg", str(tmp_path / "no" / "x.svg"))

    assert status == 2
    assert "x.svg" in err


def test_a_trace_that_asks_for_nothing_is_replayed_and_drawn(tmp_path, capsys):
    trace, drawn = tmp_path / "trace.jsonl", tmp_path / "curves.svg"
    trace.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": []}\n')

    status = main(
        ["replay", str(trace), "--lru-curve", "--svg", str(drawn), "--policies", "lru,bound", "--json"]
    )

    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0
    assert [row["share_of_bound"] for row in told["results"]] == [1.0, 1.0]
    assert ET.fromstring(drawn.read_text()) is not None
