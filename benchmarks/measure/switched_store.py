"""A real ``kvstore serve --events`` that tells its events by turns while it serves, and may time that.

Between the turns it is in the state of a store without ``--events``: no change is noted, and nothing is told.
"""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import kvstore.running
from kvstore.changes import CopyChanges
from kvstore.cli import main
from kvstore.drill.store_process import StoreProcess, StoreSettings
from kvstore.event_feed import EventFeed, Listener
from kvstore.keys import BlockKey, NamespaceDigest

_ON, _OFF = signal.SIGUSR1, signal.SIGUSR2
_TIMED = "--timed"


@dataclass(slots=True)
class Told:
    """What was told since the start, and what that took of the event loop's thread, if it is timed."""

    blocks: int = 0
    lost_blocks: int = 0
    noting_s: float = 0.0
    telling_s: float = 0.0
    telling_cpu_s: float = 0.0
    tellings: int = 0


class SwitchedStore(StoreProcess):
    """The process of such a store. It begins silent."""

    def __init__(self, folder: Path, settings: StoreSettings, *, is_timed: bool) -> None:
        super().__init__(folder, settings)
        self._is_timed = is_timed

    def _command(self, order: str) -> list[str]:
        return [sys.executable, "-P", __file__, *([_TIMED] if self._is_timed else ())]

    def begin_to_tell(self) -> Told:
        """Have it tell what changes from now on."""
        return self._switch(_ON)

    def end_to_tell(self) -> Told:
        """Have it tell what waits, and then nothing any more."""
        return self._switch(_OFF)

    def _switch(self, number: signal.Signals) -> Told:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        return Told(**json.loads(self.process.stdout.readline()))


class _SwitchedFeed(EventFeed):
    told = Told()

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        loop, turn = asyncio.get_running_loop(), contextlib.ExitStack()
        listening = super().listening

        def begin() -> None:
            turn.enter_context(listening(listener))
            self._say_what_was_told()

        def end() -> None:
            while len(self._changes):
                if self._due is not None:
                    self._due.cancel()
                self._tell()
            turn.close()
            self._say_what_was_told()

        loop.add_signal_handler(_ON, begin)
        loop.add_signal_handler(_OFF, end)
        with turn:
            yield

    def _say_what_was_told(self) -> None:
        self.told.blocks, self.told.lost_blocks = self._counters.blocks, self._counters.lost_blocks
        print(json.dumps(asdict(self.told)), flush=True)


class _TimedFeed(_SwitchedFeed):
    def _tell(self) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        super()._tell()
        self.told.telling_cpu_s += time.thread_time() - began_cpu_s
        self.told.telling_s += time.perf_counter() - began_s
        self.told.tellings += 1


def _time_noting(told: Told) -> None:
    """Have each change timed as it is noted."""
    note_ready: Callable[..., None] = CopyChanges.note_ready
    note_gone: Callable[..., None] = CopyChanges.note_gone

    def timed_ready(
        self: CopyChanges,
        tier: str,
        namespace: NamespaceDigest,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
    ) -> None:
        began_s = time.perf_counter()
        note_ready(self, tier, namespace, keys, parent)
        told.noting_s += time.perf_counter() - began_s

    def timed_gone(self: CopyChanges, tier: str, namespace: NamespaceDigest, key: BlockKey) -> None:
        began_s = time.perf_counter()
        note_gone(self, tier, namespace, key)
        told.noting_s += time.perf_counter() - began_s

    CopyChanges.note_ready = timed_ready  # type: ignore[method-assign]
    CopyChanges.note_gone = timed_gone  # type: ignore[method-assign]


if __name__ == "__main__":
    kvstore.running.EventFeed = _SwitchedFeed  # type: ignore[attr-defined]
    if _TIMED in sys.argv:
        sys.argv.remove(_TIMED)
        kvstore.running.EventFeed = _TimedFeed  # type: ignore[attr-defined]
        _time_noting(_SwitchedFeed.told)
    sys.exit(main())
