"""RequestWishes: what one request may say to the store, in the parameters that its engine passes on.

    "kv_transfer_params": {"kvstore": {"tenant": "acme", "session": "c1", "priority": 1, "next_use_s": 60}}

A request never fails for what it says here: a value that is wrong is left out, alone, and counted. The one
exception is in the tenant's favour: if its name is wrong, nothing is shared, for without it the request's
blocks would be everyone's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvstore.errors import InvalidRequest
from kvstore.hints import Hints

SECTION = "kvstore"
"""The member of the engine's parameters that is for the store."""

_MAX_NAME = 256
_HINTS = tuple(field.name for field in fields(Hints))


@dataclass(frozen=True, slots=True)
class RequestWishes:
    """Whether stored blocks may be used and blocks stored, for whom, and what is known of their future.

    ``tenant``: requests of different tenants share nothing; empty: those that name none. ``session``: a name
    for the requests of one conversation; empty: none. ``num_bad`` values were left out.
    """

    wants_lookup: bool = True
    wants_save: bool = True
    tenant: str = ""
    session: str = ""
    hints: Hints | None = None
    num_bad: int = 0

    @property
    def ends_session(self) -> bool:
        """Whether nobody goes on from these blocks."""
        return self.hints is not None and self.hints.ends_session

    @classmethod
    def read(cls, params: object) -> "RequestWishes":
        """Return what an engine's parameters of a request say. Never raises."""
        given = params.get(SECTION) if isinstance(params, Mapping) else None
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            return cls(num_bad=1)
        told = dict(given)
        bad: list[str] = []
        wants = {name: _flag(told, name, bad) for name in ("lookup", "save")}
        tenant, session = _name(told, "tenant", bad), _name(told, "session", bad)
        is_private = "tenant" not in bad
        hints = _hints(told, bad)
        return cls(
            wants_lookup=wants["lookup"] and is_private,
            wants_save=wants["save"] and is_private,
            tenant=tenant,
            session=session,
            hints=hints,
            num_bad=len(bad) + len(told),
        )


def _flag(told: dict[object, object], name: str, bad: list[str]) -> bool:
    value = told.pop(name, True)
    if isinstance(value, bool):
        return value
    bad.append(name)
    return True


def _name(told: dict[object, object], name: str, bad: list[str]) -> str:
    value = told.pop(name, "")
    if isinstance(value, str) and len(value) <= _MAX_NAME and "\0" not in value and _is_text(value):
        return value
    bad.append(name)
    return ""


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _hints(told: dict[object, object], bad: list[str]) -> Hints | None:
    """Take the hints out of what is told, each for itself."""
    good: dict[str, object] = {}
    for name in _HINTS:
        if name not in told:
            continue
        value = told.pop(name)
        try:
            Hints.from_dict({name: value})
        except InvalidRequest:
            bad.append(name)
        else:
            good[name] = value
    hints = Hints.from_dict(good)
    return None if hints == Hints() else hints
