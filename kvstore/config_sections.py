"""Sections of the configuration: the table of its keys.

Name, type, default, range and meaning of each key stand in its field, and ``docs/configuration.md`` is
generated from them. The environment is read here, for secrets, and in ``config``.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar, cast

from kvstore.config_values import Kind, Rule, is_loopback, listen_host_port
from kvstore.secret_source import SecretSource

_MIB = 1 << 20
_GIB = 1 << 30
_TIB = 1 << 40
_DAY_S = 86_400.0

_T = TypeVar("_T")


def _key(default: _T, rule: Rule) -> _T:
    return field(default=default, metadata={"rule": rule})


def _required(rule: Rule, kind: type[_T]) -> _T:
    return cast("_T", field(metadata={"rule": rule}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """``[server]``: how clients reach the store."""

    section: ClassVar[str] = "server"

    socket: Path = _key(
        Path("/run/kvstore/kvstore.sock"),
        Rule("Unix socket of the server, made with mode 0600.", Kind.SOCKET),
    )
    max_connections: int = _key(
        256, Rule("Clients connected at a time; more are refused.", Kind.COUNT, 1, 65_536)
    )
    log_level: str = _key(
        "info",
        Rule(
            "Least severe message that is logged.", Kind.CHOICE, choices=("debug", "info", "warning", "error")
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """``[http]``: the store over HTTP. Without this section nothing listens on the network."""

    section: ClassVar[str] = "http"

    listen: str = _key(
        "127.0.0.1:8470",
        Rule(
            "Address that HTTP is served at; port 0: any free one. Off loopback api_keys and tls_folder are"
            " required.",
            Kind.LISTEN,
        ),
    )
    api_keys: SecretSource | None = _key(
        None,
        Rule(
            "Where the keyring is that kvstore keys makes; absent: whoever reaches the port is the operator.",
            Kind.PLACE,
        ),
    )
    tls_folder: Path | None = _key(
        None,
        Rule(
            "Folder with PEM files: tls.crt and tls.key of the server; with a ca.crt there, clients must"
            " show a certificate of one of its authorities.",
            Kind.FOLDER,
        ),
    )
    public_models: tuple[str, ...] = _key(
        (),
        Rule(
            'Models of which tenants may share a namespace, for all who ask for it; "*": every model.',
            Kind.NAMES,
        ),
    )
    max_connections: int = _key(
        1024,
        Rule(
            "Connections open at a time; more are answered 503. Fewer where the limit on open files is low.",
            Kind.COUNT,
            1,
            65_536,
        ),
    )
    requests_per_s: float = _key(
        0.0, Rule("Requests a second that each key may begin; 0: no limit.", Kind.RATE, 0, 1_000_000)
    )

    @property
    def host_port(self) -> tuple[str, int]:
        """IP address and port of ``listen``."""
        return listen_host_port(self.listen)

    def read_api_keys(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the keyring's text from where ``api_keys``, which is given, says it is. Blocks on a file.

        Raises:
            InvalidConfig: as ``SecretSource.read_text``.
        """
        assert self.api_keys is not None
        return self.api_keys.read_text(environ, key=f"[{self.section}] api_keys")

    def open_door(self) -> str | None:
        """Return what would let anybody in from the network, and the remedy; None if nothing does."""
        host, _ = self.host_port
        missing = [name for name in ("api_keys", "tls_folder") if getattr(self, name) is None]
        if is_loopback(host) or not missing:
            return None
        return (
            f"[{self.section}] listen: {self.listen} is reached from the network, which needs API keys and"
            f" TLS: set {' and '.join(missing)} too, or listen on 127.0.0.1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """``[store]``: the block manager."""

    section: ClassVar[str] = "store"

    timeout_s: float = _key(
        0.05,
        Rule(
            "Deadline of a lookup that names none; what is not ready then is a miss.",
            Kind.DURATION,
            0.001,
            60,
        ),
    )
    lease_s: float = _key(
        30.0, Rule("A lease that nobody ended ends after this time.", Kind.DURATION, 0.1, 3600)
    )
    high_water_ratio: float = _key(
        0.95, Rule("Filling of a tier above which blocks are evicted or demoted.", Kind.RATIO, 0.01, 1)
    )
    low_water_ratio: float = _key(
        0.90, Rule("Filling that eviction stops at; not above high_water_ratio.", Kind.RATIO, 0.01, 1)
    )
    write_queue_blocks: int = _key(
        1024,
        Rule(
            "Blocks waiting to be written to each slower tier; a full queue drops writes.",
            Kind.COUNT,
            1,
            1_000_000,
        ),
    )
    write_batch_blocks: int = _key(16, Rule("Blocks written to a slower tier at once.", Kind.COUNT, 1, 1024))
    write_mode: str = _key(
        "through",
        Rule(
            "When a block is written to slower tiers: at once, when it leaves memory, or when used again.",
            Kind.CHOICE,
            choices=("through", "back", "second_hit"),
        ),
    )
    namespace_quota_ratio: float = _key(
        1.0, Rule("Share of each tier that one namespace may fill.", Kind.RATIO, 0.01, 1)
    )
    pin_budget_ratio: float = _key(
        1.0, Rule("Share of memory that one namespace may keep leased.", Kind.RATIO, 0.01, 1)
    )
    policy: str = _key(
        "gittins",
        Rule(
            "Which blocks are evicted first, and which are not even stored: docs/policies.md.",
            Kind.POLICIES,
        ),
    )
    records_bytes: int = _key(
        256 * _MIB,
        Rule(
            "Room for records, on the first ssd folder or else in memory, taken as they come; a tenant may"
            " fill namespace_quota_ratio of it, remote included. 0: none.",
            Kind.SIZE,
            0,
            64 * _GIB,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DramConfig:
    """``[tiers.dram]``: blocks in shared memory."""

    section: ClassVar[str] = "tiers.dram"

    capacity_bytes: int = _key(
        _GIB, Rule("Memory for blocks, slot padding included.", Kind.SIZE, _MIB, 64 * _TIB)
    )
    staging_bytes: int = _key(
        64 * _MIB,
        Rule("Memory for blocks on their way between tiers, besides capacity_bytes.", Kind.SIZE, 0, _TIB),
    )
    lock_memory: bool = _key(
        False,
        Rule("Keep the memory from being swapped (mlock); needs a sufficient RLIMIT_MEMLOCK.", Kind.FLAG),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdConfig:
    """``[tiers.ssd]``: blocks on a local disk. Without this section there is no ssd tier."""

    section: ClassVar[str] = "tiers.ssd"

    path: tuple[Path, ...] = _required(
        Rule(
            "Folder for slab and index, or several, one per disk; made if absent, used by one server only.",
            Kind.FOLDERS,
        ),
        tuple[Path, ...],
    )
    capacity_bytes: int = _required(
        Rule(
            "Disk space for blocks in each folder, preallocated at the start.", Kind.SIZE, _MIB, 1024 * _TIB
        ),
        int,
    )
    write_budget_bytes_per_day: int = _key(
        0,
        Rule(
            "Bytes written to each folder per day; below half of it only blocks seen before. 0: no limit.",
            Kind.SIZE,
            0,
            1024 * _TIB,
        ),
    )
    io_threads: int = _key(4, Rule("Threads that read and write, for each folder.", Kind.COUNT, 1, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """``[tiers.remote]``: blocks in Redis or Valkey. Without this section there is no remote tier."""

    section: ClassVar[str] = "tiers.remote"

    url: str = _required(Rule("Address of the servers, without user and password.", Kind.URL), str)
    username: str | None = _key(None, Rule("ACL user; absent: the server's default user.", Kind.NAME))
    password: SecretSource | None = _key(
        None,
        Rule("Where the password is: an environment variable, or the first line of a file.", Kind.PLACE),
    )
    sentinel_master: str = _key(
        "mymaster", Rule("Name that the sentinels of a redis+sentinel url know the master by.", Kind.NAME)
    )
    tls_folder: Path | None = _key(
        None,
        Rule(
            "Folder with PEM files for a rediss server: ca.crt, the authorities trusted (absent: the"
            " system's); tls.crt and tls.key, shown to the server.",
            Kind.FOLDER,
        ),
    )
    key_prefix: str = _key("kvstore", Rule("First part of every key written there.", Kind.NAME))
    ttl_s: float = _key(
        0.0,
        Rule("Time a block is kept there after it was written; 0: no limit.", Kind.DURATION, 0, 365 * _DAY_S),
    )
    timeout_s: float = _key(
        0.05, Rule("Longest wait for one answer of the server.", Kind.DURATION, 0.001, 60)
    )
    num_connections: int = _key(4, Rule("Connections kept to each server.", Kind.COUNT, 1, 256))
    breaker_backoff_s: float = _key(
        0.5,
        Rule(
            "Pause after a failure before a server is asked again; doubles while it does not answer.",
            Kind.DURATION,
            0.01,
            3600,
        ),
    )
    breaker_backoff_max_s: float = _key(5.0, Rule("Longest such pause.", Kind.DURATION, 0.01, 3600))

    def read_password(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return the password from where the configuration says it is; None if it names no place.

        Blocks on a file.

        Raises:
            InvalidConfig: as ``SecretSource.read``.
        """
        if self.password is None:
            return None
        return self.password.read(environ, key=f"[{self.section}] password")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptionConfig:
    """``[encryption]``: blocks on ssd and remote, encrypted. Without this section they are in the clear."""

    section: ClassVar[str] = "encryption"

    keys: SecretSource = _required(
        Rule(
            "Where the master keys are: 64 hex digits a line, the first in use, others being replaced.",
            Kind.PLACE,
        ),
        SecretSource,
    )

    def read_keys(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the text with the master keys. Blocks on a file.

        Raises:
            InvalidConfig: as ``SecretSource.read_text``.
        """
        return self.keys.read_text(environ, key=f"[{self.section}] keys")


SectionConfig = (
    ServerConfig | HttpConfig | StoreConfig | DramConfig | SsdConfig | RemoteConfig | EncryptionConfig
)
SECTIONS: tuple[type[SectionConfig], ...] = (
    ServerConfig,
    HttpConfig,
    StoreConfig,
    DramConfig,
    SsdConfig,
    RemoteConfig,
    EncryptionConfig,
)
"""Every section, in the order of the reference."""
