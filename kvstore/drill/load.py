"""Load: threads that put, get and match at random during a fault; all they are served is verified."""

import random
import threading
from typing import Self

from kvstore.client import KVStore
from kvstore.drill.stage import Stage
from kvstore.errors import ServerUnavailable
from kvstore.keys import PrefixChain

_CHAINS = 10
_BLOCKS_MAX = 6
_PAUSE_S = 0.004
_CONTROL_S = 0.5
_DURABLE_MAX_BLOCKS = 40
_JOIN_S = 30.0


class Load:
    """A context: the threads run inside it. ``acknowledges``: some puts wait until they are durable."""

    def __init__(self, stage: Stage, *, num_threads: int = 2, acknowledges: bool = True) -> None:
        self._stage = stage
        self._acknowledges = acknowledges
        self._over = threading.Event()
        self._chains = [stage.new_chain(stage.rng.randint(1, _BLOCKS_MAX)) for _ in range(_CHAINS)]
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(stage.rng.getrandbits(64)),), daemon=True)  # noqa: S311 (a schedule)
            for _ in range(num_threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                self._stage.ledger.note_violation(f"a call has not ended after {_JOIN_S:.0f} s")

    def _run(self, rng: random.Random) -> None:
        with self._stage.new_client(control_s=_CONTROL_S) as client:
            while not self._over.wait(_PAUSE_S):
                chain = rng.choice(self._chains)
                self._call(rng, client, chain[: rng.randint(1, len(chain))])

    def _call(self, rng: random.Random, client: KVStore, chain: PrefixChain) -> None:
        stage, dice = self._stage, rng.random()
        if dice < 0.5:
            stage.get(chain, client=client)
        elif dice < 0.8:
            stage.put(chain, client=client)
        elif dice < 0.9 or not self._acknowledges or stage.journal.num_blocks >= _DURABLE_MAX_BLOCKS:
            stage.match(chain, client=client)
        else:
            try:
                stage.put_durable(stage.new_chain_from(rng, rng.randint(1, 3)), client=client)
            except ServerUnavailable:
                self._over.wait(_PAUSE_S)
