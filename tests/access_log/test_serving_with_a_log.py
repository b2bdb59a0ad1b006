"""``kvstore serve --access-log``: what clients ask a real store for can be replayed."""

import json
import sys

import numpy as np
import pytest

from kvstore import KVLayout, KVStore, Namespace, Timeouts
from kvstore.cli import main
from kvstore.replay import read_trace
from tests.redis_server import free_port
from tests.store_process import StoreProcess

NAMESPACE = Namespace("tiny", KVLayout.opaque(block_bytes=4096, block_tokens=4))
PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=30, control_s=30)


class LoggingStore(StoreProcess):
    """A store with an access log in its folder."""

    def _command(self, order):
        code = (
            "import sys; from kvstore.cli import main;"
            f" sys.exit(main([*sys.argv[1:], '--access-log', {str(self.folder / 'access.jsonl')!r}]))"
        )
        return [sys.executable, "-P", "-c", code]


def prompt(*first_tokens):
    return NAMESPACE.chain([token for token in first_tokens for _ in range(4)])


def use(store, chain):
    """Ask for a prompt's blocks, and store those that are missing."""
    blocks = [np.zeros(4096, np.uint8) for _ in chain]
    matched = store.match(chain).blocks
    assert len(store.get(chain[:matched])) == matched
    store.put(chain, blocks)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The requests of two clients, and the store's stats before it was stopped."""
    folder = tmp_path_factory.mktemp("store")
    with LoggingStore(folder, http_port=free_port()) as process:
        for address in (process.socket_path, process.url):
            with KVStore.connect(address, timeouts=PATIENT) as store:
                store.open_namespace(NAMESPACE)
                for chain in (prompt(1, 2, 3), prompt(1, 2, 4), prompt(1, 2, 3, 5)):
                    use(store, chain)
                stats = store.stats()
        process.terminate()
    return folder / "access.jsonl", stats


def test_each_request_of_each_client_is_logged_once(logged):
    trace = read_trace(str(logged[0]))

    assert [list(chain) for chain in trace.chains()] == [[0, 1, 2], [0, 1, 3], [0, 1, 2, 4]] * 2
    assert trace.block_tokens == 4


def test_the_stats_say_what_was_dropped(logged):
    assert logged[1]["server"]["access_log"]["dropped"] == 0


def test_the_log_can_be_replayed(logged, capsys):
    status = main(["replay", str(logged[0]), "--policies", "lru", "--capacities", "5", "--json"])

    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0
    # Of the first three requests 0, 2 and 3 blocks were there; of the others all.
    assert told["results"][0]["hit_blocks"] == 15


def test_a_log_that_cannot_be_written_stops_the_start(tmp_path, capsys):
    config = tmp_path / "store.toml"
    config.write_text(f'[server]\nsocket = "{tmp_path}/kv.sock"\n[tiers.dram]\ncapacity_bytes = "16MiB"\n')

    status = main(["serve", "--config", str(config), "--access-log", str(tmp_path / "no" / "log")])

    assert status == 2
    assert "access log: " in capsys.readouterr().err
