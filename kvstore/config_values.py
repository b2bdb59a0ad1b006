"""Values of a configuration: kinds and ranges, read from TOML and written for people."""

import enum
import ipaddress
import math
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from kvstore.errors import InvalidConfig
from kvstore.policy_plan import PLAN_EXPECTED, PolicyPlan
from kvstore.secret_source import EXPECTED as SECRET_EXPECTED
from kvstore.secret_source import SecretSource

SOCKET_PATH_MAX_BYTES = 107
"""Longest path a Unix socket can have on Linux: sun_path holds 108 bytes with its final zero (unix(7))."""

_PORT_MAX = 65_535
_TEXT_MAX_BYTES = 4096
_LIST_MAX = 64
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_SHOWN_BITS = 256
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([KMGT]i?B|B|)")
_REMOTE_SCHEMES = ("redis", "rediss")
_REMOTE_SCHEMES_OF_MANY = tuple(
    f"{scheme}+{kind}" for scheme in _REMOTE_SCHEMES for kind in ("sentinel", "cluster")
)
_REMOTE_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\[\]:@,/?#\s]+)(?::([0-9]{1,5}))?")
_REMOTE_MAX_HOSTS = 64


class Kind(enum.Enum):
    """Kind of a configuration value; the text is what the reference calls it."""

    SIZE = "size"
    DURATION = "seconds"
    COUNT = "integer"
    RATIO = "ratio"
    RATE = "per second"
    FLAG = "true or false"
    CHOICE = "choice"
    POLICIES = "policy, or several by place"
    NAME = "text"
    NAMES = "list of texts"
    FOLDER = "path"
    FOLDERS = "path or paths"
    PLACE = "place of a secret"
    SOCKET = "socket path"
    LISTEN = "IP address and port"
    URL = "URL"


class BadValue(ValueError):
    """A value that its rule does not allow; the text says what it is and what is expected."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one configuration key holds: meaning, kind and range (both ends allowed)."""

    doc: str
    kind: Kind
    low: float = 0
    high: float = math.inf
    choices: tuple[str, ...] = ()

    def read(self, raw: object) -> object:
        """Return the typed value of what TOML gave.

        Raises:
            BadValue: another type, or a value out of range.
        """
        try:
            return _READERS[self.kind](self, raw)
        except BadValue as error:
            raise BadValue(f"{error}, expected {self.expected()}") from None

    def expected(self) -> str:
        """Say what is allowed, for messages and the reference."""
        if self.kind is Kind.SIZE:
            return f'bytes or text like "4GiB", {size_text(self.low)} to {size_text(self.high)}'
        if self.kind is Kind.DURATION:
            return f"seconds, {_number(self.low)} to {_number(self.high)}"
        if self.kind is Kind.COUNT:
            return f"an integer, {_number(self.low)} to {_number(self.high)}"
        if self.kind in (Kind.RATIO, Kind.RATE):
            return f"a number, {_number(self.low)} to {_number(self.high)}"
        if self.kind is Kind.CHOICE:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        return _EXPECTED[self.kind]


def size_text(num_bytes: float) -> str:
    """Write a number of bytes with the largest binary unit that keeps it whole: ``"64MiB"``."""
    whole = int(num_bytes)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if whole and whole % _UNITS[unit] == 0:
            return f"{whole // _UNITS[unit]}{unit}"
    return f"{whole}B"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _shown(raw: object) -> str:
    if isinstance(raw, int) and raw.bit_length() > _SHOWN_BITS:  # thousands of digits are never written out
        return f"a whole number of {raw.bit_length()} bits"
    text = f'"{raw}"' if isinstance(raw, str) else repr(raw).lower() if isinstance(raw, bool) else repr(raw)
    return text if len(text) <= 80 else text[:77] + "..."


def _in_range(rule: Rule, number: float, raw: object) -> None:
    if not rule.low <= number <= rule.high:
        raise BadValue(f"is {_shown(raw)}")


