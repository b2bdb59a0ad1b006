"""The tier, called in the order in which vLLM's manager of tiers calls it, with a real store."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore_engine_adapter.vllm as package
from kvstore import KVStore
from kvstore.errors import InvalidConfig
from tests.engine_adapter.vllm import vllm_stand_in
from tests.engine_adapter.vllm.conftest import LOAD, LOOKUP, SAVE, TakeSpans, headers
from tests.engine_adapter.vllm.engine_stand_in import FULL, WINDOWED, hybrid_cache, plain_cache
from tests.engine_adapter.vllm.tier_stand_in import (
    CHUNK_BYTES,
    Context,
    LookupResult,
    StandInTiers,
    offloading_spec,
)
from tests.engine_adapter.vllm.vllm_stand_in import KVConnectorRole, vllm_config
from tests.store_damage import damage_memory
from tests.store_process import StoreProcess

LONG = {"lookup_deadline_ms": 20_000, "load_deadline_ms": 20_000}
HIT, MISS = LookupResult.HIT, LookupResult.MISS
MakeTiers = Callable[..., StandInTiers]


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    vllm_stand_in.forget_connector()
    vllm_stand_in.install(monkeypatch, rank=[0])
    yield package.KVStoreOffloadingConnector
    vllm_stand_in.forget_connector()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as process:
        yield process


@pytest.fixture
def make_tiers(connector: Any, store: StoreProcess) -> Iterator[MakeTiers]:
    made: list[StandInTiers] = []

    def make(*, is_hybrid: bool = False, events: bool = True, **options: Any) -> StandInTiers:
        config = config_of(store, **options)
        cache = hybrid_cache(64) if is_hybrid else plain_cache()
        groups = [(0, tuple(WINDOWED)), (1, tuple(FULL))] if is_hybrid else [(0, tuple(FULL))]
        given = connector(config, KVConnectorRole.SCHEDULER, cache).given
        tier = given.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][-1]
        spec = offloading_spec(*groups, events=events)
        made.append(
            StandInTiers(lambda view: package.KVStoreTier(spec, view, "kvstore", None, engine=tier["engine"]))
        )
        return made[-1]

    yield make
    for one in made:
        one.tier.shutdown()


def config_of(store: StoreProcess, **options: Any) -> Any:
    config = vllm_config(f"unix:{store.socket_path}")
    config.kv_transfer_config.kv_connector_extra_config = {
        "cpu_bytes_to_use": 1 << 20,
        "kvstore": {"store": f"unix:{store.socket_path}", "weights": "one", **LONG, **options},
    }
    return config


def context(name: str = "a", *, chunks: int = 9, seed: int = 0, **more: Any) -> Context:
    hashes = [hashlib.sha256(f"{seed}/{at}".encode()).digest() for at in range(chunks)]
    return Context(name, hashes, **more)


def save(tiers: StandInTiers, of: Context, *, group: int = 0, first: int = 0) -> None:
    """Store the chunks of a request from row 1 on; each is filled with a number of its own."""
    tiers.tier.on_new_request(of)
    keys = of.chunk_keys(group)[first:]
    rows = list(range(1, len(keys) + 1))
    for row in rows:
        tiers.rows[row] = row + first
    tiers.submit(of, keys, rows, is_load=False)
    assert tiers.finish().success
    tiers.tier.on_request_finished(of)


def test_chunks_that_another_engine_has_stored_are_found_and_loaded(make_tiers: MakeTiers) -> None:
    save(make_tiers(), context())
    tiers, asked = make_tiers(), context("b", chunks=11)
    tiers.tier.on_new_request(asked)
    assert tiers.look_up(asked) == [HIT] * 9 + [MISS] * 2
    tiers.submit(asked, asked.chunk_keys()[:9], list(range(20, 29)), is_load=True)
    done = tiers.finish()
    assert (done.success, done.transfer_bytes) == (True, 9 * CHUNK_BYTES)
    assert tiers.rows[20:29, :CHUNK_BYTES].min(axis=1).tolist() == list(range(1, 10))


def test_the_first_question_is_answered_with_not_yet_and_goes_out_with_the_others(
    make_tiers: MakeTiers, store: StoreProcess
) -> None:
    tiers, asked = make_tiers(), context()
    tiers.tier.on_new_request(asked)
    assert {tiers.tier.lookup(key, asked) for key in asked.chunk_keys()} == {LookupResult.RETRY}
    assert tiers.look_up(asked) == [MISS] * 9
    with KVStore.connect(store.socket_path) as client:
        assert client.stats()["match"]["requests"] == 1


def test_only_leading_chunks_are_found_and_gaps_of_vllms_own_cache_do_not_matter(
    make_tiers: MakeTiers,
) -> None:
    tiers = make_tiers()
    save(tiers, context(chunks=4))
    save(tiers, context(chunks=9), first=6)
    asked = context("b")
    tiers.tier.on_new_request(asked)
    assert tiers.look_up(asked) == [HIT] * 4 + [MISS] * 5


def test_of_windows_every_chunk_counts_by_itself(make_tiers: MakeTiers) -> None:
    tiers = make_tiers(is_hybrid=True)
    save(tiers, context(num_groups=2), group=1)
    save(tiers, context("w", num_groups=2), group=0, first=6)
    asked = context("b", num_groups=2)
    tiers.tier.on_new_request(asked)
    for group in (1, 0):
        for key in asked.chunk_keys(group):
            tiers.tier.lookup(key, asked)
    assert tiers.look_up(asked, 1) == [HIT] * 9
    assert tiers.look_up(asked, 0) == [MISS] * 6 + [HIT] * 3


def test_a_chunk_whose_load_failed_is_told_apart_and_not_offered_again(
    make_tiers: MakeTiers, store: StoreProcess
) -> None:
    save(make_tiers(), context())
    tiers, asked = make_tiers(), context("b")
    tiers.tier.on_new_request(asked)
    assert tiers.look_up(asked) == [HIT] * 9
    damage_memory(store)
    tiers.submit(asked, asked.chunk_keys(), list(range(20, 29)), is_load=True)
    done = tiers.finish()
    assert not done.success
    good = set(done.successful_keys or ())
    assert good < set(asked.chunk_keys())
    offered = {key for key in asked.chunk_keys() if tiers.tier.lookup(key, asked) is HIT}
    assert offered == good


def test_without_a_store_everything_is_a_miss_and_jobs_end(
    make_tiers: MakeTiers, store: StoreProcess
) -> None:
    tiers, asked = make_tiers(), context()
    store.kill()
    tiers.tier.on_new_request(asked)
    assert tiers.look_up(asked) == [MISS] * 9
    tiers.submit(asked, asked.chunk_keys(), list(range(9)), is_load=False)
    assert not tiers.finish().success
    tiers.submit(asked, asked.chunk_keys(), list(range(9)), is_load=True)
    assert not tiers.finish().success


def test_a_frozen_store_holds_a_request_no_longer_than_its_deadline_and_jobs_can_be_drained(
    make_tiers: MakeTiers, store: StoreProcess
) -> None:
    tiers, asked = make_tiers(lookup_deadline_ms=50, load_deadline_ms=100), context()
    tiers.tier.on_new_request(asked)
    store.pause()
    assert tiers.look_up(asked) == [MISS] * 9
    tiers.submit(asked, asked.chunk_keys(), list(range(9)), is_load=True)
    tiers.submit(asked, asked.chunk_keys(), list(range(9)), is_load=False)
    tiers.tier.drain_jobs()
    assert len(list(tiers.tier.get_finished_jobs())) == 2
    store.resume()


def test_a_preempted_request_asks_anew(make_tiers: MakeTiers) -> None:
    tiers, asked = make_tiers(), context()
    tiers.tier.on_new_request(asked)
    assert tiers.look_up(asked) == [MISS] * 9
    tiers.step(new=("a",))
    tiers.submit(asked, asked.chunk_keys(), list(range(9)), is_load=False)
    assert tiers.finish().success
    tiers.step(preempted=("a",))
    assert tiers.look_up(asked) == [HIT] * 9


def test_tenants_and_requests_with_other_wishes_do_not_share(make_tiers: MakeTiers) -> None:
    tiers = make_tiers()
    save(tiers, context(kv_transfer_params={"kvstore": {"tenant": "one"}}))
    save(tiers, context("n", seed=1, kv_transfer_params={"kvstore": {"save": False}}))
    for name, seed, told, found in (
        ("b", 0, {"tenant": "one"}, HIT),
        ("c", 0, {"tenant": "two"}, MISS),
        ("d", 0, {"tenant": 3}, MISS),
        ("e", 0, {}, MISS),
        ("f", 0, {"tenant": "one", "lookup": False}, MISS),
        ("g", 1, {}, MISS),
    ):
        asked = context(name, seed=seed, kv_transfer_params={"kvstore": told})
        tiers.tier.on_new_request(asked)
        assert set(tiers.look_up(asked)) == {found}, name
    stats = tiers.tier.get_stats()
    assert stats.counts["vllm:kvstore_bad_params",] == 1
    assert stats.counts["vllm:kvstore_saved_blocks",] == 9
    assert stats.counts["vllm:kvstore_misses", "never_seen"] >= 1
    assert tiers.tier.get_stats() is None


def test_what_was_stored_is_told_once(make_tiers: MakeTiers) -> None:
    tiers = make_tiers()
    save(tiers, context())
    events = tiers.tier.take_events()
    assert [(one.keys, one.removed, one.medium.value) for one in events] == [
        (context().chunk_keys(), False, "STORAGE")
    ]
    save(tiers, context())
    assert not list(tiers.tier.take_events())


def test_a_request_with_an_adapter_shares_nothing_until_its_files_are_known(
    connector: Any, make_tiers: MakeTiers, store: StoreProcess
) -> None:
    made = connector(config_of(store), KVConnectorRole.SCHEDULER, plain_cache())
    engine = made.given.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][-1]["engine"]
    adapter = SimpleNamespace(lora_path="/nowhere", load_inplace=False)
    made.on_new_request(SimpleNamespace(request_id="a", lora_request=adapter))
    assert engine.adapters == {"a": adapter}


@pytest.mark.parametrize("end_token", [None, 48])
def test_what_is_not_a_whole_chunk_is_neither_stored_nor_found(
    make_tiers: MakeTiers, end_token: int | None
) -> None:
    tiers, of = make_tiers(), context(chunks=2)
    whole, odd = of.chunk_keys()
    of.places[odd] = end_token
    tiers.tier.on_new_request(of)
    tiers.submit(of, [whole, odd], [1, 2], is_load=False)
    assert tiers.finish().success
    assert tiers.tier.lookup(odd, of) is MISS
    tiers.submit(of, [odd], [3], is_load=True)
    assert not tiers.finish().success
    tiers.tier.on_request_finished(of)

    asked = context("b", chunks=2)
    asked.hashes.pop(0)
    tiers.tier.on_new_request(asked)
    assert tiers.look_up(asked) == [MISS]


def test_a_tier_that_shares_nothing_keeps_nothing_of_requests(connector: Any, store: StoreProcess) -> None:
    made = connector(config_of(store), KVConnectorRole.SCHEDULER, plain_cache())
    engine = made.given.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][-1]["engine"]
    engine.identity = None
    spec = offloading_spec((0, tuple(FULL)))
    tiers = StandInTiers(lambda view: package.KVStoreTier(spec, view, "kvstore", None, engine=engine))
    made.on_new_request(SimpleNamespace(request_id="a", lora_request=SimpleNamespace()))
    tiers.tier.on_new_request(context("a"))
    assert not engine.adapters


def test_what_is_done_for_a_traced_request_lies_below_its_span(
    connector: Any, store: StoreProcess, take_spans: TakeSpans
) -> None:
    made = connector(config_of(store), KVConnectorRole.SCHEDULER, plain_cache())
    engine = made.given.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][-1]["engine"]
    spec = offloading_spec((0, tuple(FULL)))
    tiers = StandInTiers(lambda view: package.KVStoreTier(spec, view, "kvstore", None, engine=engine))
    for name in ("a", "b"):
        made.on_new_request(SimpleNamespace(request_id=name, trace_headers=headers()))
    save(tiers, context("a"))
    asked = context("b")
    tiers.tier.on_new_request(asked)
    assert tiers.look_up(asked) == [HIT] * 9
    tiers.submit(asked, asked.chunk_keys(), list(range(20, 29)), is_load=True)
    assert tiers.finish().success
    tiers.tier.shutdown()
    spans = take_spans()
    assert spans >= {LOOKUP, SAVE}
    assert spans & LOAD
    assert not engine.traces


def test_without_the_connector_that_knows_the_model_nothing_is_shared(
    connector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = StandInTiers(
        lambda view: package.KVStoreTier(offloading_spec((0, tuple(FULL))), view, "kvstore", None)
    )
    assert "KVStoreOffloadingConnector" in caplog.text
    asked = context()
    tiers.tier.on_new_request(asked)
    assert tiers.look_up(asked) == [MISS] * 9
    tiers.submit(asked, asked.chunk_keys(), list(range(9)), is_load=False)
    assert not tiers.finish().success
    tiers.tier.drain_jobs()
    tiers.tier.shutdown()


def test_vllms_memory_can_be_unmapped_after_the_shutdown(make_tiers: MakeTiers) -> None:
    tiers = make_tiers()
    save(tiers, context())
    held = memoryview(bytearray(64))
    tiers.tier.shutdown()
    tiers.tier.shutdown()
    assert tiers.tier._primary_kv_view.nbytes == 0
    held.release()


def test_a_configuration_without_options_of_the_store_is_refused(connector: Any, store: StoreProcess) -> None:
    config = config_of(store)
    del config.kv_transfer_config.kv_connector_extra_config["kvstore"]
    with pytest.raises(InvalidConfig, match="kvstore"):
        connector(config, KVConnectorRole.SCHEDULER, plain_cache())


def test_the_tier_comes_after_those_of_the_operator_and_vllms_keys_are_kept(
    connector: Any, store: StoreProcess
) -> None:
    config = config_of(store)
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra["secondary_tiers"] = [{"type": "fs"}]
    given = connector(config, KVConnectorRole.WORKER, plain_cache()).given
    completed = given.kv_transfer_config.kv_connector_extra_config
    assert [one["type"] for one in completed["secondary_tiers"]] == ["fs", "KVStoreTier"]
    assert (completed["spec_name"], completed["cpu_bytes_to_use"]) == ("TieringOffloadingSpec", 1 << 20)
    assert "secondary_tiers" in extra
    assert len(extra["secondary_tiers"]) == 1


def test_a_view_that_has_no_rows_of_a_chunk_shares_nothing(
    connector: Any, store: StoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    made = connector(config_of(store), KVConnectorRole.SCHEDULER, plain_cache())
    engine = made.given.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][-1]["engine"]
    view = memoryview(np.zeros((4, 100), np.int8))
    tier = package.KVStoreTier(offloading_spec((0, tuple(FULL))), view, "kvstore", None, engine=engine)
    assert "nothing is shared" in caplog.text
    tier.shutdown()
