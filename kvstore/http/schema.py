"""JSON Schemas that requests are checked against, the same ones that the OpenAPI document shows.

The part of JSON Schema that is used: type (one or several), properties, required, additionalProperties
false, oneOf with nothing but required, items, minItems, maxItems, uniqueItems, pattern (of the whole text),
minLength, maxLength, minimum, maximum, enum.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvstore.http.refusal import ErrorCode, Refused

Schema: TypeAlias = Mapping[str, Any]
"""A JSON Schema. Any: JSON."""

HEX_KEY_PATTERN = "^[0-9a-f]{64}$"
_SURROGATE = re.compile("[\ud800-\udfff]")
_HEX = re.compile("[0-9a-f]*")
_HEX_PATTERN = re.compile(r"\^\[0-9a-f\]\{(\d+)\}\$")


def parse_json(data: bytes) -> object:
    """Return what a JSON text says. Names given twice, NaN and infinities are refused.

    Raises:
        Refused: it is not such a text.
    """
    try:
        value: object = json.loads(
            data, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_number
        )
    except RecursionError:
        raise Refused(ErrorCode.BAD_REQUEST, "body: nested too deeply") from None
    except ValueError as error:
        raise Refused(ErrorCode.BAD_REQUEST, f"body: not JSON: {_short(str(error))}") from None
    return value


def check(schema: Schema, value: object, where: str) -> None:
    """Check a value against a schema.

    Raises:
        Refused: it does not fit; the message says where and what is expected.
    """
    kinds = schema["type"]
    kinds = kinds if isinstance(kinds, list) else [kinds]
    kind = next((kind for kind in kinds if _IS_KIND[kind](value)), None)
    if kind is None:
        raise _misfit(where, f"expected {' or '.join(kinds)}")
    if "enum" in schema and value not in schema["enum"]:
        raise _misfit(where, f"expected one of {', '.join(map(str, schema['enum']))}")
    further = _CHECKS.get(kind)
    if further is not None:
        further(schema, value, where)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return found


def _number(text: str) -> int | float:
    """Return a number that is written with a fraction or exponent; one without a fraction is an integer."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _check_object(schema: Schema, value: Mapping[str, object], where: str) -> None:
    properties: Mapping[str, Schema] = schema["properties"]
    for name in value:
        if name not in properties:
            raise _misfit(where, f"unknown member {_short(ascii(name))}: there are {', '.join(properties)}")
    for name in schema.get("required", ()):
        if name not in value:
            raise _misfit(where, f"{name} is missing")
    choices = ["".join(choice["required"]) for choice in schema.get("oneOf", ())]
    if choices and sum(name in value for name in choices) != 1:
        raise _misfit(where, f"expected either {' or '.join(choices)}")
    for name, member in value.items():
        check(properties[name], member, f"{where}.{name}")


def _check_array(schema: Schema, value: list[object], where: str) -> None:
    low, high = schema.get("minItems", 0), schema.get("maxItems", MAX_ITEMS)
    if not low <= len(value) <= high:
        raise _misfit(where, f"{len(value)} items, expected {low} to {high}")
    items: Schema = schema["items"]
    if not _all_fit(items, value):
        for index, item in enumerate(value):
            check(items, item, f"{where}[{index}]")
    if schema.get("uniqueItems") and len(set(value)) < len(value):
        raise _misfit(where, "an item is there twice")


def _all_fit(items: Schema, value: list[object]) -> bool:
    """Whether all items are sure to fit: the quick way for thousands of numbers, keys or checksums.

    A body may hold half a million tokens, which one by one would keep the event loop for a second.
    """
    if items.keys() >= {"minimum", "maximum"} and items["type"] == "integer":
        numbers = [item for item in value if type(item) is int]
        if not numbers or len(numbers) < len(value):
            return False
        return bool(items["minimum"] <= min(numbers) and max(numbers) <= items["maximum"])
    digits = _HEX_PATTERN.fullmatch(items.get("pattern", ""))
    return digits is not None and _are_hex(value, int(digits[1]))


def _are_hex(value: list[object], length: int) -> bool:
    if not all(isinstance(item, str) and len(item) == length for item in value):
        return False
    return _HEX.fullmatch("".join(map(str, value))) is not None


def _check_string(schema: Schema, value: str, where: str) -> None:
    low, high = schema.get("minLength", 0), schema.get("maxLength", MAX_ITEMS)
    if not low <= len(value) <= high:
        raise _misfit(where, f"{len(value)} characters, expected {low} to {high}")
    if not value.isascii() and _SURROGATE.search(value):
        raise _misfit(where, "half of a surrogate pair is no text")
    pattern = schema.get("pattern")
    if pattern is not None and re.fullmatch(pattern.removeprefix("^").removesuffix("$"), value) is None:
        raise _misfit(where, f"expected text like {pattern}")


def _check_number(schema: Schema, value: float, where: str) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        raise _misfit(where, f"expected {low} to {high}")


def _misfit(where: str, problem: str) -> Refused:
    return Refused(ErrorCode.BAD_REQUEST, f"{where}: {problem}")


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


MAX_ITEMS = 1_000_000
"""Items of an array and characters of a text where their schema names no number; a body has fewer."""

_IS_KIND: dict[str, Callable[[object], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_CHECKS: dict[str, Callable[..., None]] = {
    "object": _check_object,
    "array": _check_array,
    "string": _check_string,
    "integer": _check_number,
    "number": _check_number,
}
