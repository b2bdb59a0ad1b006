"""Which policy a name means: one of the store's, the bound, or a class in a file of the user's own."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.policy import POLICIES, EvictionPolicy
from kvstore.replay.outcome import BOUND
from kvstore.replay.own_policy import describe, load_class

REPLAY_BLOCK_BYTES = 4096
"""The size of a block as policies are told it; all are alike, so that no figure depends on it."""

_METHODS = ("touch", "offer", "insert", "candidates", "evict", "refuse", "remove")
"""What a replay calls of a policy."""


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy under the name that a result shows. ``new`` makes one for a capacity; None is the bound.

    ``own_file`` is the file it came from, for messages. ``by_tier`` are several instead, fastest tier first.
    """

    name: str
    new: Callable[[int], EvictionPolicy] | None
    own_file: Path | None = None
    by_tier: "tuple[NamedPolicy, ...]" = ()

    @property
    def is_bound(self) -> bool:
        """Whether it is the bound, and no policy."""
        return self.new is None and not self.by_tier

    def of_tiers(self, count: int) -> "Sequence[NamedPolicy]":
        """Return the policies of so many tiers.

        Raises:
            InvalidRequest: it is of another number of tiers.
        """
        if self.by_tier and len(self.by_tier) != count:
            raise InvalidRequest(
                f"policy {self.name}: it names {len(self.by_tier)} policies, and there"
                f" {'is one tier' if count == 1 else f'are {count} tiers'}"
            )
        return self.by_tier or [self] * count

    def make(self, capacity_blocks: int) -> EvictionPolicy:
        """Return a fresh policy for so many blocks of ``REPLAY_BLOCK_BYTES``.

        Raises:
            InvalidRequest: it is the user's own, and cannot be made or lacks a method.
        """
        capacity_bytes = capacity_blocks * REPLAY_BLOCK_BYTES
        assert self.new is not None, "the bound is no policy"
        if self.own_file is None:
            return self.new(capacity_bytes)
        try:
            policy: Any = self.new(capacity_bytes)  # Any: the user's object
        except Exception as error:
            raise InvalidRequest(f"policy {self.name}: {describe(error, self.own_file)}") from error
        missing = [name for name in _METHODS if not callable(getattr(policy, name, None))]
        if missing:
            raise InvalidRequest(
                f"policy {self.name}: {self.own_file} has no method {', '.join(missing)}: see"
                " kvstore.policy.EvictionPolicy"
            )
        made: EvictionPolicy = policy
        return made


def policy_names() -> list[str]:
    """Return the names that ``policy_of`` knows, the bound last."""
    return [*POLICIES, BOUND]


def policy_of(text: str) -> NamedPolicy:
    """Return the policy of a name, in any spelling of it (``s3fifo``, ``S3-FIFO``), or of ``FILE.py:CLASS``.

    With a plus between, ``lru+gittins``, one for each tier.

    Raises:
        InvalidRequest: there is none.
    """
    if "+" in text:
        parts = tuple(policy_of(part) for part in text.split("+"))
        if any(part.is_bound for part in parts):
            raise InvalidRequest(f"policy {text!r}: the bound is no policy of a tier")
        own_file = next((part.own_file for part in parts if part.own_file is not None), None)
        return NamedPolicy("+".join(part.name for part in parts), None, own_file, parts)
    if ":" in text:
        return own_policy(text)
    known = {_plain(name): new for name, new in POLICIES.items()}
    plain = _plain(text)
    if plain == BOUND:
        return NamedPolicy(BOUND, None)
    if plain not in known:
        raise InvalidRequest(f"policy {text!r} is unknown, expected some of {', '.join(policy_names())}")
    return NamedPolicy(text.lower(), known[plain])


def own_policy(where: str) -> NamedPolicy:
    """Return the policy that is the class ``FILE.py:CLASS``. The file is run.

    Raises:
        InvalidRequest: there is no such class.
    """
    path, _, name = where.rpartition(":")
    return NamedPolicy(name, load_class(where), Path(path))


def require_distinct(policies: list[NamedPolicy]) -> list[NamedPolicy]:
    """Return the policies once each, under the first of the spellings that they are named by.

    Raises:
        InvalidRequest: two that are not the same have one name.
    """
    by_name: dict[str, NamedPolicy] = {}
    for policy in policies:
        spelled = policy.name if policy.own_file is not None else _plus_plain(policy.name)
        same = by_name.setdefault(spelled, policy)
        if (same.new, same.own_file) != (policy.new, policy.own_file) and policy.own_file is not None:
            raise InvalidRequest(f"policy {policy.name}: two have that name: rename the class")
    return list(by_name.values())


def _plus_plain(name: str) -> str:
    return "+".join(map(_plain, name.split("+")))


@functools.cache
def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
