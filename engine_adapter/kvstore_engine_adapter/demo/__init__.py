"""The demo: two nodes, real processes and model; each tier is hit, timed and checked against no store."""

from kvstore_engine_adapter.demo.processes import DemoFailed
from kvstore_engine_adapter.demo.scenario import (
    DemoReport,
    DemoSettings,
    PreparedDemo,
    prepare_demo,
    run_demo,
)

__all__ = [
    "DemoFailed",
    "DemoReport",
    "DemoSettings",
    "PreparedDemo",
    "prepare_demo",
    "run_demo",
]
