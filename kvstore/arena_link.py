"""The server's arena as a client holds it: mapped once per server instance, shared by its connections."""

import os
import threading
from dataclasses import dataclass

from kvstore.arena_view import ArenaView
from kvstore.errors import ProtocolMismatch


@dataclass(frozen=True, slots=True)
class MappedArena:
    """The arena of one server instance: a read-only mapping for fetches and a writable one for puts."""

    instance: bytes
    reading: ArenaView
    writing: ArenaView


class ArenaCache:
    """Remembers the arena that was mapped last, so that further connections do not map it again.

    An arena whose server is gone stays mapped until the last call that copies from it ends. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: MappedArena | None = None

    def adopt(self, instance: bytes, fd: int, size_bytes: int) -> MappedArena:
        """Return the mapping of an instance's arena. Takes over ``fd`` and closes it.

        Raises:
            ProtocolMismatch: the descriptor is not an arena of ``size_bytes``.
        """
        try:
            with self._lock:
                latest = self._latest
                if latest is not None and latest.instance == instance:
                    return latest
                found_bytes = os.fstat(fd).st_size
                if found_bytes != size_bytes:
                    raise ProtocolMismatch(f"arena: {found_bytes} bytes, the server announced {size_bytes}")
                reading, writing = ArenaView.map(fd), ArenaView.map(fd, is_writable=True)
                mapped = MappedArena(instance, reading, writing)
                self._latest = mapped
                return mapped
        finally:
            os.close(fd)

    def forget(self) -> None:
        """Let go of the mapping; calls under way keep it until they end."""
        with self._lock:
            self._latest = None