def parse_bytes(text: str) -> float | None:
    """Read a number of bytes with or without a unit, such as ``"64MiB"``; None if it is none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    return float(found[1]) * _UNITS[found[2]] if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def _read_size(rule: Rule, raw: object) -> int:
    if isinstance(raw, str):
        parsed = parse_bytes(raw)
        if parsed is None:
            raise BadValue(f"is {_shown(raw)}")
        num_bytes = parsed
    elif isinstance(raw, int) and not isinstance(raw, bool):
        num_bytes = raw
    else:
        raise BadValue(f"is {_shown(raw)}")
    _in_range(rule, num_bytes, raw)
    return int(num_bytes)


def _read_number(rule: Rule, raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise BadValue(f"is {_shown(raw)}")
    _in_range(rule, raw, raw)
    try:
        number = float(raw)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadValue(f"is {_shown(raw)}")
    return number


def _read_count(rule: Rule, raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise BadValue(f"is {_shown(raw)}")
    _in_range(rule, raw, raw)
    return raw


def _read_flag(rule: Rule, raw: object) -> bool:
    if not isinstance(raw, bool):
        raise BadValue(f"is {_shown(raw)}")
    return raw


def _read_choice(rule: Rule, raw: object) -> str:
    if not isinstance(raw, str) or raw not in rule.choices:
        raise BadValue(f"is {_shown(raw)}")
    return raw


def _read_policies(rule: Rule, raw: object) -> str:
    """Read a plan's text, or a list of such; the rules that a text has twice stand once."""
    items = raw if isinstance(raw, list | tuple) else [raw]
    if not items or not all(isinstance(item, str) for item in items):
        raise BadValue(f"is {_shown(raw)}")
    try:
        return str(PolicyPlan.parse(", ".join(map(str, items))))
    except InvalidConfig as error:
        raise BadValue(f"is {_shown(raw)}: {error}") from None


def _read_name(rule: Rule, raw: object) -> str:
    if not isinstance(raw, str) or not raw or not raw.isprintable():
        raise BadValue(f"is {_shown(raw)}")
    if len(raw.encode()) > _TEXT_MAX_BYTES:
        raise BadValue(f"is {len(raw.encode())} bytes long")
    return raw


def _read_names(rule: Rule, raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list | tuple) or len(raw) > _LIST_MAX:
        raise BadValue(f"is {_shown(raw)}")
    return tuple(_read_name(rule, item) for item in raw)


def _read_folder(rule: Rule, raw: object) -> Path:
    path = Path(_read_name(rule, raw))
    if not path.is_absolute():
        raise BadValue(f"is {_shown(raw)}")
    return path


def _read_folders(rule: Rule, raw: object) -> tuple[Path, ...]:
    items = raw if isinstance(raw, list | tuple) else [raw]
    if not 1 <= len(items) <= _LIST_MAX:
        raise BadValue(f"is {_shown(raw)}")
    return tuple(_read_folder(rule, item) for item in items)


def _read_secret(rule: Rule, raw: object) -> SecretSource:
    try:
        return SecretSource.parse(raw)
    except ValueError as error:
        raise BadValue(str(error)) from None


def _read_socket(rule: Rule, raw: object) -> Path:
    path = _read_folder(rule, raw)
    length = len(str(path).encode())
    if length > SOCKET_PATH_MAX_BYTES:
        raise BadValue(f"is {length} bytes long ({_shown(raw)})")
    return path


def listen_host_port(text: str) -> tuple[str, int]:
    """Return IP address and port of ``127.0.0.1:8470`` or ``[::1]:8470``; port 0: any that is free.

    Raises:
        BadValue: another text. Host names are not taken: what one resolves to may change.
    """
    host, colon, port = text.rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if is_v6 else host)
    except ValueError:
        raise BadValue(f"is {_shown(text)}") from None
    is_port = colon and port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= _PORT_MAX
    if not is_port or (address.version == 6) != is_v6:
        raise BadValue(f"is {_shown(text)}")
    return str(address), int(port)


