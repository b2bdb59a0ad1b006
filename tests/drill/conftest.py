"""Stages of real parts, for tests that break promises on purpose."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.drill.ledger import Ledger
from kvstore.drill.stage import Stage
from kvstore.drill.store_process import MIB, StoreSettings


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    settings = _settings(tmp_path)
    stage = Stage(tmp_path, settings, Ledger(lambda _: None), rng=random.Random(1), heal_s=0.3)
    try:
        stage.store.start()
        yield stage
    finally:
        stage.close()


@pytest.fixture
def troubled_stage(tmp_path: Path) -> Iterator[Stage]:
    settings = replace(_settings(tmp_path), is_troubled=True)
    stage = Stage(tmp_path, settings, Ledger(lambda _: None), rng=random.Random(1), heal_s=0.3)
    try:
        stage.store.start()
        yield stage
    finally:
        stage.close()


def _settings(folder: Path) -> StoreSettings:
    return StoreSettings(dram_bytes=2 * MIB, ssd_bytes=16 * MIB, ssd_folder=folder / "ssd")
