"""Puts, fetches and drops blocks flat out until its standard input ends.

Called as ``copier.py SOCKET BLOCK_BYTES BATCH``. It writes ``copying`` once it is under way, and
the GB that it copied per second when it ends.
"""

import os
import select
import sys
import time

import numpy as np

from kvstore import KVLayout, KVStore, Namespace, PrefixChain
from kvstore.keys import BlockKey

BLOCK_TOKENS = 16
TIMEOUT_S = 30.0


def main() -> None:
    """Copy until nobody listens."""
    socket_path, block_bytes, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    layout = KVLayout.opaque(block_bytes=block_bytes, block_tokens=BLOCK_TOKENS)
    payloads = np.random.default_rng(os.getpid()).integers(0, 256, (batch, block_bytes), np.uint8)
    target = np.zeros_like(payloads)
    copied_bytes, started_s = 0, 0.0
    with KVStore.connect(socket_path, timeout_s=TIMEOUT_S) as client:
        namespace = client.open_namespace(Namespace("copier", layout))
        while not select.select([sys.stdin], [], [], 0)[0]:
            keys = tuple(BlockKey(os.urandom(32)) for _ in range(batch))
            chain = PrefixChain(namespace.digest, keys, BLOCK_TOKENS)
            put = client.put(chain, payloads)
            assert put.stored == batch, put
            assert client.fetch_into(chain, target).blocks == batch
            client.drop(chain)
            if started_s == 0.0:
                started_s = time.perf_counter()
                print("copying", flush=True)
            else:
                copied_bytes += payloads.nbytes + target.nbytes
    print(copied_bytes / (time.perf_counter() - started_s) / 1e9)


if __name__ == "__main__":
    main()
