"""Fields: typed reads of a JSON body, which refuse what is wrong with the parameter's name."""

import json
import math
from collections.abc import Sequence
from typing import NoReturn

from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.parameters import Parameter, Use


class Fields:
    """A JSON object's values. Null counts as absent, except where a method says otherwise.

    ``path`` leads to the object: empty, or ending in a dot. Every method raises ApiError (400) for a value of
    another type.
    """

    def __init__(self, values: dict[str, object], path: str = "") -> None:
        self.values = values
        self._path = path

    def refuse(self, name: str, what: str, *, code: str | None = None) -> NoReturn:
        """Refuse a parameter: ``what`` goes on after its name."""
        raise ApiError(400, f"{self._path}{name} {what}", param=f"{self._path}{name}", code=code)

    def require_known(self, parameters: Sequence[Parameter]) -> None:
        """Refuse a parameter that is not in the table, and one that asks for what is not supported."""
        known = {parameter.name: parameter for parameter in parameters}
        for name, value in self.values.items():
            parameter = known.get(name)
            if parameter is None:
                shown = name[:200] if name.isprintable() else ascii(name[:200])
                self.refuse(shown, "is an unrecognized parameter", code="unknown_parameter")
            if parameter.use is Use.REFUSED and value is not None and not _is_among(value, parameter.off):
                self.refuse(name, "is not supported by this server", code="unsupported_parameter")

    def has(self, name: str) -> bool:
        """Whether the parameter is given, and not null."""
        return self.values.get(name) is not None

    def nested(self, name: str, parameters: Sequence[Parameter]) -> "Fields":
        """Return the fields of an object inside; without it, none."""
        value = self.values.get(name)
        if value is None:
            return Fields({}, f"{self._path}{name}.")
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
        fields = Fields(value, f"{self._path}{name}.")
        fields.require_known(parameters)
        return fields

    def text(self, name: str) -> str:
        """Return a text that must be there."""
        value = self.optional_text(name)
        if value is None:
            self.refuse(name, "must be a text")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a text, None without it."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, "must be a text")
        return None if value is None else require_unicode(value, f"{self._path}{name}")

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return value

    def integer(self, name: str) -> int | None:
        """Return an integer, None without it."""
        value = self.values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            self.refuse(name, "must be an integer")
        return value

    def whole(self, name: str, *, low: int, high: int, default: int) -> int:
        """Return an integer within bounds."""
        value = self.integer(name)
        if value is None:
            return default
        if not low <= value <= high:
            self.refuse(name, f"is {value}, expected {low} to {high}")
        return value

    def number(self, name: str) -> float | None:
        """Return a finite number, None without it."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(name, "must be a number")
        try:
            number = float(value)
        except OverflowError:
            self.refuse(name, "is too large")
        if not math.isfinite(number):
            self.refuse(name, "must be finite")
        return number

    def texts(self, name: str, *, most: int) -> tuple[str, ...]:
        """Return a text or a list of texts, none of them empty, as a tuple."""
        value = self.values.get(name)
        texts = [value] if isinstance(value, str) else value
        if texts is None:
            return ()
        if not isinstance(texts, list) or len(texts) > most or not all(map(_is_text, texts)):
            self.refuse(name, f"must be a text, or a list of at most {most}, none of them empty")
        return tuple(require_unicode(text, f"{self._path}{name}") for text in texts)

    def tokens(self, name: str, *, most: int) -> tuple[int, ...]:
        """Return a list of token numbers as a tuple."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > most or not all(map(is_token, value)):
            self.refuse(name, f"must be a list of at most {most} token numbers")
        return tuple(value)


def json_object(body: bytes) -> dict[str, object]:
    """Return the JSON object in a body.

    Raises:
        ApiError: 400: it holds none.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid_json")
    return value


def require_unicode(text: str, path: str) -> str:
    """Return a text that every tokenizer takes.

    Raises:
        ApiError: 400: JSON's escapes have smuggled in a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{path} holds a lone surrogate, which is no text", param=path) from error
    return text


def is_token(value: object) -> bool:
    """Whether a JSON value may be the number of a token; booleans may not."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _is_among(value: object, off: Sequence[object]) -> bool:
    # By type too: JSON's true is no 1.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in off)
