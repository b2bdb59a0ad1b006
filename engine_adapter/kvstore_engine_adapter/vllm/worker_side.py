"""WorkerSide: loads and saves of one rank, as the scheduler's side has planned them."""

import logging
from collections.abc import Mapping
from typing import Any

from kvstore.client import KVStore
from kvstore.errors import InvalidLayout
from kvstore.keys import BlockKey, Namespace, NamespaceDigest
from kvstore_engine_adapter.block_transfers import BlockLoads, BlockSaves, EnginePages, LoadDone, Move
from kvstore_engine_adapter.vllm.block_events import GONE
from kvstore_engine_adapter.vllm.identity import EngineIdentity
from kvstore_engine_adapter.vllm.options import ConnectorOptions
from kvstore_engine_adapter.vllm.pages import TensorPages
from kvstore_engine_adapter.vllm.plans import StepPlan

logger = logging.getLogger(__name__)

_IDLE_PATIENCE_S = 0.001


class WorkerSide:
    """The worker's half of the connector. All methods are called from the worker's thread."""

    def __init__(
        self,
        client: KVStore,
        identity: EngineIdentity,
        options: ConnectorOptions,
        *,
        rank: int,
        tells_events: bool = False,
    ) -> None:
        self._tells_events = tells_events
        self._client = client
        self._identity = identity
        self._options = options
        self._part = identity.part(rank)
        self._loads: BlockLoads | None = None
        self._saves: BlockSaves | None = None
        self._opened: set[NamespaceDigest] = set()
        self._refused: list[Move] = []
        self._gone: list[BlockKey] = []

    def register(self, caches: Mapping[str, Any]) -> None:  # Any: torch.Tensor
        """Take the KV cache's tensors; of a layout that is not known nothing is moved."""
        try:
            pages: EnginePages = TensorPages(caches, self._identity.groups)
        except InvalidLayout as error:
            logger.error("connector: nothing is loaded or saved: %s", error)
            return
        load_s = self._options.load_deadline_ms / 1000
        self._loads = BlockLoads(self._client, pages, self._part, deadline_s=load_s)
        self._saves = BlockSaves(
            self._client,
            pages,
            self._part,
            queue_bytes=self._options.save_queue_bytes,
            reports=self._tells_events,
        )

    def begin_loads(self, plan: StepPlan) -> None:
        """Begin the loads of a step."""
        self._open(plan.namespaces)
        for move in plan.loads:
            if self._loads is None:
                self._refused.append(move)
            else:
                self._loads.begin(move)

    def begin_saves(self, plan: StepPlan) -> None:
        """Take snapshots of what is to be saved after a step."""
        if self._saves is None or not plan.saves:
            return
        self._open(plan.namespaces)
        for move in plan.saves:
            try:
                self._saves.begin(move)
            except Exception:
                # A save is best effort; the step goes on.
                logger.exception("save: a snapshot failed; its blocks are not shared")

    def take_loaded(self, *, is_idle: bool) -> list[LoadDone]:
        """Return the loads that have ended since."""
        patience_s = _IDLE_PATIENCE_S if is_idle else 0.0
        done = [] if self._loads is None else self._loads.take_done(patience_s=patience_s)
        for move in self._refused:
            done.append(
                LoadDone(move.request_id, tuple((g.group, page) for g in move.groups for page in g.pages))
            )
        self._refused = []
        if self._tells_events:
            self._gone += [key for one in done for key, reason in one.missing if reason.value in GONE]
        return done

    def take_stored(self) -> tuple[BlockKey, ...]:
        """Return the blocks that were stored since the last time; only with ``tells_events``."""
        if self._saves is None or not self._tells_events:
            return ()
        return tuple(key for done in self._saves.take_done() for key in done.stored)

    def take_gone(self) -> tuple[BlockKey, ...]:
        """Return the blocks that loads have found gone since the last time; only with ``tells_events``."""
        gone, self._gone = tuple(self._gone), []
        return gone

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last time."""
        counts: dict[str, int] = {}
        for part in (self._loads, self._saves):
            if part is not None:
                counts |= part.counts.take()
        return counts

    def close(self) -> None:
        """End the threads; what waits to be saved is saved if the store takes it soon."""
        if self._loads is not None:
            self._loads.close()
        if self._saves is not None:
            self._saves.close()
        self._client.close()

    def _open(self, namespaces: tuple[Namespace, ...]) -> None:
        for namespace in namespaces:
            if namespace.digest not in self._opened:
                self._client.open_namespace(namespace)
                self._opened.add(namespace.digest)
