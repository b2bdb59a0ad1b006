"""The figures of one run with what they were taken with, as one JSON object."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from measure.figures import Row
from peers import versions

_OWN = ("numpy", "xxhash", "msgpack")


@dataclass(frozen=True)
class Record:
    """One run.

    ``load`` is the load average of the minute before it, of other work. ``left_out`` says why a peer that was
    asked for was not measured; ``versions`` names Python and the packages of client and peers.
    """

    results: list[Row]
    rounds: int
    cores: int
    load: float
    versions: dict[str, str]
    left_out: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Take up what ``write`` or ``line`` made."""
        return cls(**json.loads(path.read_text().splitlines()[-1]))

    def line(self) -> str:
        """All of it on one line."""
        return json.dumps(asdict(self))

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        path.write_text(self.line() + "\n")

    def row(self, peer: str, op: str, block_bytes: int, batch: int) -> Row | None:
        """Return a row; None if it was not measured."""
        wanted = (peer, op, block_bytes, batch)
        for row in self.results:
            if (row["peer"], row["op"], row["block_bytes"], row["batch"]) == wanted:
                return row
        return None


def make_record(
    rows: list[Row], peers: Sequence[str], left_out: dict[str, str], *, rounds: int, load: float
) -> Record:
    """Note what the rows were measured with."""
    own = {name: importlib.metadata.version(name) for name in _OWN}
    found = {"python": platform.python_version(), **own}
    for peer in peers:
        found |= versions(peer)
    return Record(rows, rounds, os.cpu_count() or 1, load, found, left_out)
