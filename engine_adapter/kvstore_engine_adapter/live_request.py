"""LiveRequest: one request from its arrival to its end."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from kvstore.hints import Hints
from kvstore.keys import Namespace, PrefixChain
from kvstore.tier import Slot
from kvstore_engine_adapter.generation import (
    Finished,
    GenerateRequest,
    Prefilled,
    RequestReport,
    Token,
)
from kvstore_engine_adapter.load_policy import FREE_TIER
from kvstore_engine_adapter.request_blocks import LoadedPrefix, RequestBlocks
from kvstore_engine_adapter.request_trace import RequestTrace
from kvstore_engine_adapter.sampling import Sampler
from kvstore_engine_adapter.scheduler import Phase, RequestView

Event = Prefilled | Token | Finished
"""What ``generate`` yields: one Prefilled, tokens, then one Finished."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """State of one request; one event loop's thread.

    ``tokens`` are those of prompt and answer, of which ``computed`` have their keys and values in ``blocks``
    (there while it is seated). ``chain`` names the full blocks of ``tokens``; ``published`` of them are
    shared. ``late_tiers`` are the first block whose load was late and the tiers of those from it on.
    ``short_since_s`` is set while it wants slots that are not to be had.
    """

    number: int
    request: GenerateRequest
    max_tokens: int
    arrived_s: float
    namespace: Namespace
    report: RequestReport
    sampler: Sampler
    tokens: list[int]
    chain: PrefixChain
    phase: Phase = Phase.WAITING
    blocks: RequestBlocks | None = None
    lookup: "asyncio.Task[LoadedPrefix] | None" = None
    computed: int = 0
    published: int = 0
    late_tiers: tuple[int, tuple[str, ...]] = (0, ())
    seated_s: float = 0.0
    short_since_s: float | None = None
    trace: RequestTrace = field(default_factory=RequestTrace)
    is_computing: bool = False
    is_abandoned: bool = False
    events: "asyncio.Queue[Event | Exception]" = field(default_factory=asyncio.Queue)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.chain.block_tokens

    @property
    def slots(self) -> list[Slot]:
        """Its slots, in chain order."""
        return self.blocks.slots if self.blocks is not None else []

    @property
    def reusable_blocks(self) -> int:
        """Full blocks before the last token, which is always computed: its logits choose the next one."""
        return (len(self.tokens) - 1) // self.block_tokens

    @property
    def is_first_prefill(self) -> bool:
        """Whether nothing is generated yet."""
        return self.report.output_tokens == 0

    def view(self, *, missing_blocks: int = 0) -> RequestView:
        """Return what the scheduler sees."""
        is_running = self.phase is Phase.RUNNING
        return RequestView(
            number=self.number,
            priority=self.request.priority,
            arrived_s=self.arrived_s,
            phase=self.phase,
            known_tokens=len(self.tokens),
            computed_tokens=self.computed,
            held_blocks=len(self.slots),
            releasable_blocks=self.blocks.num_releasable if self.blocks is not None else 0,
            missing_blocks=missing_blocks,
            next_work=self._next_work() if is_running else None,
        )

    def _next_work(self) -> Hashable | None:
        """Name the block it computes next by all tokens up to its end; None if it is under way in one."""
        at, rest = divmod(self.computed, self.block_tokens)
        if rest or len(self.tokens) - self.computed == 1:
            return None
        if at < len(self.chain):
            return self.chain.keys[at]
        parent = self.chain.keys[at - 1] if at else self.chain.namespace
        return parent, tuple(self.tokens[self.computed :])

    def add(self, token: int) -> None:
        """Append a token of the answer."""
        self.tokens.append(token)
        self.report.output_tokens += 1
        named = self.chain.num_tokens
        if len(self.tokens) - named >= self.block_tokens:
            self.chain = self.namespace.extend(self.chain, self.tokens[named:])

    def note_loaded(self, prefix: LoadedPrefix) -> None:
        """Take over what loading found."""
        self.computed = len(prefix.slots) * self.block_tokens
        self.published = len(prefix.slots)
        self.late_tiers = (self.published, prefix.late_tiers)
        if self.is_first_prefill:
            self.report.note_prefix(prefix, self.block_tokens)

    def note_joined(self, blocks: int) -> None:
        """Take over published blocks: a request beside this one computed them, or its own load was late."""
        first, late = self.late_tiers
        skipped = self.published - first
        tiers = Counter(late[skipped : skipped + blocks])
        tiers[FREE_TIER] += blocks - tiers.total()
        self.published += blocks
        for tier, count in tiers.items():
            self._note_reused(count * self.block_tokens, tier)

    def note_copied(self, tokens: int) -> None:
        """Take over tokens from a copy of a page of a request beside this one."""
        self._note_reused(tokens, FREE_TIER)

    def _note_reused(self, tokens: int, tier: str) -> None:
        self.computed += tokens
        if self.is_first_prefill and tokens:
            is_all = self.computed >= self.reusable_blocks * self.block_tokens
            self.report.note_joined(tokens, tier, is_all=is_all)

    def publish(self) -> None:
        """Share the blocks that have filled up since the last call."""
        filled = self.computed // self.block_tokens
        if filled > self.published and self.blocks is not None and self.blocks.is_sharing:
            self.blocks.publish(self.chain[self.published : filled], self.slots[self.published : filled])
        self.published = filled

    def tell_hints(self) -> None:
        """Say what the end of the request tells of its blocks' future: how long its answer is, at least."""
        if self.blocks is None or not self.published:
            return
        hints = dataclasses.replace(self.request.hints or Hints(), output_tokens=self.report.output_tokens)
        self.blocks.note_hints(self.chain[: self.published], hints)

    def leave_seat(self) -> None:
        """Give the slots back; what was published may be found again."""
        if self.lookup is not None:
            self.lookup.cancel()
            self.lookup = None
        if self.blocks is not None:
            self.blocks.end()
            self.blocks = None
        self.phase, self.computed, self.published = Phase.WAITING, 0, 0
        self.short_since_s = None
