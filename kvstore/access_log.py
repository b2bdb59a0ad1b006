"""AccessLog: which blocks requests asked for, under hashed names, in a file for ``kvstore replay``.

Whoever serves requests only appends to a queue. A thread puts the exchanges of a client together into
requests, and writes one line for each. It works in slices with pauses between them, so that it never keeps
the server's loop from running for long; what comes faster than it can write is dropped and counted. While the
file cannot be written (a full disk, say) requests are lost and counted; it goes on once that is over.

Names are keyed BLAKE2b of the blocks' keys under a random secret of this process, which is kept nowhere: no
one can tell from the file what was asked for, not even whoever can guess a prompt and name its blocks.
"""

import enum
import hashlib
import json
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import InvalidConfig
from kvstore.keys import BlockKey, NamespaceDigest, PrefixChain
from kvstore.layout import Part

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 1 << 30
MIN_MAX_BYTES = 1 << 16

_MAX_QUEUED_KEYS = 500_000
"""Keys that may wait to be written: about 60 MB."""

_MAX_OPEN_REQUESTS = 1024
_MAX_LOOKED_AT = 64
"""Requests of one client that an exchange is compared with, the latest ones."""

_MAX_REQUEST_KEYS = 200_000
"""Keys of one request, more than any context has: who goes on for ever begins another one."""

_OPEN_S = 10.0
"""How long after its last exchange a request may still go on: an engine prefills between match and put."""

_POLL_S = 0.2
_SLICE_KEYS = 64
_SLICE_EXCHANGES = 16
_PAUSE_S = 0.0005
"""After a slice of about 60 us others run for so long."""

_NAME_BYTES = 8
_JOIN_S = 2.0
_RETRY_S = 1.0
"""How long after a failure the file is left alone."""


class Access(enum.IntEnum):
    """What a client does with a chain, in the order in which a request does it."""

    LOOK = 0
    PEEK = 1
    TAKE = 2
    STORE = 3


class _Exchange(NamedTuple):
    at_s: float
    client: int
    access: Access
    chain: PrefixChain


@dataclass(slots=True)
class _Request:
    """A request as far as it is known: the leading keys it named, and what it did last."""

    client: int
    first_s: float
    latest_s: float
    namespace: NamespaceDigest
    block_tokens: int
    latest: Access
    keys: list[BlockKey] = field(default_factory=list)

    def continues_with(self, exchange: _Exchange) -> bool:
        """Whether an exchange belongs to this request and not to another one for the same blocks."""
        chain = exchange.chain
        if chain.namespace != self.namespace or exchange.at_s - self.latest_s > _OPEN_S:
            return False
        if len(self.keys) > _MAX_REQUEST_KEYS:
            return False
        if chain.start:
            is_known = chain.start <= len(self.keys) and self.keys[chain.start - 1] == chain.parent
            return is_known and exchange.access >= self.latest
        shared = min(len(self.keys), len(chain.keys))
        return exchange.access > self.latest and self.keys[shared - 1] == chain.keys[shared - 1]

    def take(self, exchange: _Exchange) -> None:
        self.latest_s, self.latest = exchange.at_s, exchange.access
        self.keys += exchange.chain.keys[len(self.keys) - exchange.chain.start :]


