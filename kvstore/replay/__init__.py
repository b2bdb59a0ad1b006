"""Replay of recorded traffic through eviction policies, and the best that any of them could do."""

from kvstore.replay.bound import next_uses, replay_bound
from kvstore.replay.lru_curve import LruCurve, lru_curve
from kvstore.replay.reading import FORMATS, read_trace
from kvstore.replay.trace import Trace, TraceRequest

__all__ = [
    "FORMATS",
    "LruCurve",
    "Trace",
    "TraceRequest",
    "lru_curve",
    "next_uses",
    "read_trace",
    "replay_bound",
]
