"""Hit rates by size, of the lookups that a caller may know of."""

import hmac

from aiohttp import web

from kvstore.http.service import Call, json_answer
from kvstore.keys import NamespaceDigest

_OPERATORS_ONLY = ("sampled_blocks", "sample_ratio", "lost_blocks")
"""What tells of others' lookups."""


async def size(call: Call) -> web.StreamResponse:
    """Estimate hit rates at other sizes of the store.

    Of a namespace that is the caller's own, or of all that are; of the whole store for an administrator.
    """
    manager = call.service.manager
    if call.values.text("namespace") is not None:
        told = manager.size_curve([call.own_namespace().digest])
    elif call.identity.is_operator:
        told = manager.size_curve()
    else:
        told = manager.size_curve([digest for digest in manager.sized_namespaces() if _is_own(call, digest)])
    if not call.identity.is_operator:
        told = {name: value for name, value in told.items() if name not in _OPERATORS_ONLY}
    return json_answer(told)


def _is_own(call: Call, digest: NamespaceDigest) -> bool:
    known = call.service.manager.namespace(digest)
    return known is not None and hmac.compare_digest(known.tenant_salt, call.identity.salt)
