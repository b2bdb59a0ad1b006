"""Keys for tests of encrypted tiers."""

from kvstore.keys import NamespaceDigest
from kvstore.tenant import tenant_of
from kvstore.tier import TierHealth
from kvstore_tiers.sealing import DataKey

TENANT = tenant_of(b"tenant")


class OneKey:
    """The keys of a node with one tenant, whose every namespace is: SealKeys without a vault."""

    def __init__(self) -> None:
        self.key = DataKey.make(TENANT)
        self.down = ""
        self.num_erased = 0

    def erase(self) -> None:
        """Forget the key; the next one is made at once."""
        self.key.forget()
        self.num_erased += 1
        self.key = DataKey.make(TENANT)

    def health(self) -> TierHealth:
        return TierHealth(not self.down, self.down)

    async def sealing_key(self, namespace: NamespaceDigest, *, deadline_s: float) -> DataKey | None:
        return None if self.down else self.key

    async def opening_key(
        self, namespace: NamespaceDigest, key_id: bytes, *, deadline_s: float
    ) -> DataKey | None:
        return self.key if self.is_known(key_id) else None

    async def refresh(self) -> None:
        """There is nothing to look at."""

    def is_known(self, key_id: bytes) -> bool:
        return key_id == self.key.id

    def is_erased(self, namespace: NamespaceDigest) -> bool:
        return self.num_erased > 0

    def has_key(self, namespace: NamespaceDigest) -> bool:
        return True
