"""Addresses of a store's server: ``unix:/path``, a plain path, ``http://host:port`` or ``https://host:port``."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.errors import InvalidConfig

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket (sockaddr_un holds 108 bytes and a terminating zero)."""


def parse_address(address: str | os.PathLike[str]) -> Path:
    """Return the path of the Unix socket an address names.

    Raises:
        InvalidConfig: another scheme, an empty path, or one that is too long for a socket.
    """
    text = os.fspath(address)
    if text.startswith("unix:"):
        text = text.removeprefix("unix:").removeprefix("//")
    elif "://" in text:
        raise InvalidConfig(f"address {text!r}: expected unix:/path, a path, http://host:port or https://")
    length_bytes = len(os.fsencode(text))
    if not text or "\0" in text:
        raise InvalidConfig(f"address {address!r}: it names no path")
    if length_bytes > MAX_PATH_BYTES:
        raise InvalidConfig(
            f"socket {text}: the path has {length_bytes} bytes, limit {MAX_PATH_BYTES}: use a shorter folder"
        )
    return Path(text)


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where a server speaks HTTP. Its text form is that of a URL."""

    host: str
    port: int
    is_tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"


def parse_http_address(address: str | os.PathLike[str]) -> HttpAddress | None:
    """Return where an ``http://`` or ``https://`` address leads; None if it is an address of another kind.

    Raises:
        InvalidConfig: it has no host, a port that is none, or more than host and port.
    """
    text = os.fspath(address)
    if not text.lower().startswith(("http://", "https://")):
        return None
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise InvalidConfig("address: not a URL: expected https://host:port") from None
    if url.username is not None or url.password is not None:
        raise InvalidConfig("address: it holds a user or a password: give the key as api_key")
    if not url.hostname or url.path not in ("", "/") or url.query or url.fragment:
        raise InvalidConfig("address: expected https://host:port and nothing behind it")
    is_tls = url.scheme == "https"
    return HttpAddress(url.hostname, port or (443 if is_tls else 80), is_tls)


def refuse_http_options(api_key: str | None, tls_folder: str | os.PathLike[str] | None) -> None:
    """Raise InvalidConfig if what only an HTTP address takes is given for a socket."""
    if api_key is not None or tls_folder is not None:
        raise InvalidConfig("address: api_key and tls_folder go with http:// and https:// addresses only")
