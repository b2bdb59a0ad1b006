"""Scenarios of SGLang with the storage backend. Each takes a Workshop and returns an Outcome."""

from collections.abc import Callable

from kvstore import Part
from tests.engines.default_scenarios import reuse_without_options
from tests.engines.scenario import Outcome, batches
from tests.engines.sglang_process import storage
from tests.engines.sglang_trouble import (
    full_store,
    random_failures,
    slow_store,
    store_in_trouble,
    store_never_there,
    trouble_in_the_middle,
    two_at_once,
)
from tests.engines.sglang_workshop import ENGINE, LONG, PAGE, SHARED, SglangWorkshop
from tests.engines.stored import address, await_blocks, drop_pages
from tests.store_process import StoreProcess


def reuse(shop: SglangWorkshop) -> Outcome:
    """A producer, then a fresh consumer, over the zero-copy interface."""
    outcome = Outcome(ENGINE, "reuse")
    with shop.store("reuse") as store:
        _reuse(shop, outcome, store)
    return outcome


def reuse_by_default(shop: SglangWorkshop) -> Outcome:
    """The same with no deadlines but the defaults, and the policy for prefetches that the docs name."""
    more = {"hicache_storage_prefetch_policy": "timeout"}
    return reuse_without_options(
        shop, ENGINE, "reuse_by_default", lambda store: storage(address(store)) | more
    )


def reuse_generic(shop: SglangWorkshop) -> Outcome:
    """The same over the generic interface, from host pages in another layout."""
    outcome = Outcome(ENGINE, "reuse_generic")
    with shop.store("reuse_generic") as store:
        _reuse(shop, outcome, store, hicache={"hicache_mem_layout": "layer_first"}, interface_v1=False)
    return outcome


def reuse_by_two_ranks(shop: SglangWorkshop) -> Outcome:
    """The same with two tensor-parallel ranks; what only one of them has is not used."""
    outcome = Outcome(ENGINE, "reuse_by_two_ranks")
    prompt = batches(1)[0][0]
    with shop.store("ranks") as store:
        _reuse(shop, outcome, store, key="two-ranks", engine=_TWO_RANKS)
        dropped = drop_pages(store, [prompt], part=Part(0, 1, 1, 2), first=4)
        outcome.demand(dropped == 5, f"the second rank had {dropped} of 5 pages")
        # A page whose other part was computed is stored again by both.
        with shop.replica("ranks-apart", **storage(address(store), **LONG) | _TWO_RANKS) as replica:
            got = replica.ask([prompt])
        outcome.compare(got, shop.reference("two-ranks", lambda: batches(1), **_TWO_RANKS)[0], what="apart")
        outcome.demand(got.external == 4 * PAGE, f"apart: {got.external} of {4 * PAGE} tokens")
    return outcome


def reuse_hybrid(shop: SglangWorkshop) -> Outcome:
    """The same with a model of which every other layer has a window, in a pool of its own (v2 interface)."""
    outcome = Outcome(ENGINE, "reuse_hybrid")
    with shop.store("hybrid") as store:
        _reuse(shop, outcome, store, key="hybrid", engine={"model": shop.model("windows")})
    said = "".join(log.read_text(errors="replace") for log in shop.folder.glob("*reuse_hybrid-*.log"))
    outcome.demand(said.count("kvstore: shares the pool swa") == 2, "the windows had no pool of their own")
    return outcome


# On one NUMA node SGLang has to be told which processors are whose.
_TWO_RANKS: dict[str, object] = {"tp_size": 2, "environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}


def _reuse(
    shop: SglangWorkshop,
    outcome: Outcome,
    store: StoreProcess,
    *,
    key: str = "llama",
    engine: dict[str, object] | None = None,
    hicache: dict[str, object] | None = None,
    interface_v1: bool = True,
) -> None:
    wanted = shop.reference(key, lambda: batches(1), **engine or {})
    arguments = storage(address(store), interface_v1=interface_v1, **LONG) | (engine or {}) | (hicache or {})
    for who in ("producer", "consumer"):
        with shop.replica(f"{outcome.scenario}-{who}", **arguments) as replica:
            got = [replica.ask(batch) for batch in batches(1)]
            await_blocks(store, 10)
        for one, other in zip(got, wanted, strict=True):
            outcome.compare(one, other, what=who)
        outcome.notes[who] = [one.cached for one in got]
        outcome.notes[f"{who}, from storage"] = [one.external for one in got]
    outcome.external_tokens = got[0].external or 0
    outcome.demand(outcome.external_tokens == SHARED, f"{outcome.external_tokens} of {SHARED} tokens")


def others_on_one_store(shop: SglangWorkshop) -> Outcome:
    """Another page size, dtype and model find nothing of each other's."""
    kinds: dict[str, dict[str, object]] = {
        "page_size": {"page_size": 64},
        "dtype": {"dtype": "bfloat16"},
        "model": {"model": shop.model(seed=2)},
    }
    return _others(shop, "others_on_one_store", kinds)


def other_layout_and_salt(shop: SglangWorkshop) -> Outcome:
    """Another layout of host pages and another salt find nothing of each other's."""
    kinds: dict[str, dict[str, object]] = {"layout": {"hicache_mem_layout": "layer_first"}, "salt": {}}
    return _others(shop, "other_layout_and_salt", kinds)


def _others(shop: SglangWorkshop, scenario: str, kinds: dict[str, dict[str, object]]) -> Outcome:
    outcome = Outcome(ENGINE, scenario)
    prompt = batches(1)[0]
    with shop.store(scenario) as store:
        with shop.replica(f"{scenario}-first", **storage(address(store), **LONG)) as replica:
            replica.ask(prompt)
            await_blocks(store, 9)
        for name, more in kinds.items():
            is_same_computation = name in ("layout", "salt", "page_size")
            reference, given = ("llama", {}) if is_same_computation else (f"other-{name}", more)
            wanted = shop.reference(reference, lambda: batches(1), **given)
            options = {"salt": "of another team"} if name == "salt" else {}
            arguments = storage(address(store), **LONG, **options) | more
            with shop.replica(f"{scenario}-{name}", **arguments) as replica:
                got = replica.ask(prompt)
            outcome.compare(got, wanted[0], what=name)
            outcome.notes[name] = got.cached[0]
            outcome.demand(got.cached[0] == 0, f"{name}: {got.cached[0]} tokens of another's")
    return outcome


SCENARIOS: tuple[Callable[[SglangWorkshop], Outcome], ...] = (
    reuse,
    reuse_by_default,
    reuse_generic,
    store_never_there,
    store_in_trouble,
    trouble_in_the_middle,
    full_store,
    slow_store,
    two_at_once,
    random_failures,
    others_on_one_store,
    other_layout_and_salt,
    reuse_by_two_ranks,
    reuse_hybrid,
)
