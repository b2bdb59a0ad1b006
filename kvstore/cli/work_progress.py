"""Progress of what a store does for a command: a bar on a terminal, elsewhere a line now and then, on stderr.

The store says how far it is in its stats, which a client of its own asks for while the command waits.
"""

import argparse
import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TextIO

from kvstore.calls import MALFORMED
from kvstore.cli.store_address import connected
from kvstore.errors import KVStoreError
from kvstore.progress import ProgressBar

Stats = Mapping[str, Any]  # Any: JSON
Reading = Callable[[Stats], tuple[float, float]]
"""Returns how much is done, and of how much, by the stats of the store."""

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_LINE_S = 5.0


def add_quiet_argument(parser: argparse.ArgumentParser) -> None:
    """Add --quiet."""
    parser.add_argument("--quiet", action="store_true", help="show no progress on stderr")


class ProgressLines:
    """Says how far some work is, as a bar or as lines. One thread's."""

    def __init__(
        self, label: str, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._clock = clock
        self._bar = ProgressBar(self._stream, clock=clock) if self._stream.isatty() else None
        self._next_line_s = clock() + _LINE_S
        self._total = 0.0

    def show(self, done: float, total: float) -> None:
        """Say that ``done`` of ``total`` is done, unless it was said a moment ago."""
        if self._bar is None:
            if self._clock() >= self._next_line_s:
                self._next_line_s = self._clock() + _LINE_S
                self._stream.write(f"{self._label}: {done:.0f} of {total:.0f}\n")
                self._stream.flush()
            return
        if total != self._total:
            self._total = total
            self._bar.start(self._label, total)
        self._bar.show(done)

    def clear(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.clear()


class StepLines:
    """Says how far work of several steps is, as a bar or as lines; nothing without a stream. One thread's."""

    def __init__(self, stream: TextIO | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._bar = ProgressBar(stream, clock=clock) if stream is not None and stream.isatty() else None
        self._next_line_s = clock() + _LINE_S
        self._label, self._total = "", 0.0

    def start(self, label: str, total: float) -> None:
        """Begin another step; a ``total`` that is not known is infinite."""
        self._label, self._total = label, total
        if self._bar is not None:
            self._bar.start(label, total)

    def show(self, done: float) -> None:
        """Say how much of the step is done, unless something was said a moment ago."""
        if self._bar is not None:
            self._bar.show(done)
        elif self._stream is not None and self._clock() >= self._next_line_s:
            self._next_line_s = self._clock() + _LINE_S
            of = f" of {self._total:.0f}" if math.isfinite(self._total) else ""
            self._stream.write(f"{self._label}: {done:.0f}{of}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.clear()


@contextlib.asynccontextmanager
async def progress_of_drain(stats: Callable[[], Stats]) -> AsyncIterator[None]:
    """Show how much of what waits is written down while this process's store closes, inside the block."""
    showing = asyncio.create_task(_show_drain(stats), name="drain-progress")
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.wait([showing])


async def _show_drain(stats: Callable[[], Stats]) -> None:
    lines, written = ProgressLines("writing down"), Written()
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            lines.show(*written(stats()))
    except Exception:
        logger.exception("showing what is written down failed")
    finally:
        lines.clear()


@contextlib.contextmanager
def progress_of_store(args: argparse.Namespace, label: str, read: Reading) -> Iterator[None]:
    """Show how far the store is with what is asked for inside the block; nothing with --quiet."""
    if args.quiet:
        yield
        return
    is_over = threading.Event()
    watching = threading.Thread(target=_watch, args=(args, label, read, is_over), daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join(_LOOK_S)


def _watch(args: argparse.Namespace, label: str, read: Reading, is_over: threading.Event) -> None:
    if is_over.wait(_LOOK_S):
        return
    lines = ProgressLines(label)
    try:
        # The command itself says what is wrong.
        with contextlib.suppress(KVStoreError, *MALFORMED), connected(args) as client:
            while not is_over.is_set():
                lines.show(*read(client.stats()))
                is_over.wait(_LOOK_S)
    finally:
        lines.clear()


class Checked:
    """How many blocks a check has looked at, of those that it will; ``before`` are the stats at its start."""

    def __init__(self, before: Stats, sample_blocks: int) -> None:
        self._before = before.get("checked_blocks", 0)
        self._total = sum(
            min(tier.get("blocks", 0), sample_blocks)
            for tier in before.get("tiers", {}).values()
            if tier.get("medium") != "remote"
        )

    def __call__(self, stats: Stats) -> tuple[float, float]:
        """Read it in the stats of now."""
        return stats.get("checked_blocks", 0) - self._before, self._total


class Written:
    """How many blocks of those that waited to be written to slower tiers are written, or dropped."""

    def __init__(self) -> None:
        self._most = 0

    def __call__(self, stats: Stats) -> tuple[float, float]:
        """Read it in the stats of now."""
        waiting = sum(tier.get("queued_blocks", 0) for tier in stats["tiers"].values())
        self._most = max(self._most, waiting)
        return self._most - waiting, self._most
