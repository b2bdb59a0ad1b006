"""The connector, called in the order in which vLLM calls it, with a real store."""

import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvstore_engine_adapter.vllm as package
from kvstore import KVStore
from kvstore.errors import InvalidConfig
from kvstore.hints import Hints
from kvstore.keys import PrefixChain
from kvstore_engine_adapter.request_wishes import RequestWishes
from tests.engine_adapter.vllm import vllm_stand_in
from tests.engine_adapter.vllm.conftest import LOAD, LOOKUP, SAVE, TakeSpans, headers
from tests.engine_adapter.vllm.engine_stand_in import PAGES, StandInEngine, hybrid_cache, plain_cache
from tests.engine_adapter.vllm.vllm_stand_in import KVConnectorRole, Request, vllm_config
from tests.store_damage import damage_memory
from tests.store_process import StoreProcess

MakeEngine = Callable[..., StandInEngine]
LONG = {"lookup_deadline_ms": 20_000, "load_deadline_ms": 20_000, "loads": "always"}


@pytest.fixture
def rank() -> list[int]:
    return [0]


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch, rank: list[int]) -> Iterator[Any]:
    vllm_stand_in.forget_connector()
    vllm_stand_in.install(monkeypatch, rank=rank)
    yield package.KVStoreConnector
    vllm_stand_in.forget_connector()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as process:
        yield process


