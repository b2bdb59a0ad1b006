"""ConnectorOptions: what ``kv_connector_extra_config`` may say."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.option_fields import parse_options, require_socket

_MAX_DEADLINE_MS = 60_000
_MAX_QUEUE_BYTES = 1 << 40
_LOADS = ("cheaper", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Options of the connector.

    ``store``: socket of the node's store, ``unix:/path``. ``model``: name of the model in the store, by
    default the one vLLM has; for a folder, the folder's name. ``weights``: digest or revision of the weights;
    by default found out. ``salt``: separates what shares nothing with others. ``lookup_deadline_ms``: how
    long one request may wait for lookups, in all. ``load_deadline_ms``: how long a load may take, beside 5 ns
    per byte. ``save_queue_bytes``: memory for blocks that wait to be stored, per rank. ``min_blocks``: fewer
    blocks than this are not worth a load. ``loads``: "cheaper", only what takes clearly less time to load
    than to compute, as far as was measured; or "always". ``is_read_only``: nothing is stored.
    """

    store: str
    model: str = ""
    weights: str = ""
    salt: str = ""
    lookup_deadline_ms: float = 50.0
    load_deadline_ms: float = 500.0
    save_queue_bytes: int = 256 << 20
    min_blocks: int = 1
    loads: str = "cheaper"
    is_read_only: bool = False

    def __post_init__(self) -> None:
        for name in ("lookup_deadline_ms", "load_deadline_ms"):
            if not 0 < getattr(self, name) <= _MAX_DEADLINE_MS:
                raise InvalidConfig(
                    f"kv_connector_extra_config: {name} must be above 0, at most {_MAX_DEADLINE_MS}"
                )
        require_socket(self.store, where="kv_connector_extra_config")
        if not 0 <= self.save_queue_bytes <= _MAX_QUEUE_BYTES:
            raise InvalidConfig("kv_connector_extra_config: save_queue_bytes must be 0 to 1 TiB")
        if self.loads not in _LOADS:
            raise InvalidConfig(f"kv_connector_extra_config: loads must be one of {', '.join(_LOADS)}")
        if self.min_blocks < 1:
            raise InvalidConfig("kv_connector_extra_config: min_blocks must be at least 1")

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> "ConnectorOptions":
        """Return the options that a mapping gives.

        Raises:
            InvalidConfig: an unknown key, a bad value, or no socket in ``store``.
        """
        return parse_options(cls, given, where="kv_connector_extra_config")
