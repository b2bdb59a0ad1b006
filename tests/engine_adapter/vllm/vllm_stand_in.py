"""Stand-ins for what the connector imports of vLLM 0.32, and is given by it: data classes, no behaviour."""

import hashlib
import sys
from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.engine_adapter.vllm import tier_stand_in


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024  # as vLLM's
    pass


class KVConnectorWorkerMetadata(ABC):  # noqa: B024  # as vLLM's
    pass


@dataclass
class BlockStored:
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None
    ownership: str | None
    session_id: str | None


@dataclass
class BlockRemoved:
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None
    ownership: str | None


class SupportsHMA(ABC):  # noqa: B024  # as vLLM's
    pass


class KVConnectorBase_V1(ABC):  # noqa: B024, N801  # as vLLM's
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    pass


@dataclass
class FullAttentionSpec:
    block_size: int
    page_size_bytes: int


@dataclass
class SlidingWindowSpec:
    block_size: int
    page_size_bytes: int
    sliding_window: int


def install(monkeypatch: pytest.MonkeyPatch, *, rank: list[int]) -> None:
    """Make ``import vllm`` find stand-ins; ``rank[0]`` is the tensor-parallel rank of the next worker."""
    base = "vllm.distributed.kv_transfer.kv_connector.v1"
    parts: dict[str, dict[str, object]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: rank[0]},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        base: {},
        f"{base}.base": {
            one.__name__: one
            for one in (
                KVConnectorBase_V1,
                KVConnectorMetadata,
                KVConnectorRole,
                KVConnectorTransferResults,
                KVConnectorWorkerMetadata,
                SupportsHMA,
            )
        },
        f"{base}.metrics": {
            "KVConnectorStats": KVConnectorStats,
            "KVConnectorPromMetrics": KVConnectorPromMetrics,
        },
        "vllm.utils": {},
        "vllm.utils.hashing": {"get_hash_fn_by_name": lambda name: _hash},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {
            "resolve_none_hash_seed": lambda hash_fn: "vllm-none-hash",
            "maybe_convert_block_hash": lambda one: int.from_bytes(one[-8:], "big"),
        },
        "vllm.distributed.kv_events": {
            "MEDIUM_STORAGE": "STORAGE",
            "BlockStored": BlockStored,
            "BlockRemoved": BlockRemoved,
        },
        **tier_stand_in.MODULES,
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name, module in list(sys.modules.items()):
        parent, _, child = name.rpartition(".")
        if name in parts and parent in parts:
            setattr(sys.modules[parent], child, module)


def forget_connector() -> None:
    """Have the connector's modules be imported again."""
    for name in (
        *("connector", "stats", "kv_events", "engine_identity", "offloading", "tier"),
        *("interface", "interface_0_32"),
    ):
        sys.modules.pop(f"kvstore_engine_adapter.vllm.{name}", None)
        vars(sys.modules.get("kvstore_engine_adapter.vllm", SimpleNamespace())).pop(name, None)


def _hash(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


@dataclass
class Request:
    """A request with all of its block hashes, as the scheduler has it."""

    request_id: str
    tokens: list[int]
    hash_tokens: int
    lora_request: object = None
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.block_hashes = list(self._hashes())

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    def _hashes(self) -> Iterator[bytes]:
        parent = b"start"
        for at in range(0, len(self.tokens) - self.hash_tokens + 1, self.hash_tokens):
            parent = _hash((parent, self.tokens[at : at + self.hash_tokens]))
            yield parent


def vllm_config(store: str, *, transfer: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return a configuration; ``changes`` are by ``section__name``, ``options`` the connector's own."""
    options = changes.pop("options", {})
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="nobody/model", revision=None, dtype="torch.float32", quantization=None, hf_config=None
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", enable_prefix_caching=True
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": store, "weights": "one", **options},
            **(transfer or {}),
        ),
    )
    for name, value in changes.items():
        section, _, key = name.partition("__")
        setattr(getattr(config, section) if key else config, key or section, value)
    return config


def kv_cache_config(*groups: tuple[list[str], object], layout: str = "LBHNC", hash_tokens: int = 32) -> Any:
    """Return the configuration of the KV cache with groups of (layer names, spec)."""
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in groups],
        kv_cache_layout=layout,
        hash_block_size=hash_tokens,
    )
