"""StoreProcess: a real ``kvstore serve`` that can be killed, frozen and restarted."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvstore.errors import KVStoreError

MIB = 1 << 20
_START_S = 30.0
_END_S = 30.0


class PartFailed(KVStoreError):
    """A part that the drill started did not come up, or did not end."""


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command so that the kernel ends it when this process is killed, where that is possible."""
    guard = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    return [*guard, *command]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The configuration of one store. ``ssd_bytes`` 0: no ssd tier; ``redis_url`` empty: no remote tier.

    ``http_port`` 0: no HTTP face; ``http_more`` are further lines of its section. ``is_troubled``: it runs in
    a process where its disk operations can be made to fail, see ``Trouble``. ``master_keys`` is the file of
    the keys that blocks below memory are encrypted with; None: they are not. ``policy`` empty: the default.
    """

    dram_bytes: int = 16 * MIB
    staging_bytes: int = MIB
    lease_s: float = 30.0
    max_connections: int = 256
    ssd_bytes: int = 0
    ssd_folder: Path | None = None
    redis_url: str = ""
    key_prefix: str = "kvstore"
    http_port: int = 0
    http_more: str = ""
    sentinel_master: str = ""
    is_troubled: bool = False
    master_keys: Path | None = None
    policy: str = ""

    def toml(self, socket_path: Path) -> str:
        """Return the configuration file."""
        text = (
            f'[server]\nsocket = "{socket_path}"\nmax_connections = {self.max_connections}\n'
            f"[store]\nlease_s = {self.lease_s}\n"
            + (f'policy = "{self.policy}"\n' if self.policy else "")
            + f"[tiers.dram]\ncapacity_bytes = {self.dram_bytes}\nstaging_bytes = {self.staging_bytes}\n"
        )
        if self.http_port:
            text += f'[http]\nlisten = "127.0.0.1:{self.http_port}"\n{self.http_more}'
        if self.ssd_bytes:
            text += f'[tiers.ssd]\npath = "{self.ssd_folder}"\ncapacity_bytes = {self.ssd_bytes}\n'
        if self.redis_url:
            text += (
                f'[tiers.remote]\nurl = "{self.redis_url}"\nkey_prefix = "{self.key_prefix}"\n'
                "breaker_backoff_s = 0.05\nbreaker_backoff_max_s = 0.2\n"
            )
        if self.sentinel_master:
            text += f'sentinel_master = "{self.sentinel_master}"\n'
        if self.master_keys is not None:
            text += f'[encryption]\nkeys = "file:{self.master_keys}"\n'
        return text


class StoreProcess:
    """``kvstore serve`` on a socket in ``folder``; what it logs goes to ``store.log`` there."""

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        self.folder = folder
        self.settings = settings
        self.socket_path = folder / "kv.sock"
        self.trouble_path = folder / "trouble.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The process; there is one between ``launch`` and its end."""
        assert self._process is not None, "the store was not started"
        return self._process

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(
        self,
        *,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Start it and wait until it says that it is ready. ``more`` are further arguments of the command.

        Raises:
            PartFailed: it ended instead, or time ran out.
        """
        self.launch(prefix=prefix, environ=environ, more=more)
        status = self.wait_ready()
        if status is not None:
            raise PartFailed(f"store: ended with status {status} at its start: {self.last_words()}")

    def launch(
        self,
        *,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        order: str = "",
        more: Sequence[str] = (),
    ) -> None:
        """Start it without waiting. ``prefix`` is a command that executes the rest of its words.

        ``order`` is the trouble from its first operation on, for a store that is troubled.
        """
        config = self.folder / "store.toml"
        config.write_text(self.settings.toml(self.socket_path), encoding="utf-8")
        words = [*self._command(order), "serve", "--config", str(config), "--json", *more]
        with (self.folder / "store.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*prefix, *guarded(words)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=None if environ is None else {**os.environ, **environ},
            )

    def _command(self, order: str) -> list[str]:
        if not self.settings.is_troubled:
            return [sys.executable, "-P", "-m", "kvstore.cli"]
        words = [sys.executable, "-P", "-m", "kvstore.drill.troubled_store"]
        words += ["--folder", str(self.settings.ssd_folder), "--control", str(self.trouble_path)]
        return [*words, *(("--order", order) if order else ())]

    def wait_ready(self, timeout_s: float = _START_S) -> int | None:
        """Wait until it is ready; its exit status if it ended instead.

        Raises:
            PartFailed: neither happened in time; it is killed then.
        """
        stdout = self.process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], timeout_s)
        if not readable:
            self.kill()
            raise PartFailed(f"store: not ready after {timeout_s:.0f} s: {self.last_words()}")
        line = stdout.readline()
        if line and json.loads(line)["event"] == "ready":
            return None
        return self._reap()

    def kill(self) -> None:
        """Kill it as kill -9 does, also while it is frozen."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._reap()

    def terminate(self) -> int:
        """End it by SIGTERM; returns its exit status.

        Raises:
            PartFailed: it did not end in time; it is killed then.
        """
        self.process.terminate()
        return self._reap()

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid, signal.SIGCONT)

    def last_words(self) -> str:
        """Return the last line of its log."""
        try:
            lines = (self.folder / "store.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _reap(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            return process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise PartFailed(f"store: had not ended {_END_S:.0f} s after it was told to") from None
        finally:
            if process.stdout is not None:
                process.stdout.close()


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process takes of its machine."""

    rss_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        """Measure a live process of this user.

        Raises:
            PartFailed: there is none.
        """
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 (names only)
        except OSError as error:
            raise PartFailed(f"process {pid}: cannot be measured: {error.strerror}") from error
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return cls(int(fields["VmRSS"].split()[0]) << 10, descriptors, int(fields["Threads"]))


def wait_until(condition: Callable[[], bool], timeout_s: float, *, pause_s: float = 0.005) -> bool:
    """Ask until it holds; False if it does not within the time."""
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= give_up_s:
            return False
        time.sleep(pause_s)
    return True
