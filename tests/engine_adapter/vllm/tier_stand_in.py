"""Stand-ins for what the tier imports of vLLM 0.32, and for what calls it: vLLM's CPU cache and its tiers."""

import time
from abc import ABC
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_BYTES, ROW_BYTES, CHUNKS, TOKENS = 4096 * 3, 4096 * 4, 32, 32
_PATIENCE_S = 60.0


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


@dataclass(frozen=True)
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    ownership: str | None = None


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: list[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(ABC):  # noqa: B024  # as vLLM's
    def __init__(self, spec: Any, view: memoryview, tier_type: str, backpressure_detector: Any) -> None:
        self._primary_kv_view = view
        self.tier_type = tier_type


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], int] = {}

    def increase_counter(self, name: str, count: int, labels: tuple[str, ...] = ()) -> None:
        self.counts[name, *labels] = self.counts.get((name, *labels), 0) + count


class OffloadingConnector:
    """Keeps what it was given: the tier is made of that by the test."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.given = vllm_config

    def on_new_request(self, request: Any) -> None:
        return


_BASE = "vllm.v1.kv_offload"
MODULES: dict[str, dict[str, object]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading": {},
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
        "OffloadingConnectorStats": OffloadingConnectorStats
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": {
        "OffloadingConnector": OffloadingConnector
    },
    _BASE: {},
    f"{_BASE}.base": {
        one.__name__: one
        for one in (
            LookupResult,
            Medium,
            OffloadingCounterMetadata,
            OffloadingEvent,
            RequestOffloadingContext,
        )
    },
    f"{_BASE}.tiering": {},
    f"{_BASE}.tiering.base": {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager},
}


def offloading_spec(*groups: tuple[int, tuple[str, ...]], events: bool = True) -> Any:
    """Return a spec of one rank; groups are (index, layer names)."""
    return SimpleNamespace(
        replicated_layout=False,
        cpu_page_size_per_worker=CHUNK_BYTES,
        config=SimpleNamespace(
            enable_kv_cache_events=events,
            kv_cache_layout="LBHNC",
            canonical_layout=False,
            parallel=SimpleNamespace(world_size=1),
            cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=TOKENS),
            groups=[
                SimpleNamespace(group_id=index, tokens_per_block=TOKENS, layer_names=names)
                for index, names in groups
            ],
        ),
    )


@dataclass
class Context:
    """vLLM's ReqContext of a request with these block hashes in each of ``num_groups`` groups."""

    req_id: str
    hashes: list[bytes]
    num_groups: int = 1
    kv_transfer_params: dict[str, Any] | None = None
    places: dict[bytes, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for group in range(self.num_groups):
            for at, key in enumerate(self.chunk_keys(group)):
                self.places[key] = (at + 1) * TOKENS

    def chunk_keys(self, group: int = 0) -> list[bytes]:
        return [one + group.to_bytes(4, "big") for one in self.hashes]

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.places.get(key)


class StandInTiers:
    """Calls one tier as vLLM's manager of tiers does, and has the CPU cache that chunks come from."""

    def __init__(self, tier_of: Any) -> None:
        self.rows: npt.NDArray[np.int8] = np.zeros((CHUNKS, ROW_BYTES), np.int8)
        self.tier = tier_of(memoryview(self.rows))
        self._next_job = 0

    def step(self, *, new: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> None:
        self.tier.on_schedule_end(SimpleNamespace(new_req_ids=new, preempted_req_ids=preempted))

    def look_up(self, context: Context, group: int = 0) -> list[LookupResult]:
        """Ask about a request's chunks until nothing is 'not yet'; each step asks about all of them."""
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            assert not list(self.tier.get_finished_jobs())
            found = [self.tier.lookup(key, context) for key in context.chunk_keys(group)]
            self.step()
            if LookupResult.RETRY not in found:
                return found
        raise AssertionError("no answer")

    def submit(self, context: Context, keys: list[bytes], rows: list[int], *, is_load: bool) -> int:
        """Begin a job and return its number."""
        self._next_job += 1
        job = SimpleNamespace(
            job_id=self._next_job, keys=keys, chunk_ids=np.array(rows, np.int32), req_context=context
        )
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return self._next_job

    def finish(self) -> JobResult:
        """Wait for the one job that is under way."""
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            done = list(self.tier.get_finished_jobs())
            self.step()
            if done:
                assert len(done) == 1
                assert isinstance(done[0], JobResult)
                return done[0]
        raise AssertionError("the job has not ended")
