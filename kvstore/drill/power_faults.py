"""A power loss: the store's disk is put into a state that its writes so far may have left."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvstore.drill.fault import Fault
from kvstore.drill.load import Load
from kvstore.drill.stage import Stage, pause
from kvstore.drill.trouble import TroubleOrder
from kvstore.drill.write_log import WriteRecord, lose_power, num_at_risk, read_log


class PowerLoss(Fault):
    """See the description."""

    name = "power_loss"
    description = (
        "power is lost at a random write under load: what was not synced is lost, torn or there, at random"
    )
    is_troubled = True
    effect = "writes_replayed"
    weight = 3.0
    try_s = 3.0

    def inject(self, stage: Stage) -> None:
        """Log all writes under load, kill the store, and start it on what a power loss leaves."""
        stage.fill_durable(8)
        log, base = stage.folder / "writes.log", stage.folder / "base"
        stage.disk.order(TroubleOrder(log_path=str(log)))
        _copy_still(stage, base)
        stage.journal.position = lambda: log.stat().st_size
        with Load(stage):
            stage.put_durable(stage.new_chain(2))
            pause(stage.rng.uniform(0.02, 0.3))
            stage.store.kill()
        stage.journal.position = lambda: 0
        records = read_log(log)
        lived = _until_power_loss(records, stage.rng)
        stage.journal.forget_after(lived[-1].end_bytes)
        num_lost = lose_power(base, stage.ssd_folder, lived, stage.rng)
        stage.ledger.note_effect(self.effect, sum(not record.is_sync for record in lived))
        stage.ledger.note_effect("writes_lost_or_torn", num_lost)
        stage.store.start()


def _until_power_loss(records: Sequence[WriteRecord], rng: random.Random) -> Sequence[WriteRecord]:
    """Return the records up to a random one, more often one that leaves much unsynced."""
    candidates = [records[: rng.randint(1, len(records))] for _ in range(rng.choice((1, 8)))]
    return max(candidates, key=num_at_risk)


def _copy_still(stage: Stage, target: Path) -> None:
    """Copy the folder at one moment between two writes of the store."""
    if target.exists():
        shutil.rmtree(target)
    stage.store.pause()
    try:
        shutil.copytree(stage.ssd_folder, target)
    finally:
        stage.store.resume()


def power_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (PowerLoss(),)
