"""Runs in vLLM's own environment: reads a store's KV events with vLLM's classes, live and by a replay.

``events_reader.py ENDPOINT REPLAY``: prints ``listening``, ``heard`` after the first batch, and once stdin
has a line (or ends) one JSON object of what it decoded. Any fault ends it with a traceback.
"""

import json
import select
import sys

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

DECODER = msgspec.msgpack.Decoder(type=KVEventBatch)
PATIENCE_MS = 60_000


def main() -> None:
    """Read until told to end."""
    endpoint, replay = sys.argv[1:]
    context = zmq.Context()
    live = read_live(context, endpoint)
    replayed = read_replay(context, replay)
    classes = (BlockStored, BlockRemoved, AllBlocksCleared, KVEventBatch)
    told = {
        "fields": {one.__name__: fields_of(one) for one in classes},
        "live": live,
        "replayed": replayed,
        "topics": sorted({batch["topic"] for batch in live}),
    }
    print(json.dumps(told), flush=True)  # noqa: T201  # its output
    context.destroy(linger=0)


def fields_of(struct: type) -> list[list[object]]:
    """Return name of each field, and whether it must be given."""
    return [[field.encode_name, field.required] for field in msgspec.structs.fields(struct)]


def read_live(context: zmq.Context, endpoint: str) -> list[dict]:
    """Return the batches that come until stdin has a line."""
    sock = context.socket(zmq.SUB)
    sock.connect(endpoint)
    sock.setsockopt(zmq.SUBSCRIBE, b"")
    print("listening", flush=True)  # noqa: T201  # its output
    found: list[dict] = []
    while not select.select([sys.stdin], [], [], 0)[0]:
        if sock.poll(100):
            topic, number, payload = sock.recv_multipart()
            found.append(decoded(topic, number, payload))
            if len(found) == 1:
                print("heard", flush=True)  # noqa: T201  # its output
    return found


def read_replay(context: zmq.Context, endpoint: str) -> list[dict]:
    """Return all that the publisher still has, from batch 0 on."""
    sock = context.socket(zmq.DEALER)
    sock.connect(endpoint)
    sock.send_multipart([b"", (0).to_bytes(8, "big")])
    found: list[dict] = []
    while sock.poll(PATIENCE_MS):
        empty, topic, number, payload = sock.recv_multipart()
        assert empty == b"", empty
        if number == ZmqEventPublisher.END_SEQ:
            return found
        found.append(decoded(topic, number, payload))
    raise AssertionError("a replay without an end")


def decoded(topic: bytes, number: bytes, payload: bytes) -> dict:
    """Return a batch as vLLM's classes see it."""
    batch = DECODER.decode(payload)
    return {
        "topic": topic.decode(),
        "number": int.from_bytes(number, "big"),
        "time_s": batch.ts,
        "rank": batch.data_parallel_rank,
        "events": [{"class": type(event).__name__, **msgspec.to_builtins(event)} for event in batch.events],
    }


if __name__ == "__main__":
    main()
