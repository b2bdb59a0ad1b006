"""The drill: each kind of fault in turn, within a time, from a seed, and what came of it."""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.drill.fault import Fault
from kvstore.drill.ledger import KindReport, Ledger
from kvstore.drill.stage import Stage, own_descriptors
from kvstore.drill.stages import Stages
from kvstore.errors import KVStoreError

_log = logging.getLogger(__name__)

_DESCRIPTORS_ROOM = 4
_STARTS_MAX = 5
_GRACE = 1.25
_FINISH_SHARE = 0.1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DrillSettings:
    """How long the drill may take, the seed of every random choice, and which faults to try."""

    faults: Sequence[Fault]
    seconds: float = 120.0
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

    @property
    def kinds_skipped(self) -> int:
        """Kinds of fault that were not tried."""
        return sum(bool(kind.skipped) for kind in self.faults.values())

    @property
    def kinds_tried(self) -> int:
        """Kinds of fault that were tried: of others nothing is known."""
        return len(self.faults) - self.kinds_skipped

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        kinds = self.faults.values()
        return {
            "ok": self.is_ok,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "kinds_tried": self.kinds_tried,
            "kinds_skipped": self.kinds_skipped,
            "tries": sum(kind.tries for kind in kinds),
            "wrong_bytes": sum(kind.wrong_bytes for kind in kinds),
            "lost_durable": sum(kind.lost for kind in kinds),
            "over_deadline": sum(kind.over_deadline for kind in kinds),
            "violations": sum(kind.violations for kind in kinds),
            "faults": {name: kind.as_dict() for name, kind in self.faults.items()},
        }


def run_drill(settings: DrillSettings, say: Say) -> DrillReport:
    """Try every fault; progress and violations go to ``say``. Ends all it starts.

    Each kind gets what one try of it takes, and its share of what is left of the time beyond that. Should
    one try of each take a quarter longer than the time given, the rest is skipped.
    """
    report = DrillReport(settings.seed)
    started_s = time.monotonic()
    with _folder(settings.keep, say) as folder, Stages(folder) as stages:
        for index, fault in enumerate(settings.faults):
            took_s = time.monotonic() - started_s
            if took_s > _GRACE * settings.seconds:
                reason = stages.obstacle(fault) or f"no time left: give more than {took_s:.0f} s"
                report.faults[fault.name] = KindReport(skipped=reason)
                continue
            share_s = share_of_time(settings.faults[index:], settings.seconds - took_s)
            report.faults[fault.name] = _Kind(fault, settings, stages, say).run(share_s)
    report.seconds = time.monotonic() - started_s
    return report


def share_of_time(faults: Sequence[Fault], left_s: float) -> float:
    """Return what the first of these kinds gets of the time left for all."""
    first = faults[0]
    needed_s = sum(fault.try_s for fault in faults)
    if left_s < needed_s:
        return left_s * first.try_s / needed_s
    return first.try_s + (left_s - needed_s) * first.weight / sum(fault.weight for fault in faults)


class _Kind:
    """The tries of one kind of fault."""

    def __init__(self, fault: Fault, settings: DrillSettings, stages: Stages, say: Say) -> None:
        self._fault = fault
        self._seed = settings.seed
        self._finish_s = _FINISH_SHARE * settings.seconds
        self._stages = stages
        self._say = say
        self._ledger = Ledger(self._complain)

    def run(self, share_s: float) -> KindReport:
        """Try it until its share of the time is over; one try that cannot go on does not end the others."""
        fault, ledger = self._fault, self._ledger
        reason = self._stages.obstacle(fault)
        if reason:
            ledger.report.skipped = reason
            self._say(f"{fault.name}: skipped: {reason}")
            return ledger.report
        started_s, descriptors = time.monotonic(), own_descriptors()
        for _ in range(_STARTS_MAX):
            if self._try_until(started_s + share_s):
                break
        left_open = own_descriptors() - descriptors
        if left_open > _DESCRIPTORS_ROOM:
            ledger.note_violation(f"{left_open} descriptors are left open in the client's process")
        if fault.effect and not ledger.report.effects.get(fault.effect):
            ledger.note_violation(f"the fault did nothing: {fault.effect} is 0")
        ledger.report.seconds = time.monotonic() - started_s
        self._say_result()
        return ledger.report

    def _try_until(self, until_s: float) -> bool:
        """Return False if it must begin anew, with parts that are not spoilt."""
        fault, report = self._fault, self._ledger.report
        stage: Stage | None = None
        has_ended = False
        try:
            stage = self._stages.lend(fault, self._ledger)
            self._try_on(stage, until_s)
            has_ended = True
        except (KVStoreError, OSError) as error:
            self._ledger.note_violation(f"the try could not go on: {error}")
        except Exception as error:
            _log.exception("%s: the try failed", fault.name)
            self._ledger.note_violation(f"the try could not go on: {type(error).__name__}: {error}")
        finally:
            if stage is not None:
                self._stages.give_back(fault, stage, is_sound=has_ended and report.is_ok)
        return has_ended or time.monotonic() >= until_s

    def _try_on(self, stage: Stage, until_s: float) -> None:
        fault, report = self._fault, self._ledger.report
        stage.rng.seed(f"{self._seed}/{fault.name}/setup")
        fault.setup(stage)
        stage.note_base()
        started_s, tries_before = time.monotonic(), report.tries
        finish_s = max(until_s, started_s + self._finish_s)

        def has_time() -> bool:
            """Whether most of another try fits, by what those so far took."""
            took_s = time.monotonic() - started_s
            each_s = took_s / max(1, report.tries - tries_before)
            return started_s + took_s + each_s / 2 < (finish_s if fault.is_unfinished else until_s)

        while not report.tries or has_time():
            report.tries += 1
            stage.rng.seed(f"{self._seed}/{fault.name}/{report.tries}")
            fault.inject(stage)
            fault.verify(stage)
        stage.verify_footprint()

    def _complain(self, line: str) -> None:
        self._say(f"{self._fault.name}: VIOLATION in try {self._ledger.report.tries}: {line}")

    def _say_result(self) -> None:
        name, report = self._fault.name, self._ledger.report
        self._say(
            f"{name}: {report.tries} tries, {report.calls} calls, {report.blocks_served} blocks served,"
            f" {report.wrong_bytes} wrong bytes, {report.lost} lost, {report.over_deadline} over deadline,"
            f" {report.violations} violations, {report.seconds:.1f} s"
        )
        if not report.is_ok:
            self._say(f"{name}: repeat with: kvstore drill --seed {self._seed} --fault {name}")


@contextlib.contextmanager
def _folder(keep: bool, say: Say) -> Iterator[Path]:
    if keep:
        folder = Path(tempfile.mkdtemp(prefix="kvdrill-"))
        say(f"folders and logs stay in {folder}")
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="kvdrill-", ignore_cleanup_errors=True) as name:
        yield Path(name)
