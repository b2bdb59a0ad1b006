"""SchedulerSide: which blocks of a request are loaded and saved, decided in vLLM's scheduler.

The life of a request here: asked about (any number of times, see PrefixLookups), perhaps given blocks for a
load, which goes into the next plan; then with each of its steps the blocks that became full are saved; when
it ends, forgotten. Blocks are full as soon as vLLM has hashed them and computed all their tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.client import KVStore
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace, PrefixChain
from kvstore.tracing import TraceContext
from kvstore.wire import MAX_KEYS
from kvstore_engine_adapter.block_transfers import GroupMove, Move
from kvstore_engine_adapter.load_policy import LoadPolicy
from kvstore_engine_adapter.prefix_lookups import GroupChain, PrefixLookups
from kvstore_engine_adapter.request_wishes import RequestWishes
from kvstore_engine_adapter.step_speeds import StepSpeeds
from kvstore_engine_adapter.trace_headers import trace_of
from kvstore_engine_adapter.vllm.block_events import (
    GONE,
    BlockEvents,
    RemovedBlocks,
    StoredBlocks,
)
from kvstore_engine_adapter.vllm.identity import EngineIdentity, GroupIdentity
from kvstore_engine_adapter.vllm.options import ConnectorOptions
from kvstore_engine_adapter.vllm.plans import StepPlan
from kvstore_engine_adapter.vllm.request_groups import RequestGroups
from kvstore_engine_adapter.vllm.session_ends import SessionEnds

logger = logging.getLogger(__name__)

Request = Any
"""vLLM's ``Request``, ``KVCacheBlocks``, ``SchedulerOutput`` and ``KVConnectorOutput``: attributes only."""

_NULL_PAGE = 0
_IDLE_PATIENCE_S = 0.002


@dataclass(slots=True)
class _Followed:
    """A request as it is known here. ``saved`` is the first block that was not handed to a save yet.

    ``chosen`` are the blocks that are worth loading of those found from a block on: (start, found, chosen).
    """

    request: Request
    groups: tuple[GroupIdentity, ...]
    wishes: RequestWishes
    trace: TraceContext | None = None
    wants_lookup: bool = True
    wants_save: bool = True
    chosen: tuple[int, int, int] | None = None
    pages: list[list[int]] = field(default_factory=list)
    saved: int | None = None
    loading: tuple[int, tuple[GroupMove, ...]] | None = None
    bad_pages: set[int] = field(default_factory=set)


