"""What stands in HTTP headers about records, for the server and the clients."""

import re

from kvstore.records import MAX_VERSION

TOKEN_HEADER = "KVStore-Write"  # noqa: S105 (no secret)
"""The name of a put, 32 hex digits: the same one again is the same put."""

SALT_HEADER = "KVStore-Tenant-Salt"
"""Salt of the tenant whose records are meant, in hex; for an operator, who has none of its own."""

PLACE_HEADER = "KVStore-Place"
"""Where the record was read."""

CURRENT_HEADER = "KVStore-Current"
"""``true`` if it was read where versions are decided, else ``false``."""

LEFT_HEADER = "KVStore-Expires-In"
"""Seconds until its time is over."""

_ETAG = re.compile('"([0-9]{1,16})"')


def etag_of(version: int) -> str:
    """Return a version as ETag and If-Match have it."""
    return f'"{version}"'


def version_of_etag(text: str) -> int | None:
    """Return the version that an ETag names; None if it is none."""
    found = _ETAG.fullmatch(text.strip())
    version = 0 if found is None else int(found[1])
    return version if 0 < version <= MAX_VERSION else None
