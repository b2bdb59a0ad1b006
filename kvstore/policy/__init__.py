"""Eviction policies: which blocks of a tier are worth their room, and which are not even stored."""

from collections.abc import Callable

from kvstore.errors import InvalidConfig
from kvstore.policy.by_namespace import NamespacePolicies
from kvstore.policy.cache import PolicyCache, Served
from kvstore.policy.fifo_queues import S3FifoPolicy, SievePolicy
from kvstore.policy.gittins import GittinsPolicy
from kvstore.policy.order import FifoPolicy, LruPolicy
from kvstore.policy.protocol import NO_HINT, EvictionPolicy, Hint, Offer
from kvstore.policy.ranked import LfuPolicy, Lru2Policy
from kvstore.policy.segmented import ArcPolicy, SlruPolicy
from kvstore.policy.tinylfu import WTinyLfuPolicy
from kvstore.policy_plan import policy_spelled

NewPolicy = Callable[[int], EvictionPolicy]
"""Makes a policy for a tier of so many bytes."""

POLICIES: dict[str, NewPolicy] = {
    "fifo": FifoPolicy,
    "lru": LruPolicy,
    "lru-2": Lru2Policy,
    "slru": SlruPolicy,
    "arc": ArcPolicy,
    "s3-fifo": S3FifoPolicy,
    "sieve": SievePolicy,
    "w-tinylfu": WTinyLfuPolicy,
    "lfu": LfuPolicy,
    "gittins": GittinsPolicy,
}
"""Policies by the name a configuration gives them."""


def policy_named(name: str) -> NewPolicy:
    """Return the constructor of a policy; it takes the capacity in bytes. Dashes may be left out.

    Raises:
        InvalidConfig: no policy has that name.
    """
    spelled = policy_spelled(name)
    if spelled is None:
        raise InvalidConfig(f"policy {name!r} is unknown, expected one of {', '.join(POLICIES)}")
    return POLICIES[spelled]


def in_force(policy: EvictionPolicy) -> EvictionPolicy:
    """Return the policy itself or, while one takes over from another, the one that does."""
    successor: EvictionPolicy = getattr(policy, "successor", policy)
    return successor


def policy_name(policy: EvictionPolicy) -> str:
    """Return the name a configuration gives to policies of this kind; of one's own its class.

    Where namespaces have policies of their own it is that of the others; while one takes over, its name.
    """
    policy = in_force(policy)
    kind = type(policy.rest if isinstance(policy, NamespacePolicies) else policy)
    return next((name for name, known in POLICIES.items() if known is kind), kind.__name__)


__all__ = [
    "NO_HINT",
    "POLICIES",
    "EvictionPolicy",
    "FifoPolicy",
    "GittinsPolicy",
    "Hint",
    "LruPolicy",
    "NamespacePolicies",
    "NewPolicy",
    "Offer",
    "PolicyCache",
    "Served",
    "in_force",
    "policy_name",
    "policy_named",
]
