"""Faults of single disk operations: the N-th one fails, is torn or cut short; all hang, or are slow."""

import errno
import time
from typing import ClassVar

from kvstore.drill.fault import Fault
from kvstore.drill.load import Load
from kvstore.drill.stage import HEAL_S, HEALTH_S, Stage
from kvstore.drill.store_process import wait_until
from kvstore.drill.trouble import Harm, Operation, TroubleOrder

_EXIT_USAGE = 2
_END_S = 30.0
_STARTS_PER_CHECK = 7
_HARMED = "operations_harmed"
_SWEEPS = "sweeps_completed"


class _EachOperation(Fault):
    """One more operation goes wrong in each try, until there are fewer than that; then all over again."""

    is_troubled = True
    weight = 2.0
    try_s = 2.5
    effect = _HARMED
    harms: ClassVar[tuple[tuple[Harm, int], ...]] = ((Harm.FAIL, errno.EIO),)

    def __init__(self) -> None:
        self._number = 1
        self._sweeps = 0

    @property
    def is_unfinished(self) -> bool:
        """Whether no sweep was completed yet."""
        return not self._sweeps

    def next_order(self) -> TroubleOrder:
        """Return the order of the next try."""
        harm, error = self.harms[self._sweeps % len(self.harms)]
        return TroubleOrder(fail_at=self._number, harm=harm.value, error=error)

    def note(self, stage: Stage, num_harmed: int) -> bool:
        """Note how many operations went wrong in a try; True if that was the end of a sweep."""
        stage.ledger.note_effect(_HARMED, num_harmed)
        if num_harmed:
            self._number += 1
            return False
        stage.ledger.note_effect(_SWEEPS, 1)
        self._number, self._sweeps = 1, self._sweeps + 1
        return True


class ErrorAtEachOperation(_EachOperation):
    """See the description."""

    name = "error_at_each_operation"
    description = (
        "the N-th disk operation of a running store fails (EIO), is torn (EIO) or finds no space, for every N"
    )
    harms: ClassVar[tuple[tuple[Harm, int], ...]] = (
        (Harm.FAIL, errno.EIO),
        (Harm.TEAR, errno.EIO),
        (Harm.FAIL, errno.ENOSPC),
    )

    def inject(self, stage: Stage) -> None:
        """Let one operation go wrong while blocks are written, read from disk, and dropped."""
        stage.fill_durable(3)
        chains = stage.journal.durable_chains()
        stage.empty_dram()
        stage.disk.order(self.next_order())
        chain = stage.new_chain(3)
        stage.put(chain)
        stage.client.flush()
        for known in chains[:2]:
            stage.get(known)
        stage.client.drop(chain)
        stage.client.flush()
        if self.note(stage, stage.disk.end().num_harmed):
            stage.restart()
            # A delete that failed is made up for when the copy is looked at: its bytes are others' by now.
            stage.drop_damaged()

    def verify(self, stage: Stage) -> None:
        """Check every promise, and that blocks become durable again."""
        stage.verify()
        stage.verify_becomes_durable()


class ShortTransferAtEachOperation(ErrorAtEachOperation):
    """See the description."""

    name = "short_transfer_at_each_operation"
    description = "the N-th disk operation of a running store moves half of what was asked for, for every N"
    harms = ((Harm.SHORTEN, 0),)


class ErrorAtEachOperationOfStart(_EachOperation):
    """See the description."""

    name = "error_at_each_operation_of_start"
    try_s = 10.0
    description = (
        "the N-th disk operation of a start fails (EIO), for every N: refused with a message, or sound"
    )

    def inject(self, stage: Stage) -> None:
        """Start some times, each a try with another operation going wrong, and then once without."""
        for number in range(_STARTS_PER_CHECK):
            stage.ledger.report.tries += number > 0
            if stage.store.is_running:
                (stage.store.kill if stage.rng.random() < 0.5 else stage.store.terminate)()
            if self._start(stage):
                break
        stage.ensure_running()

    def _start(self, stage: Stage) -> bool:
        """Start with one operation going wrong; True at the end of a sweep."""
        stage.store.launch(order=self.next_order().to_json())
        status = stage.store.wait_ready()
        if status is None:
            return self.note(stage, stage.disk.end().num_harmed)
        words = stage.store.last_words()
        if status != _EXIT_USAGE or str(stage.ssd_folder) not in words:
            stage.ledger.note_violation(f"a start on a failing disk: status {status}: {words}")
        return self.note(stage, 1)


