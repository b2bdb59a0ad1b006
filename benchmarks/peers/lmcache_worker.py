"""A client of LMCache's server, run by the interpreter that LMCache is installed for.

``lmcache_worker.py ADDRESS BLOCK_BYTES NUM_BLOCKS CHUNK_TOKENS`` registers with the server as an engine's
worker on the CPU does. Its standard input tells it what to do, a JSON list on each line; each answer is a
JSON value on a line. A block is one chunk of the server's, a request one range of a token sequence. The
payloads are the worker's own, and so are the places that blocks are fetched into.

    ["name", tokens]           a number for the sequence; its blocks take the next payloads
    ["put", [numbers]]         seconds of each
    ["fetch", [numbers]]       seconds of each
    ["match", [numbers]]       seconds of each
    ["cool", num_bytes]        writes so much other memory
    ["check"]                  whether all places hold their payloads; wipes a little of each
    ["clear"]                  everything is forgotten
"""

import contextlib
import itertools
import json
import sys
import time

import numpy as np
import torch
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

TIMEOUT_S = 30.0
START_S = 60.0
INSTANCE = 1
MODEL = "bench"


class Worker:
    """One registered worker: payloads ``[blocks, block_bytes]`` and as much to fetch into, uint8."""

    def __init__(self, address: str, block_bytes: int, num_blocks: int, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        rng = np.random.default_rng(block_bytes)
        # NumPy's memory, for its huge pages; torch's own has none.
        self._source = torch.from_numpy(rng.integers(0, 256, (num_blocks, block_bytes), np.uint8))
        self._target = torch.from_numpy(np.zeros((num_blocks, block_bytes), np.uint8))
        self._sources, self._targets = self._source.unbind(), self._target.unbind()
        self._other: np.ndarray | None = None
        self._sequences: list[tuple[tuple[int, ...], int]] = []
        self._next_row = 0
        self._requests = itertools.count()
        self._client = RequestClientFactory.create(address, context=zmq.Context())
        self._await_server()
        # One layer of one plane, a row of bytes per token: the server's chunk is as many bytes in a row.
        layers = {"layer.0": torch.zeros((1, chunk_tokens, block_bytes // chunk_tokens), dtype=torch.uint8)}
        self._context = create_transfer_context(
            layers, instance_id=INSTANCE, req_client=self._client, mode="engine_driven"
        )
        self._context.register(layers, MODEL, 1, 1, TIMEOUT_S)
        self._slots = self._context.engine_driven_context
        assert type(self._slots).__name__ == "EngineDrivenContextShm", "the server shares no memory"

    def _await_server(self) -> None:
        give_up_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(TimeoutError):
                assert self._client.get_chunk_size().result(timeout=1.0) == self._chunk_tokens
                return
            if time.monotonic() >= give_up_s:
                raise TimeoutError("LMCache's server does not answer")

    def name(self, tokens: list[int]) -> int:
        """Note a sequence, whose blocks have the next payloads."""
        count = len(tokens) // self._chunk_tokens
        if self._next_row + count > len(self._source):
            self._next_row = 0
        self._sequences.append((tuple(tokens), self._next_row))
        self._next_row += count
        return len(self._sequences) - 1

    def put(self, number: int) -> float:
        """Reserve slots, copy the payloads into them, commit."""
        tokens, row = self._sequences[number]
        key = self._key(tokens)
        started_s = time.perf_counter()
        slots, positions = self._slots.prepare_store(key, INSTANCE)
        for slot, position in zip(slots, positions, strict=True):
            slot.view(-1).copy_(self._sources[row + position])
        is_stored = self._slots.commit_store(key, INSTANCE, [])
        taken_s = time.perf_counter() - started_s
        assert is_stored
        assert len(slots) == len(tokens) // self._chunk_tokens, f"only {len(slots)} blocks found room"
        self._end(key)
        return taken_s

    def fetch(self, number: int) -> float:
        """Look the blocks up, which locks them, take their slots, copy, unlock."""
        tokens, row = self._sequences[number]
        key = self._key(tokens)
        started_s = time.perf_counter()
        found = self._look_up(key)
        slots = self._slots.prepare_retrieve(key, INSTANCE)
        for position, slot in enumerate(slots):
            self._targets[row + position].copy_(slot.view(-1))
        self._slots.commit_retrieve(key, INSTANCE)
        taken_s = time.perf_counter() - started_s
        assert found == len(slots) == len(tokens) // self._chunk_tokens, f"only {found} blocks are stored"
        self._end(key)
        return taken_s

    def match(self, number: int) -> float:
        """Look the blocks up; unlocking them again is not timed."""
        tokens, _ = self._sequences[number]
        key = self._key(tokens)
        started_s = time.perf_counter()
        found = self._look_up(key)
        taken_s = time.perf_counter() - started_s
        assert found == len(tokens) // self._chunk_tokens, f"only {found} blocks are stored"
        self._client.free_lookup_locks(key, 1).result(timeout=TIMEOUT_S)
        self._end(key)
        return taken_s

    def cool(self, num_bytes: int) -> None:
        """Write other memory, kept from call to call."""
        if self._other is None:
            self._other = np.zeros(num_bytes, np.uint8)
        self._other += 1

    def check(self) -> bool:
        """Whether every payload arrived where it belongs."""
        is_equal = torch.equal(self._source, self._target)
        self._target[:, :64] = 0
        return is_equal

    def clear(self) -> None:
        """Make the server forget all blocks."""
        self._client.clear(True).result(timeout=TIMEOUT_S)

    def close(self) -> None:
        """Leave the server."""
        self._context.unregister().result(timeout=TIMEOUT_S)
        self._context.close()
        self._client.close()

    def _key(self, tokens: tuple[int, ...]) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            worker_id=0,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=f"request-{next(self._requests)}",
            num_kv_readers=1,
        )

    def _look_up(self, key: IPCCacheServerKey) -> int:
        self._client.lookup(key.no_worker_id_version(), 1).result(timeout=TIMEOUT_S)
        found: int = self._client.wait_prefetch_status(key.request_id, TIMEOUT_S).result(timeout=TIMEOUT_S)
        return found

    def _end(self, key: IPCCacheServerKey) -> None:
        self._client.end_session(key.request_id).result(timeout=TIMEOUT_S)


def main() -> None:
    """Do as told until the input ends."""
    # A second thread for copies makes them several times slower on two cores that servers share.
    torch.set_num_threads(1)
    worker = Worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        call = getattr(worker, verb)
        answer = [call(number) for number in rest[0]] if verb in {"put", "fetch", "match"} else call(*rest)
        print(json.dumps(answer), flush=True)
    worker.close()


if __name__ == "__main__":
    main()
