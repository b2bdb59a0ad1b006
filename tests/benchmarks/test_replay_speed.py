"""The benchmark of the replay runs on a trace of its own making."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "replay_speed.py"

if not SCRIPT.is_file():
    pytest.skip("the benchmarks are not beside the tests", allow_module_level=True)


def test_it_times_reading_the_bound_and_each_policy():
    words = ["--requests", "60", "--capacity", "100", "--policies", "lru,gittins", "--rounds", "1", "--json"]

    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["requests"] == 60
    assert set(told["median_s"]) == {"read", "lru, all capacities", "bound", "lru", "gittins"}
