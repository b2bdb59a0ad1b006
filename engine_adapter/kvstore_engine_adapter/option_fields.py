"""Options that an engine's configuration gives to its connector, as fields of a dataclass."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from kvstore.errors import InvalidConfig
from kvstore.server_address import parse_address

T = TypeVar("T")

# ``store`` has no default, and is text.
_KINDS: dict[type, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
    type(MISSING): (str,),
}


def parse_options(options: type[T], given: Mapping[str, object], *, where: str) -> T:
    """Return a dataclass of options, ``store`` among them, as a mapping gives them.

    Raises:
        InvalidConfig: an unknown key, a bad value, or no ``store``; the text begins with ``where``.
    """
    described: Any = options  # dataclasses.fields takes any dataclass; there is no type for that to bind T to
    kinds = {item.name: _KINDS[type(item.default)] for item in fields(described)}
    unknown = sorted(set(given) - set(kinds))
    if unknown:
        raise InvalidConfig(f"{where}: unknown key {unknown[0]!r}, there are {', '.join(kinds)}")
    for name, value in given.items():
        is_bool = isinstance(value, bool)
        if not isinstance(value, kinds[name]) or is_bool != (kinds[name] == (bool,)):
            raise InvalidConfig(f"{where}: {name} is {value!r}, a {type(value).__name__}")
    if not given.get("store"):
        raise InvalidConfig(
            f'{where}: no store: set "store" to the address of kvstore serve, '
            "such as unix:/run/kvstore/kvstore.sock"
        )
    return options(**given)


def require_socket(store: str, *, where: str) -> None:
    """Raise InvalidConfig unless a store's address is that of a socket on this node."""
    if store.startswith(("http://", "https://")):
        raise InvalidConfig(
            f"{where}: store is {store}: the connector uses the socket of the store on its own node, "
            "such as unix:/run/kvstore/kvstore.sock"
        )
    parse_address(store)
