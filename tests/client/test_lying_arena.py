"""Clients of a server whose arena is real, and which names slots that are not in it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, KVStore, MissReason, PrefixChain
from kvstore.drill.store_process import wait_until
from kvstore.messages import (
    Answer,
    Commit,
    Count,
    Fetch,
    Lent,
    LentSlot,
    Peek,
    Ready,
    ReadySlot,
    Release,
    Request,
    Reserve,
    ReturnSlots,
    Seen,
    TierNames,
)
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT
from tests.client.facade import SyncFace
from tests.client.lying_arena import lying_server

OUTSIDE = {
    "behind the arena": 1 << 40,
    "no multiple of a page": 4097,
    "in the header": 0,
    "the last page, where a block does not fit": (1 << 20) + 4096,
    "the largest number there is": (1 << 64) - 1,
}


def _seen(offset: int) -> Callable[[Request], Answer | None]:
    def answer(request: Request) -> Answer | None:
        if isinstance(request, Peek):
            return Seen(BLOCK_BYTES, (ReadySlot(offset, 1, 0),) * len(request.about.chain), "dram")
        return _lent(offset)(request)

    return answer


def _ready(offset: int) -> Callable[[Request], Answer | None]:
    def answer(request: Request) -> Answer | None:
        if isinstance(request, Peek | Fetch):
            slots = (ReadySlot(offset, 1, 0),) * len(request.about.chain)
            return Ready(7, BLOCK_BYTES, slots, TierNames.of(["dram"] * len(slots)), None)
        return _lent(offset)(request)

    return answer


def _lent(offset: int) -> Callable[[Request], Answer | None]:
    def answer(request: Request) -> Answer | None:
        if isinstance(request, Release | ReturnSlots):
            return None
        if isinstance(request, Reserve):
            return Lent(tuple(LentSlot(at, offset, 1) for at in range(len(request.about.chain))), 0)
        assert isinstance(request, Commit), f"{request} was not expected"
        return Count(len(request.slots))

    return answer


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("lie", [_seen, _ready], ids=["seen", "ready"])
@pytest.mark.parametrize("offset", OUTSIDE.values(), ids=OUTSIDE)
async def test_a_slot_outside_the_arena_is_a_counted_miss_and_ends_the_connection(
    tmp_path: Path,
    chain: PrefixChain,
    payloads: np.ndarray,
    kind: str,
    lie: Callable[[int], Callable[[Request], Answer | None]],
    offset: int,
) -> None:
    path = tmp_path / "kv.sock"
    with lying_server(path, lie(offset)) as server:
        face = KVStore.connect(path, timeouts=PATIENT)
        client = SyncFace(face) if kind == "sync" else await AsyncKVStore.connect(path, timeouts=PATIENT)
        await client.open_namespace(NAMESPACE)

        found = await client.fetch_into(chain, np.zeros_like(payloads))
        assert (found.blocks, found.reason) == (0, MissReason.UNAVAILABLE)
        assert wait_until(lambda: server.num_ended == 1, 30)

        put = await client.put(chain, payloads)
        assert (put.stored, put.present, put.dropped) == (0, 0, 8)
        assert wait_until(lambda: server.num_ended == 2, 30)

        stats = client.client_stats()
        assert (stats.protocol_errors, stats.unavailable) == (2, 2)
        await client.close()
        face.close()
