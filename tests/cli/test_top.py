"""kvstore top: on a terminal, beside a real store; without one; and as JSON."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from kvstore import KVLayout, KVStore, Namespace
from kvstore.auth import Scope
from kvstore.keyring_file import add_key, create_keyring
from tests.cli.pseudo_terminal import PseudoTerminal
from tests.redis_server import free_port
from tests.store_process import StoreProcess

SPACE = Namespace(model="m", layout=KVLayout.opaque(block_bytes=4096, block_tokens=4))
PLAIN = {name: text for name, text in os.environ.items() if not name.startswith("KVSTORE_")}
TERMINAL = {**PLAIN, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
TERMINAL.pop("NO_COLOR", None)
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


def words(store, *more):
    return [sys.executable, "-P", "-m", "kvstore.cli", "top", "--store", str(store.socket_path), *more]


def told(store, *more, environ=PLAIN, status=0):
    done = subprocess.run(
        words(store, *more),
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def use(store, blocks=10):
    """Store blocks and read them twice, with as many behind them that are not there."""
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(SPACE)
        chain = SPACE.chain(list(range(2 * blocks * SPACE.block_tokens)))
        client.put(chain[:blocks], [np.zeros(4096, np.uint8)] * blocks)
        for _ in range(2):
            assert len(client.get(chain)) == blocks
        return client.stats()


@pytest.fixture
def store(tmp_path):
    with StoreProcess(tmp_path) as running:
        yield running


def test_a_sample_says_what_the_stats_say(store):
    stats = use(store)

    sample = json.loads(told(store, "--once", "--json"))

    assert sample["is_up"]
    assert sample["total"]["hits_blocks"] == stats["fetch"]["hits_blocks"] == {"dram": 20}
    assert sample["total"]["misses_blocks"] == {"never_seen": 2, "behind_miss": 18}
    assert sample["total"]["hit_ratio"] == sample["total"]["hit_ratios"]["dram"] == 0.5
    assert sample["tiers"]["dram"]["used_bytes"] == stats["tiers"]["dram"]["used_bytes"]
    assert (sample["now"], sample["interval_s"], sample["faults"], sample["down"]) == (None, None, {}, {})


def test_the_hottest_branches_are_shown_by_digest(store):
    use(store)
    key = SPACE.chain(list(range(20 * SPACE.block_tokens))).keys[-1].hex()

    (branch,) = json.loads(told(store, "--once", "--json"))["branches"]
    shown = told(store, environ={**PLAIN, "PYTHONIOENCODING": "utf-8"})

    assert (branch["key"], branch["lookups"], branch["hit_ratio"]) == (key, 2, 0.0)
    assert (branch["blocks"], branch["tokens"], branch["tiers"]) == (20, 80, {"dram": 10})
    assert re.search(rf"^{key[:12]} +2 +0.0 % +80 +dram 10 +\d+ s", shown, re.M)
    assert max(map(len, shown.splitlines())) <= 80


def test_a_sample_costs_one_request(store):
    use(store)
    before = json.loads(told_stats(store))["server"]["requests"]

    with subprocess.Popen(
        words(store, "--json", "--interval", "0.1"), env=PLAIN, stdout=subprocess.PIPE, text=True
    ) as running:
        lines = [json.loads(running.stdout.readline()) for _ in range(5)]
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read().splitlines()
        assert running.wait(60) == 0

    after = json.loads(told_stats(store))["server"]["requests"]
    taken = len(lines) + len(rest)
    # Each of the two calls of `kvstore stats` asks for them too; the last sample may not have been printed.
    assert taken <= after["stats"] - before["stats"] - 1 <= taken + 1
    assert set(after) == set(before)
    assert all(line["interval_s"] > 0 and line["now"]["requests"] == 0 for line in lines[1:])


def told_stats(store):
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "stats", "--store", str(store.socket_path), "--json"],
        capture_output=True,
        check=True,
    )
    return done.stdout


def test_where_the_output_is_no_terminal_it_is_plain_and_ends(store):
    use(store)

    shown = told(store, environ={**PLAIN, "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8"})

    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^all tiers +- +50\.0 % +20 ", shown, re.M)
    assert re.search(r"^dram +█", shown, re.M)
    assert re.search(r"behind_miss +- +18 ", shown)
    assert "Faults  none" in shown


def test_an_output_without_block_elements_gets_letters(store):
    use(store)

    shown = told(store, "--once", environ={**PLAIN, "PYTHONIOENCODING": "ascii"})

    assert shown.isascii()
    assert "\\u" not in shown
    assert re.search(r"^dram +#+\.+ ", shown, re.M)


def test_on_a_terminal_it_follows_a_store_that_goes_away_and_comes_back(store):
    use(store)
    with PseudoTerminal(words(store, "--interval", "0.1"), environ=TERMINAL) as terminal:
        drawn = terminal.until(lambda screen: "Lookups of 2 requests" in screen)
        assert "every 0.1 s, q ends" in drawn
        assert COLOUR.search(terminal.raw)
        store.kill()
        terminal.until(lambda screen: "AWAY since" in screen and "Connection refused" in screen)
        store.start()
        drawn = terminal.until(lambda screen: "back since" in screen and "Lookups of 0 requests" in screen)
        assert "AWAY" not in drawn
        use(store)
        terminal.until(lambda screen: "Lookups of 2 requests" in screen)
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.raw.endswith("\x1b[?1049l")
        assert terminal.settings_now == terminal.settings


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(store, number):
    with PseudoTerminal(words(store), environ={**TERMINAL, "NO_COLOR": "1"}) as terminal:
        terminal.until(lambda screen: "Clients" in screen)
        terminal.process.send_signal(number)
        assert terminal.end() == 0
        assert terminal.raw.endswith("\x1b[?1049l")
        assert terminal.settings_now == terminal.settings
        assert not COLOUR.search(terminal.raw)


def test_over_http_it_needs_a_key_with_the_scope_admin(tmp_path):
    keyring = tmp_path / "keys"
    create_keyring(keyring)
    admin, reader = (
        add_key(keyring, scope.value, tenant="t", scopes=frozenset({scope}))
        for scope in (Scope.ADMIN, Scope.READ)
    )
    with StoreProcess(tmp_path, http_port=free_port(), http_more=f'api_keys = "file:{keyring}"\n') as store:
        use(store)
        store.socket_path = store.url
        sample = json.loads(told(store, "--once", "--json", environ={**PLAIN, "KVSTORE_API_KEY": admin}))
        refused = told(store, "--once", environ={**PLAIN, "KVSTORE_API_KEY": reader}, status=2)

    assert sample["total"]["hits_blocks"] == {"dram": 20}
    assert "lacks the scope admin" in refused


def test_without_a_server_at_the_start_it_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "top", "--store", str(tmp_path / "none.sock")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3
    assert "is it running?" in done.stderr


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_an_interval_that_cannot_be_is_refused(tmp_path, interval):
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "top", "--interval", interval],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "--interval is" in done.stderr


def test_without_rich_it_says_what_to_install_and_json_works(store):
    code = (
        "import sys; sys.modules['rich'] = None; from kvstore.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *words(store)[4:]]

    shown, as_json = (
        subprocess.run([*command, "--once", *more], capture_output=True, text=True, check=False)
        for more in ((), ("--json",))
    )

    assert shown.returncode == 2
    assert "pip install 'tiered-kvstore[top]'" in shown.stderr
    assert json.loads(as_json.stdout)["is_up"]
