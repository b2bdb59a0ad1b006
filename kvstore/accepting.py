"""Accepting: lets a listening socket's connections in, one for each turn of the event loop.

So whoever is connected has a turn between two that come, however many come at once.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from kvstore.log_limit import LimitedWarning

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1


class Accepting:
    """Accepts for one listener. ``let_in`` gets each connection, not blocking; ``name`` stands in the log."""

    def __init__(self, listener: socket.socket, let_in: Callable[[socket.socket], None], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._let_in = let_in
        self._name = name
        self._pause: asyncio.TimerHandle | None = None
        self._failures = LimitedWarning(logger)
        self._begin()

    def stop(self) -> None:
        """Accept no more; the listener stays the caller's. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)

    def _begin(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._let_in(sock)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # it has gone again
        except (OSError, MemoryError) as error:
            # Out of descriptors or memory: clients wait in the backlog meanwhile.
            self._failures.warn("%s: cannot accept a connection: %s", self._name, error or "out of memory")
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(_PAUSE_S, self._begin)
