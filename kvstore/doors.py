"""Doors: everything that stands between the network and a store, as its configuration says."""

import logging
import os
import ssl
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.auth import Keyring, Tenancy
from kvstore.config_sections import HttpConfig
from kvstore.errors import InvalidConfig
from kvstore.gate import FailureLimit, Gate
from kvstore.reloading import Reloaded, Watcher
from kvstore.secret_source import SecretSource
from kvstore.tls import ServerTls

logger = logging.getLogger(__name__)

_WRITABLE_BY_OTHERS = 0o022


class Doors:
    """The gate, the tenancy and the TLS of one listener; keys and certificates are taken up as they change.

    ``gate`` decides who may call, ``tenancy`` which namespaces a caller may use. ``tls`` returns the context
    that the next connection is served with; None: connections are plain. Without arguments there are neither
    keys nor TLS, which is for loopback alone.
    """

    def __init__(
        self,
        *,
        keyring: Callable[[], Keyring] | None = None,
        tenancy: Tenancy | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        failures: FailureLimit | None = None,
        followed: Sequence[Reloaded[Any]] = (),  # Any: it does not matter what the values are
    ) -> None:
        self.gate = Gate(keyring, failures=failures)
        self.tenancy = tenancy or Tenancy()
        self.tls = tls
        self._watcher = Watcher(followed)

    @classmethod
    def make(cls, config: HttpConfig, environ: Mapping[str, str] = os.environ) -> "Doors":
        """Read keys and certificates. Blocks.

        Raises:
            InvalidConfig: anybody could get in from the network, or keys or certificates cannot be used.
        """
        problem = config.open_door()
        if problem is not None:
            raise InvalidConfig(problem)
        keyring = None
        if config.api_keys is not None:
            keyring = reloaded_keyring(config.api_keys, environ, key="[http] api_keys")
        certificates = None if config.tls_folder is None else ServerTls(config.tls_folder).reloaded()
        return cls(
            keyring=None if keyring is None else lambda: keyring.value,
            tenancy=Tenancy(config.public_models),
            tls=None if certificates is None else lambda: certificates.value,
            followed=[value for value in (keyring, certificates) if value is not None],
        )

    def start(self) -> None:
        """Begin to take up changes. Once."""
        self._watcher.start()

    def refresh(self) -> None:
        """Take up changes once, in place of ``start``. Blocks."""
        self._watcher.refresh()

    def stop(self) -> None:
        """Take up no more changes. Idempotent."""
        self._watcher.stop()


def reloaded_keyring(source: SecretSource, environ: Mapping[str, str], *, key: str) -> Reloaded[Keyring]:
    """Return the keyring at a place, and later ones of it. ``key`` begins what is said of it. Blocks.

    Raises:
        InvalidConfig: it cannot be read, is damaged, or others may write to it.
    """
    name = f"{key}: {source}"

    def read() -> bytes:
        if source.file is not None and _mode(source.file) & _WRITABLE_BY_OTHERS:
            raise InvalidConfig(f"{name}: others may write to it: chmod 600 {source.file}")
        if source.file is not None and stat.S_ISFIFO(_mode(source.file)):
            raise InvalidConfig(f"{name}: is a pipe, which nobody may ever write to: make it a file")
        return source.read_text(environ, key=key).encode()

    keyring = Reloaded(name, read, lambda text: Keyring.parse(text.decode(), source=name))
    logger.info("%s: %d keys", name, len(keyring.value))
    if source.is_readable_by_others:
        logger.warning("%s: others may read it: chmod 600 %s", name, source.file)
    return keyring


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0  # reading it will tell