def is_loopback(host: str) -> bool:
    """Whether an IP address is reached from this machine alone. The wildcard addresses are not."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if address.version == 6 else None
    return (mapped or address).is_loopback


def _read_listen(rule: Rule, raw: object) -> str:
    text = _read_name(rule, raw)
    listen_host_port(text)
    return text


def _read_url(rule: Rule, raw: object) -> str:
    """Read the address of a Redis-protocol server. The value is never shown: it may hold a secret."""
    text = _read_name(rule, raw) if isinstance(raw, str) else ""
    try:
        url = urlsplit(text)
    except ValueError:
        raise BadValue("is not a URL (value not shown)") from None
    if "@" in url.netloc or url.password or url.username:
        raise BadValue(
            "holds a user or a password (value not shown): put the user into username, the place of the"
            " password into password"
        )
    if url.query or url.fragment:
        raise BadValue("holds a query or fragment (value not shown): options are keys of this section")
    if url.scheme == "unix":
        is_whole = not url.netloc and len(url.path) > 1 and len(url.path.encode()) <= SOCKET_PATH_MAX_BYTES
    else:
        is_whole = _names_servers(url)
    if not is_whole:
        raise BadValue("is not the address of a Redis-protocol server (value not shown)")
    return text


def _names_servers(url: SplitResult) -> bool:
    """Whether a redis url is whole: host and port of one server or of several, and a database."""
    is_many = url.scheme in _REMOTE_SCHEMES_OF_MANY
    if not is_many and url.scheme not in _REMOTE_SCHEMES:
        return False
    hosts = [_REMOTE_HOST.fullmatch(host) for host in url.netloc.split(",")]
    if len(hosts) > (_REMOTE_MAX_HOSTS if is_many else 1):
        return False
    if any(host is None or not 1 <= int(host[1] or 1) <= _PORT_MAX for host in hosts):
        return False
    databases = r"/?|/0" if url.scheme.endswith("cluster") else r"/?|/[0-9]{1,5}"
    return re.fullmatch(databases, url.path) is not None


_READERS = {
    Kind.SIZE: _read_size,
    Kind.DURATION: _read_number,
    Kind.COUNT: _read_count,
    Kind.RATIO: _read_number,
    Kind.RATE: _read_number,
    Kind.FLAG: _read_flag,
    Kind.CHOICE: _read_choice,
    Kind.POLICIES: _read_policies,
    Kind.NAME: _read_name,
    Kind.NAMES: _read_names,
    Kind.FOLDER: _read_folder,
    Kind.FOLDERS: _read_folders,
    Kind.PLACE: _read_secret,
    Kind.SOCKET: _read_socket,
    Kind.LISTEN: _read_listen,
    Kind.URL: _read_url,
}
_EXPECTED = {
    Kind.FLAG: "true or false",
    Kind.POLICIES: PLAN_EXPECTED,
    Kind.NAME: f"printable text of 1 to {_TEXT_MAX_BYTES} bytes",
    Kind.NAMES: f"a list of at most {_LIST_MAX} printable texts",
    Kind.FOLDER: "an absolute path",
    Kind.FOLDERS: f"an absolute path, or a list of 1 to {_LIST_MAX} of them",
    Kind.PLACE: SECRET_EXPECTED,
    Kind.SOCKET: f"an absolute path of at most {SOCKET_PATH_MAX_BYTES} bytes",
    Kind.LISTEN: 'an IP address and a port like "127.0.0.1:8470" or "[::1]:8470"',
    Kind.URL: (
        "redis://HOST:PORT/DB, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/DB or"
        " redis+cluster://HOST:PORT,HOST:PORT; with TLS rediss instead of redis"
    ),
}
