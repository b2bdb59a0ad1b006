"""What both clients keep besides connections: timeouts, namespaces, counters, patience with a dead server."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore.calls import miss_reason
from kvstore.errors import (
    CorruptBlock,
    EpochEnded,
    InvalidConfig,
    InvalidRequest,
    KVStoreError,
    NamespaceNotOpen,
    ProtocolMismatch,
    RejectedRequest,
    ServerUnavailable,
    TierFull,
    TierUnavailable,
    TimedOut,
)
from kvstore.keys import Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.log_limit import LimitedWarning
from kvstore.miss import MissReason

logger = logging.getLogger(__name__)

AWAY = (
    ServerUnavailable,
    ProtocolMismatch,
    TierFull,
    TierUnavailable,
    CorruptBlock,
    EpochEnded,
    RejectedRequest,
    NamespaceNotOpen,
)
"""Failures that are results on the data path: all that a server may say. What a caller does wrong is found
before anything is sent.
"""

_LONGEST_CALL_S = 86_400.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a call may take when it is not told otherwise.

    ``match_s``: match, exists, and renewing a lease; ``fetch_s``: fetch, get, prefetch, lease and view;
    ``put_s``: put, reserve and commit; ``control_s``: everything else.
    """

    match_s: float = 0.05
    fetch_s: float = 1.0
    put_s: float = 1.0
    control_s: float = 5.0

    def for_data(self, timeout_s: float | None) -> "Timeouts":
        """Return these with one time for all calls of the data path, if one is given."""
        if timeout_s is None:
            return self
        if not timeout_s > 0:
            raise InvalidConfig(f"timeout_s is {timeout_s!r}, expected a positive number of seconds")
        return replace(self, match_s=timeout_s, fetch_s=timeout_s, put_s=timeout_s)


@dataclass(frozen=True, slots=True)
class ClientStats:
    """What happened to one client since it was made.

    ``connects`` counts connections made, ``server_restarts`` those that met another server instance than
    the one before; ``timeouts`` and ``unavailable`` calls that ended so; ``checksum_failures`` blocks whose
    bytes were wrong after the copy or in place; ``protocol_errors`` connections closed because of what the
    server sent; ``ended_leases`` views that were asked of a lease which had ended; ``refused`` calls of the
    data path that the server does not allow this caller (its key is gone, say); ``rejected`` those that it
    calls invalid, though nothing was wrong with them here: they were damaged on the way, or the two are of
    different versions; ``direct_blocks`` those read from shared memory without asking, ``untold_blocks`` of
    them those that the server could not be told of, since it was behind with reading (what was still to be
    sent when a connection ended counts as told).
    """

    connects: int = 0
    server_restarts: int = 0
    timeouts: int = 0
    unavailable: int = 0
    checksum_failures: int = 0
    protocol_errors: int = 0
    refused: int = 0
    ended_leases: int = 0
    rejected: int = 0
    direct_blocks: int = 0
    untold_blocks: int = 0


