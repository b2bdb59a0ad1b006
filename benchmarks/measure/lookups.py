"""Calls that move no payload: exists, match, and the naming of blocks."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvstore import KVLayout, Namespace
from measure.clients import ClientProcess, allowing, clients_of, in_rounds
from measure.figures import Bench, timed

MATCH_KEYS = 6_250
EXISTS_KEYS = 1_000
CHAIN_TOKENS = 100_000
BLOCK_TOKENS = 16
SMALL_BLOCK_BYTES = 128


def measure_lookups(bench: Bench, peers: Sequence[str], rounds: int) -> None:
    """Exists and match of many small blocks that are stored, each round in another order."""
    for op, count in (("match", MATCH_KEYS), ("exists", EXISTS_KEYS)):
        with clients_of(bench, ["kvstore", *peers], SMALL_BLOCK_BYTES, count, 0) as clients:
            able = [client for client in clients if op in client.ops]
            for client in able:
                with allowing(bench, client.name):
                    client.tell("time", "put")
            in_rounds(bench, able, partial(_ask, bench, op, count), rounds)


def _ask(bench: Bench, op: str, count: int, client: ClientProcess) -> None:
    at = bench.figures(client.name, f"{op}_{count}", SMALL_BLOCK_BYTES, count)
    bench.note(at, *client.tell("repeat", op))


def measure_chain(bench: Bench, rounds: int) -> None:
    """Hash a long sequence of tokens into the keys of its blocks."""
    layout = KVLayout.opaque(block_bytes=4096, block_tokens=BLOCK_TOKENS)
    space = Namespace("chain", layout)
    tokens = np.random.default_rng(1).integers(0, 150_000, CHAIN_TOKENS).astype(np.uint32)
    listed = [int(token) for token in tokens]
    for number in range(rounds + 1):
        bench.is_warm = number > 0
        for op, given in (("chain_of_array", tokens), ("chain_of_list", listed)):
            at = bench.figures("kvstore", op, 0, CHAIN_TOKENS // BLOCK_TOKENS)
            bench.run(at, timed([partial(space.chain, given)] * 3))
