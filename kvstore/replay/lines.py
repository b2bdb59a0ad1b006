"""Lines of a trace: JSON, one value a line, each bounded, each fault with its place and its remedy."""

import gzip
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from kvstore.errors import InvalidTrace

MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is read: a prompt of a million tokens in blocks of one token fits."""

_MAX_ID_LENGTH = 256
_MAX_NUMBER = 1e18
_READ_BYTES = 2**20


class BadLine(Exception):
    """What is wrong with one line, without its place."""


class TraceLines:
    """The values of a file of JSON lines, with the number of the last line read.

    ``skips``: bad lines are counted instead of raised. ``may_be_torn``: so are lines that are no JSON, as a
    full disk or a crash leaves them in a log.
    """

    def __init__(self, file: BinaryIO, *, source: str, skips: bool = False) -> None:
        self.source = source
        self.skips = skips
        self.line_number = 0
        self.read_bytes = 0
        self.num_skipped = 0
        self.may_be_torn = False
        self.num_torn = 0
        self._file = file
        self._ahead: list[Any] = []  # Any: a JSON value

    def peek(self) -> Any:  # Any: a JSON value
        """Return the first value, which is still yielded later.

        Raises:
            InvalidTrace: there is none.
        """
        for value in self:
            self._ahead.append(value)
            return value
        raise InvalidTrace(f"{self.source}: is empty")

    @property
    def is_ahead(self) -> bool:
        """Whether a value was read that is still to be yielded."""
        return bool(self._ahead)

    def __iter__(self) -> Iterator[Any]:  # Any: a JSON value
        """Yield each line's value; empty lines are passed over.

        Raises:
            InvalidTrace: a line is too long or no JSON.
        """
        while self._ahead:
            yield self._ahead.pop()
        while True:
            line = self._file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            self.line_number += 1
            self.read_bytes += len(line)
            if len(line) > MAX_LINE_BYTES:
                raise InvalidTrace(self._where(f"is longer than {MAX_LINE_BYTES} bytes: is it JSON lines?"))
            if line.isspace():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                if self.may_be_torn:
                    self.num_torn += 1
                    continue
                self.complain(BadLine(f"is no JSON ({_reason(error)})"))
                continue
            yield value

    def objects(self) -> Iterator[Mapping[str, Any]]:  # Any: JSON values
        """Yield each line's value; other values than objects are bad lines.

        Raises:
            InvalidTrace: as for all values, or a line is no object.
        """
        for value in self:
            if isinstance(value, dict):
                yield value
            else:
                self.complain(BadLine("is no JSON object"))

    def complain(self, error: BadLine) -> None:
        """Raise what is wrong with the last line, or count it.

        Raises:
            InvalidTrace: bad lines are not skipped.
        """
        if not self.skips:
            raise InvalidTrace(self._where(f"{error}; mend the line, or give --skip-bad-lines")) from error
        self.num_skipped += 1

    def notes(self) -> list[str]:
        """Say what was skipped."""
        counts = {"bad": self.num_skipped, "torn": self.num_torn}
        return [f"{count} {kind} lines skipped" for kind, count in counts.items() if count]

    def _where(self, what: str) -> str:
        return f"{self.source}: line {self.line_number}: {what}"


@contextmanager
def open_lines(path: str, *, skips: bool = False) -> Iterator[TraceLines]:
    """Open a trace for reading: a file, a file compressed with gzip (by its name), or ``-`` for stdin.

    Raises:
        InvalidTrace: it cannot be read.
    """
    try:
        with _open(path) as file:
            yield TraceLines(file, source="stdin" if path == "-" else path, skips=skips)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidTrace(f"{path}: cannot be read: {reason}") from error


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb", buffering=_READ_BYTES) as file:  # noqa: PTH123 - a path as the user gave it
        if path.endswith(".gz"):
            with (
                gzip.GzipFile(fileobj=file) as unpacked,
                io.BufferedReader(unpacked, _READ_BYTES) as buffered,
            ):
                yield buffered
        else:
            yield file


def number(fields: Mapping[str, Any], name: str, *, default: float | None = None) -> float:
    """Return a field that is a finite number.

    Raises:
        BadLine: it is not there and has no default, or is something else.
    """
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise BadLine(_expected(fields, name, "a number"))
    return float(value)


def count(fields: Mapping[str, Any], name: str) -> int:
    """Return a field that is a whole number from 0.

    Raises:
        BadLine: it is not there, or something else.
    """
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise BadLine(_expected(fields, name, "a whole number from 0"))
    return value


def block_ids(fields: Mapping[str, Any], name: str) -> Sequence[int | str]:
    """Return a field that is a list of block ids: whole numbers or short texts.

    Raises:
        BadLine: it is not there, or holds something else.
    """
    value = fields.get(name)
    if not isinstance(value, list):
        raise BadLine(_expected(fields, name, "a list of block ids"))
    for at, block_id in enumerate(value):
        if type(block_id) is not int and not (isinstance(block_id, str) and len(block_id) <= _MAX_ID_LENGTH):
            raise BadLine(f"{name}[{at}] is {_shown(block_id)}, expected a whole number or a short text")
    return value


def _expected(fields: Mapping[str, Any], name: str, kind: str) -> str:
    if name not in fields:
        return f"has no {name}, expected {kind}"
    return f"{name} is {_shown(fields[name])}, expected {kind}"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error) or type(error).__name__
