"""The drill: each kind of fault in turn, within a time, from a seed, and what came of it."""

import contextlib
import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.drill.fault import Fault
from kvstore.drill.ledger import KindReport, Ledger
from kvstore.drill.redis_server import RedisServer, find_binary
from kvstore.drill.stage import Stage, own_descriptors
from kvstore.drill.store_process import PartFailed, StoreSettings
from kvstore.errors import KVStoreError

_log = logging.getLogger(__name__)

_DESCRIPTORS_ROOM = 4

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DrillSettings:
    """How long the drill may take, the seed of every random choice, and which faults to try."""

    faults: Sequence[Fault]
    seconds: float = 60.0
    seed: int = 0
    keep: bool = False


@dataclass(slots=True)
class DrillReport:
    """What came of a drill, by kind of fault."""

    seed: int
    seconds: float = 0.0
    faults: dict[str, KindReport] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """Whether every kind was tried without a violation, or skipped for a reason."""
        return bool(self.faults) and all(report.is_ok for report in self.faults.values())

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        kinds = self.faults.values()
        return {
            "ok": self.is_ok,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "tries": sum(kind.tries for kind in kinds),
            "wrong_bytes": sum(kind.wrong_bytes for kind in kinds),
            "lost_durable": sum(kind.lost for kind in kinds),
            "over_deadline": sum(kind.over_deadline for kind in kinds),
            "violations": sum(kind.violations for kind in kinds),
            "faults": {name: kind.as_dict() for name, kind in self.faults.items()},
        }


def run_drill(settings: DrillSettings, say: Say) -> DrillReport:
    """Try every fault; progress and violations go to ``say``. Ends all it starts.

    The time left is divided among the kinds left, so that each is tried at least once.
    """
    report = DrillReport(settings.seed)
    started_s = time.monotonic()
    with _folder(settings.keep, say) as folder:
        for index, fault in enumerate(settings.faults):
            left_s = settings.seconds - (time.monotonic() - started_s)
            share_s = left_s / (len(settings.faults) - index)
            report.faults[fault.name] = _try_kind(fault, settings.seed, share_s, folder=folder, say=say)
    report.seconds = time.monotonic() - started_s
    return report


def _try_kind(fault: Fault, seed: int, share_s: float, *, folder: Path, say: Say) -> KindReport:
    ledger = Ledger(lambda line: say(f"{fault.name}: VIOLATION in try {tries.report.tries + 1}: {line}"))
    tries = ledger
    reason = fault.obstacle() or (_redis_obstacle() if fault.needs_redis else "")
    if reason:
        ledger.report.skipped = reason
        say(f"{fault.name}: skipped: {reason}")
        return ledger.report
    started_s, descriptors = time.monotonic(), own_descriptors()
    try:
        with _stage(fault, seed, ledger, folder) as stage:
            _try_until(fault, stage, seed, started_s + share_s)
    except (KVStoreError, OSError) as error:
        ledger.note_violation(f"the try could not go on: {error}")
    except Exception as error:  # one kind must not end the drill
        _log.exception("%s: the try failed", fault.name)
        ledger.note_violation(f"the try could not go on: {type(error).__name__}: {error}")
    if own_descriptors() > descriptors + _DESCRIPTORS_ROOM:
        ledger.note_violation(f"{own_descriptors() - descriptors} descriptors are left open in the client")
    ledger.report.seconds = time.monotonic() - started_s
    _say_result(fault, seed, ledger.report, say)
    return ledger.report


def _try_until(fault: Fault, stage: Stage, seed: int, until_s: float) -> None:
    stage.rng.seed(f"{seed}/{fault.name}/setup")
    fault.setup(stage)
    stage.note_base()
    while not stage.ledger.report.tries or time.monotonic() < until_s:
        stage.rng.seed(f"{seed}/{fault.name}/{stage.ledger.report.tries}")
        fault.inject(stage)
        fault.verify(stage)
        stage.ledger.report.tries += 1
    stage.verify_footprint()
    if fault.effect and not stage.ledger.report.effects.get(fault.effect):
        stage.ledger.note_violation(f"the fault did nothing: {fault.effect} is 0")


@contextlib.contextmanager
def _stage(fault: Fault, seed: int, ledger: Ledger, folder: Path) -> Iterator[Stage]:
    home = folder / fault.name
    home.mkdir()
    redis = RedisServer(home / "redis") if fault.needs_redis else None
    settings = StoreSettings(
        dram_bytes=fault.dram_bytes,
        lease_s=fault.lease_s,
        ssd_bytes=fault.ssd_bytes,
        ssd_folder=home / "ssd",
        redis_url=redis.url if redis is not None else "",
    )
    stage = Stage(home, settings, ledger, rng=random.Random(seed), redis=redis)  # noqa: S311 (a schedule)
    try:
        if redis is not None:
            redis.start()
        yield stage
    finally:
        fault.teardown(stage)
        stage.close()
        if redis is not None:
            redis.stop()


@contextlib.contextmanager
def _folder(keep: bool, say: Say) -> Iterator[Path]:
    if keep:
        folder = Path(tempfile.mkdtemp(prefix="kvdrill-"))
        say(f"folders and logs stay in {folder}")
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="kvdrill-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _redis_obstacle() -> str:
    try:
        find_binary()
    except PartFailed as error:
        return str(error)
    return ""


def _say_result(fault: Fault, seed: int, report: KindReport, say: Say) -> None:
    say(
        f"{fault.name}: {report.tries} tries, {report.calls} calls, {report.blocks_served} blocks served,"
        f" {report.wrong_bytes} wrong bytes, {report.lost} lost, {report.over_deadline} over deadline,"
        f" {report.violations} violations, {report.seconds:.1f} s"
    )
    if not report.is_ok:
        say(f"{fault.name}: repeat with: kvstore drill --seed {seed} --fault {fault.name}")
