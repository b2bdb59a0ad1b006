"""A client process that holds a lease or reserved slots, is frozen with them, and says what it finds."""

import json
import sys

import numpy as np

from kvstore import KVStore
from tests.client.conftest import NAMESPACE, PATIENT


def _say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def read(store: KVStore) -> None:
    chain = NAMESPACE.chain(range(32))
    lease = store.lease(chain)
    views = store.view(lease)
    before = [bytes(view) for view in views]
    _say(blocks=len(views))
    sys.stdin.readline()
    is_changed = [bytes(view) for view in views] != before
    is_valid = lease.is_valid()
    _say(
        is_changed=is_changed,
        is_valid=is_valid,
        views=len(store.view(lease)),
        is_renewed=lease.renew(),
        ended_leases=store.client_stats().ended_leases,
        fetched=len(store.get(chain)),
    )
    lease.release()


def write(store: KVStore) -> None:
    with store.reserve(NAMESPACE.chain(range(32))) as blocks:
        _say(blocks=len(blocks))
        sys.stdin.readline()
        for block in blocks:
            np.copyto(block.array, 255)
    result = blocks.result
    _say(stored=result.stored, present=result.present, dropped=result.dropped)


if __name__ == "__main__":
    with KVStore.connect(sys.argv[1], timeouts=PATIENT) as client:
        client.open_namespace(NAMESPACE)
        {"read": read, "write": write}[sys.argv[2]](client)
