"""Blocks put and fetched through every peer in turn, beside the plain copy and a bare round trip."""

from collections.abc import Sequence

from measure.clients import ClientProcess, clients_of, in_rounds
from measure.figures import Bench

COPYING = ("copy", "round_trip_and_copy", "fetch_into", "fetch_into_unchecked")
"""Operations that leave the payloads with the caller."""

OPS = (*COPYING, "put", "view")


def measure_blocks(
    bench: Bench, peers: Sequence[str], *, block_bytes: int, batch: int, set_bytes: int, rounds: int
) -> None:
    """Put and fetch blocks of one shape in every way, each round in another order."""

    def turn(client: ClientProcess) -> None:
        for op in client.ops:
            if op in OPS:
                bench.note(bench.figures(client.name, op, block_bytes, batch), *client.tell("time", op))
            if op in COPYING and not bench.is_warm:
                client.tell("check")
        client.tell("remove")

    beside = ["memcpy", "bare"] if batch == 1 else ["memcpy"]
    with clients_of(bench, [*beside, "kvstore", *peers], block_bytes, batch, set_bytes) as clients:
        in_rounds(bench, clients, turn, rounds)
