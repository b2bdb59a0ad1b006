"""Records that nodes share through the remote tier like blocks, and that are none: epochs and tenants' keys.

Their namespaces are the SHA-256 of texts that no ``Namespace`` hashes, so nobody can open them and name a
record as a block.
"""

import hashlib

from kvstore.keys import NamespaceDigest

EPOCH_RECORDS = NamespaceDigest(hashlib.sha256(b"kvstore.epochs").digest())
"""The namespace of the records that share epochs."""

KEY_RECORDS = NamespaceDigest(hashlib.sha256(b"kvstore.tenant.keys").digest())
"""The namespace of the records of tenants' keys."""

SHARED_RECORDS = frozenset({EPOCH_RECORDS, KEY_RECORDS})
"""The namespaces of all of them."""
