"""What a client holds from one call to the next: leases on stored blocks, and slots it writes into."""

import contextlib
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvstore.client_calls import Call, ClientCalls
from kvstore.errors import InvalidRequest
from kvstore.holding_calls import Grant, Loan
from kvstore.keys import BlockKey, PrefixChain
from kvstore.miss import MissReason
from kvstore.results import PrefixMatch, PutResult

T = TypeVar("T")
L = TypeVar("L", bound="HeldBlocks")


class Run(Protocol):
    """Carries out a call."""

    def __call__(self, call: Call[T]) -> T:
        """Return the call's result."""


class RunAsync(Protocol):
    """Carries out a call on an event loop."""

    def __call__(self, call: Call[T]) -> Coroutine[Any, Any, T]:  # Any: nothing is sent to it
        """Return the call's result."""


class HeldBlocks:
    """Leading blocks of a chain that stay in shared memory while a lease on them lasts."""

    def __init__(self, grant: Grant) -> None:
        self._grant = grant

    @property
    def grant(self) -> Grant:
        """What the server granted."""
        return self._grant

    @property
    def chain(self) -> PrefixChain:
        """The leased blocks."""
        return self._grant.chain

    @property
    def blocks(self) -> int:
        """How many blocks are leased."""
        return len(self._grant.chain)

    @property
    def tiers(self) -> tuple[str, ...]:
        """For each leased block the tier that held it when the lease was asked for."""
        return self._grant.tiers

    @property
    def reason(self) -> MissReason | None:
        """Why no more blocks are leased: the next one is not stored, or (over HTTP: ``quota``) may not be.

        None when every block of the chain is stored.
        """
        return self._grant.reason

    @property
    def remaining_s(self) -> float:
        """Seconds that the lease lasts unless it is renewed; 0.0 if it has ended."""
        if self._grant.lease is None:
            return 0.0
        return max(0.0, self._grant.deadline_s - time.monotonic())

    def is_valid(self) -> bool:
        """Whether the lease lasts, so that the blocks have their bytes until now. Asks nobody.

        False from its deadline on, after a release, when the connection is lost, and in a forked child.
        """
        return self._grant.is_valid(time.monotonic())


class Lease(HeldBlocks):
    """A lease of a `KVStore`, to be released: leave its ``with`` block, or call ``release``.

    It ends by itself at its deadline, when its client is closed or dies, and when the server restarts. One
    that nobody releases is the store's burden until then. Thread-safe.
    """

    def __init__(self, grant: Grant, calls: ClientCalls, run: Run) -> None:
        super().__init__(grant)
        self._calls = calls
        self._run = run

    def renew(self, *, timeout_s: float | None = None) -> bool:
        """Have it last its full time again, from now; False if it has ended or no server answers in time."""
        lease = self._grant.lease
        return lease is not None and self._run(self._calls.renew(self._grant, lease, timeout_s=timeout_s))

    def release(self) -> None:
        """End it. Idempotent, and without effect on one that has ended."""
        lease, self._grant.lease = self._grant.lease, None
        if lease is not None:
            self._run(self._calls.release(self._grant, lease))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class AsyncLease(HeldBlocks):
    """A lease of an `AsyncKVStore`, to be released: leave its ``async with`` block, or call ``release``.

    It ends by itself at its deadline, when its client is closed or dies, and when the server restarts.
    """

    def __init__(self, grant: Grant, calls: ClientCalls, run: RunAsync) -> None:
        super().__init__(grant)
        self._calls = calls
        self._run = run

    async def renew(self, *, timeout_s: float | None = None) -> bool:
        """Have it last its full time again, from now; False if it has ended or no server answers in time."""
        lease = self._grant.lease
        if lease is None:
            return False
        return await self._run(self._calls.renew(self._grant, lease, timeout_s=timeout_s))

    async def release(self) -> None:
        """End it. Idempotent, and without effect on one that has ended."""
        lease, self._grant.lease = self._grant.lease, None
        if lease is not None:
            await self._run(self._calls.release(self._grant, lease))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


