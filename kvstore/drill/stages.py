"""Stages: makes the parts that kinds of fault work on, and lends sound ones again: a start costs a second."""

import random
import secrets
from collections.abc import Callable
from pathlib import Path

from kvstore.drill.disk_control import trouble_obstacle
from kvstore.drill.fault import Fault
from kvstore.drill.ledger import Ledger
from kvstore.drill.redis_server import RedisServer, redis_obstacle
from kvstore.drill.stage import Stage
from kvstore.drill.store_process import StoreSettings

_POLICIES = ("gittins", "lru")
_POLICIES_BY_TIER = (*_POLICIES, "lru, ssd=gittins")
"""Stages have them in turn. No kind of fault may count on which blocks stay."""


class Stages:
    """Owner of the stage in use. A context that ends its parts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_made = 0
        self._kept: Stage | None = None
        self._kept_for: tuple[object, ...] = ()
        self._obstacles: dict[str, str] = {}

    def __enter__(self) -> "Stages":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def obstacle(self, fault: Fault) -> str:
        """Return why a kind cannot be tried on this machine; empty if it can."""
        reason = fault.obstacle()
        if not reason and fault.needs_redis:
            reason = self._obstacle("redis", redis_obstacle)
        if not reason and fault.is_troubled:
            reason = self._obstacle("trouble", trouble_obstacle)
        return reason

    def _obstacle(self, name: str, find: Callable[[], str]) -> str:
        if name not in self._obstacles:
            self._obstacles[name] = find()
        return self._obstacles[name]

    def lend(self, fault: Fault, ledger: Ledger) -> Stage:
        """Return a stage for a kind: the one that was kept if it is of that form, else a new one."""
        if self._kept is not None and self._kept_for != _wants(fault):
            self.close()
        stage, self._kept = self._kept, None
        if stage is None:
            return self._make(fault, ledger)
        stage.ledger = ledger
        return stage

    def give_back(self, fault: Fault, stage: Stage, *, is_sound: bool) -> None:
        """Take a stage back; one that is not sound, or not like others, is ended."""
        fault.teardown(stage)
        self._kept, self._kept_for = stage, _wants(fault)
        if not (is_sound and fault.shares_stage):
            self.close()

    def close(self) -> None:
        """End the stage that is kept, if there is one."""
        stage, self._kept = self._kept, None
        if stage is not None:
            stage.close()

    def _make(self, fault: Fault, ledger: Ledger) -> Stage:
        self._num_made += 1
        folder = self._folder / f"{self._num_made}-{fault.name}"
        folder.mkdir()
        master_keys: Path | None = None
        if fault.is_encrypted:
            master_keys = folder / "master.keys"
            master_keys.write_text(f"{secrets.token_hex(32)}\n")
        policies = _POLICIES_BY_TIER if fault.ssd_bytes else _POLICIES
        redis = RedisServer(folder / "redis") if fault.needs_redis else None
        settings = StoreSettings(
            dram_bytes=fault.dram_bytes,
            lease_s=fault.lease_s,
            ssd_bytes=fault.ssd_bytes,
            ssd_folder=folder / "ssd",
            redis_url=redis.url if redis is not None else "",
            is_troubled=fault.is_troubled,
            master_keys=master_keys,
            policy=policies[(self._num_made - 1) % len(policies)],
        )
        stage = Stage(folder, settings, ledger, rng=random.Random(), redis=redis)  # noqa: S311 (a schedule)
        if redis is not None:
            redis.start()
        return stage


def _wants(fault: Fault) -> tuple[object, ...]:
    parts = (fault.shares_stage, fault.needs_redis, fault.is_troubled, fault.is_encrypted)
    return (*parts, fault.dram_bytes, fault.ssd_bytes, fault.lease_s)
