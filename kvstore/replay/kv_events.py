"""vLLM's KV events, recorded as JSON lines: requests as well as they can be told from them.

An engine reports the blocks that it stores and removes, not its requests. Each ``BlockStored`` names its
parent block, so the whole chain up to its last block is known: that chain is a request that computed the new
blocks and used the ones before them. What is not in the events cannot be told:

- A request whose blocks were all in the engine's cache stores nothing, and is not seen.
- Blocks of answers are stored like those of prompts, and are part of the chain.
- A prompt is stored in several events when it is computed in pieces, and an answer block by block. An event
  that goes on from the last block of one no longer than ``gap_s`` ago continues that request; later, it is
  the next turn of the conversation.

What the engine removes does not matter: the replay has a cache of its own. A removed block is still known as
a parent.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.replay.lines import BadLine, TraceLines, block_ids, number
from kvstore.replay.trace import TraceRequest

STORED = "BlockStored"
EVENT_TYPES = frozenset({STORED, "BlockRemoved", "AllBlocksCleared"})

DEFAULT_GAP_S = 5.0
"""How long a request may pause between two of its events."""

_POSITIONAL = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
"""Fields of a ``BlockStored`` that is an array, after its type."""

_GPU_MEDIA = (None, "GPU")


@dataclass(slots=True)
class _Growing:
    """A request whose chain may still go on."""

    arrival_s: float
    latest_s: float
    ids: list[Hashable]


@dataclass(slots=True)
class KvEvents:
    """What was learnt of the blocks so far, and the requests that may still go on.

    ``block_tokens`` None: what the first stored block has.

    A block is known by its hash for as long as the trace is read: a few hundred bytes each.
    """

    block_tokens: int | None = None
    gap_s: float = DEFAULT_GAP_S
    num_other_media: int = 0
    num_orphans: int = 0
    _parents: dict[Hashable, Hashable | None] = field(default_factory=dict)
    _by_leaf: dict[Hashable, _Growing] = field(default_factory=dict)
    _growing: deque[_Growing] = field(default_factory=deque)

    def read(self, lines: TraceLines) -> Iterator[TraceRequest]:
        """Yield requests in the order in which they began.

        Raises:
            InvalidTrace: a line is bad, or blocks have another size.
        """
        for value in lines:
            try:
                now_s, events = _batch(value)
                for event in events:
                    self._take(now_s, event)
            except BadLine as error:
                lines.complain(error)
                continue
            yield from self._finished(now_s)
        yield from self._finished(None)

    def notes(self) -> list[str]:
        """Say what could not be told."""
        notes = ["requests are guessed from stored blocks: one that found everything is not seen"]
        if self.num_other_media:
            notes.append(f"{self.num_other_media} events of other media than the GPU left out")
        if self.num_orphans:
            notes.append(f"{self.num_orphans} events go on from a block never seen: taken for beginnings")
        return notes

    def _take(self, now_s: float, event: Mapping[str, Any]) -> None:
        if event.get("type") != STORED:
            return
        if event.get("medium") not in _GPU_MEDIA or event.get("group_idx") not in (None, 0):
            self.num_other_media += 1
            return
        hashes = block_ids(event, "block_hashes")
        if not hashes:
            return
        self._check_size(event)
        parent = event.get("parent_block_hash")
        if parent is not None and type(parent) not in (int, str):
            raise BadLine("parent_block_hash is neither a whole number nor a text")
        if parent is not None and parent not in self._parents:
            self.num_orphans += 1
            parent = None
        self._grow(now_s, parent, hashes)

    def _check_size(self, event: Mapping[str, Any]) -> None:
        size = event.get("block_size", self.block_tokens)
        if type(size) is not int or size < 1:
            raise BadLine(f"block_size is {size}, expected a whole number from 1")
        if self.block_tokens is None:
            self.block_tokens = size
        if size != self.block_tokens:
            raise BadLine(f"block_size is {size}, expected {self.block_tokens} as before")

    def _grow(self, now_s: float, parent: Hashable | None, hashes: Sequence[Hashable]) -> None:
        before = self._by_leaf.pop(parent, None) if parent is not None else None
        if before is not None and now_s - before.latest_s <= self.gap_s:
            growing = before
        else:
            growing = _Growing(now_s, now_s, self._chain_to(parent))
            self._growing.append(growing)
        growing.latest_s = now_s
        for block in hashes:
            # The first parent that a block was seen with: a cycle cannot come about.
            self._parents.setdefault(block, parent)
            growing.ids.append(block)
            parent = block
        self._by_leaf[hashes[-1]] = growing

    def _chain_to(self, block: Hashable | None) -> list[Hashable]:
        chain: list[Hashable] = []
        while block is not None:
            chain.append(block)
            block = self._parents[block]
        return chain[::-1]

    def _finished(self, now_s: float | None) -> Iterator[TraceRequest]:
        """Yield the oldest requests as far as none of them can go on."""
        while self._growing and (now_s is None or now_s - self._growing[0].latest_s > self.gap_s):
            oldest = self._growing.popleft()
            if self._by_leaf.get(oldest.ids[-1]) is oldest:
                del self._by_leaf[oldest.ids[-1]]
            yield TraceRequest(oldest.arrival_s, len(oldest.ids) * (self.block_tokens or 0), None, oldest.ids)


def is_event_line(value: object) -> bool:
    """Whether a line looks like a batch of events, or one event."""
    try:
        _, events = _batch(value)
    except BadLine:
        return False
    return all(event["type"] in EVENT_TYPES for event in events)


def _batch(value: object) -> tuple[float, list[Mapping[str, Any]]]:
    """Return time and events of a line: ``[ts, events, rank]``, ``{"ts", "events"}``, or one event.

    Raises:
        BadLine: it is none of these.
    """
    if isinstance(value, list) and len(value) >= 2 and isinstance(value[1], list):
        fields: Mapping[str, Any] = {"ts": value[0], "events": value[1]}
    elif isinstance(value, dict):
        fields = value if "events" in value else {**value, "events": [value]}
    else:
        raise BadLine("is no batch of events: expected [ts, events], or an object with ts and events")
    events = fields["events"]
    if not isinstance(events, list):
        raise BadLine("events is no list")
    name = "ts" if "ts" in fields else "timestamp"
    return number(fields, name), [_event(event) for event in events]


def _event(value: object) -> Mapping[str, Any]:
    if isinstance(value, list) and value and isinstance(value[0], str):
        return {"type": value[0], **dict(zip(_POSITIONAL, value[1:], strict=False))}
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return value
    raise BadLine("an event has no type")
