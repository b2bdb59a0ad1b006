"""A server asks for short slices, and changes nothing else of how its threads are scheduled."""

import platform
import subprocess
import sys

import pytest

from kvstore import short_slices

AROUND = """
import os
from kvstore.short_slices import ask_for_short_slices
os.nice(3)
before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
print(ask_for_short_slices())
after = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
print(before == after)
"""


def told(script: str) -> list[str]:
    """What a process of its own says: what a thread asks for is its own for good."""
    words = [sys.executable, "-c", script]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="its system calls are not known")
def test_policy_priority_and_cores_stay_as_they_are() -> None:
    could_ask, is_unchanged = told(AROUND)

    assert is_unchanged == "True"
    if could_ask != "True":
        pytest.skip("this kernel or its sandbox does not let a thread ask for a slice")


def test_who_is_scheduled_in_another_way_is_left_alone() -> None:
    batch = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    script = f"{batch}; from kvstore.short_slices import ask_for_short_slices; print(ask_for_short_slices())"

    assert told(script) == ["False"]


def test_a_kernel_that_refuses_costs_nothing_but_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(short_slices, "_CALLS", {platform.machine(): (-1, -1)})

    with caplog.at_level("INFO"):
        assert not short_slices.ask_for_short_slices()

    assert "no short slices" in caplog.text


def test_a_machine_whose_calls_are_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "mips")

    assert not short_slices.ask_for_short_slices()
