"""NamespacePolicies: one tier whose namespaces do not all have the same policy."""

from collections.abc import Iterator, Mapping, Sequence

from kvstore.keys import KEY_BYTES, NamespaceDigest
from kvstore.policy.protocol import NO_HINT, EvictionPolicy, Hint, Offer
from kvstore.tier import StorageKey


class Group:
    """Blocks that one policy orders. ``given`` is how often the group has given all that it stores."""

    __slots__ = ("given", "policy", "used_bytes")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.used_bytes = 0.0
        self.given = 0.0

    @property
    def block_bytes(self) -> float:
        """Bytes of a block, on average: no size is kept per block."""
        return self.used_bytes / max(1, len(self.policy))

    def share_of(self, size_bytes: float) -> float:
        """Which part of all that the group stores so many bytes are."""
        return size_bytes / max(1.0, self.used_bytes, size_bytes)


class NamespacePolicies:
    """Orders the blocks of some namespaces by policies of their own, and all others by one.

    Which blocks of a namespace leave its policy decides. How many leave is the same for all: what a put needs
    is taken from every group in proportion to the bytes that it stores, so that blocks stay equally long on
    average and a namespace gets the share that its traffic has. Room that a namespace makes among its own
    blocks (``candidates_of``: it is at its quota) does not count as given.
    """

    def __init__(self, rest: EvictionPolicy, own: Mapping[NamespaceDigest, EvictionPolicy]) -> None:
        self._rest = Group(rest)
        self._own = {digest: Group(policy) for digest, policy in own.items()}
        self._groups = [self._rest, *self._own.values()]
        self._counts_given = True
        self.may_refuse = any(getattr(group.policy, "may_refuse", False) for group in self._groups)

    @property
    def rest(self) -> EvictionPolicy:
        """The policy of the namespaces that have none of their own."""
        return self._rest.policy

    @property
    def own(self) -> dict[NamespaceDigest, EvictionPolicy]:
        """The policies of those that have."""
        return {digest: group.policy for digest, group in self._own.items()}

    def _group(self, block: StorageKey) -> Group:
        return self._own.get(NamespaceDigest(block[-KEY_BYTES:]), self._rest)

    def touch(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint = NO_HINT) -> None:
        """As the policy of the blocks' namespace."""
        if blocks:
            self._group(blocks[0]).policy.touch(blocks, now_s=now_s, hint=hint)

    def note_hint(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint) -> None:
        """As the policy of the blocks' namespace."""
        if blocks:
            self._group(blocks[0]).policy.note_hint(blocks, now_s=now_s, hint=hint)

    def offer(self, offer: Offer, *, now_s: float) -> None:
        """As the policy of the blocks' namespace."""
        if offer.blocks:
            self._group(offer.blocks[0]).policy.offer(offer, now_s=now_s)

    def insert(
        self,
        blocks: Sequence[StorageKey],
        *,
        size_bytes: int,
        now_s: float,
        parent: StorageKey | None = None,
        hint: Hint = NO_HINT,
        is_use: bool = True,
    ) -> None:
        """As the policy of the blocks' namespace. A group that had none begins where the others are."""
        if not blocks:
            return
        group = self._group(blocks[0])
        num_before = len(group.policy)
        group.policy.insert(
            blocks, size_bytes=size_bytes, now_s=now_s, parent=parent, hint=hint, is_use=is_use
        )
        if not num_before:
            self._join(group)
        group.used_bytes += size_bytes * (len(group.policy) - num_before)

    def _join(self, group: Group) -> None:
        others = [other.given for other in self._groups if other is not group and len(other.policy)]
        group.used_bytes = 0.0
        group.given = max(group.given, min(others, default=0.0))

    def adopt(
        self,
        blocks: Sequence[StorageKey],
        parents: Sequence[StorageKey | None],
        *,
        size_bytes: int,
        now_s: float,
    ) -> None:
        """As the policies of the blocks' namespaces."""
        parts: dict[Group, tuple[list[StorageKey], list[StorageKey | None]]] = {}
        for block, parent in zip(blocks, parents, strict=True):
            part = parts.setdefault(self._group(block), ([], []))
            part[0].append(block)
            part[1].append(parent)
        for group, (names, above) in parts.items():
            num_before = len(group.policy)
            group.policy.adopt(names, above, size_bytes=size_bytes, now_s=now_s)
            group.used_bytes += size_bytes * (len(group.policy) - num_before)

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield each group's candidates in its order, in turns by what the groups have given of theirs."""
        self._counts_given = True
        offering = None if offer is None or not offer.blocks else self._group(offer.blocks[0])
        walks = {
            group: group.policy.candidates(now_s=now_s, offer=offer if group is offering else None)
            for group in self._groups
            if len(group.policy) or group is offering
        }
        given = {group: group.given for group in walks}
        while walks:
            group = min(walks, key=given.__getitem__)
            block = next(walks[group], None)
            if block is None:
                del walks[group]
                continue
            given[group] += group.share_of(group.block_bytes or (offer.size_bytes if offer else 1.0))
            yield block

    def candidates_of(self, namespace: NamespaceDigest, *, now_s: float) -> Iterator[StorageKey]:
        """Yield candidates of the group that a namespace belongs to; what then leaves does not count."""
        self._counts_given = False
        return self._own.get(namespace, self._rest).policy.candidates(now_s=now_s)

    def evict(self, block: StorageKey, *, now_s: float) -> None:
        """As the policy of the block's namespace."""
        group = self._group(block)
        if block in group.policy:
            if self._counts_given:
                group.given += group.share_of(group.block_bytes)
            group.used_bytes -= group.block_bytes
        group.policy.evict(block, now_s=now_s)

    def refuse(self, offer: Offer, *, now_s: float) -> None:
        """As the policy of the blocks' namespace."""
        if offer.blocks:
            self._group(offer.blocks[0]).policy.refuse(offer, now_s=now_s)

    def remove(self, block: StorageKey) -> None:
        """As the policy of the block's namespace."""
        group = self._group(block)
        if block in group.policy:
            group.used_bytes -= group.block_bytes
        group.policy.remove(block)

    def to_state(self) -> dict[str, object]:
        """Return what the policy of the others learned: a namespace's own begins anew at each start."""
        return self.rest.to_state()

    def from_state(self, state: dict[str, object]) -> None:
        """Take over what the policy of the others learned.

        Raises:
            ValueError: as the policy's own.
        """
        self.rest.from_state(state)

    def __contains__(self, block: object) -> bool:
        return any(block in group.policy for group in self._groups)

    def __len__(self) -> int:
        return sum(len(group.policy) for group in self._groups)
