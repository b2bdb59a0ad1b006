"""TierRequests: what vLLM's tiers ask about one chunk at a time, asked of the store once for each request.

vLLM looks chunks up one by one, all of a request's in one step, and asks again in the next step about those
of which it was told 'not yet'. So a step's questions are collected and go to the store together at its end;
``PrefixLookups`` has the rules (in a thread, in time, under a lease). Then each question is answered from
what was found. Chunks that come up later are misses: a request asks once, and anew if it is preempted.
A chunk whose load failed is not offered to that request again.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.keys import PrefixChain
from kvstore.tracing import TraceContext
from kvstore_engine_adapter.block_transfers import GroupMove, Move
from kvstore_engine_adapter.prefix_lookups import GroupChain, PrefixLookups
from kvstore_engine_adapter.request_wishes import RequestWishes
from kvstore_engine_adapter.vllm.adapters import Groups
from kvstore_engine_adapter.vllm.identity import GroupIdentity

_GROUP_BYTES = 4
_MAX_CHUNKS = 10_000

ChunkKey = bytes
"""vLLM's ``OffloadKey``: the hash of the chunk's last block, and the index of its group in 4 bytes."""

Context = Any
"""vLLM's ``ReqContext``: ``req_id``, ``kv_transfer_params``, ``get_offload_key_position``."""


class Answer(enum.Enum):
    """Of one chunk: stored, not stored, not known yet."""

    HIT = enum.auto()
    MISS = enum.auto()
    NOT_YET = enum.auto()


@dataclass(slots=True)
class _Asking:
    """A request as the tier knows it. ``groups`` None: it shares nothing. ``places`` are (group, index)."""

    groups: dict[int, GroupIdentity] | None
    wishes: RequestWishes
    trace: TraceContext | None = None
    collected: dict[ChunkKey, None] = field(default_factory=dict)
    asked: tuple[tuple[ChunkKey, ...], ...] = ()
    found: dict[ChunkKey, bool] | None = None
    failed: set[ChunkKey] = field(default_factory=set)
    places: dict[tuple[int, int], bytes] = field(default_factory=dict)
    is_running: bool = False


