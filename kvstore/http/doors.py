"""Doors: who is let in to the HTTP face."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.auth import Keyring, Tenancy


def no_keyring() -> Keyring | None:
    """Return that there are no keys."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Keys, tenants' namespaces and TLS of one HTTP face.

    ``keyring`` returns the keys in force; None: there are none, and whoever reaches the port is the operator.
    ``tls`` returns the context that the next connection is served with; None: connections are plain.
    """

    keyring: Callable[[], Keyring | None] = no_keyring
    tenancy: Tenancy = field(default_factory=Tenancy)
    tls: Callable[[], ssl.SSLContext] | None = None
