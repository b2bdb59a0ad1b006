"""A stage whose disk has trouble: what the drill would see if the store broke its promises."""

import contextlib
import errno
import shutil
from pathlib import Path

import pytest

from kvstore.drill.disk_control import DiskControl
from kvstore.drill.stage import Stage
from kvstore.drill.store_process import PartFailed
from kvstore.drill.trouble import TroubleOrder
from kvstore.drill.write_log import lose_power, read_log
from kvstore.errors import TimedOut


def test_a_disk_that_fails_makes_nothing_durable_and_is_used_again_afterwards(troubled_stage: Stage) -> None:
    stage = troubled_stage
    stage.disk.order(TroubleOrder(fail_at=1, error=errno.EIO))

    assert not stage.put_durable(stage.new_chain(1))

    assert stage.disk.end().num_harmed == 1
    stage.verify_becomes_durable()
    stage.verify()
    assert stage.ledger.report.notes == []


def test_a_store_that_did_not_sync_would_lose_blocks_in_a_power_loss(troubled_stage: Stage) -> None:
    stage, log, base = troubled_stage, troubled_stage.folder / "log", troubled_stage.folder / "base"
    stage.disk.order(TroubleOrder(log_path=str(log)))
    shutil.copytree(stage.ssd_folder, base)
    assert stage.put_durable(stage.new_chain(4))
    stage.store.kill()
    writes = [record for record in read_log(log) if not record.is_sync]
    assert len(writes) >= 2  # payloads in touching slots go by one write, and then there is the index

    lose_power(base, stage.ssd_folder, [], stage.rng)  # as if none of it had reached the disk
    stage.store.start()
    stage.verify_durable()

    assert stage.ledger.report.lost == 4


def test_a_power_loss_after_all_of_it_loses_nothing(troubled_stage: Stage) -> None:
    stage, log, base = troubled_stage, troubled_stage.folder / "log", troubled_stage.folder / "base"
    stage.disk.order(TroubleOrder(log_path=str(log)))
    shutil.copytree(stage.ssd_folder, base)
    assert stage.put_durable(stage.new_chain(4))
    stage.store.kill()

    lose_power(base, stage.ssd_folder, read_log(log), stage.rng)
    stage.store.start()
    stage.verify()

    assert stage.ledger.report.notes == []
    assert stage.ledger.report.blocks_served == 4


def test_a_stuck_disk_is_told_and_let_go(troubled_stage: Stage) -> None:
    stage = troubled_stage
    stage.disk.order(TroubleOrder(is_stuck=True))
    stage.put(stage.new_chain(1))
    with contextlib.suppress(TimedOut):  # on a busy machine the answer may be late
        assert not stage.client.flush(timeout_s=0.2)

    assert stage.disk.end().num_held >= 1

    assert stage.client.flush(timeout_s=30)


def test_a_store_that_is_gone_takes_no_orders(tmp_path: Path) -> None:
    with pytest.raises(PartFailed, match="takes no orders"):
        DiskControl(tmp_path / "none").status()
