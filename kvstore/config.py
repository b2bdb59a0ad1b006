"""Configuration: one TOML file read into frozen dataclasses, every key typed, bounded and documented.

The dataclasses below are the table of keys: name, type, default, range and meaning of each stand in its
field, and ``docs/configuration.md`` is generated from them. The environment is read in this module only.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from kvstore.config_values import BadValue, Kind, Rule, is_loopback, listen_host_port, size_text
from kvstore.errors import InvalidConfig
from kvstore.secret_source import SecretSource

CONFIG_VARIABLE = "KVSTORE_CONFIG"
"""Environment variable: path of the configuration file where no ``--config`` is given."""

SOCKET_VARIABLE = "KVSTORE_SOCKET"
"""Environment variable: the server's Unix socket where a client command gets no address."""

API_KEY_VARIABLE = "KVSTORE_API_KEY"
"""Environment variable: the API key of client commands, for a store that is reached over HTTP."""

TLS_FOLDER_VARIABLE = "KVSTORE_TLS_FOLDER"
"""Environment variable: folder of the certificates that client commands use over HTTPS."""

_FILE_MAX_BYTES = 1 << 20
_MIB = 1 << 20
_GIB = 1 << 30
_TIB = 1 << 40
_DAY_S = 86_400.0

_T = TypeVar("_T")
_S = TypeVar("_S", bound="SectionConfig")


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
            Kind.CHOICE,
            choices=(
                "fifo",
                "lru",
                "lru-2",
                "slru",
                "arc",
                "s3-fifo",
                "sieve",
                "w-tinylfu",
                "lfu",
                "gittins",
            ),
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


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key as the reference shows it. ``default`` is meaningless where ``is_required``."""

    section: str
    name: str
    rule: Rule
    is_required: bool
    default: object


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """One key in force. ``source`` is ``default`` or the name of the file that gives it."""

    section: str
    name: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration. Sections that may be absent are None then."""

    server: ServerConfig = field(default_factory=ServerConfig)
    http: HttpConfig | None = None
    store: StoreConfig = field(default_factory=StoreConfig)
    dram: DramConfig = field(default_factory=DramConfig)
    ssd: SsdConfig | None = None
    remote: RemoteConfig | None = None
    encryption: EncryptionConfig | None = None
    source: str = field(default="built-in defaults", compare=False)
    given: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Config":
        """Read a TOML file. Blocks.

        Raises:
            InvalidConfig: the file cannot be read, is not TOML, or holds an unknown key or a bad value.
        """
        name = os.fspath(path)
        try:
            with Path(name).open("rb") as file:
                data = file.read(_FILE_MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise InvalidConfig(f"{name}: cannot be read: {reason}: name a readable TOML file") from error
        if len(data) > _FILE_MAX_BYTES:
            raise InvalidConfig(f"{name}: larger than {size_text(_FILE_MAX_BYTES)}: not a configuration")
        try:
            tree = tomllib.loads(data.decode())
        except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
            raise InvalidConfig(f"{name}: not TOML: {error}") from error
        except RecursionError as error:
            raise InvalidConfig(f"{name}: not a configuration: nested too deeply") from error
        return cls.from_dict(tree, source=name)

    @classmethod
    def from_dict(cls, tree: Mapping[str, object], *, source: str = "configuration") -> "Config":
        """Build from what a TOML file would hold: ``{"store": {...}, "tiers": {"dram": {...}}}``.

        ``source`` names the origin in messages.

        Raises:
            InvalidConfig: an unknown section or key, or a bad value.
        """
        tables = _tables(tree, source)
        config = cls(
            server=_build(ServerConfig, tables, source),
            http=_build(HttpConfig, tables, source) if HttpConfig.section in tables else None,
            store=_build(StoreConfig, tables, source),
            dram=_build(DramConfig, tables, source),
            ssd=_build(SsdConfig, tables, source) if SsdConfig.section in tables else None,
            remote=_build(RemoteConfig, tables, source) if RemoteConfig.section in tables else None,
            encryption=(
                _build(EncryptionConfig, tables, source) if EncryptionConfig.section in tables else None
            ),
            source=source,
            given=frozenset((section, key) for section, table in tables.items() for key in table),
        )
        _check_together(config)
        return config

    def _sections(self) -> tuple[SectionConfig | None, ...]:
        tiers = (self.dram, self.ssd, self.remote)
        return (self.server, self.http, self.store, *tiers, self.encryption)

    def effective(self) -> list[EffectiveValue]:
        """Return every key in force with its value and where that comes from. Holds no secrets."""
        return [
            EffectiveValue(
                part.section,
                item.name,
                getattr(part, item.name),
                self.source if (part.section, item.name) in self.given else "default",
            )
            for part in self._sections()
            if part is not None
            for item in fields(part)
        ]


def config_keys() -> list[ConfigKey]:
    """Return every key there is, in the order of the reference."""
    return [
        ConfigKey(section.section, item.name, item.metadata["rule"], item.default is MISSING, item.default)
        for section in SECTIONS
        for item in fields(section)
    ]


def load_config(path: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read the file at ``path``, else the one that KVSTORE_CONFIG names, else take the defaults. Blocks.

    Raises:
        InvalidConfig: as ``Config.load``.
    """
    name = path or environ.get(CONFIG_VARIABLE)
    return Config.load(name) if name else Config()


def default_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address a client uses where none is given: KVSTORE_SOCKET, else the default socket."""
    return f"unix:{environ.get(SOCKET_VARIABLE) or ServerConfig().socket}"


def client_credentials(environ: Mapping[str, str] = os.environ) -> tuple[str | None, Path | None]:
    """Return the API key and the folder of certificates that client commands use over HTTP, if given."""
    folder = environ.get(TLS_FOLDER_VARIABLE)
    return environ.get(API_KEY_VARIABLE) or None, Path(folder) if folder else None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for what can be fetched again: $XDG_CACHE_HOME/kvstore or ~/.cache/kvstore."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvstore"


def _tables(tree: Mapping[str, object], source: str) -> dict[str, Mapping[str, object]]:
    """Return the tables that are there by section name: ``tiers.dram``."""
    names = [kind.section for kind in SECTIONS]
    tables: dict[str, Mapping[str, object]] = {}
    tiers = tree.get("tiers", {})
    found = {name: table for name, table in tree.items() if name != "tiers"}
    if isinstance(tiers, Mapping):
        found |= {f"tiers.{name}": table for name, table in tiers.items()}
    else:
        raise InvalidConfig(
            f"{source}: tiers: is not a section: write [tiers.dram], [tiers.ssd], [tiers.remote]"
        )
    for name, table in found.items():
        if name not in names:
            raise InvalidConfig(f"{source}: {_unknown_table(name, table, names)}")
        if not isinstance(table, Mapping):
            raise InvalidConfig(f"{source}: {name}: is not a section: write [{name}] on a line of its own")
        tables[name] = table
    return tables


def _build(kind: type[_S], tables: Mapping[str, Mapping[str, object]], source: str) -> _S:
    table = tables.get(kind.section, {})
    keys = {item.name: item for item in fields(kind)}
    for name in table:
        if name not in keys:
            raise InvalidConfig(
                f"{source}: [{kind.section}] unknown key {_printable(name)}{_nearest_key(kind.section, name)}"
            )
    for name, item in keys.items():
        if item.default is MISSING and name not in table:
            rule = item.metadata["rule"]
            raise InvalidConfig(f"{source}: [{kind.section}] {name}: is missing, expected {rule.expected()}")
    values: dict[str, Any] = {}  # Rule.read gives each key the type of its field
    for name, raw in table.items():
        try:
            values[name] = keys[name].metadata["rule"].read(raw)
        except BadValue as error:
            raise InvalidConfig(f"{source}: [{kind.section}] {name}: {error}") from None
    return kind(**values)


def _nearest_key(section: str, name: str) -> str:
    keys = [(key.section, key.name) for key in config_keys()]
    here = _nearest(name, [key for where, key in keys if where == section])
    if here:
        return here
    elsewhere = [where for where, key in keys if key == name]
    if elsewhere:
        return f": it belongs to [{elsewhere[0]}]"
    subject = name.partition("_")[0] + "_"
    related = [key for where, key in keys if where == section and key.startswith(subject)]
    if related:
        return f": did you mean {related[0]}?"
    return f": see the keys of [{section}] in kvstore config --reference"


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= 80 else ascii(name)[:80]


def _unknown_table(name: str, table: object, sections: Sequence[str]) -> str:
    """Return what is wrong with a name that is no section's, and which section was probably meant."""
    kind = "key outside any section"
    if isinstance(table, Mapping):
        kind = "section"
        # [tier.dram] is read as a table "dram" in a section "tier".
        inner = next((key for key, value in table.items() if isinstance(value, Mapping)), None)
        name = name if inner is None else f"{name}.{inner}"
    # The last part says more than the whole: tier.dram is nearer to tiers.dram than to tiers.ssd.
    by_last_part = {section.rpartition(".")[2]: section for section in sections}
    close = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1)
    hint = f"did you mean [{by_last_part[close[0]]}]?" if close else f"there are [{'], ['.join(sections)}]"
    return f"unknown {kind} [{_printable(name)}]: {hint}"


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else ""


def _check_together(config: Config) -> None:
    """Refuse values that are fine alone and wrong together."""
    store, remote = config.store, config.remote
    problem = _ssd_problem(config.ssd) or (None if config.http is None else config.http.open_door())
    if problem is not None:
        raise InvalidConfig(f"{config.source}: {problem}")
    if store.low_water_ratio > store.high_water_ratio:
        problem = (
            f"[store] low_water_ratio: is {store.low_water_ratio:g}, above high_water_ratio"
            f" {store.high_water_ratio:g}: lower it"
        )
    elif remote is not None:
        problem = _remote_problem(remote)
    if problem is not None:
        raise InvalidConfig(f"{config.source}: {problem}")


def _remote_problem(remote: RemoteConfig) -> str | None:
    if remote.breaker_backoff_s > remote.breaker_backoff_max_s:
        return (
            f"[tiers.remote] breaker_backoff_s: is {remote.breaker_backoff_s:g}, above breaker_backoff_max_s"
            f" {remote.breaker_backoff_max_s:g}: lower it"
        )
    if remote.tls_folder is not None and not remote.url.startswith("rediss"):
        return (
            "[tiers.remote] tls_folder: the url is not encrypted: let it begin with rediss, or take the"
            " folder out"
        )
    return None


def _ssd_problem(ssd: SsdConfig | None) -> str | None:
    if ssd is not None and len(set(ssd.path)) < len(ssd.path):
        return "[tiers.ssd] path: names a folder twice: one folder per disk"
    return None
