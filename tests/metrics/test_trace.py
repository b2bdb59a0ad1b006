"""A trace of 1000 operations on real tiers, counted by hand: every counter is what the hand says."""

import pytest

from kvstore import KVLayout, KVStore, Namespace
from kvstore.client_state import Timeouts
from kvstore.drill.redis_server import redis_obstacle
from kvstore.drill.store_process import StoreProcess, StoreSettings, wait_until
from tests.metrics.scrape import scrape
from tests.redis_server import RedisServer, free_port

pytestmark = pytest.mark.skipif(bool(redis_obstacle()), reason=redis_obstacle())

MIB = 1 << 20
BLOCK_BYTES = 4096
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 4
PREFILL_TOKENS_PER_S = 64
SPACE = Namespace("traced", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS))
BYTES = bytes(CHAIN_BLOCKS * BLOCK_BYTES)
PATIENT = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=60)
TOTALS = (
    "lookups",
    "hits",
    "misses",
    "exists",
    "puts",
    "evictions",
    "write_drops",
    "corrupt",
    "transfers_blocks",
    "transfers_bytes",
    "transfers_failures",
    "tier_faults",
    "tier_breaker_opened",
    "disk_written",
    "prefill_saved",
    "events_lost_blocks",
    "server_failed_requests",
    "server_refused_connections",
)
"""Beginnings of the names of those counters that depend on nothing but what was asked for."""


class PatientSettings(StoreSettings):
    """A remote tier that waits for as long as a busy machine takes."""

    def toml(self, socket_path):
        return f"{super().toml(socket_path)}timeout_s = 30.0\n"


def chain_of(number, num_blocks=CHAIN_BLOCKS):
    return SPACE.chain([number] * 8 + list(range(num_blocks * BLOCK_TOKENS - 8)))


def chains(start, count, num_blocks=CHAIN_BLOCKS):
    return [chain_of(number, num_blocks) for number in range(start, start + count)]


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


def store_over(redis, folder):
    (folder / "disk").mkdir(parents=True)
    settings = PatientSettings(
        ssd_bytes=64 * MIB, ssd_folder=folder / "disk", redis_url=redis.url, http_port=free_port()
    )
    return StoreProcess(folder, settings)


@pytest.fixture(scope="module")
def traced(redis, tmp_path_factory):
    """Run the trace, and return how many operations it had, and the series afterwards."""
    elsewhere, here = (tmp_path_factory.mktemp(name) for name in ("elsewhere", "here"))
    foreign = chains(2000, 50)
    with store_over(redis, elsewhere) as store, connected(store) as client:
        for chain in foreign:
            client.put(chain, BYTES)
        assert client.flush()
    store = store_over(redis, here)
    try:
        store.start(more=("--prefill-tokens-per-s", str(PREFILL_TOKENS_PER_S)))
        with connected(store) as client:
            num_operations = run_trace(client, foreign)
            assert client.flush()
            yield num_operations, scrape(store), client.stats()
    finally:
        store.kill()


def connected(store):
    client = KVStore.connect(store.socket_path, timeouts=PATIENT)
    client.open_namespace(SPACE)
    return client


def run_trace(client, foreign):
    known, longer, unknown = chains(0, 100), chains(0, 100, CHAIN_BLOCKS + 2), chains(1000, 100)
    steps = [
        *(lambda chain=chain: client.put(chain, BYTES) for chain in known),
        *(lambda chain=chain: client.put(chain, BYTES) for chain in known[:50]),
        *(lambda chain=chain: client.match(chain) for chain in known),
        *(lambda chain=chain: client.get(chain) for chain in known),
        *(lambda chain=chain: client.match(chain) for chain in unknown),
        *(lambda chain=chain: client.match(chain) for chain in longer),
        *(lambda chain=chain: client.demote(chain) for chain in known),
        *(lambda chain=chain: client.match(chain) for chain in known[:50]),
        *(lambda chain=chain: client.get(chain) for chain in known[:50]),
        *(lambda chain=chain: client.get(chain) for chain in known[:50]),
        *(lambda chain=chain: client.drop(chain) for chain in known[50:]),
        *(lambda chain=chain: client.get(chain) for chain in known[50:]),
        *(lambda chain=chain: client.match(chain) for chain in foreign),
        *(lambda chain=chain: client.get(chain) for chain in foreign),
    ]
    for index, step in enumerate(steps):
        step()
        if index == 99:
            assert client.flush()  # what is demoted next is below already
    return len(steps)


def series(noun, **labels):
    return (f"kvstore_{noun}_total", *sorted(labels.items()))


