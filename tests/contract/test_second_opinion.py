"""Policies that another library has too hit the same blocks of recorded traffic, one by one."""

import pytest

from kvstore.policy import PolicyCache, policy_named
from kvstore.replay import read_trace
from kvstore.tier import StorageKey
from tests.replay.traces import PUBLISHED, needs_published_trace

libcachesim = pytest.importorskip(
    "libcachesim", reason="libcachesim is not installed: it has wheels for Linux on x86-64 and ARM only"
)

CAPACITY = 2000


@pytest.fixture(scope="module")
def uses():
    trace = read_trace(str(PUBLISHED), max_requests=1500)
    return [block for chain in trace.chains() for block in chain]


def ours(name, uses):
    cache = PolicyCache(policy_named(name)(CAPACITY), CAPACITY)
    names = {block: StorageKey(block.to_bytes(8, "little")) for block in uses}
    return [cache.serve((names[block],), now_s=float(at)).hit_blocks == 1 for at, block in enumerate(uses)]


def theirs(kind, uses):
    cache, request = getattr(libcachesim, kind)(cache_size=CAPACITY, hashpower=16), libcachesim.Request()
    request.obj_size = 1
    hits = []
    for block in uses:
        request.obj_id = block + 1
        hits.append(cache.get(request))
    return hits


@needs_published_trace
@pytest.mark.parametrize(
    ("name", "kind"),
    [("fifo", "FIFO"), ("lru", "LRU"), ("arc", "ARC"), ("sieve", "Sieve"), ("lfu", "LFU")],
)
def test_a_library_hits_the_same_blocks(name, kind, uses):
    hits = theirs(kind, uses)

    assert ours(name, uses) == hits
    assert 1000 < sum(hits) < len(hits)
