"""PolicyPlan: which policy each tier has, and which namespaces have one of their own.

Its text is the same in the configuration, on the command line and over HTTP: a policy, or ``PLACE=POLICY``,
separated by commas. A place is a tier, a namespace by its digest in hex, or ``DIGEST@TIER``.
``PLACE=default`` takes the place's own rules away.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import InvalidConfig
from kvstore.keys import KEY_BYTES, NamespaceDigest

POLICY_NAMES = ("fifo", "lru", "lru-2", "slru", "arc", "s3-fifo", "sieve", "w-tinylfu", "lfu", "gittins")
"""Policies that a plan can name."""

PLAN_EXPECTED = (
    f"one of {', '.join(POLICY_NAMES)}; or several, separated by commas, of which PLACE=POLICY is for a tier,"
    " a namespace (its digest in hex) or DIGEST@TIER"
)

NO_RULE = "default"
"""Stands for a policy in the text of a place that is to have no rule of its own."""

MAX_PLAN_CHARS = 4096
MAX_NAMESPACES = 32
"""Namespaces with a policy of their own."""

_TIER = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_DIGEST = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")

Place = tuple[str | None, NamespaceDigest | None]
"""Tier and namespace; None: every one that has no rule of its own."""

EVERYWHERE: Place = (None, None)


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """Names of policies by place. The rule that says more of a place holds: first namespace, then tier."""

    rules: Mapping[Place, str] = field(default_factory=lambda: {EVERYWHERE: "gittins"})

    @classmethod
    def parse(cls, text: str) -> "PolicyPlan":
        """Return the plan of a text; what it does not speak of has the default policy.

        Raises:
            InvalidConfig: it is none.
        """
        return cls().amended(text)

    def amended(self, text: str) -> "PolicyPlan":
        """Return this plan as a text changes it, from left to right.

        A rule ends those before it that are for parts of its place; ``PLACE=default`` does no more than that.

        Raises:
            InvalidConfig: it is no plan.
        """
        if len(text) > MAX_PLAN_CHARS:
            raise InvalidConfig(f"policy: {len(text)} characters, at most {MAX_PLAN_CHARS}")
        rules = dict(self.rules)
        for item in text.split(","):
            place, equals, name = item.strip().rpartition("=")
            where = _place(place.strip()) if equals else EVERYWHERE
            rules = {known: policy for known, policy in rules.items() if not _is_part(known, where)}
            if name.strip() != NO_RULE:
                rules[where] = _name(name.strip())
            elif where == EVERYWHERE:
                raise InvalidConfig(f"policy {NO_RULE!r}: expected a policy, or PLACE={NO_RULE} with a place")
        if len({digest for _, digest in rules if digest is not None}) > MAX_NAMESPACES:
            raise InvalidConfig(f"policy: at most {MAX_NAMESPACES} namespaces may have one of their own")
        return PolicyPlan(rules)

    def of_tier(self, tier: str) -> str:
        """Name the policy of a tier, for namespaces that have none of their own."""
        return self.rules.get((tier, None)) or self.rules[EVERYWHERE]

    def own_of(self, tier: str) -> dict[NamespaceDigest, str]:
        """Name the policies that namespaces have of their own in a tier."""
        own = {digest: name for (at, digest), name in self.rules.items() if digest is not None and at is None}
        return own | {
            digest: name for (at, digest), name in self.rules.items() if digest is not None and at == tier
        }

    def tiers(self) -> set[str]:
        """Return the tiers that it names."""
        return {tier for tier, _ in self.rules if tier is not None}

    def __str__(self) -> str:
        everywhere = self.rules[EVERYWHERE]
        rest = [f"{place_text(place)}={name}" for place, name in self.rules.items() if place != EVERYWHERE]
        return ", ".join([everywhere, *sorted(rest, key=len)])


def place_text(place: Place) -> str:
    """Write a place as a plan's text does."""
    tier, digest = place
    if digest is None:
        return tier or ""
    return digest.hex() + ("" if tier is None else f"@{tier}")


def plan_text(policy: str, *, tier: str | None = None, namespace: NamespaceDigest | None = None) -> str:
    """Return the text that gives a policy to a tier, to a namespace, or to every one."""
    place = place_text((tier, namespace))
    return f"{place}={policy}" if place else policy


def policy_spelled(name: str) -> str | None:
    """Return a policy's name as a configuration has it; dashes may be left out. None: there is none."""
    plain = name.replace("-", "")
    return next((known for known in POLICY_NAMES if known.replace("-", "") == plain), None)


def _name(text: str) -> str:
    name = policy_spelled(text)
    if name is None:
        raise InvalidConfig(f"policy {text!r} is unknown, expected one of {', '.join(POLICY_NAMES)}")
    return name


def _place(text: str) -> Place:
    first, at, tier = text.partition("@")
    digest = NamespaceDigest(bytes.fromhex(first)) if _DIGEST.fullmatch(first) else None
    if (digest is None and (at or not _TIER.fullmatch(text))) or (at and not _TIER.fullmatch(tier)):
        raise InvalidConfig(
            f"policy: {text!r} is no place, expected a tier, or a namespace's digest of {2 * KEY_BYTES} hex"
            " digits, or DIGEST@TIER"
        )
    return (text, None) if digest is None else (tier or None, digest)


def _is_part(place: Place, of: Place) -> bool:
    return all(whole is None or whole == part for part, whole in zip(place, of, strict=True))
