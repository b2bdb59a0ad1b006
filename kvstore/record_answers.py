"""Answers to what clients ask about records."""

import json

from kvstore.messages import (
    Answer,
    Count,
    DropRecord,
    GetRecord,
    ListRecords,
    PutRecord,
    RecordFound,
    RecordWritten,
    Report,
)
from kvstore.record_store import RecordStore

RecordRequest = PutRecord | GetRecord | DropRecord | ListRecords
RECORD_REQUESTS = (PutRecord, GetRecord, DropRecord, ListRecords)
"""The requests that are answered here."""


async def answer_about_records(records: RecordStore, request: RecordRequest) -> Answer:
    """Answer one request.

    Raises:
        TierUnavailable, TimedOut: it is not known; a put ends in an outcome instead.
    """
    timeout_s = request.timeout_us / 1e6
    match request:
        case PutRecord(put, _):
            return RecordWritten(await records.put(put, timeout_s=timeout_s))
        case GetRecord(key, _):
            return RecordFound(await records.get(key, timeout_s=timeout_s))
        case DropRecord(key, _):
            return Count(int(await records.drop(key, timeout_s=timeout_s)))
        case ListRecords(salt, collection, prefix, after, limit, _):
            found = await records.names(
                salt, collection, prefix=prefix, after=after, limit=limit, timeout_s=timeout_s
            )
            return Report(json.dumps([info.as_dict() for info in found]).encode())
