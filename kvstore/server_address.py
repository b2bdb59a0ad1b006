"""Addresses of a store's server: ``unix:/path`` or a plain path."""

import os
from pathlib import Path

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
        raise InvalidConfig(f"address {text!r}: expected unix:/path or a path")
    length_bytes = len(os.fsencode(text))
    if not text or "\0" in text:
        raise InvalidConfig(f"address {address!r}: it names no path")
    if length_bytes > MAX_PATH_BYTES:
        raise InvalidConfig(
            f"socket {text}: the path has {length_bytes} bytes, limit {MAX_PATH_BYTES}: use a shorter folder"
        )
    return Path(text)
