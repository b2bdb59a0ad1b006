"""Keys that what is data of record needs: on disk before they are used, and as long as the store runs."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from kvstore.key_file import KeyFile
from kvstore.master_keys import MasterKeys
from kvstore.tenant_record import RECORD_BYTES
from kvstore.vault import Vault
from kvstore_tiers.child_check import bare_environment, run_check
from tests.encryption.node import ANN, MASTER, tenant


def soon() -> float:
    return time.monotonic() + 30


class Clock:
    def __init__(self) -> None:
        self.moved_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.moved_s


async def opened(folder: Path, clock: Clock) -> Vault:
    file = KeyFile([folder], record_bytes=RECORD_BYTES, in_use=lambda: [folder])
    vault = Vault(MasterKeys.parse(MASTER, key="keys"), file=file, exchange=None, clock=clock)
    await vault.open()
    return vault


async def test_a_key_that_no_file_could_take_is_not_used_for_records(tmp_path: Path) -> None:
    folder, clock = tmp_path / "keys-folder", Clock()
    vault = await opened(folder, clock)

    assert await vault.shared_key_of(tenant(ANN), deadline_s=soon()) is None
    folder.mkdir()
    clock.moved_s += 60
    await vault.poll()
    key = await vault.shared_key_of(tenant(ANN), deadline_s=soon())
    await vault.close()

    assert key is not None
    again = await opened(folder, clock)
    assert again.is_known(key.id)
    await again.close()


async def test_everybody_who_asks_for_a_records_key_waits_until_it_is_on_disk(tmp_path: Path) -> None:
    vault = await opened(tmp_path, Clock())
    path = tmp_path / "keys"

    async def ask() -> bool:
        key = await vault.shared_key_of(tenant(ANN), deadline_s=soon())
        return key is not None and path.exists()

    assert all(await asyncio.gather(*(ask() for _ in range(20))))
    await vault.close()


@pytest.mark.parametrize("harm", ["removed", "replaced", "cut"])
async def test_a_key_file_that_somebody_else_changed_is_written_anew(tmp_path: Path, harm: str) -> None:
    clock = Clock()
    first = await opened(tmp_path, clock)
    key = await first.shared_key_of(tenant(ANN), deadline_s=soon())
    await first.close()
    vault = await opened(tmp_path, clock)
    path = tmp_path / "keys"
    if harm == "removed":
        path.unlink()
    elif harm == "replaced":
        (tmp_path / "other").write_bytes(b"another store's")
        (tmp_path / "other").rename(path)
    else:
        os.truncate(path, 20)

    clock.moved_s += 60
    await vault.poll()
    await vault.close()

    again = await opened(tmp_path, clock)
    assert key is not None
    assert again.is_known(key.id)
    await again.close()


def test_a_child_that_examines_files_is_told_no_secret() -> None:
    environ = {"PATH": "/bin", "KVSTORE_MASTER_KEYS": "ab" * 32, "PYTHONPATH": "x", "REDIS_PASSWORD": "s"}

    assert bare_environment(environ) == {"PATH": "/bin", "PYTHONPATH": "x"}


def test_a_check_in_a_child_runs_without_the_secrets_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_MASTER_KEYS", "ab" * 32)
    (tmp_path / "say_environment.py").write_text("import os\nprint(sorted(os.environ))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    ended = run_check("say_environment", [], timeout_s=60)

    assert ended.returncode == 0
    assert b"PYTHONPATH" in ended.stdout
    assert b"KVSTORE" not in ended.stdout
