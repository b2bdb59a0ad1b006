"""Assembly: builds the manager of a store, with the tiers its configuration names."""

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.branches import Branches
from kvstore.config import Config
from kvstore.config_sections import RemoteConfig, SsdConfig
from kvstore.epoch_file import EpochFile
from kvstore.erasing import Encryption
from kvstore.errors import InvalidConfig
from kvstore.manager import BlockManager
from kvstore.policy_file import PolicyFile
from kvstore.policy_plan import PolicyPlan
from kvstore.record_store import RecordStore
from kvstore.record_truth import LocalTruth, RecordTruth
from kvstore.size_curve import SizeCurve
from kvstore.state import ManagerSettings, WriteMode
from kvstore.tier import Tier
from kvstore_tiers.dram import DramTier
from kvstore_tiers.record_codec import PlainCodec, RecordCodec
from kvstore_tiers.record_local import LocalRecords

if TYPE_CHECKING:
    from kvstore_tiers.record_remote import RemoteRecords

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Store:
    """A manager and its top tier, whose arena the server shares with clients; and the records beside them."""

    manager: BlockManager
    dram: DramTier
    records: RecordStore


def assemble(
    config: Config, *, prefill_tokens_per_s: float = 0.0, clock: Callable[[], float] = time.monotonic
) -> Store:
    """Build a store that is not open yet: ``await store.manager.open()`` opens its tiers, then
    ``await store.records.open()`` its records.

    ``prefill_tokens_per_s`` is how fast engines compute what they do not find; 0: not known. Blocks on the
    files of secrets that the configuration names.

    Raises:
        InvalidConfig: the remote tier's password or the master keys cannot be had, or a package is missing.
    """
    dram = DramTier(
        capacity_bytes=config.dram.capacity_bytes,
        staging_bytes=config.dram.staging_bytes,
        is_locked=config.dram.lock_memory,
    )
    lower: list[Tier] = []
    if config.ssd is not None:
        lower.append(_ssd_tier(config.ssd, is_sealed=config.encryption is not None))
    if config.remote is not None:
        lower.append(_remote_tier(config.remote, clock))
    folders = () if config.ssd is None else config.ssd.path
    encryption: Encryption | None = None
    if config.encryption is not None:
        with _packages_of(config.encryption.section):
            # Only a store with encryption needs its package.
            from kvstore.sealing_assembly import seal

        masters = config.encryption.read_keys()
        lower, encryption = seal(masters, dram, lower, folders=folders, clock=clock)
    records = _records(config, encryption, clock)
    if encryption is not None:
        encryption = replace(encryption, records=records)
    _warn_of_exposed_secrets(config)
    settings = ManagerSettings(
        timeout_s=config.store.timeout_s,
        lease_s=config.store.lease_s,
        high_water_ratio=config.store.high_water_ratio,
        low_water_ratio=config.store.low_water_ratio,
        write_queue_blocks=config.store.write_queue_blocks,
        write_batch_blocks=config.store.write_batch_blocks,
        write_mode=WriteMode(config.store.write_mode),
        namespace_quota_ratio=config.store.namespace_quota_ratio,
        pin_budget_ratio=config.store.pin_budget_ratio,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    manager = BlockManager(
        dram,
        lower,
        settings=settings,
        new_policy=PolicyPlan.parse(config.store.policy),
        epoch_file=EpochFile([folder / "epochs" for folder in folders]) if folders else None,
        policy_file=PolicyFile(folders[0] / "policies") if folders else None,
        encryption=encryption,
        new_size_curve=lambda limit_bytes: SizeCurve(
            multipliers=[secrets.randbits(64) | 1 for _ in range(4)], limit_bytes=limit_bytes, clock=clock
        ),
        branches=Branches(clock=clock),
        clock=clock,
    )
    return Store(manager, dram, records)


def _warn_of_exposed_secrets(config: Config) -> None:
    places = {
        "[encryption] keys": None if config.encryption is None else config.encryption.keys,
        "[tiers.remote] password": None if config.remote is None else config.remote.password,
    }
    for key, place in places.items():
        if place is not None and place.is_readable_by_others:
            logger.warning("%s: %s: others may read it: chmod 600 %s", key, place, place.file)


def _records(config: Config, encryption: Encryption | None, clock: Callable[[], float]) -> RecordStore:
    capacity_bytes = config.store.records_bytes
    if not capacity_bytes:
        folder = None if config.ssd is None else config.ssd.path[0] / "records" / "index"
        if folder is not None and folder.exists():
            logger.warning("records: %s is left alone: records_bytes of [store] is 0, none is served", folder)
        return RecordStore(None, clock=clock)
    codec: RecordCodec = PlainCodec()
    if encryption is not None:
        # Only a store with encryption needs its package, which is here by now.
        from kvstore_tiers.record_sealing import SealedCodec

        codec = SealedCodec(encryption.vault, reads_clear=config.remote is None)
    local = _local_records(config, codec, clock)
    quota_bytes = int(capacity_bytes * config.store.namespace_quota_ratio)
    truth: RecordTruth
    if config.remote is None:
        truth = LocalTruth(local, codec, capacity_bytes, quota_bytes, clock)
    else:
        # Only a store with a remote tier needs its package, which is here by now.
        from kvstore.record_copies import RecordCopies
        from kvstore.shared_truth import SharedTruth

        remote = _remote_records(config.remote, clock)
        copies = RecordCopies(local, capacity_bytes, clock)
        truth = SharedTruth(remote, copies, codec, quota_bytes, clock)
    return RecordStore(truth, clock=clock)


def _remote_records(config: RemoteConfig, clock: Callable[[], float]) -> "RemoteRecords":
    from kvstore_tiers.record_remote import RemoteRecords
    from kvstore_tiers.remote_tls import TlsFolder

    return RemoteRecords(
        config.url,
        user=config.username or "",
        password=config.read_password() or "",
        sentinel_master=config.sentinel_master,
        key_prefix=config.key_prefix,
        timeout_s=config.timeout_s,
        num_connections=config.num_connections,
        breaker_backoff_s=config.breaker_backoff_s,
        breaker_backoff_max_s=config.breaker_backoff_max_s,
        tls=TlsFolder(config.tls_folder),
        clock=clock,
    )


def _local_records(config: Config, codec: RecordCodec, clock: Callable[[], float]) -> LocalRecords:
    capacity_bytes, ssd = config.store.records_bytes, config.ssd
    if ssd is None:
        return LocalRecords(None, capacity_bytes=capacity_bytes, clock=clock, wall_s=time.time)
    with _packages_of(ssd.section):
        # Only a store with such a tier needs its package.
        from kvstore_tiers.record_disk import RecordDisk

    folder = ssd.path[0] / "records"
    return LocalRecords(
        lambda: RecordDisk.open(folder, capacity_bytes=capacity_bytes, is_sealed=codec.is_sealed),
        where=f"folder {folder}",
        capacity_bytes=capacity_bytes,
        clock=clock,
        wall_s=time.time,
    )


def _ssd_tier(config: SsdConfig, *, is_sealed: bool = False) -> Tier:
    with _packages_of(config.section):
        # Only a store with such a tier needs its package.
        from kvstore_tiers.ssd import SsdTier
        from kvstore_tiers.ssd_array import SsdArray
        from kvstore_tiers.ssd_copies import Numbers

    numbers = Numbers()
    disks = [
        SsdTier(
            folder,
            capacity_bytes=config.capacity_bytes,
            io_threads=config.io_threads,
            write_budget_bytes_per_day=config.write_budget_bytes_per_day,
            is_sealed=is_sealed,
            numbers=numbers,
        )
        for folder in config.path
    ]
    return disks[0] if len(disks) == 1 else SsdArray(disks)


def _remote_tier(config: RemoteConfig, clock: Callable[[], float]) -> Tier:
    with _packages_of(config.section):
        # Only a store with such a tier needs its package.
        from kvstore_tiers.remote import RemoteTier
        from kvstore_tiers.remote_tls import TlsFolder

    return RemoteTier(
        config.url,
        user=config.username or "",
        password=config.read_password() or "",
        sentinel_master=config.sentinel_master,
        key_prefix=config.key_prefix,
        ttl_s=config.ttl_s or None,
        timeout_s=config.timeout_s,
        num_connections=config.num_connections,
        breaker_backoff_s=config.breaker_backoff_s,
        breaker_backoff_max_s=config.breaker_backoff_max_s,
        tls=TlsFolder(config.tls_folder),
        clock=clock,
    )


@contextmanager
def _packages_of(section: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise InvalidConfig(
            f"[{section}] needs the package {package}: pip install 'tiered-kvstore[server]'"
        ) from error
