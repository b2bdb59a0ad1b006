"""Values of a request that its schema has checked, read by name with their types."""

from collections.abc import Mapping

from kvstore.hints import Hints


class Values:
    """What a request gives, by name. A value that is absent or null is None."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = dict(values)

    def text(self, name: str) -> str | None:
        """Return a text."""
        value = self._values.get(name)
        assert value is None or isinstance(value, str), f"{name}: its schema allows another type"
        return value

    def need_text(self, name: str) -> str:
        """Return a text that the schema requires."""
        value = self.text(name)
        assert value is not None, f"{name}: its schema does not require it"
        return value

    def integer(self, name: str) -> int | None:
        """Return an integer."""
        value = self._values.get(name)
        assert value is None or isinstance(value, int), f"{name}: its schema allows another type"
        return value

    def number(self, name: str) -> float | None:
        """Return a number."""
        value = self._values.get(name)
        assert value is None or isinstance(value, int | float), f"{name}: its schema allows another type"
        return None if value is None else float(value)

    def flag(self, name: str) -> bool:
        """Return a flag; absent means no."""
        return self._values.get(name) is True

    def texts(self, name: str) -> list[str] | None:
        """Return a list of texts."""
        value = self._values.get(name)
        assert value is None or isinstance(value, list), f"{name}: its schema allows another type"
        return value

    def integers(self, name: str) -> list[int] | None:
        """Return a list of integers."""
        value = self._values.get(name)
        assert value is None or isinstance(value, list), f"{name}: its schema allows another type"
        return value

    def taken_integers(self, name: str) -> list[int] | None:
        """Return a list of integers, and let go of it: it is absent from then on."""
        value = self.integers(name)
        self._values.pop(name, None)
        return value

    def hints(self) -> Hints | None:
        """Return what is said of the blocks' future."""
        value = self._values.get("hints")
        assert value is None or isinstance(value, dict), "hints: their schema allows another type"
        return None if value is None else Hints.from_dict(value)

    def nested(self, name: str) -> "Values":
        """Return the values of an object that the schema requires."""
        value = self._values[name]
        assert isinstance(value, dict), f"{name}: its schema allows another type"
        return Values(value)
