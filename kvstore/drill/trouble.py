"""Trouble: what happens to the disk operations of a store: one fails, all are slow or stuck, each is logged.

This is the part inside the store's process; ``DiskControl`` is the drill's end of it.
"""

import enum
import errno
import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.drill.write_log import WriteLog


class Operation(enum.Enum):
    """A kind of operation on a file."""

    OPEN = "open"
    CLOSE = "close"
    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    SIZE = "size"
    NAME = "name"


class Harm(enum.Enum):
    """What happens to the operation that is chosen to go wrong."""

    NONE = "none"
    FAIL = "fail"
    """It does nothing but fail."""
    TEAR = "tear"
    """A write is done by half and fails; anything else fails."""
    SHORTEN = "shorten"
    """A write, or a read of the slab, moves less than was asked for, and says so; anything else is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleOrder:
    """What is to happen from now on. ``fail_at`` counts operations from 1, from this order on; 0: none."""

    fail_at: int = 0
    harm: str = Harm.FAIL.value
    error: int = errno.EIO
    delay_s: float = 0.0
    is_stuck: bool = False
    concerns: tuple[str, ...] = (Operation.READ.value, Operation.WRITE.value, Operation.SYNC.value)
    """Operations that ``delay_s`` and ``is_stuck`` hold up."""
    log_path: str = ""
    clock_s: float = 0.0
    """How far the wall clock is off, for what reads it through Python."""

    def to_json(self) -> str:
        """Return it on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TroubleOrder":
        """Read what ``to_json`` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "concerns": tuple(fields["concerns"])})


@dataclass(frozen=True, slots=True)
class TroubleStatus:
    """What has happened since the last order; ``num_stuck`` operations are held up now."""

    num_operations: int
    num_harmed: int
    num_held: int
    num_stuck: int


class Trouble:
    """Carries out orders. Thread-safe: operations come from every thread of the store."""

    def __init__(self, order: TroubleOrder) -> None:
        self._changed = threading.Condition()
        self._order = order
        self._num_operations = self._num_harmed = self._num_held = self._num_stuck = 0
        self.log: WriteLog | None = None
        self._take(order)

    @property
    def clock_s(self) -> float:
        """How far the wall clock is off."""
        return self._order.clock_s

    @property
    def error(self) -> int:
        """The error of an operation that fails."""
        return self._order.error

    def take(self, order: TroubleOrder) -> TroubleStatus:
        """Begin anew with another order; returns what had happened under the one before."""
        with self._changed:
            status = self._status()
            self._take(order)
            self._changed.notify_all()
        return status

    def status(self) -> TroubleStatus:
        """Return what has happened since the last order."""
        with self._changed:
            return self._status()

    def begin(self, operation: Operation) -> Harm:
        """Count an operation, hold it up if it is to be, and return what is to happen to it."""
        with self._changed:
            order = self._order
            self._num_operations += 1
            is_chosen = self._num_operations == order.fail_at
            self._num_harmed += is_chosen
            if operation.value in order.concerns:
                self._hold(order)
        return Harm(order.harm) if is_chosen else Harm.NONE

    def _hold(self, order: TroubleOrder) -> None:
        """Wait as the order says, or until there is another."""
        if order.is_stuck or order.delay_s:
            self._num_held += 1
            self._num_stuck += 1
            until_s = None if order.is_stuck else time.monotonic() + order.delay_s
            while self._order is order and (until_s is None or time.monotonic() < until_s):
                self._changed.wait(None if until_s is None else max(0.0, until_s - time.monotonic()))
            self._num_stuck -= 1

    def _status(self) -> TroubleStatus:
        return TroubleStatus(self._num_operations, self._num_harmed, self._num_held, self._num_stuck)

    def _take(self, order: TroubleOrder) -> None:
        self._order = order
        self._num_operations = self._num_harmed = self._num_held = 0
        log, self.log = self.log, WriteLog(Path(order.log_path)) if order.log_path else None
        if log is not None:
            log.close()