class SchedulerSide:
    """The scheduler's half of the connector. All methods are called from the scheduler's thread."""

    def __init__(
        self,
        client: KVStore,
        identity: EngineIdentity,
        options: ConnectorOptions,
        *,
        tells_events: bool = False,
    ) -> None:
        self._identity = identity
        self._options = options
        self._groups = RequestGroups(identity.groups, client.open_namespace)
        self._client = client
        self._events = BlockEvents(num_ranks=identity.num_ranks) if tells_events else None
        self._sessions = SessionEnds(client, identity.parts)
        self._speeds: StepSpeeds | None = None
        if options.loads == "cheaper":
            block_bytes = sum(group.block_bytes for group in identity.groups)
            self._speeds = StepSpeeds(LoadPolicy(identity.block_tokens, block_bytes))
        self.lookups = PrefixLookups(client, identity.parts, deadline_s=options.lookup_deadline_ms / 1000)
        self._followed: dict[str, _Followed] = {}
        self._loads: list[Move] = []
        # Once in a step while nothing is computed: an answer comes sooner when this thread lets others run.
        self._may_wait = True

    def blocks_to_load(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens after the computed ones can be loaded; None: not known yet."""
        followed = self._follow(request)
        tokens = self._identity.block_tokens
        if not followed.wants_lookup or computed_tokens % tokens:
            return 0
        start = computed_tokens // tokens
        stop = min(self._loadable_blocks(request), start + MAX_KEYS)
        if stop - start < self._options.min_blocks:
            return 0

        def chains() -> Sequence[GroupChain]:
            return [
                GroupChain(self._chain(group, request, start, stop), group.window_blocks)
                for group in followed.groups
            ]

        patience_s = _IDLE_PATIENCE_S if self._may_wait else 0.0
        blocks = self.lookups.blocks_after(
            request.request_id, start, chains, patience_s=patience_s, trace=followed.trace
        )
        if blocks is None:
            self._may_wait = False
            return None
        if blocks < stop - start:
            self._note_end(followed)
        blocks = self._worth_loading(followed, start, blocks)
        return 0 if blocks < self._options.min_blocks else blocks * tokens

    def plan_load(self, request: Request, pages: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Plan to load what was found into the pages that vLLM has allocated for the whole request."""
        if not external_tokens:
            return
        followed = self._follow(request)
        tokens = self._identity.block_tokens
        start = self.lookups.promised_start(request.request_id)
        stop = start - (-external_tokens // tokens)
        moves = []
        for group in followed.groups:
            table = pages[group.index]
            assert len(table) >= stop, f"{len(table)} pages for {stop} blocks that are to be loaded"
            # Every page counts as computed from then on, so each is loaded; before a window there are none.
            taken = [
                at for at in range(start, stop) if group.window_blocks is None or table[at] != _NULL_PAGE
            ]
            if taken:
                first = taken[0]
                chain = self._chain(group, request, first, stop)
                moves.append(GroupMove(group.index, chain, tuple(table[first:stop])))
        followed.loading = start, tuple(moves)
        if self._speeds is not None:
            tiers = self.lookups.tiers_found(request.request_id, start)[: stop - start]
            self._speeds.begin_load(request.request_id, tiers)
        self._loads.append(Move(request.request_id, tuple(moves), followed.wishes.hints, followed.trace))

    def plan_step(self, output: Request) -> StepPlan:
        """Return the plan of a step: loads to begin, and blocks that are full when it has been computed."""
        is_idle = self._may_wait = not output.total_num_scheduled_tokens
        if self._speeds is not None:
            self._speeds.note_step(int(output.total_num_scheduled_tokens))
        computed = self._update_pages(output)
        saves: list[Move] = []
        if not self._options.is_read_only:
            for request_id, before in computed.items():
                save = self._plan_save(request_id, before, before + output.num_scheduled_tokens[request_id])
                if save is not None:
                    saves.append(save)
        loads, self._loads = tuple(self._loads), []
        return StepPlan(loads, tuple(saves), self._namespaces_of(loads, saves), is_idle)

    def note_output(self, output: Request) -> None:
        """Learn which loads have ended, what they could not load, and what was stored or is gone."""
        report = getattr(output, "kv_connector_worker_meta", None)
        if report is not None and self._events is not None:
            # What is stored in the step in which it was found gone was stored after that.
            self._events.note_gone(report.gone)
            self._events.note_stored(report.num_parts)
        bad_pages, failed = (
            set(output.invalid_block_ids or ()),
            set(getattr(output, "failed_recving", None) or ()),
        )
        if bad_pages:
            for followed in self._followed.values():
                if followed.loading is not None:
                    followed.bad_pages |= bad_pages
        for request_id in output.finished_recving or ():
            followed_one = self._followed.get(request_id)
            if followed_one is None or followed_one.loading is None:
                continue
            start, moves = followed_one.loading
            first_bad = self._first_bad(followed_one, moves, start, has_failed=request_id in failed)
            followed_one.loading, followed_one.bad_pages = None, set()
            if self._speeds is not None:
                self._speeds.end_load(request_id, is_whole=first_bad is None)
            if first_bad is None:
                self.lookups.note_loaded(request_id)
            else:
                self.lookups.note_failed(request_id, first_bad)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            self._end_session(followed)
        if self._speeds is not None:
            self._speeds.end_load(request_id, is_whole=False)
        self.lookups.forget(request_id)
        if not any(other.pages for other in self._followed.values()):
            self._may_wait = True

    def take_events(self) -> list[StoredBlocks | RemovedBlocks]:
        """Return what was stored and what has left the store since the last time."""
        return [] if self._events is None else self._events.take()

    def close(self) -> None:
        """End the threads and close the client."""
        self.lookups.close()
        self._sessions.close()
        self._groups.close()
        self._client.close()

    def _follow(self, request: Request) -> _Followed:
        followed = self._followed.get(request.request_id)
        if followed is None:
            wishes = RequestWishes.read(getattr(request, "kv_transfer_params", None))
            self.lookups.counts.add("bad_params", wishes.num_bad)
            found = self._groups.groups(getattr(request, "lora_request", None), wishes)
            wants_lookup = wishes.wants_lookup and not getattr(request, "skip_reading_prefix_cache", False)
            followed = _Followed(
                request,
                self._identity.groups if found is None else found,
                wishes,
                trace_of(request),
                wants_lookup=found is not None and wants_lookup,
                wants_save=found is not None and wishes.wants_save,
            )
            self._followed[request.request_id] = followed
        followed.request = request
        return followed

    def _worth_loading(self, followed: _Followed, start: int, found: int) -> int:
        """Return how many of the blocks found are loaded; decided once for what one lookup has found."""
        if self._speeds is None or not found:
            return found
        if followed.chosen is None or followed.chosen[:2] != (start, found):
            tiers = self.lookups.tiers_found(followed.request.request_id, start)
            chosen = self._speeds.blocks_worth_loading(tiers, found)
            self.lookups.counts.add("cheaper_computed_blocks", found - chosen)
            followed.chosen = start, found, chosen
        return followed.chosen[2]

    def _note_end(self, followed: _Followed) -> None:
        """Tell of a block that was told to be stored, and that a lookup did not find."""
        if self._events is None:
            return
        missing = self.lookups.first_missing(followed.request.request_id)
        if missing is not None and missing[1] in GONE and missing[0] < self._num_hashes(followed.request):
            chain = self._chain(followed.groups[0], followed.request, missing[0], missing[0] + 1)
            self._events.note_gone(chain.keys)

    def _end_session(self, followed: _Followed) -> None:
        """Remember the blocks of a session's last request, or say that nobody goes on from them."""
        wishes, request = followed.wishes, followed.request
        session = wishes.session or str(getattr(request, "session_id", None) or "")
        blocks = followed.saved or 0
        if blocks and (session or wishes.ends_session):
            chains = [self._chain(group, request, 0, blocks) for group in followed.groups]
            name = (wishes.tenant, session) if session else None
            self._sessions.note_end(name, chains, wishes.hints if wishes.ends_session else None)

    def _namespaces_of(self, loads: Sequence[Move], saves: Sequence[Move]) -> tuple[Namespace, ...]:
        """Return the namespaces that the workers need for these moves."""
        namespaces: dict[Namespace, None] = {}
        for move in (*loads, *saves):
            followed = self._followed.get(move.request_id)
            groups = self._identity.groups if followed is None else followed.groups
            namespaces.update(dict.fromkeys(group.namespace for group in groups))
        return tuple(namespaces)

    def _num_hashes(self, request: Request) -> int:
        """Blocks of a request that have a name now."""
        per_block = self._identity.groups[0].hashes_per_block
        named = len(request.block_hashes) // per_block
        publishable = getattr(request, "num_publishable_block_hashes", None)
        return named if publishable is None else min(named, int(publishable) // per_block)

    def _loadable_blocks(self, request: Request) -> int:
        """Blocks that may be loaded: the whole prompt where vLLM computes its last token again by itself."""
        has_windows = any(group.window_blocks is not None for group in self._identity.groups)
        tokens = int(request.num_tokens) - (1 if has_windows else 0)
        return min(self._num_hashes(request), tokens // self._identity.block_tokens)

    def _chain(self, group: GroupIdentity, request: Request, start: int, stop: int) -> PrefixChain:
        """Name blocks ``start..stop`` of a request in one group."""
        every = group.hashes_per_block
        first = max(0, start - 1)
        hashes = [bytes(request.block_hashes[(at + 1) * every - 1]) for at in range(first, stop)]
        named = group.namespace.chain_of_hashes(hashes)
        if not start:
            return named
        return replace(named, keys=named.keys[1:], start=start, parent=named.keys[0])

    def _update_pages(self, output: Request) -> dict[str, int]:
        """Learn the pages of the requests that this step computes; returns the tokens computed before it."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            followed = self._followed.get(new.req_id)
            if followed is not None:
                followed.pages = [list(pages) for pages in new.block_ids]
                # If it is preempted it asks anew: by then it may find what it has saved itself.
                self.lookups.note_loaded(new.req_id)
                computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            followed = self._followed.get(request_id)
            if followed is None:
                continue
            pages = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                followed.pages = [list(group) for group in pages or ()]
            elif pages is not None:
                for known, more in zip(followed.pages, pages, strict=False):
                    known.extend(more)
            computed[request_id] = cached.num_computed_tokens[index]
        return computed

    def _plan_save(self, request_id: str, before: int, after: int) -> Move | None:
        followed = self._followed[request_id]
        tokens = self._identity.block_tokens
        # A block may get its hash a step after it is full; and what is computed again was not stored before.
        start = before // tokens if followed.saved is None else min(before // tokens, followed.saved)
        stop = min(after // tokens, self._num_hashes(followed.request), *(map(len, followed.pages)))
        followed.saved = max(start, stop)
        if not followed.wants_save or stop <= start:
            return None
        try:
            moves = self._save_moves(followed, start, stop)
        except InvalidRequest as error:
            logger.debug("save: %s", error)
            return None
        for move in moves:
            self.lookups.note_saved(move.chain.keys)
            if self._events is not None:
                self._note_planned(followed, move)
        return Move(request_id, tuple(moves), followed.wishes.hints, followed.trace)

    def _note_planned(self, followed: _Followed, move: GroupMove) -> None:
        """Remember what the events of blocks say, for when they are stored."""
        assert self._events is not None
        request, tokens = followed.request, self._identity.block_tokens
        every = followed.groups[0].hashes_per_block
        adapter = getattr(request, "lora_request", None)
        session = followed.wishes.session or getattr(request, "session_id", None)
        for at, key in enumerate(move.chain.keys, move.chain.start):
            block = StoredBlocks(
                hashes=(bytes(request.block_hashes[(at + 1) * every - 1]),),
                parent=bytes(request.block_hashes[at * every - 1]) if at else None,
                tokens=tuple(request.all_token_ids[at * tokens : (at + 1) * tokens]),
                group=move.group,
                lora_id=None if adapter is None else int(adapter.adapter_id),
                lora_name=None if adapter is None else str(adapter.name),
                session=session,
            )
            self._events.note_planned(key, block)

    def _save_moves(self, followed: _Followed, start: int, stop: int) -> list[GroupMove]:
        moves = []
        for group in followed.groups:
            pages = followed.pages[group.index][start:stop]
            skipped = next((i for i, page in enumerate(pages) if page != _NULL_PAGE), len(pages))
            if group.window_blocks is None:
                skipped = 0
            if skipped < len(pages) and _NULL_PAGE not in pages[skipped:]:
                chain = self._chain(group, followed.request, start + skipped, stop)
                moves.append(GroupMove(group.index, chain, tuple(pages[skipped:])))
        return moves

    @staticmethod
    def _first_bad(
        followed: _Followed, moves: Sequence[GroupMove], start: int, *, has_failed: bool
    ) -> int | None:
        """Return the first block that did not arrive; of several groups, vLLM starts over."""
        if has_failed:
            return start
        bad = [
            move.chain.start + at
            for move in moves
            for at, page in enumerate(move.pages)
            if page in followed.bad_pages
        ]
        return min(bad, default=None)
