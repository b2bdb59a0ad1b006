"""WritePace: an engine puts off its manager's background writes while they would be in a request's way."""

import asyncio
import time
from collections.abc import Callable


class WritePace:
    """Whether background writes may begin now. One event loop's thread.

    What waits to be written waits for at most ``patience_s``, and until there is much of it: then all of it
    is written, whatever goes on. So a busy engine writes seldom, many blocks at a time, an idle one at once.
    """

    def __init__(self, *, patience_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience_s = patience_s
        self._clock = clock
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    def put_off(self) -> None:
        """Have writes wait. Idempotent."""
        self._may_begin.clear()

    def resume(self) -> None:
        """Have writes go on. Idempotent."""
        self._may_begin.set()

    def due_s(self) -> float:
        """Return the instant until which what comes in now may be put off."""
        return self._clock() + self.patience_s

    async def turn(self, *, is_urgent: asyncio.Event, until_s: float) -> None:
        """Return when writes may go on, something ``is_urgent``, or it is ``until_s``."""
        if self._may_begin.is_set() or is_urgent.is_set():
            return
        waits = [asyncio.create_task(event.wait()) for event in (self._may_begin, is_urgent)]
        try:
            timeout_s = max(0.0, until_s - self._clock())
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
