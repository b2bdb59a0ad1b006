"""Caller: what one identity has at the HTTP face: requests under way, leases, its share of the rate."""

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.auth import Identity
from kvstore.http.limits import Limits, TokenBucket
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.manager import BlockManager
from kvstore.results import LeaseId, Owner

MAX_CALLERS = 2048
"""Callers that are remembered; those that have nothing under way are forgotten first."""


@dataclass(slots=True)
class _HeldLease:
    """One lease of a caller and the timer that ends it."""

    lease: LeaseId
    timer: asyncio.TimerHandle


class Caller:
    """One identity. Its leases are an owner's of their own, and end with it."""

    def __init__(
        self, identity: Identity, manager: BlockManager, limits: Limits, clock: Callable[[], float]
    ) -> None:
        self.identity = identity
        self._manager = manager
        self._limits = limits
        self._bucket = TokenBucket(limits.requests_per_s, clock)
        self._num_requests = 0
        self._num_places = 0
        self._owner: Owner | None = None
        self._leases: dict[str, _HeldLease] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost if it were forgotten."""
        return not self._num_requests and not self._leases

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as under way.

        Raises:
            Refused: too many are, or too many began lately.
        """
        if self._num_requests >= self._limits.max_requests and not self.identity.is_operator:
            raise Refused(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{self._num_requests} requests of this caller are under way, none more: wait for one",
                headers={"Retry-After": "1"},
            )
        wait_s = self._bucket.take()
        if wait_s:
            raise Refused(
                ErrorCode.TOO_MANY_REQUESTS,
                f"this caller may begin {self._limits.requests_per_s:g} requests a second: wait",
                headers={"Retry-After": str(wait_s)},
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    @contextlib.contextmanager
    def place_for_lease(self) -> Iterator[Owner | None]:
        """Yield the owner of its leases, for one lease more; None if it has as many as it may.

        The place is taken before the lease is granted: requests at the same time get no more than there are.
        """
        if len(self._leases) + self._num_places >= self._limits.max_leases:
            yield None
            return
        if self._owner is None:
            self._owner = self._manager.new_owner()
        self._num_places += 1
        try:
            yield self._owner
        finally:
            self._num_places -= 1

    def keep(self, lease: LeaseId, *, for_s: float) -> str:
        """Keep a lease of its owner for some seconds, in a place; returns the name it is ended by."""
        name = secrets.token_hex(16)
        timer = asyncio.get_running_loop().call_later(for_s, self.end_lease, name)
        self._leases[name] = _HeldLease(lease, timer)
        return name

    def renew(self, name: str, *, for_s: float) -> bool:
        """Have a lease last ``for_s`` seconds from now; False if it has none of that name."""
        held = self._leases.get(name)
        if held is None or self._owner is None:
            return False
        if not self._manager.renew(held.lease, owner=self._owner):
            return False
        held.timer.cancel()
        held.timer = asyncio.get_running_loop().call_later(for_s, self.end_lease, name)
        return True

    def end_lease(self, name: str) -> bool:
        """End a lease; False if it has none of that name."""
        held = self._leases.pop(name, None)
        if held is None:
            return False
        held.timer.cancel()
        assert self._owner is not None, "a lease has an owner"
        self._manager.release(held.lease, owner=self._owner)
        return True

    def end(self) -> None:
        """End all it has."""
        for held in self._leases.values():
            held.timer.cancel()
        self._leases.clear()
        if self._owner is not None:
            self._manager.release_owner(self._owner)
            self._owner = None


class Callers:
    """All callers of one HTTP face, by identity."""

    def __init__(self, manager: BlockManager, limits: Limits, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._limits = limits
        self._clock = clock
        self._callers: OrderedDict[str, Caller] = OrderedDict()

    def get(self, identity: Identity) -> Caller:
        """Return the caller of an identity. One whose key changed hands is ended first."""
        caller = self._callers.get(identity.name)
        if caller is not None and caller.identity.tenant != identity.tenant:
            caller.end()
            caller = None
        if caller is None:
            self._forget_idle()
            caller = Caller(identity, self._manager, self._limits, self._clock)
            self._callers[identity.name] = caller
        caller.identity = identity
        self._callers.move_to_end(identity.name)
        return caller

    def end(self) -> None:
        """End all that any caller has."""
        for caller in self._callers.values():
            caller.end()
        self._callers.clear()

    def _forget_idle(self) -> None:
        if len(self._callers) >= MAX_CALLERS:
            name = next((name for name, caller in self._callers.items() if caller.is_idle), None)
            if name is not None:
                self._callers.pop(name).end()
