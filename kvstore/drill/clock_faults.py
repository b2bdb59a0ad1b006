"""Jumps of the wall clock, which no lease and no deadline may notice."""

import time
from pathlib import Path

from kvstore.drill.fault import Fault
from kvstore.drill.load import Load
from kvstore.drill.raw_client import RawClient
from kvstore.drill.stage import HEAL_S, Stage, pause
from kvstore.drill.store_process import wait_until
from kvstore.drill.trouble import TroubleOrder
from kvstore.link import unix_dial

_FAKETIME_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu/faketime",
    "/usr/lib/aarch64-linux-gnu/faketime",
    "/usr/lib/faketime",
)


class ClockJumps(Fault):
    """See the description. With libfaketime every reader of the clock notices, else all Python code."""

    name = "clock_jumps"
    description = "the wall clock jumps by hours and years: leases and deadlines do not notice"
    effect = "jumps"
    shares_stage = False
    is_troubled = True
    lease_s = 2.0

    def __init__(self) -> None:
        self._others: set[Path] = set()

    def setup(self, stage: Stage) -> None:
        """Start the store with a clock that follows a file, or orders."""
        library = _faketime_library()
        self._others = _faketime_memory()
        environ = {} if library is None else self._environ(stage, library)
        stage.store.start(environ=environ)
        stage.fill_durable()
        stage.verify()

    def inject(self, stage: Stage) -> None:
        """Let the clock jump under load, several times, while a lease is held."""
        chain = stage.new_chain(2)
        stage.put(chain, timeout_s=HEAL_S)
        with RawClient(unix_dial(stage.store.socket_path), stage.namespace) as holder:
            holder.lease(chain)
            began_s = time.monotonic()
            with Load(stage):
                for _ in range(stage.rng.randint(1, 4)):
                    jump_s = stage.rng.choice((3600, 7200, 86_400, 315_360_000)) * stage.rng.choice((-1, 1))
                    self._set_clock(stage, jump_s)
                    stage.ledger.note_effect(self.effect, 1)
                    pause(stage.rng.uniform(0.0, 0.1))
                stage.answers()
            self._check_lease(stage, began_s)

    def _check_lease(self, stage: Stage, began_s: float) -> None:
        """Check that a lease that began then lives, and, now and then, that it ends when it should."""
        is_live = stage.stats()["live_leases"] > 0
        if not is_live and time.monotonic() - began_s < self.lease_s / 2:
            stage.ledger.note_violation("a jump of the clock ended a lease")
        if stage.rng.random() < 0.3:
            left_s = began_s + self.lease_s - time.monotonic()
            if not wait_until(lambda: stage.stats()["live_leases"] == 0, left_s + HEAL_S, pause_s=0.05):
                stage.ledger.note_violation("after a jump of the clock a lease does not end")

    def teardown(self, stage: Stage) -> None:
        """Remove the shared memory that the library leaves behind when its process is killed."""
        stage.store.kill()
        for path in _faketime_memory() - self._others:
            path.unlink(missing_ok=True)

    def _environ(self, stage: Stage, library: Path) -> dict[str, str]:
        self._clock_file(stage).write_text("+0\n", encoding="ascii")
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._clock_file(stage)),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # Else the library stretches waits of threads by seconds, whatever the clock does.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def _set_clock(self, stage: Stage, offset_s: int) -> None:
        if self._clock_file(stage).exists():
            self._clock_file(stage).write_text(f"{offset_s:+d}\n", encoding="ascii")
        else:
            stage.disk.order(TroubleOrder(clock_s=offset_s))

    def _clock_file(self, stage: Stage) -> Path:
        return stage.folder / "clock"


def _faketime_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("*faketime_*"))  # noqa: S108 (where the library puts it)


def _faketime_library() -> Path | None:
    for folder in _FAKETIME_FOLDERS:
        found = Path(folder) / "libfaketimeMT.so.1"
        if found.exists():
            return found
    return None


def clock_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (ClockJumps(),)
