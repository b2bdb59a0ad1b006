"""Keep what repeats from flooding the log: warnings, and tracebacks of one fault over and over."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_INTERVAL_S = 10.0
_MAX_PLACES = 64
_ADMITTED = "kvstore_admitted"


class LimitedWarning:
    """Logs a warning at most once per interval, with the number of those it kept back."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = 0.0
        self._num_kept_back = 0

    def warn(self, message: str, *values: object) -> None:
        """Log the warning, or count it."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_kept_back += 1
            return
        if self._num_kept_back:
            self._logger.warning("%d more like the following were not logged", self._num_kept_back)
        self._next_s, self._num_kept_back = now_s + self._interval_s, 0
        self._logger.warning(message, *values)


class _Repeats:
    """What was let through lately, by where it comes from; a bounded number of places."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._places: dict[object, tuple[float, int]] = {}

    def admit(self, place: object) -> int | None:
        """Return how many of the same place were kept back since the last one; None: keep this one back."""
        now_s = self._clock()
        if place not in self._places and len(self._places) >= _MAX_PLACES:
            place = None
        next_s, num_kept_back = self._places.get(place, (now_s, 0))
        if now_s < next_s:
            self._places[place] = (next_s, num_kept_back + 1)
            return None
        self._places[place] = (now_s + _INTERVAL_S, 0)
        return num_kept_back


class LimitedTracebacks(logging.Filter):
    """For the handlers of a process: lets a traceback through once per interval for each place it comes from.

    A machine that is out of memory makes the same fault of every request and every connection.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._repeats = _Repeats(clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged; one that is says how many like it were not."""
        if not record.exc_info or record.exc_info[1] is None:
            return True
        # Every handler asks of the same record, and all of them get the same answer.
        admitted: bool | None = getattr(record, _ADMITTED, None)
        if admitted is None:
            num_kept_back = self._repeats.admit((record.name, *_place(record.exc_info[1])))
            if num_kept_back:
                record.msg, record.args = f"{record.getMessage()} ({num_kept_back} more were not logged)", ()
            admitted = num_kept_back is not None
            setattr(record, _ADMITTED, admitted)
        return admitted

    @classmethod
    @contextmanager
    def installed(cls) -> Iterator[None]:
        """Put one before every handler of the root logger, as long as the context lasts."""
        limit, handlers = cls(), list(logging.getLogger().handlers)
        for handler in handlers:
            handler.addFilter(limit)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(limit)


def limit_loop_errors(loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
    """Have an event loop log what fails in its callbacks once per interval for each place it comes from."""
    repeats = _Repeats(clock)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # Any: asyncio's own
        error = context.get("exception")
        num_kept_back = repeats.admit(_place(error) if error is not None else context.get("message"))
        if num_kept_back is None:
            return
        if num_kept_back:
            context = {
                **context,
                "message": f"{context.get('message')} ({num_kept_back} more were not logged)",
            }
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def _place(error: BaseException) -> tuple[str, str, int]:
    """Return the kind of an error, and the line that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return type(error).__name__, "", 0
    return type(error).__name__, at.tb_frame.f_code.co_filename, at.tb_lineno