class AccessLog:
    """Writes requests to a file of at most ``max_bytes``, of which the older half is a second file, ``.1``.

    ``note`` is for one thread, the loop's; it never waits and never raises. ``start`` and ``close`` are the
    owner's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = os.fspath(path)
        self._max_bytes = max_bytes
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._queue: deque[_Exchange] = deque()
        self._queued_keys = 0  # written by the loop's thread only
        self._taken_keys = 0  # written by the writer only
        self._dropped = 0
        self._lost = 0
        self._lines = 0
        self._unwritten = 0
        self._failed_s: float | None = None
        self._unwritten_before = 0
        self._is_torn = False
        self._has_header = False
        self._session = secrets.token_hex(4)
        self._open: deque[_Request] = deque()  # in the order in which they began
        self._by_client: dict[int, deque[_Request]] = {}
        self._fd = -1
        self._file_bytes = 0
        self._started_s = 0.0
        self._is_ending = threading.Event()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="kvstore-access-log", daemon=True)

    def start(self) -> None:
        """Open the file, for its user alone, and begin to write. What is there stays.

        Raises:
            InvalidConfig: the file cannot be opened.
        """
        if self._max_bytes < MIN_MAX_BYTES:
            raise InvalidConfig(f"access log: {self._max_bytes} bytes, at least {MIN_MAX_BYTES}")
        self._started_s = self._clock()
        try:
            self._open_file()
            self._write_header()
        except OSError as error:
            raise InvalidConfig(f"access log: {self._path}: {error.strerror}") from error
        self._thread.start()

    def note(self, client: int, access: Access, chain: PrefixChain, part: Part | None) -> None:
        """Take note of an exchange with a client. Of several parts of a block the first one counts."""
        if part is not None and (part.layer_start or part.head_start):
            return
        if self._has_ended or self._queued_keys - self._taken_keys > _MAX_QUEUED_KEYS:
            self._dropped += 1
            return
        self._queued_keys += len(chain.keys)
        self._queue.append(_Exchange(self._clock(), client, access, chain))

    def close(self) -> None:
        """Write what is known, for a few seconds at most, and close the file. Idempotent."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def as_dict(self) -> dict[str, int]:
        """Return what was written and what was not: requests, and exchanges that were dropped."""
        return {
            "lines": self._lines,
            "dropped": self._dropped + self._lost,
            "unwritten": self._unwritten,
        }

    def _run(self) -> None:
        try:
            while not self._is_ending.wait(_POLL_S):
                self._work()
            self._work()
            self._end_requests(math.inf)
        except Exception:
            logger.exception("access log: nothing more is written")
        finally:
            self._has_ended = True
            self._queue.clear()
            if self._fd >= 0:
                os.close(self._fd)

    def _work(self) -> None:
        num_done = 0
        while self._queue:
            exchange = self._queue.popleft()
            if exchange.chain.keys:
                self._sort(exchange)
            self._taken_keys += len(exchange.chain.keys)
            num_done += 1
            if num_done % _SLICE_EXCHANGES == 0:
                self._pause()
        self._end_requests(self._clock() - _OPEN_S)

    def _sort(self, exchange: _Exchange) -> None:
        """Add an exchange to the request it belongs to, or begin one."""
        theirs = self._by_client.setdefault(exchange.client, deque(maxlen=_MAX_LOOKED_AT))
        request = next((request for request in reversed(theirs) if request.continues_with(exchange)), None)
        chain = exchange.chain
        if request is not None:
            request.take(exchange)
        elif chain.start:
            self._lost += 1  # the beginning of its chain was not seen
        else:
            at_s = exchange.at_s
            begun = _Request(
                exchange.client,
                at_s,
                at_s,
                chain.namespace,
                chain.block_tokens,
                exchange.access,
                list(chain.keys),
            )
            theirs.append(begun)
            self._open.append(begun)
            if len(self._open) > _MAX_OPEN_REQUESTS:
                self._end_first()

    def _end_requests(self, before_s: float) -> None:
        """Write the oldest requests that nothing was heard of since ``before_s``."""
        while self._open and self._open[0].latest_s <= before_s:
            self._end_first()

    def _end_first(self) -> None:
        """Write the request that began first; nothing of it is kept, nor of a client without another."""
        request = self._open.popleft()
        theirs = self._by_client.get(request.client)
        if theirs and theirs[0] is request:
            theirs.popleft()
            if not theirs:
                del self._by_client[request.client]
        self._write(request)

    def _pause(self) -> None:
        if not self._is_ending.is_set():
            time.sleep(_PAUSE_S)

    def _write(self, request: _Request) -> None:
        """Write a request, or count it as lost."""
        if self._failed_s is not None and self._clock() - self._failed_s < _RETRY_S:
            self._unwritten += 1
            return
        try:
            self._write_header()
            at_s = round(request.first_s - self._started_s, 3)
            names = self._names(request.keys)
            self._write_line({"t": at_s, "n": request.block_tokens, "blocks": names})
        except OSError as error:
            self._note_failure(error)
            self._unwritten += 1
            return
        self._lines += 1
        if self._failed_s is not None:
            self._failed_s = None
            num_lost = self._unwritten - self._unwritten_before
            logger.warning("access log: %s: goes on; %d requests were lost", self._path, num_lost)

    def _note_failure(self, error: OSError) -> None:
        if self._failed_s is None:
            self._unwritten_before = self._unwritten
            logger.warning(
                "access log: %s: %s: requests are lost until it can be written", self._path, error.strerror
            )
        self._failed_s = self._clock()

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        blake2b, secret, names = hashlib.blake2b, self._secret, []
        for start in range(0, len(keys), _SLICE_KEYS):
            names += [
                blake2b(key, key=secret, digest_size=_NAME_BYTES).hexdigest()
                for key in keys[start : start + _SLICE_KEYS]
            ]
            self._pause()
        return names

    def _open_file(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._file_bytes = os.fstat(self._fd).st_size
        self._is_torn = self._file_bytes > 0  # after what a crash may have left
        self._has_header = False

    def _write_header(self) -> None:
        """Have the file begin as such files do, a new one if the one before is large enough."""
        if self._fd >= 0 and self._file_bytes > self._max_bytes // 2:
            Path(self._path).replace(f"{self._path}.1")
            os.close(self._fd)
            self._fd = -1
        if self._fd < 0:
            self._open_file()
        if not self._has_header:
            self._write_line({"kvstore_access_log": 1, "session": self._session})
            self._has_header = True

    def _write_line(self, values: dict[str, object]) -> None:
        data = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        view = memoryview(b"\n" + data if self._is_torn else data)
        self._is_torn = True
        while view:
            written = os.write(self._fd, view)
            self._file_bytes += written
            view = view[written:]
        self._is_torn = False
