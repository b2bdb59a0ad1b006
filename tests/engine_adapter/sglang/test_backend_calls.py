"""The backend, called in the order in which SGLang calls it, with a real store."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore_engine_adapter.sglang as package
from kvstore import KVStore
from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.sglang import pool_store
from tests.engine_adapter.sglang import sglang_stand_in
from tests.engine_adapter.sglang.sglang_stand_in import (
    PAGE,
    ExtraInfo,
    HostPool,
    PoolHitPolicy,
    PoolTransfer,
    PoolWithoutFlatPages,
    ServerArgs,
    config,
    hashes,
    indices,
)
from tests.store_damage import damage_memory
from tests.store_process import StoreProcess

MakeBackend = Callable[..., Any]
LONG: dict[str, object] = {
    "lookup_deadline_ms": 20_000,
    "load_deadline_ms": 20_000,
    "save_deadline_ms": 20_000,
}
LAYOUTS = ("page_first_direct", "page_first", "layer_first")


@pytest.fixture
def server_args() -> ServerArgs:
    return ServerArgs()


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("shared")) as process:
        yield process


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store of the test's own, to be hurt."""
    with StoreProcess(tmp_path) as process:
        yield process


@pytest.fixture
def make_backend(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, server_args: ServerArgs
) -> Iterator[MakeBackend]:
    """Make backends on the test's own store, or on the shared one, apart from other tests by their salt."""
    name = "store" if "store" in request.fixturenames else "shared_store"
    process: StoreProcess = request.getfixturevalue(name)
    sglang_stand_in.forget_backend()
    sglang_stand_in.install(monkeypatch, server_args)
    made: list[Any] = []

    def make(pool: Any = None, *, options: dict[str, object] | None = None, **changes: Any) -> Any:
        chosen = LONG | {"salt": request.node.name} | (options or {})
        backend = package.KVStoreBackend(config(f"unix:{process.socket_path}", options=chosen, **changes), {})
        backend.register_mem_pool_host(HostPool() if pool is None else pool)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()
    sglang_stand_in.forget_backend()


def pages_of(pool: HostPool, pages: list[int]) -> list[torch.Tensor]:
    return [pool._page(at * pool.page_size).clone() for at in pages]


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_replica_loads_what_another_has_saved(
    make_backend: MakeBackend, layout: str, dtype: torch.dtype
) -> None:
    keys, first, second = hashes(9), HostPool(layout, dtype=dtype), HostPool(layout, dtype=dtype, seed=1)
    assert make_backend(first).batch_set_v1(keys, indices(range(9))) == [True] * 9
    consumer = make_backend(second)
    assert consumer.batch_exists([*keys, *hashes(1, seed=9)]) == 9
    there = list(range(15, 6, -1))
    assert consumer.batch_get_v1(keys, indices(there)) == [True] * 9
    assert are_equal(pages_of(second, there), pages_of(first, list(range(9))))


def test_pages_that_nobody_loads_are_left_alone(make_backend: MakeBackend) -> None:
    keys, pool = hashes(3), HostPool(seed=1)
    make_backend().batch_set_v1(keys[:2], indices([0, 1]))
    before = pages_of(pool, list(range(16)))
    assert make_backend(pool).batch_get_v1(keys, indices([4, 5, 6])) == [True, True, False]
    rest = [at for at in range(16) if at not in (4, 5)]
    assert are_equal(pages_of(pool, rest), [before[at] for at in rest])


def test_both_interfaces_share_pages(make_backend: MakeBackend) -> None:
    keys, first, second = hashes(2), HostPool("layer_first"), HostPool("layer_first", seed=1)
    make_backend(first).batch_set_v1(keys, indices([3, 4]))
    consumer = make_backend(second)
    targets = [torch.zeros_like(second.get_data_page(0)) for _ in range(3)]
    found = consumer.batch_get([*keys, *hashes(1, seed=9)], targets)
    assert torch.equal(found[0], first.get_data_page(3 * PAGE))
    assert torch.equal(found[1], first.get_data_page(4 * PAGE))
    assert found[2] is None
    more = hashes(2, seed=5)
    assert consumer.batch_set(more, [second.get_data_page(0), second.get_data_page(PAGE)])
    assert consumer.exists(more[1])
    assert consumer.set(hashes(1, seed=6)[0], second.get_data_page(0))
    assert torch.equal(consumer.get(hashes(1, seed=6)[0], targets[0]), second.get_data_page(0))


