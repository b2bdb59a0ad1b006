"""Values made from small files that others replace while we run: keys, certificates.

The content is read again every second on a thread of its own: a file system that hangs holds up nothing else,
and no clock of a file system has to be trusted. A new content that cannot be used changes nothing.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvstore.errors import InvalidConfig

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_JOIN_PATIENCE_S = 1.0

T = TypeVar("T")


class Reloaded(Generic[T]):
    """The value that the latest usable content gave.

    ``read`` returns the content, ``make`` the value; both may block and may raise InvalidConfig. ``value``
    may be read from any thread; what it gave before stays as it was.

    Raises:
        InvalidConfig: the first content cannot be had or used.
    """

    def __init__(self, what: str, read: Callable[[], bytes], make: Callable[[bytes], T]) -> None:
        self._what = what
        self._read = read
        self._make = make
        self._failure = ""
        self.num_reloads = 0
        self.num_failures = 0
        content = read()
        self._seen = _stamp(content)
        self.value: T = make(content)

    def refresh(self) -> bool:
        """Look at the content again; True if there is a new value. Blocks. One thread calls it."""
        try:
            content = self._read()
            stamp = _stamp(content)
            if stamp == self._seen:
                self._failure = ""
                return False
            value = self._make(content)
        except InvalidConfig as error:
            self._keep(str(error))
            return False
        self._seen, self.value, self._failure = stamp, value, ""
        self.num_reloads += 1
        logger.info("%s: loaded anew", self._what)
        return True

    def _keep(self, failure: str) -> None:
        """Go on with the value there is; say so once per failure."""
        if failure != self._failure:
            self.num_failures += 1
            logger.warning(
                "%s: changed, and cannot be used, so what was loaded stays: %s", self._what, failure
            )
        self._failure = failure


class Watcher:
    """Refreshes values every second on a thread. ``start`` and ``stop`` may each be called once."""

    def __init__(
        self,
        values: Sequence[Reloaded[Any]],
        *,
        interval_s: float = _INTERVAL_S,
        join_patience_s: float = _JOIN_PATIENCE_S,
    ) -> None:
        # Any: it does not matter what the values are.
        self._values = tuple(values)
        self._interval_s = interval_s
        self._join_patience_s = join_patience_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvstore-reload", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        if self._values:
            self._thread.start()

    def refresh(self) -> None:
        """Look at everything once, where no thread does. Blocks."""
        for value in self._values:
            try:
                value.refresh()
            except Exception:
                logger.exception("reload: failed")

    def stop(self) -> None:
        """End the thread; one that a file system holds is left behind."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(self._join_patience_s)

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.refresh()


def _stamp(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
