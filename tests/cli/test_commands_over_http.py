"""The client commands over HTTP: the key of the environment, and its tenant's namespace."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from kvstore.auth import Scope
from kvstore.keyring_file import add_key, create_keyring
from tests.redis_server import free_port
from tests.store_process import StoreProcess

NAMES = ["--model", "m", "--block-tokens", "4", "--block-bytes", "4096"]


def run(store: StoreProcess, key: str, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    command = [sys.executable, "-m", "kvstore.cli", *words, "--store", store.url, "--json"]
    environ = {**os.environ, "KVSTORE_API_KEY": key}
    done = subprocess.run(command, env=environ, input=stdin, capture_output=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def lookups_told(store: StoreProcess, key: str) -> int:
    """Blocks looked up that a key's owner is told of, once there are some."""
    until_s = time.monotonic() + 60
    while True:
        status, printed, _ = run(store, key, "size")
        assert status == 1  # too few to tell
        lookups: int = json.loads(printed)["lookups_blocks"]
        if lookups or time.monotonic() > until_s:
            return lookups


def test_commands_use_the_key_of_the_environment_and_its_tenants_blocks(tmp_path: Path) -> None:
    keyring = tmp_path / "keys"
    create_keyring(keyring)
    one, two = (
        add_key(keyring, name, tenant=name, scopes=frozenset({Scope.READ, Scope.WRITE}))
        for name in ("one", "two")
    )
    payload = tmp_path / "payload"
    payload.write_bytes(os.urandom(8192))
    tokens = b"[1, 2, 3, 4, 5, 6, 7, 8]"
    piped = ["--tokens-file", "/dev/stdin"]
    with StoreProcess(tmp_path, http_port=free_port(), http_more=f'api_keys = "file:{keyring}"\n') as store:
        status, printed, _ = run(store, one, "put", *NAMES, *piped, "--in", str(payload), stdin=tokens)
        assert (status, json.loads(printed)["stored"]) == (0, 2)
        out = tmp_path / "out"
        assert run(store, one, "get", *NAMES, *piped, "--out", str(out), stdin=tokens)[0] == 0
        assert out.read_bytes() == payload.read_bytes()
        status, printed, _ = run(store, two, "match", *NAMES, *piped, stdin=tokens)
        assert (status, json.loads(printed)["blocks"]) == (1, 0)
        status, printed, _ = run(store, two, "why", *NAMES, *piped, stdin=tokens)
        assert (status, json.loads(printed)["elsewhere"]) == (1, [])
        assert lookups_told(store, one) == lookups_told(store, two) == 2
        for words in (["stats"], ["check"]):
            status, printed, complaint = run(store, one, *words)
            assert (status, printed) == (2, "")
            assert "lacks the scope admin" in complaint
        status, printed, complaint = run(store, "kvs_wrong", "stats")
        assert (status, printed) == (2, "")
        assert one not in complaint