def test_a_pool_without_flat_pages_is_shared_by_its_addresses(make_backend: MakeBackend) -> None:
    keys, first, second = hashes(4), PoolWithoutFlatPages(), PoolWithoutFlatPages(seed=1)
    make_backend(first).batch_set_v1(keys, indices([0, 1, 2, 3]))
    consumer = make_backend(second)
    assert consumer.batch_get_v1(keys, indices([9, 8, 7, 6])) == [True] * 4
    assert are_equal(pages_of(second, [9, 8, 7, 6]), pages_of(first, [0, 1, 2, 3]))
    assert consumer.batch_get(keys[:1], [torch.zeros(8)]) == [None]


def test_pages_after_a_known_prefix_are_the_same_pages(make_backend: MakeBackend) -> None:
    keys = hashes(9)
    backend = make_backend()
    assert all(backend.batch_set_v1(keys[:4], indices(range(4)), ExtraInfo()))
    assert all(backend.batch_set_v1(keys[4:], indices(range(4, 9)), ExtraInfo(keys[:4])))
    assert backend.batch_exists(keys) == 9
    assert backend.batch_exists(keys[5:], ExtraInfo(keys[:5])) == 4


def test_a_damaged_page_is_not_loaded_nor_those_after_it(
    make_backend: MakeBackend, store: StoreProcess
) -> None:
    keys, pool = hashes(3), HostPool(seed=1)
    make_backend().batch_set_v1(keys, indices([0, 1, 2]))
    damage_memory(store)
    before = pages_of(pool, [0, 1, 2])
    assert make_backend(pool).batch_get_v1(keys, indices([0, 1, 2])) == [False] * 3
    assert are_equal(pages_of(pool, [0, 1, 2]), before)


def test_two_ranks_have_parts_of_their_own(make_backend: MakeBackend) -> None:
    keys = hashes(2)
    pools = [HostPool(seed=rank) for rank in range(2)]
    ranks = [make_backend(pools[rank], tp_rank=rank, tp_size=2) for rank in range(2)]
    ranks[0].batch_set_v1(keys, indices([0, 1]))
    assert [rank.batch_exists(keys) for rank in ranks] == [2, 0]
    ranks[1].batch_set_v1(keys, indices([0, 1]))
    fresh = [HostPool().empty() for _ in range(2)]
    for rank in range(2):
        backend = make_backend(fresh[rank], tp_rank=rank, tp_size=2)
        assert backend.batch_get_v1(keys, indices([0, 1])) == [True, True]
        assert are_equal(pages_of(fresh[rank], [0, 1]), pages_of(pools[rank], [0, 1]))


def test_ranks_of_latent_attention_share_whole_pages(make_backend: MakeBackend) -> None:
    make_backend(is_mla_model=True, tp_size=2).batch_set_v1(hashes(2), indices([0, 1]))
    assert make_backend(is_mla_model=True, tp_size=2, tp_rank=1).batch_exists(hashes(2)) == 2
    assert make_backend(is_mla_model=True, tp_size=4, tp_rank=1).batch_exists(hashes(2)) == 0


def test_other_pools_and_models_on_one_store_find_nothing_of_each_others(make_backend: MakeBackend) -> None:
    make_backend().batch_set_v1(hashes(2), indices([0, 1]))
    others = [
        make_backend(HostPool("layer_first")),
        make_backend(HostPool(dtype=torch.int32)),
        make_backend(HostPool(page_size=16)),
        make_backend(PoolWithoutFlatPages()),
        make_backend(options={"weights": "w2"}),
        make_backend(tp_size=2),
    ]
    assert [other.batch_exists(hashes(2)) for other in others] == [0] * 6
    assert make_backend().batch_exists(hashes(2)) == 2


