"""SessionEnds: tells the store which blocks nobody goes on from, when a request ends its session."""

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from kvstore.client import KVStore
from kvstore.errors import KVStoreError
from kvstore.hints import Hints
from kvstore.keys import PrefixChain
from kvstore.layout import Part

logger = logging.getLogger(__name__)

_MAX_SESSIONS = 1024
_MAX_BLOCKS = 4096
_MAX_WAITING = 64
_TIMEOUT_S = 0.5

SessionName = tuple[str, str]
"""A tenant, empty for none, and its name for a conversation."""


class SessionEnds:
    """The blocks of each session's last request, and a thread that tells the store of sessions' ends.

    While a store does not answer, at most 64 ends wait to be told; later ones are not told.
    """

    def __init__(self, client: KVStore, parts: Sequence[Part | None]) -> None:
        self._client = client
        self._parts = tuple(parts)
        self._last: OrderedDict[SessionName, tuple[PrefixChain, ...]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-session")
        self._waiting: deque[Future[None]] = deque()

    def note_end(
        self, session: SessionName | None, chains: Sequence[PrefixChain], hints: Hints | None
    ) -> None:
        """A request has ended, with these blocks in each group; ``hints`` if its session ends with it.

        Blocks of the session's request before it are told of too: they may be others, as when a prompt was
        cut at its beginning.
        """
        told = [chain[:_MAX_BLOCKS] for chain in chains]
        before = () if session is None else self._last.pop(session, ())
        if hints is None:
            assert session is not None
            self._last[session] = tuple(told)
            if len(self._last) > _MAX_SESSIONS:
                self._last.popitem(last=False)
            return
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if len(self._waiting) < _MAX_WAITING:
            hints = replace(hints, ends_session=True)
            self._waiting.append(self._thread.submit(self._tell, (*told, *before), hints))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _tell(self, chains: Sequence[PrefixChain], hints: Hints) -> None:
        for chain in chains:
            for part in self._parts:
                try:
                    self._client.hint(chain, hints, part=part, timeout_s=_TIMEOUT_S)
                except KVStoreError as error:
                    logger.debug("session: its end was not told: %s", error)
                    return
