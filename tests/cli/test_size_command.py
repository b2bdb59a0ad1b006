"""``kvstore size`` against a real server: what it foretells is what a store of that size then does."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore
from kvstore.cli import main
from kvstore.cli.size_command import answer_for, hit_ratio_at
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from tests.store_process import MIB, StoreProcess

SPACE = Namespace("m", KVLayout.opaque(block_bytes=4096, block_tokens=4))
OTHER = Namespace("other", KVLayout.opaque(block_bytes=4096, block_tokens=4))
PAYLOAD = np.zeros(4 * 4096, np.uint8)
PROMPTS = 80
ROUNDS = 3
LOOKUPS = ROUNDS * PROMPTS * 4
WAIT_S = 60

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def use_in_turn(client: KVStore) -> None:
    """Prompts of 320 blocks together, in turn: nothing hits in a store of fewer blocks."""
    client.open_namespace(SPACE)
    for _ in range(ROUNDS):
        for prompt in range(PROMPTS):
            chain = SPACE.chain(np.arange(16 * prompt, 16 * prompt + 16))
            client.match(chain, timeout_s=WAIT_S)
            client.put(chain, PAYLOAD, timeout_s=WAIT_S)


def settled(client: KVStore) -> dict[str, Any]:
    """The curve when all lookups are in it."""
    until_s = time.monotonic() + WAIT_S
    while (told := client.size_curve())["lookups_blocks"] < LOOKUPS and time.monotonic() < until_s:
        time.sleep(0.02)
    return told


def measured(client: KVStore) -> float:
    match = client.stats()["match"]
    return sum(match["hits_blocks"].values()) / match["lookups_blocks"]


def test_a_store_of_the_foretold_size_has_the_foretold_hit_rate(run: Run, tmp_path: Path) -> None:
    with (
        StoreProcess(tmp_path, dram_bytes=MIB, policy="lru") as store,
        KVStore.connect(store.socket_path) as client,
    ):
        use_in_turn(client)
        settled(client)
        small = measured(client)
        words = ["size", "--store", str(store.socket_path), "--add", "1MiB"]
        text = run(*words)
        status, out, _ = run(*words, "--json")
    answer = json.loads(out)
    (tmp_path / "larger").mkdir()
    with (
        StoreProcess(tmp_path / "larger", dram_bytes=2 * MIB, policy="lru") as store,
        KVStore.connect(store.socket_path) as client,
    ):
        use_in_turn(client)
        large = measured(client)

    assert (text[0], status, answer["samples"]) == (0, 0, LOOKUPS)
    assert answer["now"] == {"size_bytes": MIB, "hit_ratio": pytest.approx(small, abs=0.02)}
    assert answer["then"]["size_bytes"] == 2 * MIB
    assert answer["then"]["hit_ratio"] == pytest.approx(large, abs=0.02)
    assert (small, large) == (0.0, pytest.approx(2 / 3))
    assert "1.0 MiB  0.000" in text[1]
    assert "2.0 MiB  0.667  (+0.667)  +1.0 MiB dram" in text[1]


def test_a_store_with_few_lookups_says_that_it_cannot_tell(run: Run, tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as store:
        with KVStore.connect(store.socket_path) as client:
            client.open_namespace(OTHER)
            client.match(OTHER.chain(range(16)), timeout_s=WAIT_S)
        words = ["size", "--store", str(store.socket_path)]
        all_of_it = run(*words)
        one = run(*words, "--namespace", OTHER.digest.hex(), "--json")
        malformed = [run(*words, *more)[0] for more in (["--namespace", "zz"], ["--add", "much"])]
        too_little = run(*words, "--add=-1TiB")

    assert all_of_it[0] == 1
    assert "too few samples: estimates need 500" in all_of_it[1]
    assert (one[0], json.loads(one[1])["now"]["hit_ratio"]) == (1, None)
    assert malformed == [2, 2]
    assert too_little[0] == 2
    assert "not that much" in too_little[2]


def told(write_mode: str, **capacity_bytes: int) -> dict[str, Any]:
    return {
        "capacity_bytes": capacity_bytes,
        "write_mode": write_mode,
        "points": [[10, 0.1], [100, 0.5], [200, 0.6], [400, 0.6]],
        "lookups_blocks": 1,
        "samples": 1,
        "min_samples": 1,
        "limit_bytes": 400,
        "hit_ratio": {},
        "size_bytes": {},
    }


def test_more_disk_counts_beside_memory_only_where_memory_holds_other_blocks() -> None:
    through = answer_for(told("through", dram=100, ssd=50), 100, None)
    back = answer_for(told("back", dram=100, ssd=50), 100, None)

    assert (through["now"]["size_bytes"], through["then"]["size_bytes"]) == (100, 150)
    assert (back["now"]["size_bytes"], back["then"]["size_bytes"]) == (150, 250)
    assert (through["then"]["tier"], through["then"]["hit_ratio"]) == ("ssd", 0.55)


def test_room_is_added_to_the_tier_that_is_named_or_to_the_slowest_there_is() -> None:
    assert answer_for(told("through", dram=100), 50, None)["then"]["tier"] == "dram"
    assert answer_for(told("through", dram=100), 150, "ssd")["then"]["size_bytes"] == 150
    with pytest.raises(InvalidRequest, match="not that much"):
        answer_for(told("through", dram=100), -150, None)


def test_between_points_that_do_not_tell_nothing_is_told() -> None:
    points = [[10, None], [20, 0.5], [40, 0.7], [80, None]]

    assert [hit_ratio_at(points, size) for size in (5, 15, 20, 30, 40, 60, 90)] == [
        None,
        None,
        0.5,
        0.6,
        0.7,
        None,
        None,
    ]
