"""Callers: whose request it is, decided by the gate that the store's doors have too."""

from aiohttp import web

from kvstore.auth import Identity, Scope
from kvstore.gate import Gate, Shown
from kvstore_engine_adapter.faces.record_access import Owner

OPEN_PATHS = frozenset({"/health", "/healthz"})
"""Paths that anybody may ask, as load balancers do; they say nothing but that the engine runs."""

_ADMIN_PATHS = frozenset({"/stats"})
_OWNER = web.RequestKey("owner", Owner)


class Callers:
    """Lets requests in.

    ``salt`` is that of the records of whoever runs the engine: all callers, or with ``has_tenants`` only
    those that no gate asks for a key.
    """

    def __init__(self, gate: Gate, *, salt: bytes = b"", has_tenants: bool = True) -> None:
        self._gate = gate
        self._salt = salt
        self._has_tenants = has_tenants

    def admit(self, request: web.Request) -> None:
        """Note whose request it is.

        Raises:
            Unauthorized, TooManyFailures, Forbidden: as ``Gate.admit``.
        """
        if request.path in OPEN_PATHS:
            return
        shown = Shown(
            authorization=request.headers.getall("Authorization", []),
            host=request.headers.getall("Host", []),
            origin=request.headers.getall("Origin", []),
            peer=request.remote or "",
        )
        needs = Scope.ADMIN if request.path in _ADMIN_PATHS else Scope.WRITE
        request[_OWNER] = self._owner(self._gate.admit(shown, needs))

    def _owner(self, identity: Identity) -> Owner:
        if identity.is_operator or not self._has_tenants:
            return Owner(identity.name, self._salt)
        return Owner(identity.tenant, identity.salt, block_salt=identity.salt)


def owner_of(request: web.Request) -> Owner:
    """Return whose request it is, once it was admitted."""
    return request[_OWNER]
