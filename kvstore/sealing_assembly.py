"""Puts encryption between a manager and the tiers below memory."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvstore.erasing import Encryption
from kvstore.key_exchange import KeyExchange
from kvstore.key_file import KeyFile
from kvstore.master_keys import MasterKeys
from kvstore.shared_records import SHARED_RECORDS
from kvstore.tenant_record import RECORD_BYTES
from kvstore.tier import Medium, Tier
from kvstore.vault import Vault
from kvstore_tiers.dram import DramTier
from kvstore_tiers.sealed import SealedTier


@runtime_checkable
class _OnDisk(Protocol):
    """A tier that has folders of its own."""

    @property
    def folders(self) -> Collection[Path]:
        """Those that it has open."""


def seal(
    master_keys: str,
    dram: DramTier,
    lower: Sequence[Tier],
    *,
    folders: Sequence[Path],
    clock: Callable[[], float],
) -> tuple[list[Tier], Encryption]:
    """Return the tiers below memory, encrypted, and what a manager needs to erase tenants.

    ``folders`` are those of the ssd tier; the keys are kept in each. ``master_keys`` is the text of them.

    Raises:
        InvalidConfig: the text holds no master key.
    """
    masters = MasterKeys.parse(master_keys, key="[encryption] keys")
    shared = next((tier for tier in lower if tier.medium is Medium.REMOTE), None)
    on_disk = next((tier for tier in lower if isinstance(tier, _OnDisk)), None)
    file: KeyFile | None = None
    if on_disk is not None:
        file = KeyFile(folders, record_bytes=RECORD_BYTES, in_use=lambda: on_disk.folders)
    vault = Vault(
        masters,
        file=file,
        exchange=None if shared is None else KeyExchange(shared, masters, clock=clock),
        clock=clock,
    )
    sealed = [SealedTier(tier, vault, plain=SHARED_RECORDS, clock=clock) for tier in lower]
    return [*sealed], Encryption(vault, dram, sealed)
