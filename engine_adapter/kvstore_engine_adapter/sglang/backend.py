"""KVStoreBackend: the class that SGLang loads. It needs SGLang; what it does is in PoolStore."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (  # pyright: ignore[reportMissingImports]
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)

from kvstore.client import KVStore
from kvstore.errors import InvalidConfig, InvalidLayout, KVStoreError
from kvstore_engine_adapter.counts import Counts
from kvstore_engine_adapter.model_identity import NotNameable, commit_in_cache
from kvstore_engine_adapter.sglang.identity import identify
from kvstore_engine_adapter.sglang.options import BackendOptions
from kvstore_engine_adapter.sglang.pages import HostPool, Payload, as_bytes, page_tokens, pages_of
from kvstore_engine_adapter.sglang.pool_store import PoolStore
from kvstore_engine_adapter.sglang.tally import Tally
from kvstore_engine_adapter.store_breaker import StoreBreaker

logger = logging.getLogger("sglang.kvstore")

T = TypeVar("T")
_KV = "kv"


class KVStoreBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there for mypy
    """Shares the pages of SGLang's host pools through a store.

    SGLang makes one for each rank. If pages of this configuration cannot be named for certain, it says so in
    the log once and does nothing. No method of the data path raises: whatever goes wrong is a miss, or a page
    that is not stored; it is counted, and logged once per interval.

    Raises:
        InvalidConfig: an option is unknown or has a bad value.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, object] | None = None) -> None:
        self._config = storage_config
        self._options = BackendOptions.parse(storage_config.extra_config)
        self._breaker = StoreBreaker(time.monotonic)
        self._counts = Counts()
        self._tally = Tally(logger, self._counts)
        self._client: KVStore | None = None
        self._pools: dict[str, PoolStore] = {}
        self._host_pools: dict[str, HostPool] = {}
        self._lock = threading.Lock()

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Take the pool of the keys and values."""
        self.mem_pool_host = mem_pool_host
        self._take(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: Any) -> None:
        """Take another pool, by its name."""
        self._take(host_pool, _name(host_pool_name))

    def _take(self, pool: HostPool, name: str) -> None:
        with self._lock:
            if self._host_pools.get(name) is pool:
                return
            self._host_pools[name] = pool
            self._pools.pop(name, None)
            try:
                self._pools[name] = self._open(pool, name)
            except (NotNameable, InvalidLayout, KVStoreError) as error:
                logger.error("kvstore: nothing of the pool %s is shared: %s", name, error)
            except Exception:
                logger.exception("kvstore: nothing of the pool %s is shared", name)

    def _open(self, pool: HostPool, name: str) -> PoolStore:
        pages = pages_of(pool)
        identity = identify(
            pool,
            pages,
            self._config,
            _server_args(),
            self._options,
            pool_name=name,
            version=str(sglang.__version__).partition("+")[0],
            resolve=commit_in_cache,
        )
        if self._client is None:
            self._client = KVStore.connect(self._options.store, is_read_only=self._options.is_read_only)
        self._client.open_namespace(identity.namespace)
        logger.info(
            "kvstore: shares the pool %s, pages of %d tokens and %d bytes, through %s",
            name,
            page_tokens(pool),
            pages.page_bytes,
            self._options.store,
        )
        return PoolStore(
            self._client, identity, pages, self._options, breaker=self._breaker, counts=self._counts
        )

    # Keys and values: questions, and the zero-copy interface ("interface_v1").

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are stored."""
        return self._guard(0, lambda: self._pools[_KV].find(keys, _before(extra_info)))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool; says of each whether it is there."""

        def load() -> list[bool]:
            pool = self._pools[_KV]
            starts = self._starts(_KV, keys, host_indices)
            loaded = pool.load(
                keys, lambda at, payload: pool.pages.write(starts[at], payload), _before(extra_info)
            )
            return [at < loaded for at in range(len(keys))]

        return self._guard([False] * len(keys), load)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool; says of each whether it is stored."""

        def save() -> list[bool]:
            pool = self._pools[_KV]
            return pool.save(
                keys, pool.pages.read(self._starts(_KV, keys, host_indices)), _before(extra_info)
            )

        return self._guard([False] * len(keys), save)

    # The same through flat pages, the generic interface.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load a page into a flat tensor and return it; None: it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Load pages into flat tensors and return them, None for each that is not there."""
        found: list[Any] = [None] * len(keys)

        def load() -> list[Any]:
            pool = self._pools[_KV]
            _require_flat(pool)
            targets = [_bytes_of_target(one, pool.pages.page_bytes) for one in target_locations]

            def write(at: int, payload: Payload) -> None:
                targets[at].copy_(torch.from_numpy(payload))
                found[at] = target_locations[at]

            pool.load(keys, write)
            return found

        return self._guard([None] * len(keys), load)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages; True if all are stored."""

        def save() -> bool:
            pool = self._pools[_KV]
            _require_flat(pool)
            return all(pool.save(keys, [as_bytes(value) for value in values]))

        return self._guard(False, save)

    # Several pools, the v2 interface.

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how many leading pages can be used, given what each pool needs of them."""
        return self._guard(
            PoolTransferResult.empty(), lambda: self._find_v2(keys, pool_transfers or [], extra_info)
        )

    def _find_v2(self, keys: list[str], transfers: Sequence[Any], extra_info: Any) -> Any:
        pages = self._pools[_KV].find(keys, _before(extra_info))
        hits: dict[Any, int] = {_KV: pages} if pages else {}
        usable = set(range(1, pages + 1))
        for transfer in transfers:
            if not usable:
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # such a pool says nothing of the pages that can be used
            there = self._pools[_name(transfer.name)].find_each(keys[:pages])
            needed = None
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                needed = max(1, len(transfer.keys or ()))
            ends = {
                end
                for end in range(1, pages + 1)
                if all(there[0 if needed is None else max(0, end - needed) : end])
            }
            if ends:
                hits[transfer.name] = max(ends)
            usable &= ends
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of several pools; says of each whether it is there."""
        return {one.name: self._guard([False] * len(one.keys or ()), self._load_v2(one)) for one in transfers}

    def _load_v2(self, transfer: Any) -> Callable[[], list[bool]]:
        def load() -> list[bool]:
            name, keys = _name(transfer.name), list(transfer.keys or ())
            pool = self._pools[name]
            starts = self._starts(name, keys, transfer.host_indices)
            return pool.load_each(keys, lambda at, payload: pool.pages.write(starts[at], payload))

        return load

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools; says of each whether it is stored."""
        return {one.name: self._guard([False] * len(one.keys or ()), self._save_v2(one)) for one in transfers}

    def _save_v2(self, transfer: Any) -> Callable[[], list[bool]]:
        def save() -> list[bool]:
            name, keys = _name(transfer.name), list(transfer.keys or ())
            pool = self._pools[name]
            return pool.save(keys, pool.pages.read(self._starts(name, keys, transfer.host_indices)))

        return save

    # The rest.

    def clear(self) -> None:
        """Say that nothing was forgotten: the store is not this engine's alone."""
        logger.warning(
            "kvstore: the store forgets nothing when this engine's storage is cleared; if weights have "
            "changed in place, run: kvstore epoch --advance, and restart the replicas"
        )

    def counts(self) -> dict[str, int]:
        """Return all that was counted since the start."""
        return self._tally.counts()

    def get_stats(self) -> Any:
        """Return what SGLang's metrics show of a backend; None when there is nothing new."""
        return None

    def close(self) -> None:
        """End the connections."""
        self._tally.tell(at_once=True)
        with self._lock:
            self._pools.clear()
            self._host_pools.clear()
            if self._client is not None:
                self._client.close()
                self._client = None

    def _starts(self, name: str, keys: Sequence[str], host_indices: Any) -> list[int]:
        """Return the index of each page's first token."""
        tokens = page_tokens(self._host_pools[name])
        if host_indices is None or host_indices.numel() != len(keys) * tokens:
            given = 0 if host_indices is None else host_indices.numel()
            raise InvalidLayout(f"pages: {given} indices for {len(keys)} pages of {tokens} tokens")
        return [int(start) for start in host_indices[::tokens].tolist()]

    def _guard(self, miss: T, run: Callable[[], T]) -> T:
        """Return what ``run`` does, or ``miss`` whatever happens."""
        try:
            return run() if self._pools else miss
        except Exception as error:
            # Whatever it was, the request goes on without these pages.
            self._counts.add("faults")
            self._tally.note_fault(error)
            return miss
        finally:
            self._tally.tell()


def _server_args() -> Any:
    """Return SGLang's ServerArgs of this process; None if it has none."""
    try:
        # Imported here because the place is SGLang's own affair: without it, "weights" must be set.
        from sglang.srt.runtime_context import get_server_args  # pyright: ignore[reportMissingImports]

        return get_server_args()
    except Exception:
        logger.info("kvstore: SGLang does not say how this process was started", exc_info=True)
        return None


def _name(pool_name: Any) -> str:
    return str(getattr(pool_name, "value", pool_name))


def _before(extra_info: Any) -> list[str] | None:
    found = getattr(extra_info, "prefix_keys", None)
    return list(found) if found else None


def _require_flat(pool: PoolStore) -> None:
    if pool.pages.kind != "flat":
        raise InvalidConfig('this pool has no flat pages: set "interface_v1": 1 in the extra config')


def _bytes_of_target(target: Any, page_bytes: int) -> torch.Tensor:
    found: torch.Tensor = target.view(torch.uint8).reshape(-1)
    if found.numel() != page_bytes or found.data_ptr() != target.data_ptr():
        raise InvalidLayout(f"pages: a target of {found.numel()} bytes, expected {page_bytes} in one run")
    return found
