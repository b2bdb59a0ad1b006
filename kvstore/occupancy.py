"""What each tier of a store holds, and how the tiers below the top do."""

from collections.abc import Mapping

from kvstore.policy import NamespacePolicies, in_force, policy_name
from kvstore.policy_keeping import plan_in_force
from kvstore.state import State
from kvstore.tier import CountingTier


def occupancy_stats(state: State, queue_lengths: Mapping[str, int]) -> dict[str, object]:
    """Return what a store holds, ready for JSON; ``queue_lengths`` are blocks waiting for each lower tier."""
    return {
        "tiers": occupancies(state, queue_lengths),
        "live_leases": state.leases.num_leases,
        "overdue_slots": state.leases.num_overdue,
        "lent_ahead_bytes": state.leases.ahead_bytes(),
        "owners": state.leases.num_owners,
        "policy": str(plan_in_force(state.policies, state.top.name)),
        "epochs": state.directory.epochs(),
    }


def occupancies(state: State, queue_lengths: Mapping[str, int]) -> dict[str, dict[str, object]]:
    """Return the occupancy of every tier, ready for JSON; ``queue_lengths`` are blocks waiting for each."""
    found: dict[str, dict[str, object]] = {}
    for tier in state.all_tiers():
        found[tier.name] = {
            "medium": tier.medium.value,
            "capacity_bytes": tier.capacity_bytes,
            "used_bytes": tier.used_bytes,
        }
        if tier.name in state.policies:
            policy = in_force(state.policies[tier.name])
            found[tier.name] |= {"blocks": len(state.policies[tier.name]), "policy": policy_name(policy)}
            if isinstance(policy, NamespacePolicies):
                found[tier.name]["namespace_policies"] = {
                    digest.hex(): policy_name(own) for digest, own in policy.own.items()
                }
    for lower in state.lower:
        health = lower.health()
        found[lower.name] |= {
            "is_up": health.is_up,
            "reason": health.reason,
            "queued_blocks": queue_lengths.get(lower.name, 0),
            "events": lower.counters if isinstance(lower, CountingTier) else {},
        }
    return found