@dataclass(frozen=True, slots=True)
class LeasedMatch(PrefixMatch, Generic[L]):
    """A match, and a lease on those of the matched blocks that are in shared memory.

    Leased are the leading blocks in ``dram``, up to the first that is elsewhere, and no more than the
    namespace's pin budget allows; blocks on ``ssd`` or ``remote`` may leave. ``lease.blocks`` says how many.
    """

    lease: L


class WritableBlock(NamedTuple):
    """A slot to write one block into: its position in the chain, its key, and its memory in place."""

    position: int
    key: BlockKey
    buffer: memoryview

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as an array, ``[length_bytes]`` uint8, 4096-byte aligned."""
        return np.frombuffer(self.buffer, np.uint8)


class ReservedBlocks(Sequence[WritableBlock]):
    """Slots for those blocks of a chain that are not stored, as far as there was room, in chain order.

    Write whole blocks, and write nothing after the commit: the memory is another block's then. A commit that
    comes later than the store's ``lease_s`` after the reservation stores nothing.
    """

    def __init__(self, loan: Loan) -> None:
        self._loan = loan
        self._is_open = True
        self._blocks = tuple(_writable(loan))

    @overload
    def __getitem__(self, index: int) -> WritableBlock: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WritableBlock]: ...
    def __getitem__(self, index: int | slice) -> WritableBlock | Sequence[WritableBlock]:
        return self._blocks[index]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def result(self) -> PutResult:
        """What became of the blocks of the chain; everything that is not committed counts as dropped."""
        return self._loan.tally.result()

    def _close(self) -> bool:
        """Let go of the memory; False if that was done before."""
        was_open, self._is_open = self._is_open, False
        for block in self._blocks:
            with contextlib.suppress(BufferError):  # the caller made arrays of it
                block.buffer.release()
        return was_open and bool(self._blocks)


def _writable(loan: Loan) -> Iterator[WritableBlock]:
    for slot in loan.slots:
        assert loan.arena is not None, "lent slots lie in an arena"
        memory = loan.arena.slot(slot.offset, loan.length_bytes)
        yield WritableBlock(slot.position, loan.chain.keys[slot.position], memory)


class Reservation(ReservedBlocks):
    """Slots of a `KVStore`. Leaving the ``with`` block commits them, an exception in it gives them back."""

    def __init__(self, loan: Loan, calls: ClientCalls, run: Run) -> None:
        super().__init__(loan)
        self._calls = calls
        self._run = run

    def commit(self, *, timeout_s: float | None = None) -> PutResult:
        """Take the checksums of what was written, in place, and publish it.

        Raises:
            InvalidRequest: it was committed or abandoned before.
        """
        if not self._is_open:
            raise InvalidRequest("reservation: it is over: reserve again")
        if self._close():
            self._run(self._calls.commit(self._loan, timeout_s=timeout_s))
        return self.result

    def abandon(self) -> None:
        """Give the slots back unwritten. Idempotent."""
        if self._close():
            self._run(self._calls.abandon(self._loan))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if kind is not None:
            self.abandon()
        elif self._is_open:
            self.commit()


class AsyncReservation(ReservedBlocks):
    """Slots of an `AsyncKVStore`: leaving the ``async with`` block commits, an exception gives them back."""

    def __init__(self, loan: Loan, calls: ClientCalls, run: RunAsync) -> None:
        super().__init__(loan)
        self._calls = calls
        self._run = run

    async def commit(self, *, timeout_s: float | None = None) -> PutResult:
        """Take the checksums of what was written, in place, and publish it.

        Raises:
            InvalidRequest: it was committed or abandoned before.
        """
        if not self._is_open:
            raise InvalidRequest("reservation: it is over: reserve again")
        if self._close():
            await self._run(self._calls.commit(self._loan, timeout_s=timeout_s))
        return self.result

    async def abandon(self) -> None:
        """Give the slots back unwritten. Idempotent."""
        if self._close():
            await self._run(self._calls.abandon(self._loan))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if kind is not None:
            await self.abandon()
        elif self._is_open:
            await self.commit()