class TierRequests:
    """The requests of one engine. All methods are called from the scheduler's thread."""

    def __init__(self, lookups: PrefixLookups, *, chunk_tokens: int) -> None:
        self._lookups = lookups
        self._chunk_tokens = chunk_tokens
        self._requests: dict[str, _Asking] = {}
        self._open: dict[str, None] = {}
        self._num_running = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is computed, so that waiting a moment holds nobody up."""
        return self._num_running == 0

    @property
    def is_asking(self) -> bool:
        """Whether questions are at the store."""
        return any(self._requests[request_id].asked for request_id in self._open)

    def begin(
        self,
        request_id: str,
        groups: Groups | None,
        wishes: RequestWishes,
        trace: TraceContext | None = None,
    ) -> None:
        """A request has come, which belongs to the span ``trace``; ``groups`` None: it shares nothing."""
        by_index = None if groups is None else {group.index: group for group in groups}
        self._requests[request_id] = _Asking(by_index, wishes, trace)

    def note_running(self, started: Collection[str], preempted: Collection[str]) -> None:
        """Learn which requests a step has begun to compute, and which it has put back."""
        for request_id in started:
            self._set_running(request_id, is_running=True)
        for request_id in preempted:
            self._set_running(request_id, is_running=False)
            asking = self._requests.get(request_id)
            if asking is not None:
                self._open.pop(request_id, None)
                asking.collected, asking.asked, asking.found = {}, (), None
                self._lookups.note_loaded(request_id)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._set_running(request_id, is_running=False)
        self._open.pop(request_id, None)
        self._requests.pop(request_id, None)
        self._lookups.forget(request_id)

    def answer(self, key: ChunkKey, context: Context) -> Answer:
        """Say whether a chunk is stored."""
        asking = self._requests.get(context.req_id)
        if asking is None or asking.groups is None or not asking.wishes.wants_lookup:
            return Answer.MISS
        if asking.found is not None:
            is_found = asking.found.get(key, False) and key not in asking.failed
            return Answer.HIT if is_found else Answer.MISS
        if asking.asked:
            return Answer.NOT_YET
        if _group(key) not in asking.groups or len(asking.collected) >= _MAX_CHUNKS:
            return Answer.MISS
        if self._place(asking, key, context) is None:
            return Answer.MISS
        asking.collected[key] = None
        self._open[context.req_id] = None
        return Answer.NOT_YET

    def ask(self) -> None:
        """Send the questions of this step."""
        for request_id in list(self._open):
            asking = self._requests[request_id]
            if asking.collected and not asking.asked:
                asking.asked = _by_group(asking)
                asking.collected = {}
                self._settle(request_id, asking, patience_s=0.0)

    def settle(self, *, patience_s: float) -> None:
        """Take answers that have come; wait up to ``patience_s`` for the first."""
        for request_id in list(self._open):
            asking = self._requests[request_id]
            if asking.asked:
                self._settle(request_id, asking, patience_s=patience_s)
                patience_s = 0.0

    def note_load(self, request_id: str, failed: Iterable[ChunkKey]) -> None:
        """A load of a request has ended: these chunks did not come, and its lease may end."""
        asking = self._requests.get(request_id)
        if asking is not None:
            before = len(asking.failed)
            asking.failed.update(failed)
            if len(asking.failed) > before:
                self._lookups.counts.add("failed_loads")
            self._lookups.note_loaded(request_id)

    def load_move(self, job: str, keys: Sequence[ChunkKey], rows: Sequence[int], context: Context) -> Move:
        """Return the move that loads chunks into rows; without groups: they cannot be loaded."""
        return self._move(job, keys, rows, context)

    def save_move(
        self, job: str, keys: Sequence[ChunkKey], rows: Sequence[int], context: Context
    ) -> Move | None:
        """Return the move that stores rows; None: nothing is to be stored for this request."""
        asking = self._requests.get(context.req_id)
        if asking is None or asking.groups is None or not asking.wishes.wants_save:
            return None
        move = self._move(job, keys, rows, context)
        for one in move.groups:
            self._lookups.note_saved(one.chain.keys)
        return move

    def _move(self, job: str, keys: Sequence[ChunkKey], rows: Sequence[int], context: Context) -> Move:
        asking = self._requests.get(context.req_id)
        if asking is None or asking.groups is None:
            return Move(job, ())
        placed: list[tuple[tuple[int, int], int]] = []
        for key, row in zip(keys, rows, strict=True):
            at = self._place(asking, key, context)
            if at is None:
                return Move(job, ())
            placed.append((at, row))
        runs: list[list[tuple[tuple[int, int], int]]] = []
        for place, row in sorted(placed):
            last = runs[-1][-1][0] if runs else None
            if last is None or last != (place[0], place[1] - 1):
                runs.append([])
            runs[-1].append((place, row))
        moves = tuple([self._group_move(asking, run) for run in runs])
        return Move(job, moves, asking.wishes.hints, asking.trace)

    def _group_move(self, asking: _Asking, run: Sequence[tuple[tuple[int, int], int]]) -> GroupMove:
        """Name a run of chunks that follow one another; the one before them, if known, is their parent."""
        assert asking.groups is not None
        group, start = run[0][0]
        namespace = asking.groups[group].namespace
        hashes = [asking.places[place] for place, _ in run]
        before = asking.places.get((group, start - 1))
        if before is None:
            chain = namespace.chain_of_hashes(hashes)
        else:
            whole = namespace.chain_of_hashes([before, *hashes])
            chain = PrefixChain(whole.namespace, whole.keys[1:], whole.block_tokens, start, whole.keys[0])
        return GroupMove(group, chain, tuple(row for _, row in run))

    def _place(self, asking: _Asking, key: ChunkKey, context: Context) -> tuple[int, int] | None:
        """Remember where in its request a chunk is, and return it.

        None where vLLM does not say, or if it ends within a chunk, as that of a state space may.
        """
        end_token = context.get_offload_key_position(key)
        if end_token is None or end_token % self._chunk_tokens:
            return None
        place = _group(key), int(end_token) // self._chunk_tokens - 1
        asking.places[place] = key[:-_GROUP_BYTES]
        return place

    def _settle(self, request_id: str, asking: _Asking, *, patience_s: float) -> None:
        blocks = self._lookups.blocks_after(
            request_id, 0, self._chains(asking), patience_s=patience_s, trace=asking.trace
        )
        if blocks is None:
            return
        self._open.pop(request_id, None)
        each = iter(self._lookups.each_found(request_id))
        found: dict[ChunkKey, bool] = {}
        for at, keys in enumerate(asking.asked):
            is_prefix = _is_prefix(asking, at)
            flags = [place < blocks for place in range(len(keys))] if is_prefix else next(each, ())
            found.update(zip(keys, flags, strict=False))
        asking.asked, asking.found = (), found

    def _chains(self, asking: _Asking) -> Callable[[], Sequence[GroupChain]]:
        def chains() -> Sequence[GroupChain]:
            made: list[GroupChain] = []
            for at, keys in enumerate(asking.asked):
                assert asking.groups is not None
                namespace = asking.groups[_group(keys[0])].namespace
                chain = namespace.chain_of_hashes([key[:-_GROUP_BYTES] for key in keys])
                made.append(GroupChain(chain, is_each=not _is_prefix(asking, at)))
            return made

        return chains

    def _set_running(self, request_id: str, *, is_running: bool) -> None:
        asking = self._requests.get(request_id)
        if asking is not None and asking.is_running != is_running:
            asking.is_running = is_running
            self._num_running += 1 if is_running else -1


def _group(key: ChunkKey) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def _is_prefix(asking: _Asking, at: int) -> bool:
    """Whether of the chunks asked about in a group only leading ones are of use."""
    assert asking.groups is not None
    return at == 0 and asking.groups[_group(asking.asked[0][0])].window_blocks is None


def _by_group(asking: _Asking) -> tuple[tuple[ChunkKey, ...], ...]:
    """Sort collected chunks by group, each group's in the order of the request, full attention first."""
    groups = asking.groups
    assert groups is not None
    by_group: dict[int, list[ChunkKey]] = {}
    for key in asking.collected:
        by_group.setdefault(_group(key), []).append(key)
    where = {(group, content): at for (group, at), content in asking.places.items()}
    order = sorted(by_group, key=lambda index: groups[index].window_blocks is not None)
    return tuple(
        tuple(sorted(by_group[index], key=lambda key: where[index, key[:-_GROUP_BYTES]])) for index in order
    )
