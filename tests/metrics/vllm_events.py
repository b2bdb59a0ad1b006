"""What vLLM 0.32's kv_events module declares of its events, and its way to decode and to ask for replays.

The scenario ``events`` of scripts/test-engines compares this with vLLM's own classes, and decodes with those.
"""

import typing
from typing import Any

import msgspec
import zmq

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A map that names its type."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def field_names():
    """Name of each field of each class, and whether it must be given."""
    classes = (BlockStored, BlockRemoved, AllBlocksCleared, KVEventBatch)
    return {
        one.__name__: [[field.encode_name, field.required] for field in msgspec.structs.fields(one)]
        for one in classes
    }


def array_decoder():
    """A decoder of the form of vLLM's earlier classes, which llm-d reads: an array behind the type."""
    declared = {}
    for one in (BlockStored, BlockRemoved, AllBlocksCleared):
        kinds = typing.get_type_hints(one)
        fields = [
            (field.encode_name, kinds[field.encode_name])
            if field.required
            else (field.encode_name, kinds[field.encode_name], field.default)
            for field in msgspec.structs.fields(one)
        ]
        declared[one.__name__] = msgspec.defstruct(
            one.__name__, fields, array_like=True, tag=True, omit_defaults=True
        )
    batch = msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[typing.Union[tuple(declared.values())]]), ("rank", int | None, None)],  # noqa: UP007
        array_like=True,
    )
    return msgspec.msgpack.Decoder(type=batch)


DECODER = msgspec.msgpack.Decoder(type=KVEventBatch)


class Subscriber:
    """A router that keeps its picture of who holds what, and fills gaps by asking for replays."""

    def __init__(self, endpoint, replay=None, *, topic=b"", curve=None):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._replay = replay
        self._curve = curve
        if curve:
            self._secure(self.socket)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.holders = {}  # block -> media
        self.numbers = []
        self.batches = []

    def _secure(self, sock):
        sock.curve_serverkey, sock.curve_publickey, sock.curve_secretkey = self._curve

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self._context.term()

    def receive(self, timeout_s=0.2):
        """Take in what came; False if nothing did in time."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return False
        _, number, payload = self.socket.recv_multipart()
        self.take_in(int.from_bytes(number, "big"), payload)
        return True

    def take_in(self, number, payload):
        batch = DECODER.decode(payload)
        self.numbers.append(number)
        self.batches.append(batch)
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.holders.clear()
                case BlockStored():
                    for block in event.block_hashes:
                        self.holders.setdefault(block, set()).add(event.medium)
                case BlockRemoved():
                    for block in event.block_hashes:
                        self.holders.get(block, set()).discard(event.medium)

    def replayed(self, start):
        """Return the batches from a number on that the publisher still has."""
        found = []
        for _, number, payload in self.frames(start):
            if number == END_OF_REPLAY:
                return found
            found.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("a replay without an end")

    def frames(self, start, timeout_s=30):
        """Ask for a replay; yields topic, number and payload of what comes, its end included."""
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        if self._curve:
            self._secure(sock)
        sock.connect(self._replay)
        number = b""
        try:
            sock.send_multipart([b"", start.to_bytes(8, "big")])
            while number != END_OF_REPLAY and sock.poll(int(timeout_s * 1000)):
                empty, topic, number, payload = sock.recv_multipart()
                assert empty == b""
                yield topic, number, payload
        finally:
            sock.close()
