"""A client process that has slots lent ahead, says so, and puts once more when it is told to."""

import json
import os
import sys

import numpy as np

from kvstore import KVStore
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT

CHAINS = [NAMESPACE.chain(range(first, first + 32)) for first in range(0, 4000, 1000)]


def say(**words: object) -> None:
    """Write a line of JSON."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main(path: str) -> None:
    """Put until there is a stock, and then once more."""
    payloads = np.random.default_rng(1).integers(0, 256, (8, BLOCK_BYTES), np.uint8)
    with KVStore.connect(path, timeouts=PATIENT) as client:
        client.open_namespace(NAMESPACE)
        stored = [client.put(chain, payloads).stored for chain in CHAINS[:3]]
        say(stored=stored, pid=os.getpid())
        sys.stdin.readline()
        result = client.put(CHAINS[3], payloads)
        found = client.get(CHAINS[3])
        say(
            stored=result.stored,
            right=sum(bool((block == row).all()) for block, row in zip(found, payloads, strict=False)),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