def lookups(operation, *, requests, hits, misses):
    """What one operation's lookups of blocks come to, the same in tokens."""
    blocks = sum(hits.values()) + sum(misses.values())
    counts = {series("lookups_requests", operation=operation): requests}
    for unit, size in (("blocks", 1), ("tokens", BLOCK_TOKENS)):
        counts[series(f"lookups_{unit}", operation=operation)] = blocks * size
        counts |= {series(f"hits_{unit}", operation=operation, tier=at): n * size for at, n in hits.items()}
        counts |= {
            series(f"misses_{unit}", operation=operation, reason=why): n * size for why, n in misses.items()
        }
    return counts


def moved(origin, target, blocks):
    about = {"origin": origin, "target": target}
    return {
        series("transfers_blocks", **about): blocks,
        series("transfers_bytes", **about): blocks * BLOCK_BYTES,
    }


BY_HAND = {
    # 100 chains of 4 in memory, 100 unknown, 100 with two unknown blocks behind, 50 on ssd, 50 in Redis
    **lookups(
        "match",
        requests=400,
        hits={"dram": 400 + 400, "ssd": 200, "remote": 200},
        misses={"never_seen": 100 + 100, "behind_miss": 300 + 100},
    ),
    # 100 chains in memory, 50 from ssd, the same 50 again, 50 that were dropped, 50 from Redis
    **lookups(
        "fetch",
        requests=300,
        hits={"dram": 400 + 200, "ssd": 200, "remote": 200},
        misses={"dropped": 50, "behind_miss": 150},
    ),
    series("puts_blocks", result="stored"): 400,
    series("puts_blocks", result="present"): 50 * 4,
    # what was put, and what came from Redis
    **moved("dram", "ssd", 400 + 200),
    **moved("dram", "remote", 400),
    **moved("ssd", "dram", 200),
    **moved("remote", "dram", 200),
    series("disk_written_bytes", tier="ssd"): 600 * BLOCK_BYTES,
    # what fetches found, 16 tokens a block, at 64 tokens a second
    series("prefill_saved_seconds", tier="dram"): 600 / 4,
    series("prefill_saved_seconds", tier="ssd"): 200 / 4,
    series("prefill_saved_seconds", tier="remote"): 200 / 4,
}


def test_every_counter_of_a_trace_of_1000_operations_is_what_the_hand_counted(traced):
    num_operations, told, _ = traced

    counted = {
        name: value
        for name, value in told.items()
        if name[0].endswith("_total") and name[0].removeprefix("kvstore_").startswith(TOTALS) and value
    }

    assert num_operations == 1000
    assert counted == BY_HAND


def test_occupancy_is_what_the_trace_left(traced):
    _, told, _ = traced

    blocks = {tier: told["kvstore_tier_blocks", ("tier", tier)] for tier in ("dram", "ssd")}

    assert blocks == {"dram": 200 + 200, "ssd": 200 + 200}
    used_bytes = told["kvstore_tier_used_bytes", ("tier", "dram")]
    assert used_bytes - told[("kvstore_lent_ahead_bytes",)] == 400 * BLOCK_BYTES
    assert {told["kvstore_tier_up_ratio", ("tier", tier)] for tier in ("ssd", "remote")} == {1}
    assert {told["kvstore_tier_queued_blocks", ("tier", tier)] for tier in ("ssd", "remote")} == {0}
    assert told[("kvstore_clients",)] == 1
    assert told[("kvstore_live_leases",)] == 0
    assert told[("kvstore_process_resident_bytes",)] > 0
    assert told[("kvstore_event_loop_delay_seconds_count",)] > 0


def test_hits_and_misses_balance_in_blocks_and_in_tokens(traced):
    _, told, _ = traced

    def total(noun, operation):
        wanted = f"kvstore_{noun}_total"
        return sum(v for name, v in told.items() if name[0] == wanted and ("operation", operation) in name)

    for operation in ("match", "fetch"):
        for unit in ("blocks", "tokens"):
            ended = total(f"hits_{unit}", operation) + total(f"misses_{unit}", operation)
            assert ended == total(f"lookups_{unit}", operation) > 0


def test_a_histogram_of_moves_counts_each_batch_once(traced):
    _, told, stats = traced

    crossing = (("origin", "dram"), ("target", "ssd"))
    batches = sum(stats["transfers"]["dram->ssd"]["batches"].values())
    classes = [
        value
        for name, value in told.items()
        if name[0] == "kvstore_transfer_batch_seconds_bucket" and set(crossing) <= set(name[1:])
    ]

    assert told["kvstore_transfer_batch_seconds_count", *crossing] == batches > 0
    assert classes == sorted(classes)
    assert classes[-1] == batches


def test_a_client_that_goes_is_no_client_any_more(redis, tmp_path):
    with store_over(redis, tmp_path / "store") as store:
        with connected(store) as client:
            client.ping()
            assert scrape(store)[("kvstore_clients",)] == 1
        assert wait_until(lambda: scrape(store)[("kvstore_clients",)] == 0, 30)
