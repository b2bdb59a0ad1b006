"""A store with an HTTP face that wants API keys, for tests of who gets in."""

import contextlib

from kvstore.auth import KeyRecord, Keyring, Scope, Tenancy, key_digest
from kvstore.doors import Doors
from kvstore.gate import FailureLimit
from tests.http.http_store import http_store

TENANTS = ("acme", "other")
PUBLIC_MODEL = "shared"


def key_of(tenant, *scopes):
    return f"kvs_{tenant}_{'_'.join(scope.value for scope in scopes) or 'none'}"


def _record(tenant, *scopes):
    key = key_of(tenant, *scopes)
    return KeyRecord(key.removeprefix("kvs_"), tenant, frozenset(scopes), key_digest(key))


KEYRING = Keyring(
    bytes(range(32)),
    [
        *(_record(tenant, scope) for tenant in TENANTS for scope in Scope),
        *(_record(tenant, *Scope) for tenant in TENANTS),
    ],
)
"""For each tenant a key per scope, and one with all."""


@contextlib.asynccontextmanager
async def keyed_store(*lower, max_failures=1_000_000, tls=None, keyring=lambda: KEYRING, **options):
    doors = Doors(
        keyring=keyring,
        tenancy=Tenancy([PUBLIC_MODEL]),
        tls=tls,
        failures=FailureLimit(burst=max_failures),
    )
    async with http_store(*lower, doors=doors, **options) as store:
        yield store
