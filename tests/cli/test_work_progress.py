"""Progress of long work: a bar on a terminal, lines elsewhere, nothing with --quiet."""

import argparse
import asyncio
import io
import math
import re
import sys

import numpy as np
import pytest

from kvstore import KVLayout, KVStore, Namespace, Timeouts
from kvstore.cli.work_progress import (
    Checked,
    ProgressLines,
    StepLines,
    Written,
    progress_of_drain,
    progress_of_store,
)
from tests.cli.pseudo_terminal import PseudoTerminal
from tests.store_process import MIB, StoreProcess

PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=60, control_s=60)
BLOCK_BYTES = 4096
NUM_BLOCKS = 6000


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A store with so many blocks that a check of all of them takes a while."""
    with StoreProcess(tmp_path_factory.mktemp("store"), dram_bytes=64 * MIB) as process:
        with KVStore.connect(f"unix:{process.socket_path}", timeouts=PATIENT) as store:
            layout = KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4)
            namespace = store.open_namespace(Namespace("tiny", layout))
            chain = namespace.chain([token for token in range(NUM_BLOCKS) for _ in range(4)])
            blocks = [np.zeros(BLOCK_BYTES, np.uint8)] * NUM_BLOCKS
            assert store.put(chain, blocks).stored == NUM_BLOCKS
        yield process


def check(process, *options):
    words = [sys.executable, "-m", "kvstore.cli", "check", "--sample", str(NUM_BLOCKS), "--timeout", "60"]
    return [*words, "--store", f"unix:{process.socket_path}", *options]


def test_check_shows_a_bar_on_a_terminal(full):
    with PseudoTerminal(check(full), environ=None, columns=100) as terminal:
        assert terminal.end() == 0
    # How far it is seen to come depends on how quick the machine is.
    assert re.search(r"checking +\[#*\.*\] +\d+%", terminal.raw)
    assert "sound" in terminal.raw


def test_check_shows_none_with_quiet(full):
    with PseudoTerminal(check(full, "--quiet"), environ=None) as terminal:
        assert terminal.end() == 0
    assert terminal.raw.strip() == "sound"


def test_the_store_counts_the_blocks_that_it_checks(full):
    with KVStore.connect(f"unix:{full.socket_path}", timeouts=PATIENT) as store:
        before = store.stats()
        checked = Checked(before, 10)
        assert store.check(10) == []
        assert checked(store.stats()) == (10, 10)


def test_elsewhere_a_line_comes_every_few_seconds():
    now_s, stream = [0.0], io.StringIO()
    lines = ProgressLines("writing", stream, clock=lambda: now_s[0])
    for at_s in range(12):
        now_s[0] = float(at_s)
        lines.show(at_s, 100)
    lines.clear()
    assert stream.getvalue() == "writing: 5 of 100\nwriting: 10 of 100\n"


def test_a_terminal_gets_a_bar_that_goes_away():
    now_s, stream = [0.0], Terminal()
    lines = ProgressLines("writing", stream, clock=lambda: now_s[0])
    for at_s in range(3):
        now_s[0] = float(at_s)
        lines.show(at_s * 50, 100)
    lines.clear()
    assert "100%" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_work_of_several_steps_says_a_line_now_and_then_whatever_the_step():
    now_s, stream = [0.0], io.StringIO()
    lines = StepLines(stream, clock=lambda: now_s[0])
    for at_s, label, total in ((1, "reading", math.inf), (6, "reading", math.inf), (12, "lru 100", 9)):
        now_s[0] = float(at_s)
        lines.start(label, total)
        lines.show(at_s)
    lines.clear()
    assert stream.getvalue() == "reading: 6\nlru 100: 12 of 9\n"


def test_work_of_several_steps_is_a_bar_on_a_terminal_and_nothing_where_nobody_looks():
    now_s, stream = [0.0], Terminal()
    for lines in (StepLines(stream, clock=lambda: now_s[0]), StepLines(None, clock=lambda: now_s[0])):
        lines.start("lru 100", 10)
        now_s[0] += 12.0
        lines.show(5)
        lines.clear()
    assert re.search(r"lru 100 +\[#{14}\.{14}\] +50%", stream.getvalue())


async def test_a_drain_is_shown_while_the_store_closes(monkeypatch):
    stream, looked = Terminal(), asyncio.Event()
    waiting = iter([40, 20, 20])

    def stats():
        left = next(waiting, None)
        if left is None:
            looked.set()
        return {"tiers": {"ssd": {"queued_blocks": left or 0}}}

    monkeypatch.setattr(sys, "stderr", stream)
    async with progress_of_drain(stats):
        await looked.wait()

    assert re.search(r"writing down +\[#{14}\.{14}\] +50%", stream.getvalue())
    assert stream.getvalue().endswith("\r\x1b[K")


def test_what_waits_to_be_written_is_counted_from_its_peak():
    written = Written()
    told = [{"tiers": {"dram": {}, "ssd": {"queued_blocks": waiting}}} for waiting in (40, 100, 25, 0)]
    assert [written(stats) for stats in told] == [(0, 40), (0, 100), (75, 100), (100, 100)]


def test_a_store_that_is_gone_ends_the_progress_and_not_the_command(tmp_path, capsys):
    args = argparse.Namespace(quiet=False, store=f"unix:{tmp_path}/nobody", timeout=1.0)
    with progress_of_store(args, "writing", Written()):
        pass
    assert capsys.readouterr().err == ""