class _HeldUp(Fault):
    """Operations that take long: what is in memory is served as ever, and no call waits for the disk."""

    is_troubled = True
    effect = "operations_held_up"

    def use(self, stage: Stage, order: TroubleOrder, duration_s: float) -> None:
        """Put, get and match for a while under the order."""
        chain = stage.new_chain(4)
        stage.put(chain, timeout_s=HEAL_S)
        stage.disk.order(order)
        if not wait_until(lambda: stage.get(chain).blocks == len(chain), HEALTH_S):
            stage.ledger.note_violation("a block in memory is not served while the disk is slow")
        with Load(stage, acknowledges=False):
            until_s = time.monotonic() + duration_s
            while time.monotonic() < until_s:
                for known in stage.journal.durable_chains()[:3]:
                    stage.get(known)
                stage.answers()
        stage.ledger.note_effect(self.effect, stage.disk.status().num_held)

    def concerned(self, stage: Stage) -> tuple[str, ...]:
        """Return which operations are held up: one kind, or all."""
        every = (Operation.READ.value, Operation.WRITE.value, Operation.SYNC.value)
        return every if stage.rng.random() < 0.4 else (stage.rng.choice(every),)


class DiskStuck(_HeldUp):
    """See the description."""

    name = "disk_stuck"
    description = "disk operations hang for up to a second: every call ends by its deadline, then all goes on"

    def inject(self, stage: Stage) -> None:
        """Let operations hang, and go on."""
        stage.fill_durable(8)
        stage.empty_dram()
        order = TroubleOrder(is_stuck=True, concerns=self.concerned(stage))
        self.use(stage, order, stage.rng.uniform(0.1, 1.0))
        stage.disk.end()

    def verify(self, stage: Stage) -> None:
        """Check every promise, and that blocks become durable again."""
        stage.verify()
        stage.verify_becomes_durable()


class TerminateWithStuckDisk(_HeldUp):
    """See the description."""

    name = "terminate_with_stuck_disk"
    description = "SIGTERM while disk operations hang for good: the store ends within 30 s, and starts again"
    try_s = 15.0

    def inject(self, stage: Stage) -> None:
        """Let operations hang, and end the store."""
        stage.fill_durable(8)
        stage.empty_dram()
        order = TroubleOrder(is_stuck=True, concerns=self.concerned(stage))
        self.use(stage, order, stage.rng.uniform(0.05, 0.3))
        started_s = time.monotonic()
        status = stage.store.terminate()
        took_s = time.monotonic() - started_s
        if status or took_s > _END_S:
            stage.ledger.note_violation(
                f"told to end with a stuck disk, the store ended with status {status} after {took_s:.1f} s"
            )
        stage.store.start()


class DiskSlow(_HeldUp):
    """See the description."""

    name = "disk_slow"
    description = "every disk operation takes up to 0.3 s: memory serves as ever, and no call waits for it"

    def inject(self, stage: Stage) -> None:
        """Let operations be slow for up to a second."""
        stage.fill_durable(8)
        stage.empty_dram()
        order = TroubleOrder(delay_s=stage.rng.uniform(0.02, 0.3), concerns=self.concerned(stage))
        self.use(stage, order, stage.rng.uniform(0.2, 1.0))
        stage.disk.end()


def io_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (
        ErrorAtEachOperation(),
        ShortTransferAtEachOperation(),
        DiskStuck(),
        DiskSlow(),
        TerminateWithStuckDisk(),
        ErrorAtEachOperationOfStart(),
    )