def test_read_only_stores_nothing_and_lets_sglang_go_on(make_backend: MakeBackend) -> None:
    backend = make_backend(options={"is_read_only": True})
    assert backend.batch_set_v1(hashes(2), indices([0, 1])) == [True, True]
    assert backend.batch_exists(hashes(2)) == 0
    make_backend().batch_set_v1(hashes(2), indices([0, 1]))
    assert backend.batch_get_v1(hashes(2), indices([4, 5])) == [True, True]


def test_a_frozen_store_is_a_miss_and_is_left_alone_for_a_while(
    make_backend: MakeBackend, store: StoreProcess
) -> None:
    short = {"lookup_deadline_ms": 50, "load_deadline_ms": 50, "save_deadline_ms": 50}
    backend = make_backend(options=short)
    make_backend().batch_set_v1(hashes(2), indices([0, 1]))
    store.pause()
    for _ in range(20):
        assert backend.batch_exists(hashes(2)) == 0
        assert backend.batch_get_v1(hashes(2), indices([0, 1])) == [False, False]
        assert backend.batch_set_v1(hashes(2, seed=3), indices([0, 1])) == [False, False]
    # After the first that is late the store is left alone for a while.
    assert backend.counts()["miss_store_away"] > 0
    store.resume()
    until_s = time.monotonic() + 60
    while backend.batch_exists(hashes(2)) != 2:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_store_that_comes_after_the_engine_is_used(make_backend: MakeBackend, store: StoreProcess) -> None:
    store.kill()
    backend, keys = make_backend(), hashes(2)
    assert backend.batch_set_v1(keys, indices([0, 1])) == [False] * 2
    store.start()
    until_s = time.monotonic() + 60
    while not all(backend.batch_set_v1(keys, indices([0, 1]))):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    assert backend.batch_exists(keys) == 2


def test_a_store_that_is_killed_and_comes_back_is_used_again(
    make_backend: MakeBackend, store: StoreProcess
) -> None:
    backend = make_backend()
    backend.batch_set_v1(hashes(2), indices([0, 1]))
    store.kill()
    assert backend.batch_exists(hashes(2)) == 0
    assert backend.batch_get_v1(hashes(2), indices([0, 1])) == [False, False]
    assert backend.batch_set_v1(hashes(2), indices([0, 1])) == [False, False]
    store.start()
    until_s = time.monotonic() + 60
    while not all(backend.batch_set_v1(hashes(2), indices([0, 1]))):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert backend.batch_exists(hashes(2)) == 2


def test_whatever_goes_wrong_in_a_call_is_a_miss(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend()
    caplog.set_level(logging.WARNING)
    assert backend.batch_exists(["not a hash"]) == 0
    assert backend.batch_exists([hashes(1)[0], hashes(1)[0]]) == 0
    assert backend.batch_get_v1(hashes(2), indices([0])) == [False, False]
    assert backend.batch_get_v1(hashes(1), indices([99])) == [False]
    assert backend.batch_get_v1(hashes(1), indices([0]) + 1) == [False]
    assert backend.batch_set_v1(hashes(1), None) == [False]
    assert backend.batch_get(hashes(1), [None]) == [None]
    assert backend.batch_set(hashes(1), [torch.zeros(3)]) is False
    assert backend.batch_get_v2([PoolTransfer("nobody", None, hashes(1))]) == {"nobody": [False]}
    transfer = PoolTransfer("nobody", None, hashes(1), PoolHitPolicy.ALL_PAGES)
    backend.batch_set_v1(hashes(1), indices([0]))
    assert backend.batch_exists_v2(hashes(1), [transfer]).kv_hit_pages == 0
    assert len([one for one in caplog.records if "a call failed" in one.message]) == 1


def test_nothing_to_do_is_nothing(make_backend: MakeBackend) -> None:
    backend = make_backend()
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], indices([])) == []
    assert backend.batch_set_v1([], indices([])) == []


