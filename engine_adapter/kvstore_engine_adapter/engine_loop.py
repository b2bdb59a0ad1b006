"""EngineLoop: the one task that seats requests, has passes computed, and hands out what comes of them."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.hints import Hints
from kvstore.keys import Namespace
from kvstore.tier import Slot
from kvstore_engine_adapter.attention import Segment
from kvstore_engine_adapter.generation import (
    EngineClosed,
    Finished,
    GenerateRequest,
    Prefilled,
    RequestReport,
    Token,
)
from kvstore_engine_adapter.live_request import LiveRequest
from kvstore_engine_adapter.request_blocks import BlockSupply
from kvstore_engine_adapter.request_trace import RequestTrace
from kvstore_engine_adapter.sampling import Sampler
from kvstore_engine_adapter.scheduler import (
    Phase,
    RequestView,
    SchedulerLimits,
    in_order,
    plan_admissions,
    plan_pass,
)
from kvstore_engine_adapter.sharing import find_shared_page
from kvstore_engine_adapter.worker import ForwardWorker, PassResult, PassWork, Sampled, Wanted

logger = logging.getLogger(__name__)

_LOOKUP_GRACE_S = 0.005
"""How long a pass is held up for requests that have just been seated, so that they are part of it."""

_SHORT_WAIT_S = 0.01
"""How often slots are asked for again while nothing else can be computed."""

_FEW_ROWS = 32
"""A pass of fewer rows says little of the speed of prefill."""


@dataclass(slots=True)
class _Pass:
    """A pass in the making, and after it what came of it: the requests it computes, and how many tokens."""

    computing: list[tuple[LiveRequest, int]] = field(default_factory=list)
    copies: list[tuple[Slot, Slot]] = field(default_factory=list)
    cleared: list[Slot] = field(default_factory=list)

    def add(self, live: LiveRequest, tokens: int, taken: list[Slot], shared: Slot | None) -> None:
        """Add the next tokens of a request; the first page taken begins as a copy of a shared one, if any."""
        if shared is not None:
            self.copies.append((shared, taken[0]))
            taken = taken[1:]
        self.cleared += taken
        self.computing.append((live, tokens))

    def work(self) -> PassWork:
        """Return what the worker is to do."""
        return PassWork(
            self.copies, self.cleared, [_segment(live, tokens) for live, tokens in self.computing]
        )


class EngineLoop:
    """Requests from submission to their end. One event loop's thread; ``run`` is its only task.

    Each turn: waiting requests are seated and look up what is stored, those whose lookup is done start, and
    one pass is computed for all that can go on. Lookups and loads go on beside the passes.
    """

    def __init__(
        self,
        worker: ForwardWorker,
        supply: BlockSupply,
        namespace: Namespace,
        limits: SchedulerLimits,
        *,
        served_name: str,
    ) -> None:
        self._worker = worker
        self._supply = supply
        self._namespace = namespace
        self._limits = limits
        self._served_name = served_name
        self._live: dict[int, LiveRequest] = {}
        self._numbers = itertools.count()
        self._has_news = asyncio.Event()
        self._is_short = False
        self.counters: Counter[str] = Counter()

    def submit(self, request: GenerateRequest, max_tokens: int) -> LiveRequest:
        """Take a request on; its events come from now on."""
        namespace = self._namespace_of(request.tenant_salt)
        live = LiveRequest(
            number=next(self._numbers),
            request=request,
            max_tokens=max_tokens,
            arrived_s=self._supply.clock(),
            namespace=namespace,
            report=RequestReport(prompt_tokens=len(request.prompt)),
            sampler=Sampler(request.sampling, request.prompt),
            tokens=list(request.prompt),
            chain=namespace.chain(request.prompt),
        )
        live.trace = RequestTrace.begin(self._served_name, live.report, max_tokens)
        self._live[live.number] = live
        self._has_news.set()
        return live

    def note_hints(
        self, tokens: Sequence[int], hints: Hints, *, behind_tokens: int, tenant_salt: bytes
    ) -> None:
        """Tell of the future of a sequence's full blocks that begin at or after ``behind_tokens``."""
        chain = self._namespace_of(tenant_salt).chain(tokens)
        self._supply.note_hints(chain[math.ceil(behind_tokens / chain.block_tokens) :], hints)

    def _namespace_of(self, tenant_salt: bytes) -> Namespace:
        if not tenant_salt:
            return self._namespace
        namespace = dataclasses.replace(self._namespace, tenant_salt=tenant_salt)
        if self._supply.manager is not None:
            # Anew each time: one that has no blocks may have been forgotten.
            self._supply.manager.open_namespace(namespace)
        return namespace

    def abandon(self, live: LiveRequest) -> None:
        """End a request nobody waits for: at once, or after the pass under way. Idempotent."""
        live.is_abandoned = True
        if not live.is_computing:
            self._end(live)
        self._has_news.set()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def num_in(self, phase: Phase) -> int:
        """Requests in a phase."""
        return sum(live.phase is phase for live in self._live.values())

    async def run(self) -> None:
        """Serve until cancelled; then end all requests with EngineClosed."""
        try:
            while True:
                try:
                    await self._turn()
                except Exception as error:
                    logger.exception("engine: a turn failed; its requests end with the error")
                    self.counters["failed_turns"] += 1
                    self._end_all(error)
        finally:
            self._end_all(EngineClosed("engine: it was closed before the answer was finished"))

    async def _turn(self) -> None:
        self._has_news.clear()
        self._admit()
        await self._collect_lookups()
        self._join_others()
        step = self._plan()
        if step.computing:
            await self._compute(step)
        else:
            await self._wait()

    async def _compute(self, step: _Pass) -> None:
        copied = {source for source, _ in step.copies}
        # Requests whose pages are copied from keep them until that is done.
        lenders = [live for live in self._live.values() if copied.intersection(live.slots)] if copied else []
        for live in (*lenders, *(live for live, _ in step.computing)):
            live.is_computing = True
        # What a pass wants of processors and memory, writes would want too.
        self._supply.pace.put_off()
        try:
            result = await self._worker.compute(step.work())
        except Exception as error:
            logger.exception("engine: a pass failed; its requests end with the error")
            self.counters["failed_passes"] += 1
            for live, _ in step.computing:
                self._end(live, error)
        else:
            self._settle(step, result)
        finally:
            for live in (*lenders, *(live for live, _ in step.computing)):
                live.is_computing = False
            for live in lenders:
                if live.is_abandoned:
                    self._end(live)

    async def _wait(self) -> None:
        """Wait for news; while slots are short, only for a moment."""
        self._supply.pace.resume()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHORT_WAIT_S if self._is_short else None):
                await self._has_news.wait()

    def _views(self) -> list[RequestView]:
        return [
            live.view(missing_blocks=math.ceil((len(live.tokens) + 1) / self._limits.block_tokens))
            for live in self._live.values()
        ]

    def _admit(self) -> None:
        if not self.num_in(Phase.WAITING):
            return
        plan = plan_admissions(self._views(), self._limits, free_blocks=self._supply.free_blocks())
        for number in plan.preempted:
            self._preempt(self._live[number])
        for number in plan.seated:
            self._seat(self._live[number])

    def _seat(self, live: LiveRequest) -> None:
        live.phase, live.seated_s = Phase.LOADING, self._supply.clock()
        if not live.report.preemptions:
            live.report.queue_s = live.seated_s - live.arrived_s
        live.blocks = self._supply.begin()
        loading = live.blocks.load(live.chain[: live.reusable_blocks])
        live.lookup = asyncio.create_task(loading, context=live.trace.context)
        live.lookup.add_done_callback(lambda _: self._has_news.set())

    def _preempt(self, live: LiveRequest) -> None:
        live.leave_seat()
        live.report.preemptions += 1
        self.counters["preemptions"] += 1

    async def _collect_lookups(self) -> None:
        lookups = [live.lookup for live in self._live.values() if live.lookup is not None]
        if lookups:
            await asyncio.wait(lookups, timeout=_LOOKUP_GRACE_S)
        for live in self._live.values():
            if live.lookup is not None and live.lookup.done():
                prefix, live.lookup = live.lookup.result(), None
                live.phase = Phase.RUNNING
                live.note_loaded(prefix)

    def _join_others(self) -> None:
        """Let requests that prefill take over the blocks that others have published since."""
        for live in self._live.values():
            at = live.computed // live.block_tokens
            may_join = live.phase is Phase.RUNNING and at < live.reusable_blocks and len(live.slots) == at
            if may_join and live.blocks is not None:
                live.note_joined(live.blocks.join(live.chain[at : live.reusable_blocks]))

    def _plan(self) -> _Pass:
        """Decide on the next pass, and get the slots for it."""
        views = self._views()
        num_seated = sum(view.phase is not Phase.WAITING for view in views)
        rescue = self._supply.rescue_blocks if num_seated == 1 else 0
        plan = plan_pass(views, self._limits, free_blocks=self._supply.free_blocks() + rescue)
        for number in plan.preempted:
            self._preempt(self._live[number])
        step = _Pass()
        short = [
            self._live[span.number] for span in plan.spans if not self._add(step, span.number, span.tokens)
        ]
        if short and not step.computing:
            self._make_way(short[0])
        self._is_short = bool(short or plan.stalled or plan.preempted)
        return step

    def _add(self, step: _Pass, number: int, tokens: int) -> bool:
        """Get a request's slots for its next tokens; False if they are not to be had now."""
        live = self._live[number]
        assert live.blocks is not None, "a request that computes has a seat"
        running = [other for other in self._live.values() if other.phase is Phase.RUNNING]
        shared, copied = find_shared_page(live, running) or (None, 0)
        tokens = min(max(tokens, copied + 1), len(live.tokens) - live.computed) - copied
        wanted = math.ceil((live.computed + copied + tokens) / live.block_tokens) - len(live.slots)
        taken = live.blocks.take(wanted, is_pressing=self._is_pressing(live)) if wanted > 0 else []
        if taken is None:
            if live.short_since_s is None:
                live.short_since_s = self._supply.clock()
            return False
        live.short_since_s = None
        live.note_copied(copied)
        step.add(live, tokens, taken, shared)
        return True

    def _is_pressing(self, live: LiveRequest) -> bool:
        """Whether it has waited for slots long enough."""
        since_s = live.short_since_s
        return since_s is not None and self._supply.clock() - since_s >= self._supply.waits.reserve_s

    def _make_way(self, live: LiveRequest) -> None:
        """Take the seat of the last in the order, if even pressing does not help a request."""
        if not self._is_pressing(live):
            return
        for view in reversed(in_order(self._views(), self._limits)):
            if view.number != live.number and view.phase is not Phase.WAITING:
                self._preempt(self._live[view.number])
                return

    def _settle(self, step: _Pass, result: PassResult) -> None:
        rows = sum(tokens for _, tokens in step.computing)
        self.counters["passes"] += 1
        self.counters["computed_tokens"] += rows
        if rows >= _FEW_ROWS:
            speed = self._supply.policy.prefill
            expected_s = sum(speed.expected_s(live.computed, tokens) for live, tokens in step.computing)
            speed.note(expected_s, result.seconds)
        for (live, tokens), sampled in zip(step.computing, result.sampled, strict=True):
            live.computed += tokens
            live.trace.run(live.publish)
            if live.is_abandoned:
                self._end(live)
            elif sampled is not None:
                self._take(live, sampled)

    def _take(self, live: LiveRequest, sampled: Sampled) -> None:
        """Hand out a token, and end the request if it is the last."""
        token, report = sampled.token, live.report
        if isinstance(token, ArithmeticError):
            self._end(live, token)
            return
        if live.is_first_prefill:
            now_s = self._supply.clock()
            report.first_logits = sampled.logits
            report.prefill_s = now_s - live.seated_s - report.load_s
            report.ttft_s = now_s - live.arrived_s
            live.events.put_nowait(Prefilled(report))
        if token in live.request.end_tokens:
            end = Token(token, sampled.logprob, sampled.top_logprobs)
            self._end(live, Finished("stop", report, end))
            return
        live.add(token)
        live.events.put_nowait(Token(token, sampled.logprob, sampled.top_logprobs))
        if report.output_tokens == live.max_tokens:
            self._end(live, Finished("length", report))

    def _end(self, live: LiveRequest, last: Finished | Exception | None = None) -> None:
        """Give back all a request has; ``last`` is the last its consumer hears. Idempotent."""
        if self._live.pop(live.number, None) is None:
            return
        if isinstance(last, Finished):
            live.trace.run(live.tell_hints)
        live.trace.end(live.report, last)
        live.leave_seat()
        if last is not None:
            live.events.put_nowait(last)
        live.has_ended.set()

    def _end_all(self, error: Exception) -> None:
        for live in list(self._live.values()):
            self._end(live, error)


def _segment(live: LiveRequest, tokens: int) -> tuple[Segment, Wanted | None]:
    stop = live.computed + tokens
    segment = Segment(live.tokens[live.computed : stop], live.computed, list(live.slots))
    if stop < len(live.tokens):
        return segment, None
    request = live.request
    wants_logits = request.wants_first_logits and live.is_first_prefill
    return segment, Wanted(live.sampler, request.logprobs, wants_logits)
