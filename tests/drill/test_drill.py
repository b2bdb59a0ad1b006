"""The drill itself, and its command."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main
from kvstore.drill import DrillSettings, Fault, all_faults, run_drill
from kvstore.drill.blocks import payloads_of
from kvstore.drill.drill import share_of_time
from kvstore.drill.stage import Stage
from kvstore.drill.store_process import PartFailed

DISK_AND_CROWD = (
    "error_at_each_operation",
    "disk_stuck",
    "power_loss",
    "crowd_killed",
    "fork_over_local_store",
    "redis_cluster_master_lost",
)
DOCUMENT = Path(__file__).parents[2] / "docs" / "drill.md"
SHORT = (
    "kill_under_load",
    "slab_foreign_block",
    "index_bit_flips",
    "redis_bit_flips",
    "sealed_values_planted",
    "replies_garbled",
    "client_killed_while_writing",
    "slot_scribbled",
)


class Planted(Fault):
    name = "planted"
    description = "puts a wrong byte"

    def inject(self, stage: Stage) -> None:
        chain = stage.new_chain(1)
        payload = payloads_of(chain, stage.block_bytes)[0].copy()
        payload[0] ^= 1
        stage.client.put(chain, [payload])
        stage.get(chain)


class Broken(Fault):
    name = "broken"
    description = "cannot go on"

    def inject(self, stage: Stage) -> None:
        raise PartFailed("a part did not come up")


class Idle(Fault):
    name = "idle"
    description = "does nothing"
    effect = "blocks_refused"

    def inject(self, stage: Stage) -> None:
        stage.answers()


class Sweep(Fault):
    name = "sweep"
    description = "wants ten tries"

    def __init__(self, tries_wanted: int) -> None:
        self._left = tries_wanted

    @property
    def is_unfinished(self) -> bool:
        return self._left > 0

    def setup(self, stage: Stage) -> None:
        stage.ensure_running()

    def inject(self, stage: Stage) -> None:
        self._left -= 1

    def verify(self, stage: Stage) -> None:
        stage.answers()


class Impossible(Planted):
    name = "impossible"

    def obstacle(self) -> str:
        return "not on this machine"


def drill(*faults: Fault) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    report = run_drill(DrillSettings(faults, seconds=1, seed=5), lines.append)
    return report.as_dict(), lines


def test_a_drill_that_is_served_a_wrong_byte_fails_and_says_how_to_repeat_it():
    found, lines = drill(Planted())

    assert not found["ok"]
    assert found["wrong_bytes"] == found["tries"] >= 1
    assert any("VIOLATION in try 1" in line for line in lines)
    assert "planted: repeat with: kvstore drill --seed 5 --fault planted" in lines


def test_a_kind_that_cannot_go_on_fails_and_the_next_one_is_tried():
    found, _ = drill(Broken(), Impossible())

    assert not found["ok"]
    assert found["faults"]["broken"]["notes"][0] == "the try could not go on: a part did not come up"
    assert found["faults"]["impossible"] == {
        **found["faults"]["impossible"],
        "tries": 0,
        "skipped": "not on this machine",
    }


def test_a_fault_that_had_no_effect_fails():
    found, _ = drill(Idle())

    assert found["faults"]["idle"]["notes"] == ["the fault did nothing: blocks_refused is 0"]


def test_a_kind_that_is_unfinished_goes_on_beyond_its_share_and_not_for_ever():
    short = drill(Sweep(3), Idle())[0]["faults"]["sweep"]
    endless = drill(Sweep(1_000_000_000), Idle())[0]

    assert short["tries"] >= 3
    assert endless["seconds"] < 60


@pytest.mark.parametrize(
    ("left_s", "share_s"), [(1.0, 1 / 3), (3.0, 1.0), (7.0, 2.0)], ids=["too little", "just enough", "more"]
)
def test_each_kind_gets_what_a_try_takes_and_its_share_of_the_rest(left_s: float, share_s: float) -> None:
    # Four shares: one of this kind, three of the other, which takes twice as long.
    class Other(Idle):
        try_s = 2.0
        weight = 3.0

    assert share_of_time([Idle(), Other()], left_s) == pytest.approx(share_s)


def test_there_are_at_least_twenty_kinds_with_different_names():
    names = [fault.name for fault in all_faults()]

    assert len(set(names)) == len(names) >= 20
    assert {*SHORT, *DISK_AND_CROWD} <= set(names)


@pytest.mark.parametrize("names", [SHORT, DISK_AND_CROWD], ids=["short", "disk_and_crowd"])
def test_a_short_drill_keeps_every_promise(
    names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name in names for word in ("--fault", name)]

    status = main(["drill", "--seconds", "22", "--seed", "4", "--json", *words])

    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert (status, found["ok"]) == (0, True), said.err
    assert list(found) == [
        *("ok", "seed", "seconds", "kinds_tried", "kinds_skipped"),
        *("tries", "wrong_bytes", "lost_durable", "over_deadline", "violations", "faults"),
    ]
    assert list(found["faults"]) == list(names)
    assert all(
        kind["tries"] and {"lost", "over_deadline", "seconds"} <= set(kind)
        for kind in found["faults"].values()
    )


def test_the_list_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--list", "--json"]) == 0

    assert list(json.loads(capsys.readouterr().out)) == [fault.name for fault in all_faults()]


def test_an_unknown_kind_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--fault", "gremlins"]) == 2

    assert "no fault named gremlins" in capsys.readouterr().err


@pytest.mark.skipif(not DOCUMENT.exists(), reason="docs are only in the checkout")
def test_every_kind_is_described_in_the_documentation() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")

    rows = [f"| `{fault.name}` | {fault.description} |" for fault in all_faults()]
    assert [row for row in rows if row not in text] == []
    readme = (DOCUMENT.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"of a store in {len(rows)} ways" in readme
