"""Stand-ins for what the backend imports of SGLang 0.5.23, and is given by it: data classes, host pools."""

import hashlib
import sys
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PAGE = 32


class HiCacheStorage(ABC):  # noqa: B024  # as SGLang's, less its abstract methods
    pass


class PoolHitPolicy(str, Enum):  # noqa: UP042  # as SGLang's
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: str
    host_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> "PoolTransferResult":
        return cls(0, {})


@dataclass
class ExtraInfo:
    prefix_keys: list[str] | None = None


@dataclass
class StorageConfig:
    extra_config: dict[str, Any] | None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    should_split_heads: bool = False
    dcp_size: int = 1
    model_name: str | None = "model"


class HostPool:
    """A pool of pages in one of SGLang's layouts, filled with random numbers."""

    def __init__(
        self,
        layout: str = "page_first_direct",
        *,
        dtype: torch.dtype = torch.float32,
        page_size: int = PAGE,
        page_num: int = 16,
        seed: int = 0,
    ) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, page_size
        self.layer_num, self.head_num, self.head_dim = 3, 2, 8
        self.page_num = page_num
        self.size = self.page_num * page_size
        self.start_layer, self.end_layer = 0, self.layer_num
        shape = {
            "page_first_direct": (2, self.page_num, self.layer_num, page_size, 2, 8),
            "page_first": (2, self.size, self.layer_num, 2, 8),
            "layer_first": (2, self.layer_num, self.size, 2, 8),
        }[layout]
        self.kv_buffer = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def _page(self, index: int) -> torch.Tensor:
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, index : index + self.page_size]
        if self.layout == "page_first":
            return self.kv_buffer[:, index : index + self.page_size]
        at = index // self.page_size
        return self.kv_buffer[:, at : at + 1]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self._page(index).flatten() if flat else self._page(index)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        target = self._page(index)
        target.copy_(data_page.reshape(target.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert self.layout == "page_first_direct"
        size = self.kv_buffer[0, 0].numel() * self.dtype.itemsize
        base, pages = self.kv_buffer.data_ptr(), indices[:: self.page_size].tolist()
        addresses = [
            base + (plane * self.page_num + index // self.page_size) * size
            for index in pages
            for plane in (0, 1)
        ]
        return addresses, [size] * len(addresses)

    def empty(self) -> "HostPool":
        """Set all to zero, and return this."""
        self.kv_buffer.zero_()
        return self


class PoolWithoutFlatPages(HostPool):
    """A pool that gives addresses alone, as SGLang's for models whose values are of another width."""

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        raise NotImplementedError


@dataclass
class ServerArgs:
    model_path: str = "some/model"
    revision: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    json_model_override_args: str = "{}"
    speculative_algorithm: str | None = None
    enable_lora: bool | None = None
    lora_paths: list[object] | None = None
    more: dict[str, object] = field(default_factory=dict)


def hashes(count: int, *, seed: int = 0) -> list[str]:
    """Return chained page hashes as SGLang makes them."""
    found: list[str] = []
    prior = hashlib.sha256(bytes([seed])).digest()
    for at in range(count):
        prior = hashlib.sha256(prior + bytes([at])).digest()
        found.append(prior.hex())
    return found


def indices(pages: Sequence[int], page_size: int = PAGE) -> torch.Tensor:
    """Return the token indices of pages, as SGLang gives them."""
    starts = torch.tensor(list(pages), dtype=torch.int64) * page_size
    return (starts[:, None] + torch.arange(page_size)).reshape(-1)


def install(monkeypatch: pytest.MonkeyPatch, server_args: object) -> None:
    """Make ``import sglang`` find stand-ins; ``server_args`` is what the process was started with."""

    def get_server_args() -> object:
        if server_args is None:
            raise RuntimeError("not started")
        return server_args

    parts: dict[str, dict[str, object]] = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolHitPolicy": PoolHitPolicy,
            "PoolTransferResult": PoolTransferResult,
        },
        "sglang.srt.runtime_context": {"get_server_args": get_server_args},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)


def forget_backend() -> None:
    """Have the next import of the backend load it anew."""
    sys.modules.pop("kvstore_engine_adapter.sglang.backend", None)
    package = sys.modules.get("kvstore_engine_adapter.sglang")
    if package is not None:
        package.__dict__.pop("backend", None)


def config(store: str, *, options: dict[str, object] | None = None, **changes: Any) -> Any:
    """Return a storage configuration with this backend."""
    extra = {
        "backend_name": "kvstore",
        "module_path": "kvstore_engine_adapter.sglang",
        "class_name": "KVStoreBackend",
        "interface_v1": 1,
        "kvstore": {"store": store, "weights": "w1", **(options or {})},
    }
    return StorageConfig(extra, **changes)


def namespace(**values: object) -> SimpleNamespace:
    """Return an object with attributes."""
    return SimpleNamespace(**values)
