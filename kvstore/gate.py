"""Gate: who may call, decided from what a request shows, before any of its body is read.

With a keyring every caller needs a key. Without one the port is on loopback and every caller is the operator,
except what other web pages could send through a browser of the same machine: requests with an Origin that is
not the server's own, which its page has, or to a host that is neither an address nor localhost (a name of
theirs that resolves to this machine).
"""

import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvstore.auth import LOCAL, Identity, Keyring, Scope
from kvstore.errors import Forbidden, TooManyFailures, Unauthorized
from kvstore.log_limit import LimitedWarning

logger = logging.getLogger(__name__)

FAILURE_BURST = 30
"""Requests without a valid key that one address may send at once before it is answered 429."""

FAILURES_PER_S = 1.0
"""How many more of them it may send each second."""

_MAX_PEERS = 4096


@dataclass(frozen=True, slots=True)
class Shown:
    """What a request shows of its sender: the values of its headers, in their order, and its address."""

    authorization: Sequence[str] = ()
    host: Sequence[str] = ()
    origin: Sequence[str] = ()
    peer: str = ""

    def __repr__(self) -> str:
        return f"Shown(peer={self.peer!r})"


@dataclass(slots=True)
class GateCounters:
    """Requests that a gate let in and turned away; part of the stats."""

    admitted: int = 0
    unauthorized: int = 0
    forbidden: int = 0
    too_many_failures: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return a JSON-ready copy."""
        return asdict(self)


class FailureLimit:
    """Token buckets of failures, one per address; the least recently used addresses are forgotten."""

    def __init__(
        self,
        *,
        burst: int = FAILURE_BURST,
        per_s: float = FAILURES_PER_S,
        max_peers: int = _MAX_PEERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._per_s = per_s
        self._max_peers = max_peers
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, peer: str) -> int:
        """Count a failure: 0 if it is within the limit, else the whole seconds until the next one is."""
        network, now_s = _network(peer), self._clock()
        left, at_s = self._buckets.pop(network, (float(self._burst), now_s))
        left = min(self._burst, left + (now_s - at_s) * self._per_s)
        is_within = left >= 1
        self._buckets[network] = (left - 1 if is_within else left, now_s)
        if len(self._buckets) > self._max_peers:
            self._buckets.popitem(last=False)
        return 0 if is_within else max(1, math.ceil((1 - left) / self._per_s))

    @property
    def num_peers(self) -> int:
        """Addresses that are remembered."""
        return len(self._buckets)


class Gate:
    """Decides for each request. One thread calls it.

    ``keyring`` returns the keys in force; None: there are none, and the port is on loopback.
    """

    def __init__(
        self, keyring: Callable[[], Keyring] | None, *, failures: FailureLimit | None = None
    ) -> None:
        self._keyring = keyring
        self._failures = FailureLimit() if failures is None else failures
        self._warning = LimitedWarning(logger)
        self.counters = GateCounters()

    def admit(self, shown: Shown, needs: Scope | None) -> Identity:
        """Return who calls; ``needs`` is the scope that the route asks for, None if any caller may.

        Raises:
            Unauthorized: no key, several, or one that is not known.
            TooManyFailures: the same, from an address that has sent too many such requests.
            Forbidden: the key lacks the scope, or a web page sent the request.
        """
        identity = self._identify(shown)
        if needs is not None and not identity.may(needs):
            self.counters.forbidden += 1
            raise Forbidden(f"key {identity.name}: lacks the scope {needs.value}")
        self.counters.admitted += 1
        return identity

    def still_admits(self, shown: Shown, identity: Identity) -> bool:
        """Whether the key that a request under way has shown is known as the same caller's now."""
        if self._keyring is None:
            return True
        key = _bearer(shown.authorization)
        return key is not None and self._keyring().identify(key) == identity

    def _identify(self, shown: Shown) -> Identity:
        if self._keyring is None:
            if not _is_of_no_other_page(shown):
                self.counters.forbidden += 1
                raise Forbidden(
                    "request: has another Origin, or a Host that is neither an address nor localhost: where"
                    " there are no API keys, a web page may have sent it: call the server by its address"
                )
            return LOCAL
        key = _bearer(shown.authorization)
        identity = None if key is None else self._keyring().identify(key)
        # A valid key is let in whatever else comes from its address: many callers may share one.
        if identity is None:
            self._turn_away(shown.peer)
            raise Unauthorized("request: needs a known API key: send Authorization: Bearer KEY")
        return identity

    def _turn_away(self, peer: str) -> None:
        self._warning.warn("http: a request from %s has no known API key", peer or "an unknown address")
        wait_s = self._failures.wait_s(peer)
        if wait_s:
            self.counters.too_many_failures += 1
            raise TooManyFailures(
                f"request: too many without a known API key came from this address: wait {wait_s} s",
                wait_s=wait_s,
            )
        self.counters.unauthorized += 1


def _network(peer: str) -> str:
    """Return what an address is counted by: itself, or its 64-bit network if IPv6: one host may own that."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _bearer(authorization: Sequence[str]) -> str | None:
    """Return the key of the one Authorization header, None if there is not exactly one of the right form."""
    if len(authorization) != 1:
        return None
    scheme, _, key = authorization[0].partition(" ")
    key = key.strip(" ")
    return key if scheme.lower() == "bearer" and key else None


def _is_of_no_other_page(shown: Shown) -> bool:
    if len(shown.host) > 1:
        return False
    if shown.origin:
        # Browsers write both, pages can choose neither: the same address and port are this server's own page.
        own = [f"{scheme}://{host}" for scheme in ("http", "https") for host in shown.host]
        if len(shown.origin) > 1 or shown.origin[0] not in own:
            return False
    # HTTP/1.0 needs no Host; no browser leaves it out.
    return not shown.host or _is_own_name(shown.host[0])


def _is_own_name(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
