"""TenantKeys: which data keys a node holds, for whom, and how many of each tenant's were erased. No I/O."""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import CorruptBlock
from kvstore.master_keys import MasterKeys
from kvstore.tenant import TenantId
from kvstore.tenant_record import MAX_NUMBER, RecordKind, TenantRecord, UnknownMaster
from kvstore_tiers.sealing import DataKey, Random, key_id

logger = logging.getLogger(__name__)


StoredRecord = tuple[TenantRecord, bytes]
"""A record and its stored form."""


@dataclass(slots=True)
class HeldKey:
    """A data key and its stored form, wrapped by the present master key."""

    key: DataKey
    packed: bytes


@dataclass(slots=True)
class TenantState:
    """What is known of one tenant.

    ``erased`` counts its erased keys, ``erasure`` is the stored form of that, ``told`` how many of those
    other nodes were told of; ``is_untold`` says that an erasure of this node is among the others. The first
    of ``held`` is for new copies, the rest open older ones; ``is_published`` says that the first is in the
    remote tier, ``is_foreign`` that a key there was made with a master key that is not here. ``asked_s`` and
    ``looked_s`` are when the tenant was last asked for because somebody wanted a key, and when its key's
    record was last read. ``closings`` counts erasures whose blocks are still being forgotten: until then
    nothing is sealed, since it could be one of those.
    """

    erased: int = 0
    erasure: bytes = b""
    told: int = 0
    is_untold: bool = False
    held: list[HeldKey] = field(default_factory=list)
    is_published: bool = False
    is_rewrapped: bool = False
    is_foreign: bool = False
    closings: int = 0
    asked_s: float = -math.inf
    looked_s: float = -math.inf

    @property
    def number(self) -> int:
        """The number that its present key has, or will have."""
        return self.erased + 1


class TenantKeys:
    """The keys of one node. ``is_dirty`` says that the files do not say the same any more."""

    def __init__(self, masters: MasterKeys, *, random: Random = os.urandom) -> None:
        self._masters = masters
        self._random = random
        self._tenants: dict[TenantId, TenantState] = {}
        self._by_id: dict[bytes, DataKey] = {}
        self.is_dirty = False

    def parse(self, stored: Iterable[bytes]) -> tuple[list[StoredRecord], int]:
        """Return what files hold, and how many of their records other master keys made."""
        known: list[StoredRecord] = []
        num_foreign = 0
        for packed in stored:
            try:
                known.append((TenantRecord.unpack(packed, self._masters), packed))
            except UnknownMaster:
                num_foreign += 1
            except CorruptBlock as error:
                logger.error("keys: a record in the key file is dropped: %s", error)
                self.is_dirty = True
        return known, num_foreign

    def learn(self, known: Sequence[StoredRecord]) -> None:
        """Take in what files hold."""
        for record, _ in known:
            at = self.state(record.tenant)
            at.erased = max(at.erased, record.num_erased)
            at.is_untold |= record.kind is RecordKind.ERASED_UNTOLD
        for record, packed in known:
            if record.kind is RecordKind.KEY and record.number == self.state(record.tenant).number:
                self.hold(record, packed)
        for at in self._tenants.values():
            at.told = 0 if at.is_untold else at.erased

    def state(self, tenant: TenantId) -> TenantState:
        """Return the state of a tenant, made if there is none."""
        return self._tenants.setdefault(tenant, TenantState())

    def tenants(self) -> list[TenantId]:
        """Return every tenant of whom anything is known."""
        return list(self._tenants)

    def untold(self) -> list[TenantId]:
        """Return those with an erasure that other nodes were not told of."""
        return [tenant for tenant, at in self._tenants.items() if at.is_untold]

    def present(self, tenant: TenantId) -> DataKey | None:
        """Return the key for a tenant's new copies."""
        at = self._tenants.get(tenant)
        return at.held[0].key if at is not None and at.held and not at.closings else None

    def find(self, wanted: bytes) -> DataKey | None:
        """Return the key of that id."""
        return self._by_id.get(wanted)

    def ids(self) -> frozenset[bytes]:
        """Return the ids of all keys that are here."""
        return frozenset(self._by_id)

    def is_erased(self, tenant: TenantId) -> bool:
        """Whether a tenant was erased at some time."""
        return tenant in self._tenants and self._tenants[tenant].erased > 0

    def make(self, tenant: TenantId) -> None:
        """Make a key for a tenant's new copies."""
        secret = DataKey.make(tenant, self._random).secret()
        present = self._masters.present
        record = TenantRecord(RecordKind.KEY, tenant, self.state(tenant).number, secret, present.id)
        self.hold(record, record.pack(present, random=self._random), is_first=True)

    def hold(self, record: TenantRecord, packed: bytes, *, is_first: bool = False) -> None:
        """Add a key to those of its tenant, at their end or as the one for new copies."""
        held = self.state(record.tenant).held
        known = next((at for at in held if at.key.id == key_id(record.secret)), None)
        if known is None:
            if record.master_id != self._masters.present.id:
                packed = record.pack(self._masters.present, random=self._random)
            known = HeldKey(DataKey(record.secret, record.tenant), packed)
            self._by_id[known.key.id] = known.key
            self.is_dirty = True
        elif is_first:
            held.remove(known)
        else:
            return
        held.insert(0 if is_first else len(held), known)

    def lose(self, tenant: TenantId, number: int) -> list[bytes]:
        """Forget a tenant's keys up to a number; returns the ids of those that were here."""
        at = self.state(tenant)
        if number <= at.erased:
            return []
        at.erased = min(number, MAX_NUMBER)
        at.is_published, at.is_rewrapped, at.is_foreign = False, False, False
        held, at.held = at.held, []
        for one in held:
            one.key.forget()
            del self._by_id[one.key.id]
        self.is_dirty = True
        return [one.key.id for one in held]

    def records(self) -> list[bytes]:
        """Return what files are to hold, wrapped by the present master key."""
        records: list[bytes] = []
        for tenant, at in self._tenants.items():
            if at.erased:
                records.append(self._erasure(tenant, at))
            records += [one.packed for one in at.held]
        return records

    def _erasure(self, tenant: TenantId, at: TenantState) -> bytes:
        kind = RecordKind.ERASED_UNTOLD if at.is_untold else RecordKind.ERASED
        record = TenantRecord(kind, tenant, at.erased)
        if not record.is_stored_as(at.erasure):
            at.erasure = record.pack(self._masters.present, random=self._random)
        return at.erasure

    @property
    def num_known(self) -> int:
        """Tenants that have a key here, or were erased."""
        return sum(bool(at.held) or at.erased > 0 for at in self._tenants.values())

    def counts(self) -> dict[str, int]:
        """Return how much there is, for the stats."""
        states = self._tenants.values()
        return {
            "keys": len(self._by_id),
            "erased_tenants": sum(at.erased > 0 for at in states),
            "untold_erasures": sum(at.is_untold for at in states),
        }
