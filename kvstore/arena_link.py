"""The server's arena as a client holds it: mapped once per server instance, shared by its connections."""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.arena_view import ArenaView
from kvstore.cuda_registration import REGISTERED, CudaRegistration, find_runtime
from kvstore.errors import ProtocolMismatch
from kvstore.ready_table import ReadyTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MappedArena:
    """The arena of one server instance: a read-only mapping for fetches and a writable one for puts.

    The first is of a descriptor that cannot be written through. A client that never writes has no second.
    ``ready`` lists what is READY there, if the server lets clients look.
    """

    instance: bytes
    reading: ArenaView
    writing: ArenaView | None
    ready: ReadyTable | None = None


class ArenaCache:
    """Remembers the arena that was mapped last, so that further connections do not map it again.

    An arena whose server is gone stays mapped until the last call that copies from it ends. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: MappedArena | None = None
        self._registration: CudaRegistration | None = None

    def adopt(
        self, instance: bytes, fds: Sequence[int], size_bytes: int, *, table_fd: int | None = None
    ) -> MappedArena:
        """Return the mappings of an instance's arena. Takes over the descriptors and closes them.

        The first descriptor is for reading, the second, if there is one, of the same arena for writing.
        ``table_fd`` is that of the table of READY blocks; one that cannot be used is done without.

        Raises:
            ProtocolMismatch: the descriptors are not those of one arena of ``size_bytes``.
        """
        try:
            with self._lock:
                latest = self._latest
                if latest is not None and latest.instance == instance:
                    return latest
                found = [os.fstat(fd) for fd in fds]
                if found[0].st_size != size_bytes:
                    raise ProtocolMismatch(
                        f"arena: {found[0].st_size} bytes, the server announced {size_bytes}"
                    )
                if len({(at.st_dev, at.st_ino) for at in found}) > 1:
                    raise ProtocolMismatch("arena: the descriptors that came are not of one file")
                reading = ArenaView.map(fds[0])
                writing = ArenaView.map(fds[1], is_writable=True) if len(fds) > 1 else None
                ready = None if table_fd is None else _ready_table(table_fd, reading.instance)
                self._latest = mapped = MappedArena(instance, reading, writing, ready)
                self._end_registration()
                return mapped
        finally:
            for fd in fds if table_fd is None else (*fds, table_fd):
                os.close(fd)

    def forget(self) -> None:
        """Let go of the mapping; calls under way keep it until they end."""
        with self._lock:
            self._latest = None
            self._end_registration()

    def register_with_cuda(self, arena: MappedArena) -> str:
        """Pin an arena's mappings for CUDA while it is the latest; returns how that went."""
        with self._lock:
            if self._latest is not arena:
                return "the server has restarted meanwhile"
            if self._registration is not None:
                return REGISTERED
            runtime = find_runtime()
            if isinstance(runtime, str):
                return runtime
            registration = CudaRegistration(runtime)
            said = registration.add([view for view in (arena.reading, arena.writing) if view is not None])
            self._registration = registration if said == REGISTERED else None
            return said

    def _end_registration(self) -> None:
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.end()


def _ready_table(fd: int, instance: bytes) -> ReadyTable | None:
    try:
        return ReadyTable.map(fd, instance)
    except ProtocolMismatch as error:
        logger.warning("client: the server is asked for every block: %s", error)
        return None
