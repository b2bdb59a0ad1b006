"""Python's garbage collector in a process that keeps millions of objects and must answer at once.

Blocks come and go by their reference counts; none is ever part of a cycle when it goes. But a full collection
looks at all that lives, which takes 50 to 200 ms with 60 000 stored blocks. `HeapKeeper` keeps what has grown
old where no collection looks at it.
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.idle_work import IdleWork

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_MANY_AGED = 3
"""Collections of the middle generation between two ticks, of up to 7000 objects each, from which on what
survived them is not looked at once more."""

_NEVER = 1_000_000_000
_YOUNG = 700
"""Objects made since the last collection from which on one is due in an idle moment: 20 to 45 us."""

_BUSY_THRESHOLDS = (3000, 2, _NEVER)
"""When Python collects by itself, in the midst of an answer, where there are no idle moments."""

_CALM_S = 1.0
_CALM_CPU_RATIO = 0.05
_MIN_ENDED = 256
_PAUSE_S_PER_ENDED = 50e-6
_HURRY = 10
"""A collection of everything is due once it comes to so little time for each connection that ended since the
last, and waits for a calm second until it is overdue by this factor."""


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Loading makes objects by the hundred thousand and no garbage; looking for it doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def unlink_transport(transport: Any) -> None:  # Any: the attribute is asyncio's own
    """Break the cycle of an ended transport, which refers to itself by the method that it reads with.

    Without it what ended would wait for a collection of everything. Other kinds of transports are left alone.
    """
    if hasattr(transport, "_read_ready_cb"):
        transport._read_ready_cb = _nothing


def _nothing() -> None:
    """Stand in for a reader that is not called any more."""


class HeapKeeper:
    """Keeps collections short in a process that is the store's own.

    Objects that survived two collections are set aside (``gc.freeze``) several times a second, so that there
    is never much to look at. Of those only reference counts tell when they go: a cycle among them that dies
    stays. What may leave one is a connection that ends, so after enough of them (``num_ended``, since the
    start) everything is collected once, in a second in which the process has next to nothing to do.

    With ``idle_work`` young objects are looked at in idle moments, so that hardly any answer waits for it.
    What survived one or two of these looks is set aside.
    """

    def __init__(
        self,
        num_ended: Callable[[], int],
        *,
        idle_work: IdleWork | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._num_ended = num_ended
        self._idle_work = idle_work
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._ended_before = 0
        self._pause_s = 0.0
        self._looked_s = 0.0
        self._cpu_s = 0.0
        self.num_full = 0
        """Collections of everything."""

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Have Python collect young objects only, inside the block; ``tick`` does the rest."""
        thresholds = gc.get_threshold()
        self._collect_all()
        gc.set_threshold(*thresholds[:2], _NEVER)
        if self._idle_work is not None:
            gc.set_threshold(*_BUSY_THRESHOLDS)
            self._idle_work.keep_up(self.tidy, is_due=_is_untidy)
        self._looked_s, self._cpu_s = self._clock(), self._cpu_clock()
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            if self._idle_work is not None:
                self._idle_work.give_up(self.tidy)

    async def tick_forever(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.tick()

    def tidy(self) -> None:
        """Look at young objects; each second time at those of the time before too, and set them aside."""
        _, num_passes, _ = gc.get_count()
        if num_passes:
            gc.collect(1)
            gc.freeze()
        else:
            gc.collect(0)

    def tick(self) -> None:
        """Set aside what has grown old, and collect everything if that is due."""
        num_aged = gc.get_count()[2]
        if num_aged:
            if self._idle_work is not None:
                gc.collect(1)
            elif num_aged < _MANY_AGED:
                gc.collect()
            gc.freeze()
        now_s = self._clock()
        if now_s - self._looked_s < _CALM_S:
            return
        cpu_s = self._cpu_clock()
        is_calm = cpu_s - self._cpu_s < _CALM_CPU_RATIO * (now_s - self._looked_s)
        self._looked_s, self._cpu_s = now_s, cpu_s
        due = max(_MIN_ENDED, self._pause_s / _PAUSE_S_PER_ENDED) * (1 if is_calm else _HURRY)
        if self._num_ended() - self._ended_before >= due:
            self._collect_all()

    def _collect_all(self) -> None:
        began_s = time.perf_counter()
        self._ended_before = self._num_ended()
        gc.unfreeze()
        num_found = gc.collect()
        gc.freeze()
        self._pause_s = time.perf_counter() - began_s
        self.num_full += 1
        logger.debug("garbage: %d objects collected in %.3f s", num_found, self._pause_s)


def _is_untidy() -> bool:
    return gc.get_count()[0] >= _YOUNG
