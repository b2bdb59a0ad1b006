"""An engine that calls the connector in the order in which vLLM 0.32 does, and checks every block it gets."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine_adapter.vllm.vllm_stand_in import (
    FullAttentionSpec,
    KVConnectorRole,
    Request,
    SlidingWindowSpec,
    kv_cache_config,
)

TOKENS, HEADS, DIM, PAGES = 32, 2, 16, 64
PAGE_BYTES = HEADS * TOKENS * 2 * DIM * 4
FULL = ["model.layers.0.attn", "model.layers.10.attn", "model.layers.2.attn"]
WINDOWED = ["model.layers.1.attn", "model.layers.3.attn"]
_PATIENCE_S = 60.0


def plain_cache(**more: Any) -> Any:
    return kv_cache_config((FULL, FullAttentionSpec(TOKENS, PAGE_BYTES)), **more)


def hybrid_cache(window: int) -> Any:
    return kv_cache_config(
        (WINDOWED, SlidingWindowSpec(TOKENS, PAGE_BYTES, window)),
        (FULL, FullAttentionSpec(TOKENS, PAGE_BYTES)),
    )


@dataclass
class Ran:
    """What became of a request: tokens that were loaded, times that it was asked about, loads that failed."""

    loaded_tokens: int = 0
    offers: list[int] = field(default_factory=list)
    num_asked: int = 0
    num_failed: int = 0


class StandInEngine:
    """A scheduler and ``num_ranks`` workers for one request at a time."""

    def __init__(
        self, connector: Any, config: Any, cache: Any, *, rank: list[int], num_ranks: int = 1
    ) -> None:
        self.cache = cache
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers = []
        for at in range(num_ranks):
            rank[0] = at
            worker = connector(config, KVConnectorRole.WORKER, cache)
            self.caches.append(
                {
                    name: torch.zeros(PAGES, HEADS, TOKENS, 2 * DIM)
                    for group in cache.kv_cache_groups
                    for name in group.layer_names
                }
            )
            worker.register_kv_caches(self.caches[-1])
            self.workers.append(worker)
        self.scheduler = connector(config, KVConnectorRole.SCHEDULER, cache)
        self._next_page = 1
        self._counts: Counter[str] = Counter()

    def close(self) -> None:
        for one in (*self.workers, self.scheduler):
            one.shutdown()

    def ask(self, request: Request, computed: int = 0) -> int:
        """Return what the scheduler's side answers in the end."""
        ran = Ran()
        return self._ask(request, ran, computed)

    def answer(self, request: Request, *, before_load: Callable[[], object] = lambda: None) -> Ran:
        """Run a request: look up, load, compute the rest, save, end."""
        ran, computed = Ran(), 0
        pages = self._allocate(request, 0)
        external = self._ask(request, ran, 0)
        while external:
            before_load()
            pages = self._allocate(request, external)
            self.scheduler.update_state_after_alloc(
                request, SimpleNamespace(get_block_ids=lambda pages=pages: pages), external
            )
            computed = self._load(request, pages, external, ran)
            if computed:
                break
            external = self._ask(request, ran, 0)
        ran.loaded_tokens = computed
        self._check(request, pages, computed)
        self._compute(request, pages, computed)
        assert self.scheduler.request_finished_all_groups(request, pages) == (False, None)
        return ran

    def compute(self, request: Request) -> None:
        """Look up and compute a request, as far as where it may be preempted."""
        assert self.ask(request) == 0
        self._compute(request, self._allocate(request, 0), 0)

    def counted(self) -> Counter[str]:
        """Return what the scheduler's side has counted since the start."""
        stats = self.scheduler.get_kv_connector_stats()
        self._counts.update({} if stats is None else stats.data)
        return self._counts

    def await_events(self) -> list[Any]:
        """Step until the connector has something to tell."""
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            self._step(_output())
            events = list(self.scheduler.take_events())
            if events:
                time.sleep(0.05)
                self._step(_output())
                return events + list(self.scheduler.take_events())
        raise AssertionError("no events")

    def _ask(self, request: Request, ran: Ran, computed: int) -> int:
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            ran.num_asked += 1
            tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
            if tokens is not None:
                assert is_async == (tokens > 0)
                assert self.scheduler.get_num_new_matched_tokens(request, computed)[0] in (tokens, 0)
                ran.offers.append(tokens)
                return int(tokens)
            assert not is_async
            self._step(_output())
        raise AssertionError("no answer")

    def _allocate(self, request: Request, external: int) -> tuple[list[int], ...]:
        """Give every block of every group a page of its own; none to those before a window."""
        count = -(-len(request.tokens) // TOKENS)
        tables = []
        for group in self.cache.kv_cache_groups:
            window = getattr(group.kv_cache_spec, "sliding_window", None)
            skipped = 0 if window is None else max(0, external - window + 1) // TOKENS
            start = self._next_page
            self._next_page += count
            assert self._next_page <= PAGES * 8
            pages = [1 + (start + at - 1) % (PAGES - 1) for at in range(count)]
            tables.append([0] * skipped + pages[skipped:])
        return tuple(tables)

    def _load(self, request: Request, pages: tuple[list[int], ...], external: int, ran: Ran) -> int:
        until_s, bad, failed, waiting = (
            time.monotonic() + _PATIENCE_S,
            set(),
            set(),
            set(range(len(self.workers))),
        )
        while waiting:
            assert time.monotonic() < until_s, "the load has not ended"
            for at, out in enumerate(self._step(_output())):
                bad |= out.invalid_block_ids
                failed |= out.failed_recving
                if request.request_id in out.finished_recving:
                    waiting.remove(at)
        done = SimpleNamespace(
            invalid_block_ids=bad, failed_recving=failed, finished_recving={request.request_id}
        )
        self.scheduler.update_connector_output(done)
        if not bad and not failed:
            return external
        ran.num_failed += 1
        if len(self.cache.kv_cache_groups) > 1:
            assert not bad, "pages of several groups cannot be told apart"
            return 0
        return next(at for at, page in enumerate(pages[0]) if page in bad) * TOKENS

    def _compute(self, request: Request, pages: tuple[list[int], ...], computed: int) -> None:
        new = SimpleNamespace(req_id=request.request_id, block_ids=pages, num_computed_tokens=computed)
        rest = len(request.tokens) - computed

        def forward() -> None:
            for caches in self.caches:
                for group, table in zip(self.cache.kv_cache_groups, pages, strict=True):
                    for at in range(computed // TOKENS, len(request.tokens) // TOKENS):
                        for name in group.layer_names:
                            if table[at]:
                                caches[name][table[at]] = _content(request, at, name)

        self._step(_output(new, {request.request_id: rest}), forward)

    def _check(self, request: Request, pages: tuple[list[int], ...], computed: int) -> None:
        for caches in self.caches:
            for group, table in zip(self.cache.kv_cache_groups, pages, strict=True):
                for at in range(computed // TOKENS):
                    for name in group.layer_names:
                        if table[at]:
                            assert torch.equal(caches[name][table[at]], _content(request, at, name)), (
                                at,
                                name,
                            )

    def _bring(self, meta: Any) -> None:
        if meta is not None:
            self.scheduler.update_connector_output(
                SimpleNamespace(
                    invalid_block_ids=set(),
                    failed_recving=set(),
                    finished_recving=set(),
                    kv_connector_worker_meta=meta,
                )
            )

    def _step(self, output: Any, forward: Callable[[], None] = lambda: None) -> list[Any]:
        plan = self.scheduler.build_connector_meta(output)
        results = []
        for worker in self.workers:
            worker.bind_connector_metadata(plan)
        forward()
        for worker in self.workers:
            worker.start_load_kv(None)
            worker.wait_for_save()
            found = worker.get_transfer_results(set())
            bad = worker.get_block_ids_with_load_errors()
            worker.get_kv_connector_stats()
            worker.clear_connector_metadata()
            found.invalid_block_ids = bad
            results.append(found)
            self._bring(worker.build_connector_worker_meta())
        self.counted()
        return results


def _output(new: Any = None, scheduled: dict[str, int] | None = None) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[] if new is None else [new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
        ),
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
        finished_req_ids=set(),
    )


def _content(request: Request, block: int, layer: str) -> torch.Tensor:
    """Return the keys and values of a block: they depend on all tokens up to its end, and on the layer."""
    seed = int.from_bytes(request.block_hashes[block][:4], "big") * 100 + int(layer.split(".")[2])
    return torch.rand(HEADS, TOKENS, 2 * DIM, generator=torch.Generator().manual_seed(seed))
