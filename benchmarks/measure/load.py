"""What match costs while other clients of the same store copy flat out."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from kvstore import KVLayout, KVStore, Namespace, PrefixChain
from kvstore.keys import BlockKey
from measure.figures import Bench, Figures, timed
from measure.lookups import BLOCK_TOKENS, MATCH_KEYS, SMALL_BLOCK_BYTES
from peers.bare_socket import ANSWER_BYTES, REQUEST_BYTES, BareSocket
from served_store import ServedStore

COPIERS = (0, 1, 2)
FEW_KEYS = 64

_CALLS = 100
_SLOT_BYTES = 4096
_ROOM_BYTES = 16 << 20
_TIMEOUT_S = 30.0
_END_S = 60.0


def measure_load(bench: Bench, *, block_bytes: int, batch: int, rounds: int) -> None:
    """Time match of few and of many keys, and a bare round trip, beside none, one and two copiers."""
    # A client may have lent half of what others have not: each needs as much again as it has.
    room_bytes = (max(COPIERS) + 1) * batch * block_bytes + MATCH_KEYS * _SLOT_BYTES + _ROOM_BYTES
    with contextlib.ExitStack() as stack:
        bare = BareSocket()
        stack.callback(bare.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-bench-")))
        server = ServedStore(folder, room_bytes * 5 // 4)
        stack.callback(server.close)
        client = stack.enter_context(KVStore.connect(server.socket_path, timeout_s=_TIMEOUT_S))
        chain = _stored_chain(client)
        few = chain[:FEW_KEYS]
        for count in COPIERS:
            calls = [
                (_match_figures(bench, FEW_KEYS, count), partial(_match, client, few)),
                (_match_figures(bench, MATCH_KEYS, count), partial(_match, client, chain)),
                (
                    bench.figures("bare", f"round_trip_beside_{count}", 0, 1),
                    partial(bare.round_trip, REQUEST_BYTES, ANSWER_BYTES),
                ),
            ]
            with _copying([str(server.socket_path), str(block_bytes), str(batch)], count) as speeds:
                for number in range(rounds + 1):
                    bench.is_warm = number > 0
                    for at, call in calls:
                        bench.run(at, timed([call] * _CALLS))
            for at, _ in calls:
                at.more["copiers_gb_per_s"] = round(sum(speeds), 2)


def _match_figures(bench: Bench, keys: int, copiers: int) -> Figures:
    return bench.figures("kvstore", f"match_{keys}_beside_{copiers}", SMALL_BLOCK_BYTES, keys)


def _match(client: KVStore, chain: PrefixChain) -> None:
    assert client.match(chain).blocks == len(chain)


def _stored_chain(client: KVStore) -> PrefixChain:
    layout = KVLayout.opaque(block_bytes=SMALL_BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
    space = client.open_namespace(Namespace("asked", layout))
    keys = tuple(BlockKey(os.urandom(32)) for _ in range(MATCH_KEYS))
    chain = PrefixChain(space.digest, keys, BLOCK_TOKENS)
    assert client.put(chain, np.zeros((MATCH_KEYS, SMALL_BLOCK_BYTES), np.uint8)).stored == MATCH_KEYS
    return chain


@contextlib.contextmanager
def _copying(words: list[str], count: int) -> Iterator[list[float]]:
    """Let so many copiers run meanwhile; afterwards the list has the GB/s that each has copied."""
    script = str(Path(__file__).parents[1] / "copier.py")
    pipe = subprocess.PIPE
    speeds: list[float] = []
    with contextlib.ExitStack() as stack:
        copiers = []
        for _ in range(count):
            copier = subprocess.Popen([sys.executable, script, *words], stdin=pipe, stdout=pipe, text=True)
            copiers.append(stack.enter_context(copier))
            stack.callback(copier.kill)
        for copier in copiers:
            assert copier.stdout is not None
            assert copier.stdout.readline() == "copying\n", "a copier ended early"
        yield speeds
        speeds += [float(copier.communicate(timeout=_END_S)[0]) for copier in copiers]
