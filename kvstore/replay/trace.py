"""Trace: the requests of a recorded traffic, each a chain of blocks, in compact arrays."""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidTrace

MAX_ACCESSES = 2**31 - 1
"""Most block accesses of a trace: blocks and positions are 32-bit."""


class TraceRequest(NamedTuple):
    """One request as a reader found it.

    ``ids`` name the blocks of the prompt in chain order. An id need only tell apart blocks of one parent.
    ``output_tokens`` is None where the trace does not say.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int | None
    ids: Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in file order; blocks are numbered from 0 in the order in which they first appear.

    Arrays, of which nothing may be changed: ``starts`` int64 ``[requests + 1]``, request ``r`` has the
    accesses ``starts[r]`` to ``starts[r + 1]``; ``blocks`` int32 ``[accesses]``; ``arrival_s`` float64
    ``[requests]``, never falling; ``input_tokens`` and ``output_tokens`` int64 ``[requests]``, -1 unknown;
    ``parents`` int32 ``[unique blocks]``, -1 for the first of a chain.

    ``block_accesses`` counts what was asked for, which is more than there are accesses where partial blocks
    are left out.
    """

    source: str
    format: str
    block_tokens: int
    starts: NDArray[np.int64]
    blocks: NDArray[np.int32]
    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    parents: NDArray[np.int32]
    block_accesses: int
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.arrival_s)

    @property
    def unique_blocks(self) -> int:
        """How many different blocks there are."""
        return len(self.parents)

    @property
    def total_input_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.input_tokens.sum())

    def chains(self) -> Iterator[list[int]]:
        """Yield the blocks of each request, in chain order."""
        for start, stop in pairwise(self.starts.tolist()):
            yield self.blocks[start:stop].tolist()

    def hit_tokens(self, request: int, hit_blocks: int) -> int:
        """Tokens in the first ``hit_blocks`` blocks of a request; its last block may be partly filled."""
        return min(hit_blocks * self.block_tokens, int(self.input_tokens[request]))

    def full_blocks_only(self) -> "Trace":
        """Return the same requests without the partly filled block at the end of each."""
        lengths = np.diff(self.starts)
        kept = np.minimum(lengths, self.input_tokens // self.block_tokens)
        position = np.arange(len(self.blocks)) - np.repeat(self.starts[:-1], lengths)
        is_kept = position < np.repeat(kept, lengths)
        starts = np.concatenate(([0], np.cumsum(kept)))
        return replace(self, starts=starts, blocks=self.blocks[is_kept])


class TraceBuilder:
    """Numbers the blocks of requests as they come, and keeps them in arrays.

    A block is told from others by its parent and its id: chains stay apart also where ids name contents.
    """

    def __init__(self, *, source: str, format_name: str) -> None:
        self._source = source
        self._format = format_name
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._parents = array("i")
        self._blocks = array("i")
        self._starts = array("q", [0])
        self._arrival_s = array("d")
        self._input_tokens = array("q")
        self._output_tokens = array("q")
        self._latest_s = 0.0
        self._num_out_of_order = 0

    def __len__(self) -> int:
        return len(self._arrival_s)

    def add(self, request: TraceRequest) -> None:
        """Add the next request.

        Raises:
            InvalidTrace: the trace has more accesses than a replay can number.
        """
        if len(self._blocks) + len(request.ids) > MAX_ACCESSES:
            raise InvalidTrace(f"more than {MAX_ACCESSES} block accesses: give --requests")
        numbers, parent = self._numbers, -1
        for block_id in request.ids:
            name = (parent, block_id)
            number = numbers.get(name)
            if number is None:
                number = numbers[name] = len(self._parents)
                self._parents.append(parent)
            self._blocks.append(number)
            parent = number
        if request.arrival_s < self._latest_s:
            self._num_out_of_order += 1
        self._latest_s = max(self._latest_s, request.arrival_s) if self._arrival_s else request.arrival_s
        self._arrival_s.append(self._latest_s)
        self._input_tokens.append(request.input_tokens)
        self._output_tokens.append(-1 if request.output_tokens is None else request.output_tokens)
        self._starts.append(len(self._blocks))

    def build(self, block_tokens: int, notes: Sequence[str] = ()) -> Trace:
        """Return what was added, with ``notes`` for whoever reads the result."""
        own = []
        if self._num_out_of_order:
            own.append(f"{self._num_out_of_order} requests arrive before one above them: taken in file order")
        return Trace(
            source=self._source,
            format=self._format,
            block_tokens=block_tokens,
            starts=np.array(self._starts, np.int64),
            blocks=np.array(self._blocks, np.int32),
            arrival_s=np.array(self._arrival_s, np.float64),
            input_tokens=np.array(self._input_tokens, np.int64),
            output_tokens=np.array(self._output_tokens, np.int64),
            parents=np.array(self._parents, np.int32),
            block_accesses=len(self._blocks),
            notes=(*notes, *own),
        )
