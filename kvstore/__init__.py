"""Tiered KV-cache storage for LLM inference: names, layouts and the clients."""

from kvstore.async_client import AsyncKVStore
from kvstore.calls import FetchResult
from kvstore.client import KVStore
from kvstore.client_state import ClientStats, Timeouts
from kvstore.errors import KVStoreError
from kvstore.held import AsyncLease, AsyncReservation, Lease, LeasedMatch, Reservation, WritableBlock
from kvstore.hints import Hints
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout, Part
from kvstore.miss import MissReason
from kvstore.records import (
    Record,
    RecordAbsence,
    RecordInfo,
    RecordLookup,
    RecordOutcome,
    RecordPlace,
    RecordWrite,
)
from kvstore.results import EraseReport, PrefixMatch, PutResult

__version__ = "0.1.0"

__all__ = [
    "AsyncKVStore",
    "AsyncLease",
    "AsyncReservation",
    "BlockKey",
    "ClientStats",
    "EraseReport",
    "FetchResult",
    "Hints",
    "KVLayout",
    "KVStore",
    "KVStoreError",
    "Lease",
    "LeasedMatch",
    "MissReason",
    "Namespace",
    "Part",
    "PrefixChain",
    "PrefixMatch",
    "PutResult",
    "Record",
    "RecordAbsence",
    "RecordInfo",
    "RecordLookup",
    "RecordOutcome",
    "RecordPlace",
    "RecordWrite",
    "Reservation",
    "Timeouts",
    "WritableBlock",
    "__version__",
]
