"""One client of one store in a process of its own, with payloads of its own, told by a pipe what to measure.

Called as ``client_process.py PEER FOLDER BLOCK_BYTES BATCH SET_BYTES``. It starts the peer, makes payloads of
about ``SET_BYTES`` in groups of ``BATCH`` blocks, and writes the operations that it can time. Then each line
of its standard input is a JSON list, and each answer a JSON value on a line:

    ["time", op]      seconds of each call and the CPU seconds of all; payloads lie in no cache at first
    ["repeat", op]    the same of the first group, many times, whatever lies in caches
    ["check"]         fails unless every fetched block has the bytes that were put
    ["remove"]        everything is forgotten

Each client has a process: what its allocator, threads and packages do to later calls shows in its own figures
alone. (redis-py's GET of 2 MiB was 6 times as fast where another client had made the allocator keep memory.)
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from measure.figures import cpu_seconds, largest_cache_bytes, timed
from measure.shape import Shape
from peers import open_peer

REPEATS = 20

OPS = {
    "copy": "copy",
    "round_trip_and_copy": "round_trip_and_copy",
    "put": "put",
    "fetch_into": "fetch",
    "fetch_into_unchecked": "fetch_unchecked",
    "view": "view",
    "match": "match",
    "exists": "exists",
}
"""The calls of a peer that each operation times; it has some of them."""


class Client:
    """A peer and what it stores."""

    def __init__(self, name: str, folder: Path, shape: Shape) -> None:
        self._shape = shape
        self._peer = open_peer(name, folder, shape.block_bytes, len(shape.keys))
        self._names = shape.names(self._peer)
        self._other = np.zeros(2 * largest_cache_bytes(), np.uint8)

    @property
    def ops(self) -> list[str]:
        """What the peer can do."""
        return [op for op, call in OPS.items() if hasattr(self._peer, call)]

    def time(self, op: str) -> tuple[list[float], float]:
        """Call once for each group."""
        if hasattr(self._peer, "cool"):
            self._peer.cool(len(self._other))
        else:
            self._other += 1
        return self._run(op, range(len(self._names)))

    def repeat(self, op: str) -> tuple[list[float], float]:
        """Call for the first group again and again."""
        return self._run(op, [0] * REPEATS)

    def check(self) -> None:
        """Compare."""
        getattr(self._peer, "check", self._shape.check)()

    def remove(self) -> None:
        """Forget."""
        for names in self._names:
            self._peer.remove(names)

    def close(self) -> None:
        """Stop the peer."""
        self._peer.close()

    def _run(self, op: str, groups: "range | list[int]") -> tuple[list[float], float]:
        calls = self._calls(op, groups)
        cpu_s = cpu_seconds(self._peer.server_pids)
        return calls(), cpu_seconds(self._peer.server_pids) - cpu_s

    def _calls(self, op: str, groups: "range | list[int]") -> Callable[[], list[float]]:
        names, sources, targets = self._names, self._shape.sources, self._shape.targets
        remote = getattr(self._peer, "timed", None)
        if remote is not None:
            return partial(remote, OPS[op], [names[group] for group in groups])
        call = getattr(self._peer, OPS[op])
        if op == "put":
            return timed([partial(call, names[group], sources[group]) for group in groups])
        if op in {"fetch_into", "fetch_into_unchecked"}:
            return timed([partial(call, names[group], targets[group]) for group in groups])
        if op in {"copy", "round_trip_and_copy"}:
            return timed([partial(call, targets[group], sources[group]) for group in groups])
        return timed([partial(call, names[group]) for group in groups])


def main() -> None:
    """Do as told until the input ends."""
    # What packages print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, folder = sys.argv[1], Path(sys.argv[2])
    client = Client(name, folder, Shape.make(*map(int, sys.argv[3:])))
    try:
        print(json.dumps(client.ops), file=answers, flush=True)
        for line in sys.stdin:
            verb, *rest = json.loads(line)
            print(json.dumps(getattr(client, verb)(*rest)), file=answers, flush=True)
    finally:
        client.close()


if __name__ == "__main__":
    main()