class ClientState:
    """Namespaces and counters of one client. Thread-safe, also in a forked child."""

    def __init__(self, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeouts = timeouts
        self.clock = clock
        self._pid = os.getpid()
        self._own_lock = threading.Lock()
        self._namespaces: dict[NamespaceDigest, Namespace] = {}
        self._public: set[NamespaceDigest] = set()
        self._lengths: dict[NamespaceDigest, tuple[int, int]] = {}  # tokens and bytes of a block
        self._name_ends: dict[NamespaceDigest, bytes] = {}  # of whole blocks
        self._direct_blocks = self._untold_blocks = 0
        self._stats = ClientStats()
        self._instance: bytes | None = None
        self._rejections = LimitedWarning(logger)
        self._pause_s = 0.0
        self._closed_until_s = 0.0

    def _lock(self) -> threading.Lock:
        """Return this process's lock: an inherited one may be held for ever, by a thread that is not here."""
        if self._pid != os.getpid():
            self._own_lock, self._pid = threading.Lock(), os.getpid()
        return self._own_lock

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace's chains usable in this client."""
        with self._lock():
            digest, layout = namespace.digest, namespace.layout
            self._lengths[digest] = layout.block_tokens, layout.block_bytes
            self._name_ends[digest] = layout.whole.pack() + digest
            self._namespaces[digest] = namespace

    def note_public(self, digest: NamespaceDigest) -> None:
        """Remember that a namespace was opened as one that tenants share."""
        with self._lock():
            self._public.add(digest)

    def is_public(self, digest: NamespaceDigest) -> bool:
        """Whether a namespace was opened as one that tenants share."""
        return digest in self._public

    def namespace(self, digest: NamespaceDigest) -> Namespace:
        """Return an open namespace. Raises InvalidRequest if it is not open."""
        namespace = self._namespaces.get(digest)
        if namespace is None:
            raise InvalidRequest(
                f"namespace {digest.hex()[:12]}: not open in this client: call open_namespace"
            )
        return namespace

    def length_bytes(self, chain: PrefixChain, part: Part | None) -> int:
        """Return the bytes of each block of a chain, or of that part of it.

        Raises:
            InvalidRequest: the namespace is not open, or its blocks have another number of tokens.
            InvalidLayout: the part is not within the layout.
        """
        layout = self.namespace(chain.namespace).layout
        block_tokens, block_bytes = self._lengths[chain.namespace]
        if chain.block_tokens != block_tokens:
            raise InvalidRequest(
                f"chain: blocks of {chain.block_tokens} tokens, the namespace has {block_tokens}"
            )
        return block_bytes if part is None else layout.part_bytes(part)

    def name_end(self, chain: PrefixChain, part: Part | None) -> bytes:
        """Return what storage keys of a chain's blocks have behind the block key; its namespace is open."""
        if part is None:
            return self._name_ends[chain.namespace]
        return part.pack() + chain.namespace

    def deadline_s(self, timeout_s: float | None, default_s: float) -> float:
        """Return the instant at which a call must be over.

        Raises:
            InvalidRequest: the time is negative or no number.
        """
        chosen_s = default_s if timeout_s is None else timeout_s
        if not chosen_s >= 0:
            raise InvalidRequest(f"timeout_s is {chosen_s!r}, expected seconds, not negative")
        return self.clock() + min(chosen_s, _LONGEST_CALL_S)

    @property
    def stats(self) -> ClientStats:
        """Counters as they are now."""
        with self._lock():
            direct, untold = self._direct_blocks, self._untold_blocks
            return replace(self._stats, direct_blocks=direct, untold_blocks=untold)

    def note_direct(self, num_blocks: int, *, is_told: bool) -> None:
        """Count blocks that were read without asking, and whether the server was told."""
        with self._lock():  # not by replace, which takes as long as the rest of such a read
            self._direct_blocks += num_blocks
            if not is_told:
                self._untold_blocks += num_blocks

    def note_away(self, error: KVStoreError) -> MissReason:
        """Count a call that the server did not serve; returns the reason it is a miss for."""
        if isinstance(error, EpochEnded):
            return miss_reason(error)  # it is there, and says so
        if isinstance(error, RejectedRequest):
            self._note_rejected(error)
        with self._lock():
            at = self._stats
            if isinstance(error, TimedOut):
                self._stats = replace(at, timeouts=at.timeouts + 1)
            else:
                self._stats = replace(at, unavailable=at.unavailable + 1)
        return miss_reason(error)

    def _note_rejected(self, error: RejectedRequest) -> None:
        with self._lock():
            self._stats = replace(self._stats, rejected=self._stats.rejected + 1)
        self._rejections.warn("client: the server calls a request invalid, which is a miss: %s", error)

    def note_corrupt(self) -> None:
        """Count a block whose bytes were wrong after the copy."""
        with self._lock():
            self._stats = replace(self._stats, checksum_failures=self._stats.checksum_failures + 1)

    def note_protocol_error(self) -> None:
        """Count a connection that was closed because of what the server sent."""
        with self._lock():
            self._stats = replace(self._stats, protocol_errors=self._stats.protocol_errors + 1)

    def note_ended_lease(self) -> None:
        """Count a view of a lease that has ended."""
        with self._lock():
            self._stats = replace(self._stats, ended_leases=self._stats.ended_leases + 1)

    def note_connected(self, instance: bytes) -> None:
        """Count a connection, and a restart if the instance is another than before."""
        with self._lock():
            at = self._stats
            restarts = at.server_restarts + (self._instance not in (None, instance))
            self._stats = replace(at, connects=at.connects + 1, server_restarts=restarts)
            self._instance = instance
            self._pause_s = self._closed_until_s = 0.0

    def note_linked(self) -> None:
        """Count a connection to a server that does not say which instance it is."""
        with self._lock():
            self._stats = replace(self._stats, connects=self._stats.connects + 1)
            self._pause_s = self._closed_until_s = 0.0

    def note_refused(self) -> None:
        """Count a call that the server refused to this caller."""
        with self._lock():
            self._stats = replace(self._stats, refused=self._stats.refused + 1)

    def note_not_connected(self) -> None:
        """Count a failed attempt to connect: calls of the data path do not try again for a while."""
        with self._lock():
            self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
            self._closed_until_s = self.clock() + self._pause_s

    @property
    def may_connect(self) -> bool:
        """Whether the pause after a failed attempt to connect is over."""
        return self.clock() >= self._closed_until_s

    def check_may_connect(self) -> None:
        """Raise ServerUnavailable while the pause after a failed attempt lasts."""
        if not self.may_connect:
            raise ServerUnavailable("server: did not answer a moment ago; trying again shortly")