@pytest.fixture
def make_engine(connector: Any, store: StoreProcess, rank: list[int]) -> Iterator[MakeEngine]:
    engines: list[StandInEngine] = []

    def make(cache: Any = None, num_ranks: int = 1, **changes: Any) -> StandInEngine:
        options = {**LONG, **changes.pop("options", {})}
        config = vllm_config(
            f"unix:{store.socket_path}",
            options=options,
            parallel_config__tensor_parallel_size=num_ranks,
            **changes,
        )
        engines.append(
            StandInEngine(connector, config, cache or plain_cache(), rank=rank, num_ranks=num_ranks)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def request(name: str = "0-aa", *, length: int = 300, seed: int = 0, **more: Any) -> Request:
    return Request(name, [(seed * 7919 + at * 31) % 500 for at in range(length)], 32, **more)


def await_blocks(store: StoreProcess, count: int) -> None:
    """Wait until the store has at least so many blocks; saves are made behind the engine's back."""
    until_s = time.monotonic() + 60
    with KVStore.connect(store.socket_path) as client:
        while client.stats()["tiers"]["dram"]["blocks"] < count:
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_fresh_replica_loads_what_another_has_saved(make_engine: MakeEngine, store: StoreProcess) -> None:
    assert make_engine().answer(request()).loaded_tokens == 0
    await_blocks(store, 9)
    assert make_engine().answer(request("1-bb")).loaded_tokens == 288
    assert make_engine().answer(request("2-cc", length=100)).loaded_tokens == 96


def test_the_question_is_cheap_and_its_answer_stays(make_engine: MakeEngine, store: StoreProcess) -> None:
    engine = make_engine()
    engine.answer(request())
    await_blocks(store, 9)
    asked = request("1-bb")
    assert engine.ask(asked) == 288
    lookups = sum(1 for _ in range(100) if engine.ask(asked) == 288)
    assert lookups == 100
    assert engine.ask(asked, 64) == 224
    with KVStore.connect(store.socket_path) as client:
        assert client.stats()["match"]["requests"] <= 3


def test_what_a_step_leaves_is_stored_even_if_its_pages_are_overwritten_at_once(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    first = make_engine()
    first.answer(request())
    for cache in first.caches[0].values():
        cache.fill_(7)
    await_blocks(store, 9)
    assert make_engine().answer(request("1-bb")).loaded_tokens == 288  # it checks every block


def test_a_block_that_is_damaged_is_computed_and_not_offered_again(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    make_engine().answer(request())
    await_blocks(store, 9)
    ran = make_engine().answer(request("1-bb"), before_load=lambda: damage_memory(store))
    assert (ran.offers, ran.loaded_tokens, ran.num_failed) == ([288, 0], 0, 1)


def test_a_store_that_was_emptied_between_lookup_and_load_costs_one_try(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    make_engine().answer(request())
    await_blocks(store, 9)

    def empty() -> None:
        store.kill()
        store.start()

    ran = make_engine().answer(request("1-bb"), before_load=empty)
    assert ran.offers == [288, 0]
    assert ran.loaded_tokens == 0


def test_without_a_store_every_request_is_a_miss(make_engine: MakeEngine, store: StoreProcess) -> None:
    store.kill()
    engine = make_engine()
    for seed in range(3):
        assert engine.answer(request(f"{seed}-aa", seed=seed)).offers == [0]


def test_a_store_that_comes_after_the_engine_is_used(make_engine: MakeEngine, store: StoreProcess) -> None:
    store.kill()
    engine = make_engine()
    assert engine.answer(request()).offers == [0]
    store.start()
    until_s = time.monotonic() + 60
    while not engine.answer(request("1-bb")).loaded_tokens:
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_a_frozen_store_is_a_miss_after_the_deadline_and_then_at_once(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    engine = make_engine(options={"lookup_deadline_ms": 50})
    engine.answer(request())
    await_blocks(store, 9)
    store.pause()
    first, second = request("1-bb", seed=1), request("2-cc", seed=2)
    assert engine.answer(first).offers == [0]
    ran = engine.answer(second)
    assert ran.offers == [0]
    assert engine.scheduler._scheduler.lookups.blocks_after("1-bb", 0, list) == 0
    store.resume()


def test_a_hit_counts_only_when_all_ranks_have_stored_it(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    first = make_engine(num_ranks=2)
    first.workers[1]._worker._saves._queue_bytes = 0
    first.answer(request())
    await_blocks(store, 9)
    assert make_engine(num_ranks=2).answer(request("1-bb")).loaded_tokens == 0
    await_blocks(store, 18)
    assert make_engine(num_ranks=2).answer(request("2-cc")).loaded_tokens == 288


def test_of_a_group_with_a_window_only_the_window_is_loaded(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    make_engine(hybrid_cache(64)).answer(request())
    await_blocks(store, 18)
    ran = make_engine(hybrid_cache(64)).answer(request("1-bb"))
    assert ran.loaded_tokens == 288


def test_of_several_groups_a_failed_load_is_told_by_request(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    make_engine(hybrid_cache(64)).answer(request())
    await_blocks(store, 18)
    ran = make_engine(hybrid_cache(64)).answer(request("1-bb"), before_load=lambda: damage_memory(store))
    assert (ran.offers, ran.num_failed) == ([288, 0], 1)


def test_a_request_may_ask_not_to_look_or_not_to_save(make_engine: MakeEngine, store: StoreProcess) -> None:
    engine = make_engine()
    engine.answer(request(kv_transfer_params={"kvstore": {"save": False}}))
    engine.answer(request("1-bb", seed=1))
    await_blocks(store, 9)
    assert engine.answer(request("2-cc")).loaded_tokens == 0
    assert engine.answer(
        request("3-dd", seed=1, kv_transfer_params={"kvstore": {"lookup": False}})
    ).offers == [0]


def adapter(folder: Path, content: bytes) -> SimpleNamespace:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return SimpleNamespace(lora_name="ours", lora_path=str(folder))


def await_adapter(engine: StandInEngine, lora: SimpleNamespace) -> None:
    until_s = time.monotonic() + 60
    while engine.scheduler._scheduler._groups.groups(lora, RequestWishes()) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_requests_with_an_adapter_share_with_those_that_have_the_same_files(
    make_engine: MakeEngine, store: StoreProcess, tmp_path: Path
) -> None:
    one, copy = adapter(tmp_path / "a", b"one"), adapter(tmp_path / "b", b"one")
    other = adapter(tmp_path / "c", b"two")
    first, second = make_engine(), make_engine()
    assert first.answer(request(lora_request=one)).offers == [0]  # not hashed yet: neither loaded nor saved
    await_adapter(first, one)
    first.answer(request("1-bb", lora_request=one))
    await_blocks(store, 9)
    for lora in (copy, other):
        await_adapter(second, lora)
    assert second.answer(request("2-cc", lora_request=copy)).loaded_tokens == 288
    assert second.answer(request("3-dd", lora_request=other)).loaded_tokens == 0
    assert second.answer(request("4-ee")).loaded_tokens == 0


def test_an_adapter_that_changed_after_the_start_or_is_not_there_shares_nothing(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    for lora in (adapter(tmp_path / "late", b"new"), SimpleNamespace(lora_path=str(tmp_path / "nowhere"))):
        caplog.clear()
        assert engine.answer(request(lora.lora_path, lora_request=lora)).offers == [0]
        until_s = time.monotonic() + 60
        while "share nothing" not in caplog.text:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert engine.ask(request(f"{lora.lora_path}-2", lora_request=lora)) == 0


def test_an_engine_that_differs_finds_nothing(make_engine: MakeEngine, store: StoreProcess) -> None:
    make_engine().answer(request())
    await_blocks(store, 9)
    others: list[dict[str, Any]] = [
        {"options": {"weights": "two"}},
        {"options": {"salt": "theirs"}},
        {"options": {"model": "another"}},
        {"cache_config__cache_dtype": "fp8"},
        {"model_config__dtype": "torch.bfloat16"},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"cache": plain_cache(layout="BLHNC")},
        {"num_ranks": 2},
    ]
    found = [make_engine(**other).ask(request(f"{at}-bb")) for at, other in enumerate(others)]
    assert found == [0] * len(others)
    assert make_engine().ask(request("9-cc")) == 288


def test_a_cache_whose_blocks_are_not_one_run_of_bytes_moves_nothing(
    make_engine: MakeEngine, store: StoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    make_engine().answer(request())
    await_blocks(store, 9)
    engine = make_engine()
    worker = engine.workers[0]
    worker._worker._loads = worker._worker._saves = None
    worker.register_kv_caches({name: cache.transpose(0, 1) for name, cache in engine.caches[0].items()})
    assert "this KV cache layout is not supported" in caplog.text
    ran = engine.answer(request("1-bb"))
    assert (ran.loaded_tokens, ran.num_failed) == (0, 1)


def test_more_than_the_queue_holds_is_dropped(make_engine: MakeEngine, store: StoreProcess) -> None:
    engine = make_engine(options={"save_queue_bytes": 0})
    engine.answer(request())
    engine.close()
    with KVStore.connect(store.socket_path) as client:
        assert client.stats()["tiers"]["dram"]["blocks"] == 0
    assert PAGES


def test_a_request_that_starts_over_finds_what_it_has_saved(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    engine = make_engine()
    preempted = request()
    engine.compute(preempted)
    await_blocks(store, 9)
    assert engine.answer(preempted).loaded_tokens == 288


def test_resetting_vllms_cache_says_that_the_store_keeps_its_blocks(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_engine().scheduler.reset_cache() is False
    assert "kvstore epoch --advance" in caplog.text


def test_a_policy_that_fails_requests_is_refused(connector: Any) -> None:
    config = vllm_config("unix:/nowhere/kv.sock", kv_transfer_config__kv_load_failure_policy="fail")
    with pytest.raises(InvalidConfig, match='"kv_load_failure_policy": "recompute"'):
        connector(config, KVConnectorRole.SCHEDULER, plain_cache())


def test_what_cannot_be_named_is_refused_with_a_remedy_and_the_engine_runs(
    connector: Any, rank: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    config = vllm_config("unix:/nowhere/kv.sock", cache_config__prefix_caching_hash_algo="xxhash")
    engine = StandInEngine(connector, config, plain_cache(), rank=rank)
    assert engine.answer(request()).offers == [0]
    assert "--prefix-caching-hash-algo" in caplog.text
    engine.close()


def told(**wishes: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"kvstore": wishes}}


def test_tenants_share_with_nobody_else(make_engine: MakeEngine, store: StoreProcess) -> None:
    make_engine().answer(request(**told(tenant="one")))
    await_blocks(store, 9)
    engine = make_engine()
    for name, wishes, tokens in (
        ("1-bb", {"tenant": "two"}, 0),
        ("2-cc", {}, 0),
        ("3-dd", {"tenant": 7}, 0),
        ("4-ee", {"tenant": "one"}, 288),
    ):
        assert engine.ask(request(name, **told(**wishes))) == tokens, name


def test_values_that_are_wrong_are_counted_and_change_nothing(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    make_engine().answer(request(**told(priority="high", next_use_s=-1)))
    await_blocks(store, 9)
    engine = make_engine()
    assert engine.ask(request("1-bb", **told(lookup="yes", what=1))) == 288
    assert engine.counted()["bad_params"] == 2


def test_the_end_of_a_session_is_told_of_all_its_blocks(make_engine: MakeEngine, store: StoreProcess) -> None:
    engine = make_engine()
    heard: list[tuple[int, bool]] = []
    client = engine.scheduler._scheduler._client
    tell = client.hint

    def hear(chain: PrefixChain, hints: Hints, **rest: Any) -> None:
        if tell(chain, hints, **rest):
            heard.append((len(chain), hints.ends_session))

    client.hint = hear
    engine.answer(request(**told(session="s")))
    engine.answer(request("1-bb", seed=1, length=200, **told(session="s", ends_session=True)))
    engine.answer(request("2-cc", seed=2, **told(session="t")))
    engine.answer(request("3-dd", seed=3, length=100, **told(ends_session=True)))
    until_s = time.monotonic() + 60
    while len(heard) < 3:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert heard == [(6, True), (9, True), (3, True)]


def test_what_was_stored_and_what_is_gone_is_told_in_vllms_own_events(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    engine = make_engine(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    asked = request(session_id="s")
    engine.answer(asked)
    await_blocks(store, 9)
    stored = engine.await_events()
    assert isinstance(stored, list)
    hashes = [int.from_bytes(one[-8:], "big") for one in asked.block_hashes]
    assert [one for event in stored for one in event.block_hashes] == hashes
    assert [token for event in stored for token in event.token_ids] == asked.tokens[:288]
    first = stored[0]
    assert (first.parent_block_hash, first.block_size, first.medium) == (None, 32, "STORAGE")
    assert (first.group_idx, first.lora_name, first.session_id) == (0, None, "s")
    store.kill()
    store.start()
    assert engine.answer(request("1-bb")).offers == [0]
    removed = [event for event in engine.await_events() if isinstance(event, vllm_stand_in.BlockRemoved)]
    assert [one for event in removed for one in event.block_hashes] == hashes[:1]


def test_what_a_load_finds_gone_is_told_as_far_as_it_is_known(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    engine = make_engine(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    asked = request()
    engine.answer(asked)
    await_blocks(store, 9)
    engine.await_events()
    assert engine.answer(request("1-bb"), before_load=lambda: damage_memory(store)).num_failed == 1
    removed = [event for event in engine.await_events() if isinstance(event, vllm_stand_in.BlockRemoved)]
    first = int.from_bytes(asked.block_hashes[0][-8:], "big")
    assert [event.block_hashes for event in removed] == [[first]]


def test_blocks_that_a_load_did_not_get_in_time_are_not_told_as_gone(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    engine = make_engine(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    engine.answer(request())
    await_blocks(store, 9)
    engine.await_events()
    engine.workers[0]._worker._loads._deadline_s = -1.0
    assert engine.answer(request("1-bb")).num_failed == 1
    assert not engine.scheduler.take_events()


def test_without_a_listener_no_events_are_made(make_engine: MakeEngine, store: StoreProcess) -> None:
    engine = make_engine()
    engine.answer(request())
    await_blocks(store, 9)
    assert engine.workers[0].build_connector_worker_meta() is None
    assert not engine.scheduler.take_events()


def test_blocks_that_are_computed_sooner_than_they_are_loaded_are_computed(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    make_engine().answer(request())
    await_blocks(store, 9)
    engine = make_engine(options={"loads": "cheaper"})
    assert engine.ask(request("1-bb")) == 288
    policy = engine.scheduler._scheduler._speeds._policy
    policy.prefill.factor = 1e-9
    assert engine.ask(request("2-cc")) == 0
    assert engine.counted()["cheaper_computed_blocks"] == 9


def test_vllms_minor_version_decides_which_names_are_used(
    connector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shim_of = importlib.import_module("kvstore_engine_adapter.vllm.interface").shim_of
    assert shim_of("0.32.0+cpu") == shim_of("0.32.1") == "interface_0_32"
    assert not caplog.records
    assert shim_of("0.33.0rc1") == "interface_0_32"
    assert "0.33.0rc1 was not tried" in caplog.text
    for version in ("0.31.9", "dev"):
        with pytest.raises(ImportError, match="or a later one"):
            shim_of(version)


def test_hints_go_with_what_is_stored_and_what_is_loaded(
    make_engine: MakeEngine, store: StoreProcess
) -> None:
    for name, call in (("0-aa", "put"), ("1-bb", "fetch_into")):
        engine = make_engine()
        heard: list[Hints | None] = []
        client = engine.workers[0]._worker._client
        tell = getattr(client, call)

        def hear(*given: Any, tell: Any = tell, heard: Any = heard, **rest: Any) -> Any:
            heard.append(rest.get("hints"))
            return tell(*given, **rest)

        setattr(client, call, hear)
        engine.answer(request(name, **told(priority=2, is_one_off=True)))
        await_blocks(store, 9)
        assert heard == [Hints(priority=2, is_one_off=True)]


def test_what_is_done_for_a_traced_request_lies_below_its_span(
    make_engine: MakeEngine, store: StoreProcess, take_spans: TakeSpans
) -> None:
    engine = make_engine()
    engine.answer(request("0-aa", trace_headers=headers()))
    await_blocks(store, 9)
    engine.close()
    assert take_spans() >= {LOOKUP, SAVE}
    fresh = make_engine()
    fresh.answer(request("0-bb", trace_headers=headers()))
    fresh.close()
    spans = take_spans()
    assert LOOKUP in spans
    assert spans & LOAD


def test_a_request_that_is_not_sampled_or_says_nonsense_has_no_spans(
    make_engine: MakeEngine, store: StoreProcess, take_spans: TakeSpans
) -> None:
    engine = make_engine()
    told: list[Any] = [
        headers(is_sampled=False),
        {"traceparent": "00-x"},
        {"traceparent": 1},
        {},
        None,
        "text",
    ]
    for at, one in enumerate(told):
        engine.answer(request(f"0-{at}", seed=at, trace_headers=one))
    await_blocks(store, 9 * len(told))
    engine.close()
    assert not take_spans()
