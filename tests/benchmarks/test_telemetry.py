"""The benchmark of events tells its events by turns, and all of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "telemetry.py"

if not SCRIPT.is_file():
    pytest.skip("the benchmarks are not beside the tests", allow_module_level=True)


def test_it_tells_shares_and_ratios_of_a_store_that_tells_all_that_changes():
    words = ["--cases", "room", "--block-bytes", "8388608", "--batch", "4", "--seconds", "1", "--json"]

    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [(row["kind"], row["what"]) for row in rows] == [
        ("share", "wall"),
        ("share", "cpu"),
        ("ratio", "put"),
        ("ratio", "fetch_into"),
        ("ratio", "cpu"),
    ]
    assert all(row["median"] > 0 for row in rows)
    assert all(row["interval"][0] <= row["median"] <= row["interval"][1] for row in rows)
