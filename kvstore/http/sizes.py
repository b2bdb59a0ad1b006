"""Hit rates by size, and the hottest branches, of the lookups that a caller may know of."""

import hmac
from collections.abc import Collection

from aiohttp import web

from kvstore.hottest import TOLD
from kvstore.http.service import Call, json_answer
from kvstore.keys import NamespaceDigest

_OPERATORS_ONLY = ("sampled_blocks", "sample_ratio", "lost_blocks", "lost_samples", "kept_branches")
"""What tells of others' lookups."""


async def size(call: Call) -> web.StreamResponse:
    """Estimate hit rates at other sizes of the store.

    Of a namespace that is the caller's own, or of all that are; of the whole store for the operator.
    """
    return json_answer(_told(call, call.service.manager.size_curve(_namespaces(call))))


async def branches(call: Call) -> web.StreamResponse:
    """Tell which branches of the prefix tree were looked up most in the last minutes.

    Of a namespace that is the caller's own, or of all that are; of the whole store for the operator.
    """
    asked = call.values.integer("limit")
    return json_answer(branches_for(call, limit=TOLD if asked is None else asked))


def branches_for(call: Call, *, limit: int) -> dict[str, object]:
    """Return the hottest branches, as far as the caller may know of them."""
    return _told(call, call.service.manager.branches(_namespaces(call), limit=limit))


def _namespaces(call: Call) -> Collection[NamespaceDigest] | None:
    """Return the namespaces that a caller asks about and may know of; None: all there are."""
    if call.values.text("namespace") is not None:
        return [call.own_namespace().digest]
    if call.identity.is_operator:
        return None
    return [digest for digest in call.service.manager.watched_namespaces() if _is_own(call, digest)]


def _told(call: Call, answer: dict[str, object]) -> dict[str, object]:
    if call.identity.is_operator:
        return answer
    return {name: value for name, value in answer.items() if name not in _OPERATORS_ONLY}


def _is_own(call: Call, digest: NamespaceDigest) -> bool:
    known = call.service.manager.namespace(digest)
    return known is not None and hmac.compare_digest(known.tenant_salt, call.identity.salt)
