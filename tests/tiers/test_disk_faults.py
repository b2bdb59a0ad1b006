"""SsdTier under a preloaded shim that sees every write and sync, LMDB's too: faults at each, power losses."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the shim that fails single system calls cannot be built")
    built = tmp_path_factory.mktemp("shim") / "disk_shim.so"
    source = Path(__file__).with_name("disk_shim.c")
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(built), str(source), "-ldl", "-lpthread"], check=True
    )
    return built


def run(shim: Path, *words: object) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tiers.disk_faults", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("error", "tear"), [(errno.EIO, 0), (errno.EIO, 1), (errno.ENOSPC, 0)], ids=["EIO", "torn", "ENOSPC"]
)
def test_whichever_disk_operation_fails_no_byte_is_wrong_and_nothing_durable_is_lost(
    shim: Path, tmp_path: Path, error: int, tear: int
) -> None:
    result = run(shim, "sweep", tmp_path, error, tear)
    assert result["tries"] > 50
    assert {name: result[name] for name in ("wrong", "lost", "uncounted", "unhealed")} == {
        "wrong": 0,
        "lost": 0,
        "uncounted": 0,
        "unhealed": 0,
    }


def test_after_a_power_loss_no_byte_is_wrong_and_nothing_durable_is_lost(shim: Path, tmp_path: Path) -> None:
    states = int(os.environ.get("KVSTORE_POWER_LOSSES", "60"))
    result = run(shim, "crash", tmp_path, 7, states)
    assert result == {"tries": states, "wrong": 0, "lost": 0, "uncounted": 0}
