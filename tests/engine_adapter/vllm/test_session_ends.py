"""SessionEnds: what waits to be told to a store is bounded."""

import threading
from typing import Any

from kvstore import KVLayout, Namespace
from kvstore.hints import Hints
from kvstore_engine_adapter.vllm.session_ends import SessionEnds

CHAIN = Namespace("m", KVLayout.opaque(block_bytes=4096, block_tokens=1)).chain(range(3))


class HangingStore:
    """A client whose store does not answer until it is let go."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.num_told = 0

    def hint(self, *_: Any, **__: Any) -> None:
        assert self.answers.wait(60)
        self.num_told += 1


def test_ends_that_a_hanging_store_is_not_told_of_do_not_pile_up() -> None:
    store: Any = HangingStore()
    ends = SessionEnds(store, [None])
    for _ in range(1000):
        ends.note_end(None, [CHAIN], Hints())
    store.answers.set()
    ends._thread.shutdown(wait=True)
    assert store.num_told == 64
