"""ConnectorOptions: what ``kv_connector_extra_config`` may say."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields

from kvstore.errors import InvalidConfig
from kvstore.server_address import parse_address

# ``store`` has no default, and is text.
_KINDS: dict[type, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
    type(MISSING): (str,),
}
_MAX_DEADLINE_MS = 60_000
_MAX_QUEUE_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Options of the connector.

    ``store``: socket of the node's store, ``unix:/path``. ``model``: name of the model in the store, by
    default the one vLLM has; for a folder, the folder's name. ``weights``: digest or revision of the weights;
    by default found out. ``salt``: separates what shares nothing with others. ``lookup_deadline_ms``: how
    long one request may wait for lookups, in all. ``load_deadline_ms``: how long a load may take, beside 5 ns
    per byte. ``save_queue_bytes``: memory for blocks that wait to be stored, per rank. ``min_blocks``: fewer
    blocks than this are not worth a load. ``is_read_only``: nothing is stored.
    """

    store: str
    model: str = ""
    weights: str = ""
    salt: str = ""
    lookup_deadline_ms: float = 50.0
    load_deadline_ms: float = 500.0
    save_queue_bytes: int = 256 << 20
    min_blocks: int = 1
    is_read_only: bool = False

    def __post_init__(self) -> None:
        for name in ("lookup_deadline_ms", "load_deadline_ms"):
            if not 0 < getattr(self, name) <= _MAX_DEADLINE_MS:
                raise InvalidConfig(
                    f"kv_connector_extra_config: {name} must be above 0, at most {_MAX_DEADLINE_MS}"
                )
        if self.store.startswith(("http://", "https://")):
            raise InvalidConfig(
                f"kv_connector_extra_config: store is {self.store}: the connector uses the socket of the "
                "store on its own node, such as unix:/run/kvstore/kvstore.sock"
            )
        parse_address(self.store)
        if not 0 <= self.save_queue_bytes <= _MAX_QUEUE_BYTES:
            raise InvalidConfig("kv_connector_extra_config: save_queue_bytes must be 0 to 1 TiB")
        if self.min_blocks < 1:
            raise InvalidConfig("kv_connector_extra_config: min_blocks must be at least 1")

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> "ConnectorOptions":
        """Return the options that a mapping gives.

        Raises:
            InvalidConfig: an unknown key, a bad value, or no socket in ``store``.
        """
        kinds: dict[str, tuple[type, ...]] = {item.name: _KINDS[type(item.default)] for item in fields(cls)}
        unknown = sorted(set(given) - set(kinds))
        if unknown:
            raise InvalidConfig(
                f"kv_connector_extra_config: unknown key {unknown[0]!r}, there are {', '.join(kinds)}"
            )
        for name, value in given.items():
            is_bool = isinstance(value, bool)
            if not isinstance(value, kinds[name]) or is_bool != (kinds[name] == (bool,)):
                raise InvalidConfig(
                    f"kv_connector_extra_config: {name} is {value!r}, a {type(value).__name__}"
                )
        if not given.get("store"):
            raise InvalidConfig(
                'kv_connector_extra_config: no store: set "store" to the address of kvstore serve, '
                "such as unix:/run/kvstore/kvstore.sock"
            )
        return cls(**given)  # type: ignore[arg-type]  # checked above, one by one
