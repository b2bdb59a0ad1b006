"""The drill: real parts, injected faults, and a check of every promise after each."""

from kvstore.drill.catalogue import all_faults
from kvstore.drill.drill import DrillReport, DrillSettings, run_drill
from kvstore.drill.fault import Fault

__all__ = ["DrillReport", "DrillSettings", "Fault", "all_faults", "run_drill"]
