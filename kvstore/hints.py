"""Hints: what a request says of its blocks' future, for the policies that decide what stays."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvstore.errors import InvalidRequest

MAX_NEXT_USE_S = 30 * 86400.0
MAX_PRIORITY = 4
MAX_OUTPUT_TOKENS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Hints:
    """What the sender of a request knows of its blocks. Each is a claim: a wrong one costs hits, no more.

    ``ends_session``: the conversation is over, nobody goes on from these blocks. ``is_one_off``: nobody asks
    for its new blocks again. ``next_use_s``: seconds until they are expected to be used again, up to 30 days.
    ``priority``: each step up makes a block worth twice as much; -4 to 4. ``output_tokens``: the length of
    the answer.

    Raises:
        InvalidRequest: a value is of another type, or outside its range.
    """

    ends_session: bool = False
    is_one_off: bool = False
    next_use_s: float | None = None
    priority: int = 0
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("ends_session", "is_one_off"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"hints: {name} is true or false")
        next_use_s = self.next_use_s
        if next_use_s is not None and not (
            type(next_use_s) in (int, float) and 0 <= next_use_s <= MAX_NEXT_USE_S
        ):
            raise InvalidRequest(
                f"hints: next_use_s {_shown(next_use_s)}, expected 0 to {MAX_NEXT_USE_S:.0f} seconds"
            )
        if type(self.priority) is not int or not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"hints: priority {_shown(self.priority)}, expected -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        tokens = self.output_tokens
        if tokens is not None and (type(tokens) is not int or not 0 <= tokens <= MAX_OUTPUT_TOKENS):
            raise InvalidRequest(f"hints: output_tokens {_shown(tokens)}, expected 0 to {MAX_OUTPUT_TOKENS}")

    @classmethod
    def from_dict(cls, tree: Mapping[str, object]) -> "Hints":
        """Return the hints that a JSON object holds, by the names of the fields.

        Raises:
            InvalidRequest: it has other members, or a value is wrong.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(tree) - known)
        if unknown:
            raise InvalidRequest(
                f"hints: {unknown[0]!r} is unknown, expected some of {', '.join(sorted(known))}"
            )
        return cls(**tree)  # type: ignore[arg-type]  # __post_init__ looks at every value

    def as_dict(self) -> dict[str, object]:
        """Return what is said, ready for JSON; nothing that is as if it were not said."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


def _shown(value: object) -> str:
    """Return a wrong value as it is told; Python writes no number of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "of thousands of digits"
    return text if len(text) <= 40 else f"{text[:37]}..."