def test_other_pools_bound_what_can_be_used(make_backend: MakeBackend) -> None:
    keys, states = hashes(6), HostPool(page_size=1, seed=3)
    backend = make_backend()
    backend.register_mem_host_pool_v2(states, "mamba")
    backend.batch_set_v1(keys, indices(range(6)))
    saved = backend.batch_set_v2([PoolTransfer("mamba", indices([5, 7], 1), [keys[1], keys[4]])])
    assert saved == {"mamba": [True, True]}
    trailing = PoolTransfer("mamba", None, keys[:1], PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(keys, [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 5])
    assert found.extra_pool_hit_pages == {"kv": 6, "mamba": 5}
    whole = PoolTransfer("mamba", None, keys, PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(keys, [whole]).kv_hit_pages == 0
    groups = PoolTransfer("other", None, keys, PoolHitPolicy.BLOCK_GROUPS)
    assert backend.batch_exists_v2(keys, [groups]).kv_hit_pages == 6
    wanted = pages_of(states, [5, 7])
    states.empty()
    loaded = backend.batch_get_v2([PoolTransfer("mamba", indices([1, 2, 3], 1), [keys[1], keys[2], keys[4]])])
    assert loaded == {"mamba": [True, False, True]}
    assert are_equal(pages_of(states, [1, 3]), wanted)
    assert not pages_of(states, [2])[0].any()


def test_what_cannot_be_named_is_not_shared_and_said_once(
    make_backend: MakeBackend, server_args: ServerArgs, caplog: pytest.LogCaptureFixture
) -> None:
    server_args.enable_lora = True
    backend = make_backend()
    assert backend.batch_set_v1(hashes(2), indices([0, 1])) == [False, False]
    assert backend.batch_exists(hashes(2)) == 0
    assert [one.message for one in caplog.records if "nothing of the pool kv is shared" in one.message]


def test_without_options_it_does_not_start(make_backend: MakeBackend) -> None:
    for extra, text in (
        (None, "set it to an object"),
        ({"kvstore": {}}, "no store"),
        ({"kvstore": {"store": "http://a"}}, "the socket of the store on its own node"),
        ({"kvstore": {"store": "unix:/a", "stor": 1}}, "unknown key 'stor'"),
        ({"kvstore": {"store": "unix:/a", "lookup_deadline_ms": 0}}, "must be above 0"),
    ):
        with pytest.raises(InvalidConfig, match=text):
            package.KVStoreBackend(sglang_stand_in.StorageConfig(extra), {})


def test_clearing_forgets_nothing_and_closing_ends_everything(
    make_backend: MakeBackend, store: StoreProcess
) -> None:
    backend = make_backend()
    backend.batch_set_v1(hashes(2), indices([0, 1]))
    backend.clear()
    assert backend.batch_exists(hashes(2)) == 2
    backend.close()
    assert backend.batch_exists(hashes(2)) == 0
    with KVStore.connect(store.socket_path) as client:
        assert client.stats()["tiers"]["dram"]["blocks"] == 2
        assert client.check() == []


def test_the_package_imports_without_sglang_and_the_class_says_what_it_needs() -> None:
    script = (
        "import kvstore_engine_adapter.sglang as package\n"
        "print(package.TESTED_VERSIONS)\n"
        "try:\n    package.KVStoreBackend\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "0.5.23" in done.stdout.splitlines()[0]
    assert "install sglang==0.5.23" in done.stdout


def test_long_chains_go_in_several_calls(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_store, "_MAX_KEYS", 4)
    keys, first, second = hashes(14), HostPool(), HostPool(seed=1)
    make_backend(first).batch_set_v1(keys[:13], indices(range(13)))
    consumer = make_backend(second)
    assert consumer.batch_exists(keys) == 13
    assert consumer.batch_get_v1(keys, indices(range(14))) == [True] * 13 + [False]
    assert are_equal(pages_of(second, list(range(13))), pages_of(first, list(range(13))))
