"""A client process that traces: puts a prompt, has it leave memory, and reads it back, all in one span.

Arguments: the store's address, ``sync`` or ``async``, the first token. Prints the trace's id.
"""

import asyncio
import sys

import numpy as np
from opentelemetry import trace

from kvstore import AsyncKVStore, KVLayout, KVStore, Namespace, Timeouts
from kvstore.config import trace_settings
from kvstore.trace_start import tracing

BLOCK_BYTES = 4096
NAMESPACE = Namespace(
    "tiny", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4), tenant_salt=b"s3cret-salt"
)
PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=30, control_s=30)


def prompt(first):
    return [first + block for block in range(8) for _ in range(4)]


def blocks():
    return [np.full(BLOCK_BYTES, 7, np.uint8) for _ in range(8)]


def use(address, first):
    with KVStore.connect(address, timeouts=PATIENT) as store:
        namespace = store.open_namespace(NAMESPACE)
        chain = namespace.chain(prompt(first))
        store.put(chain, blocks())
        assert store.flush(30)
        assert store.demote(chain) == 8
        assert len(store.get(chain)) == 8
        with store.lease(chain) as lease:
            assert lease.blocks == 8


async def use_async(address, first):
    async with await AsyncKVStore.connect(address, timeouts=PATIENT) as store:
        namespace = await store.open_namespace(NAMESPACE)
        chain = namespace.chain(prompt(first))
        await store.put(chain, blocks())
        assert await store.flush(30)
        assert await store.demote(chain) == 8
        assert len(await store.get(chain)) == 8


def main():
    address, what, first = sys.argv[1:]
    with (
        tracing(trace_settings(), service="client"),
        trace.get_tracer("test").start_as_current_span("the whole") as span,
    ):
        if what == "sync":
            use(address, int(first))
        else:
            asyncio.run(use_async(address, int(first)))
        sys.stdout.write(f"{span.get_span_context().trace_id:032x}")


if __name__ == "__main__":
    main()
