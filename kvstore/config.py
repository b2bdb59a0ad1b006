"""Configuration: one TOML file read into frozen dataclasses, every key typed, bounded and documented.

The table of keys is in ``config_sections``. The environment is read there and here only.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from kvstore.config_sections import (
    SECTIONS,
    DramConfig,
    EncryptionConfig,
    HttpConfig,
    RemoteConfig,
    SectionConfig,
    ServerConfig,
    SsdConfig,
    StoreConfig,
)
from kvstore.config_values import BadValue, Rule, size_text
from kvstore.errors import InvalidConfig

CONFIG_VARIABLE = "KVSTORE_CONFIG"
"""Environment variable: path of the configuration file where no ``--config`` is given."""

SOCKET_VARIABLE = "KVSTORE_SOCKET"
"""Environment variable: the server's Unix socket where a client command gets no address."""

API_KEY_VARIABLE = "KVSTORE_API_KEY"
"""Environment variable: the API key of client commands, for a store that is reached over HTTP."""

TLS_FOLDER_VARIABLE = "KVSTORE_TLS_FOLDER"
"""Environment variable: folder of the certificates that client commands use over HTTPS."""

_OTLP = "OTEL_EXPORTER_OTLP"
_MIN_QUEUE_SPANS, _MAX_QUEUE_SPANS = 512, 1 << 20
_MAX_DIGITS = 20
_FILE_MAX_BYTES = 1 << 20

_S = TypeVar("_S", bound="SectionConfig")


@dataclass(frozen=True)
class TraceSettings:
    """How traces leave a process that is asked for them; at most ``queue_spans`` spans wait."""

    protocol: str = "http/protobuf"
    queue_spans: int = 2048


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


def trace_settings(environ: Mapping[str, str] = os.environ) -> TraceSettings | None:
    """Return what OpenTelemetry's variables say of traces; None: nothing asks for any, or they are off.

    An OTLP endpoint, or OTEL_TRACES_EXPORTER=otlp, asks for them. What else there is, the SDK reads itself.
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter not in ("", "otlp"):
        return None
    if not (exporter or environ.get(f"{_OTLP}_ENDPOINT") or environ.get(f"{_OTLP}_TRACES_ENDPOINT")):
        return None
    protocol = environ.get(f"{_OTLP}_TRACES_PROTOCOL") or environ.get(f"{_OTLP}_PROTOCOL") or "http/protobuf"
    queue_spans = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    num_spans = int(queue_spans) if queue_spans.isdecimal() and len(queue_spans) <= _MAX_DIGITS else 0
    is_size = _MIN_QUEUE_SPANS <= num_spans <= _MAX_QUEUE_SPANS
    return TraceSettings(protocol, num_spans if is_size else TraceSettings.queue_spans)


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
