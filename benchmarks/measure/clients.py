"""Client processes, and rounds in which each has its turn."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from measure.figures import Bench

OWN = ("memcpy", "bare", "kvstore")
"""What has to work."""

_SCRIPT = Path(__file__).parents[1] / "client_process.py"
_END_S = 60.0


class ClientEnded(Exception):
    """A client process ended before it was told to."""


class ClientProcess:
    """See client_process.py. It is ready once it is made."""

    def __init__(self, name: str, folder: Path, block_bytes: int, batch: int, set_bytes: int) -> None:
        self.name = name
        words = [sys.executable, str(_SCRIPT), name, str(folder)]
        words += [str(number) for number in (block_bytes, batch, set_bytes)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
        try:
            self.ops: list[str] = self._read("start")
        except BaseException:
            self.close()
            raise

    def tell(self, *words: str) -> Any:  # Any: see client_process.py
        """Let it do something; returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._read(" ".join(words))

    def close(self) -> None:
        """End it, and the peer with it."""
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _read(self, what: str) -> Any:  # Any: see client_process.py
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ClientEnded(f"its client ended in {what}")
        return json.loads(line)


@contextlib.contextmanager
def clients_of(
    bench: Bench, names: Sequence[str], block_bytes: int, batch: int, set_bytes: int
) -> Iterator[list[ClientProcess]]:
    """Run a client process for each peer that has not broken down before."""
    with contextlib.ExitStack() as stack:
        clients = []
        for name in names:
            with allowing(bench, name):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-bench-")))
                client = ClientProcess(name, folder, block_bytes, batch, set_bytes)
                stack.callback(client.close)
                clients.append(client)
        yield clients


@contextlib.contextmanager
def allowing(bench: Bench, name: str) -> Iterator[None]:
    """Note a breakdown of another store instead of giving up the run."""
    try:
        yield
    except ClientEnded as error:
        if name in OWN:
            raise
        bench.failed.setdefault(name, str(error))


def in_rounds(
    bench: Bench, clients: Sequence[ClientProcess], turn: Callable[[ClientProcess], None], rounds: int
) -> None:
    """Give every client its turn in each round, in another order each; the first is for warming up."""
    for number in range(rounds + 1):
        bench.is_warm = number > 0
        first = number % len(clients)
        for client in [*clients[first:], *clients[:first]]:
            if client.name not in bench.failed:
                with allowing(bench, client.name):
                    turn(client)
