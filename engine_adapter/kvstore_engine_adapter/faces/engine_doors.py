"""EngineDoors: who may reach an engine: its keys, its TLS, and where it may listen without them."""

import ipaddress
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.auth import KeyRecord, Keyring, Scope, key_digest
from kvstore.config_values import is_loopback
from kvstore.doors import Doors, reloaded_keyring
from kvstore.errors import InvalidConfig
from kvstore.secret_source import SecretSource
from kvstore.tls import ServerTls

logger = logging.getLogger(__name__)

KEY_VARIABLE = "KVSTORE_ENGINE_API_KEY"
"""Environment variable of the API key, for who gives no option."""

_KEY_MAX_CHARS = 4096


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """How an engine is reached. Of the three places of keys at most one is given.

    ``api_key`` and the first line of ``api_key_file`` are the text of the one key that everybody uses;
    ``api_keys`` is the place of a keyring, whose tenants have sessions of their own.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    api_keys: SecretSource | None = None
    tls_folder: Path | None = None

    @property
    def address(self) -> str:
        """The IP address to listen on."""
        return "127.0.0.1" if self.host == "localhost" else self.host


@dataclass(frozen=True, slots=True)
class EngineDoors:
    """The doors of one engine; ``has_tenants`` says that keys are of tenants, who see only what is theirs."""

    doors: Doors
    has_tenants: bool

    @classmethod
    def make(cls, options: DoorOptions, environ: Mapping[str, str] = os.environ) -> "EngineDoors":
        """Read keys and certificates. Blocks.

        Raises:
            InvalidConfig: anybody could get in from the network, or keys or certificates cannot be used.
        """
        _refuse_several_keys(options)
        key = _single_key(options, environ)
        _refuse_open_doors(options, has_keys=key is not None or options.api_keys is not None)
        certificates = None if options.tls_folder is None else ServerTls(options.tls_folder).reloaded()
        tls = None if certificates is None else lambda: certificates.value
        followed = [] if certificates is None else [certificates]
        if options.api_keys is not None:
            keyring = reloaded_keyring(options.api_keys, environ, key="engine: --api-keys")
            doors = Doors(keyring=lambda: keyring.value, tls=tls, followed=[keyring, *followed])
            return cls(doors, has_tenants=True)
        if key is None:
            return cls(Doors(tls=tls, followed=followed), has_tenants=False)
        only = _keyring_of(key)
        return cls(Doors(keyring=lambda: only, tls=tls, followed=followed), has_tenants=False)


def _refuse_several_keys(options: DoorOptions) -> None:
    given = [
        name
        for name, value in (
            ("--api-key", options.api_key),
            ("--api-key-file", options.api_key_file),
            ("--api-keys", options.api_keys),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise InvalidConfig(f"engine: {' and '.join(given)} exclude each other: give one")


def _single_key(options: DoorOptions, environ: Mapping[str, str]) -> str | None:
    """Return the text of the one key that everybody uses, None if there is none."""
    if options.api_key is not None:
        return _usable(options.api_key, "--api-key")
    if options.api_key_file is not None:
        source = SecretSource(file=options.api_key_file)
        if source.is_readable_by_others:
            logger.warning("engine: --api-key-file: others may read it: chmod 600 %s", source.file)
        return _usable(source.read(environ, key="engine: --api-key-file"), f"--api-key-file {source.file}")
    if options.api_keys is None and KEY_VARIABLE in environ:
        return _usable(environ[KEY_VARIABLE], f"${KEY_VARIABLE}")
    return None


def _usable(key: str, where: str) -> str:
    """Return a key that a header can carry. Its text is in no message."""
    is_plain = key.isascii() and key.isprintable() and " " not in key
    if not key or not is_plain or len(key) > _KEY_MAX_CHARS:
        raise InvalidConfig(
            f"engine: {where}: is not 1 to {_KEY_MAX_CHARS} printable ASCII characters without spaces"
        )
    return key


def _keyring_of(key: str) -> Keyring:
    record = KeyRecord("api-key", "api-key", frozenset(Scope), key_digest(key))
    # Nothing is named after the tenant of this key, so its secret is nobody's.
    return Keyring(secrets.token_bytes(32), [record])


def _refuse_open_doors(options: DoorOptions, *, has_keys: bool) -> None:
    try:
        ipaddress.ip_address(options.address)
    except ValueError as error:
        raise InvalidConfig(f"engine: --host {options.host!r} is no IP address") from error
    missing = [
        name
        for name, is_given in (
            (f"--api-key (or ${KEY_VARIABLE})", has_keys),
            ("--tls-folder", options.tls_folder is not None),
        )
        if not is_given
    ]
    if missing and not is_loopback(options.address):
        raise InvalidConfig(
            f"engine: --host {options.host} is not loopback: it is reached from the network, which needs an"
            f" API key and TLS: give {' and '.join(missing)}, or listen on 127.0.0.1"
        )
