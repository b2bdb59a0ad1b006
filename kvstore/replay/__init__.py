"""Replay of recorded traffic through eviction policies, and the best that any of them could do."""

from kvstore.progress import ProgressBar
from kvstore.replay.bound import next_uses, replay_bound
from kvstore.replay.choosing import NamedPolicy, own_policy, policy_names, policy_of, require_distinct
from kvstore.replay.curves import draw_curves
from kvstore.replay.lru_curve import LruCurve, lru_curve
from kvstore.replay.outcome import BOUND, Prices, ReplayResult, Tally, TierTally
from kvstore.replay.reading import FORMATS, read_trace
from kvstore.replay.report import as_dict, sizing, table
from kvstore.replay.runs import ReplayPlan, default_capacities, replay
from kvstore.replay.tiers import TieredCache, TierSize
from kvstore.replay.trace import Trace, TraceRequest

__all__ = [
    "BOUND",
    "FORMATS",
    "LruCurve",
    "NamedPolicy",
    "Prices",
    "ProgressBar",
    "ReplayPlan",
    "ReplayResult",
    "Tally",
    "TierSize",
    "TierTally",
    "TieredCache",
    "Trace",
    "TraceRequest",
    "as_dict",
    "default_capacities",
    "draw_curves",
    "lru_curve",
    "next_uses",
    "own_policy",
    "policy_names",
    "policy_of",
    "read_trace",
    "replay",
    "replay_bound",
    "require_distinct",
    "sizing",
    "table",
]
