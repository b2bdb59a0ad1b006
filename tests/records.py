"""Records of a store in memory, for tests of what stands above them."""

import time

from kvstore.record_store import RecordStore
from kvstore.record_truth import LocalTruth
from kvstore_tiers.record_codec import PlainCodec
from kvstore_tiers.record_local import LocalRecords

MIB = 1 << 20


def memory_records(*, capacity_bytes: int = 16 * MIB, quota_bytes: int = 16 * MIB) -> RecordStore:
    """Return records in memory that are not open yet."""
    local = LocalRecords(None, capacity_bytes=capacity_bytes, clock=time.monotonic, wall_s=time.time)
    return RecordStore(LocalTruth(local, PlainCodec(), capacity_bytes, quota_bytes))
