"""TenantId: whom blocks belong to, as far as the store needs to know it."""

import hashlib
from typing import NewType

TenantId = NewType("TenantId", bytes)
"""SHA-256 of a tenant's salt, 32 bytes. It does not tell the salt, unless that can be guessed."""

_TAG = b"kvstore.tenant.id.v1\0"


def tenant_of(salt: bytes) -> TenantId:
    """Return the tenant that namespaces with this salt belong to; the empty salt is the shared tenant."""
    return TenantId(hashlib.sha256(_TAG + salt).digest())
