"""BackendOptions: what ``kvstore`` in ``--hicache-storage-backend-extra-config`` may say."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.option_fields import parse_options, require_socket

WHERE = "hicache-storage-backend-extra-config: kvstore"
_MAX_DEADLINE_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Options of the backend.

    ``store``: socket of the node's store, ``unix:/path``. ``model``: name of the model in the store, by
    default the one SGLang has; for a folder, the folder's name. ``weights``: digest or revision of the
    weights; by default found out. ``salt``: separates what shares nothing with others.
    ``lookup_deadline_ms``: how long one lookup may take. ``load_deadline_ms``: how long one load may take,
    beside 5 ns per byte. ``save_deadline_ms``: the same of a save, for which no request waits.
    ``is_read_only``: nothing is stored.
    """

    store: str
    model: str = ""
    weights: str = ""
    salt: str = ""
    lookup_deadline_ms: float = 50.0
    load_deadline_ms: float = 500.0
    save_deadline_ms: float = 1000.0
    is_read_only: bool = False

    def __post_init__(self) -> None:
        for name in ("lookup_deadline_ms", "load_deadline_ms", "save_deadline_ms"):
            if not 0 < getattr(self, name) <= _MAX_DEADLINE_MS:
                raise InvalidConfig(f"{WHERE}: {name} must be above 0, at most {_MAX_DEADLINE_MS}")
        require_socket(self.store, where=WHERE)

    @classmethod
    def parse(cls, extra_config: Mapping[str, object] | None) -> "BackendOptions":
        """Return the options that the backend's extra configuration has under ``kvstore``.

        Raises:
            InvalidConfig: there are none, an unknown key, a bad value, or no socket in ``store``.
        """
        given = (extra_config or {}).get("kvstore")
        if not isinstance(given, Mapping):
            raise InvalidConfig(
                f'{WHERE} is {given!r}: set it to an object with "store", the address of kvstore serve, '
                'such as {"store": "unix:/run/kvstore/kvstore.sock"}'
            )
        return parse_options(cls, given, where=WHERE)
