"""The access log of a store (``kvstore.access_log``): requests with the hashed names of their blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.replay.lines import BadLine, TraceLines, block_ids, count, number
from kvstore.replay.trace import TraceRequest

MARK = "kvstore_access_log"
"""The key of a file's first line, with the format's version."""

VERSION = 1


@dataclass(slots=True)
class AccessLines:
    """Requests of a log, whose instants begin anew with each session of a store.

    ``block_tokens`` None: what the first request has. Requests with blocks of another size are left out: a
    replay counts in blocks.
    """

    block_tokens: int | None = None
    num_other_sizes: int = 0
    _session: object = None
    _base_s: float = 0.0
    _latest_s: float = 0.0

    def read(self, lines: TraceLines) -> Iterator[TraceRequest]:
        """Yield the requests: ``t`` (s), ``n`` tokens in a block, and ``blocks``, a list of names.

        Raises:
            InvalidTrace: a line is bad, or of a version that is not known.
        """
        for fields in lines.objects():
            try:
                if MARK in fields:
                    self._note_session(fields)
                    continue
                request = self._request(fields)
            except BadLine as error:
                lines.complain(error)
                continue
            if request is not None:
                yield request

    def notes(self) -> list[str]:
        """Say what was left out."""
        if not self.num_other_sizes:
            return []
        return [f"{self.num_other_sizes} requests left out: their blocks have not {self.block_tokens} tokens"]

    def _note_session(self, fields: Mapping[str, Any]) -> None:
        if fields[MARK] != VERSION:
            raise BadLine(f"{MARK} is {fields[MARK]!r}, expected {VERSION}")
        if fields.get("session") != self._session:
            self._session, self._base_s = fields.get("session"), self._latest_s

    def _request(self, fields: Mapping[str, Any]) -> TraceRequest | None:
        ids, at_s, tokens = block_ids(fields, "blocks"), number(fields, "t"), count(fields, "n")
        if not tokens:
            raise BadLine("n is 0, expected the tokens of a block")
        if self.block_tokens is None:
            self.block_tokens = tokens
        if tokens != self.block_tokens:
            self.num_other_sizes += 1
            return None
        self._latest_s = self._base_s + at_s
        return TraceRequest(self._latest_s, len(ids) * tokens, None, ids)
