"""Scenarios of vLLM whose requests say more than a prompt: adapters, tenants, hints; and its events."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

from tests.engines.replica_process import PATIENT, Answer, ReplicaProcess, engine_environ, transfer_config
from tests.engines.scenario import Outcome, Workshop, batches, tokens
from tests.engines.stored import address, await_blocks
from tests.engines.vllm_tier_scenarios import tier_config

ENGINE = "vllm"
_SHARED = 288
_LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
_PATIENCE_S = 30.0


def lora(shop: Workshop) -> Outcome:
    """No adapter and two of them on one store, and one whose files are others' on another replica."""
    return _lora(shop, "lora", transfer_config)


def tier_lora(shop: Workshop) -> Outcome:
    """The same through vLLM's CPU cache."""
    return _lora(shop, "tier_lora", tier_config)


def _lora(shop: Workshop, scenario: str, configure: Any) -> Outcome:
    outcome = Outcome(ENGINE, scenario)
    folders = {name: _adapter(shop, scenario, name, seed) for name, seed in (("a", 5), ("b", 6))}
    prompt = batches(1)[0]
    with shop.replica(f"{scenario}-reference", **_LORA) as replica:
        wanted = {name: _ask(replica, prompt, folders, name) for name in ("", "a", "b")}
    outcome.demand(
        len({str(one.tokens) for one in wanted.values()}) == 3, "the adapters change nothing: no test"
    )
    with shop.store(scenario) as store:
        transfer = configure(address(store), **PATIENT)
        with shop.replica(f"{scenario}-producer", transfer=transfer, **_LORA) as replica:
            for count, name in enumerate(("", "a", "b"), 1):
                _learn(replica, folders, name)
                got = _ask(replica, prompt, folders, name)
                outcome.compare(got, wanted[name], what=f"producer, {name or 'none'}")
                outcome.demand(got.cached[0] == 0, f"{name}: {got.cached[0]} tokens of another adapter's")
                await_blocks(store, 9 * count)
        with shop.replica(f"{scenario}-consumer", transfer=transfer, **_LORA) as replica:
            for name in ("", "a", "b"):
                _learn(replica, folders, name)
                got = _ask(replica, prompt, folders, name)
                outcome.compare(got, wanted[name], what=f"consumer, {name or 'none'}")
                outcome.notes[f"consumer, {name or 'none'}"] = got.cached[0]
                outcome.demand(got.cached[0] >= _SHARED - 32, f"{name}: reused {got.cached[0]} tokens")
                outcome.external_tokens += got.cached[0]
        shutil.copy(folders["b"] / "adapter_model.safetensors", folders["a"] / "adapter_model.safetensors")
        with shop.replica(f"{scenario}-changed", transfer=transfer, **_LORA) as replica:
            _learn(replica, folders, "a")
            got = _ask(replica, prompt, folders, "a")
            outcome.compare(got, wanted["b"], what="b's weights under a's name and path")
            outcome.notes["b's weights under a's name"] = got.cached[0]
    return outcome


def _adapter(shop: Workshop, scenario: str, name: str, seed: int) -> Path:
    folder = shop.folder / f"{scenario}-adapter-{name}"
    script = Path(__file__).with_name("tiny_adapter.py")
    command = [str(shop.python()), str(script), str(folder), str(seed)]
    subprocess.run(command, check=True, env=engine_environ(), capture_output=True)
    return folder


def _ask(replica: ReplicaProcess, prompt: list[list[int]], folders: dict[str, Path], name: str) -> Answer:
    adapter = None if not name else [name, 1 + sorted(folders).index(name), str(folders[name])]
    return replica.ask(prompt, lora=adapter, reset=True)


def _learn(replica: ReplicaProcess, folders: dict[str, Path], name: str) -> None:
    """Send a short request, with which the adapter's files begin to be hashed."""
    _ask(replica, [tokens(77, 10)], folders, name)
    time.sleep(2)


def requests_that_say_more(shop: Workshop) -> Outcome:
    """Tenants, hints, wrong values, and what vLLM's events say of the store."""
    outcome = Outcome(ENGINE, "requests_that_say_more")
    wanted = shop.reference("llama", lambda: batches(1))[0]
    prompt = batches(1)[0]
    endpoint = f"ipc://{shop.folder}/events.sock"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    asked: tuple[tuple[str, dict[str, object], int], ...] = (
        ("stored for one", {"tenant": "one", "session": "s", "priority": 1, "next_use_s": 60}, 0),
        ("the same tenant", {"tenant": "one", "is_one_off": True}, _SHARED),
        ("another tenant", {"tenant": "two", "save": False}, 0),
        ("no tenant", {"save": False}, 0),
        ("a tenant that is wrong", {"tenant": 5}, 0),
        ("wrong values", {"tenant": "one", "priority": "high", "next_use_s": -1, "what": 1}, _SHARED),
        ("the end", {"tenant": "one", "session": "s", "ends_session": True}, _SHARED),
    )
    with (
        shop.store("more") as store,
        _listener(endpoint) as heard,
        shop.replica(
            "more", transfer=transfer_config(address(store), **PATIENT), kv_events_config=events
        ) as replica,
    ):
        for what, told, tokens_reused in asked:
            got = replica.ask(prompt, reset=True, told={"kvstore": told})
            outcome.compare(got, wanted, what=what)
            outcome.notes[what] = got.cached[0]
            outcome.demand(got.cached[0] == tokens_reused, f"{what}: {got.cached[0]} tokens")
            await_blocks(store, 9)
            outcome.external_tokens += got.cached[0]
        until_s = time.monotonic() + _PATIENCE_S
        stored: list[Any] = []
        while len(stored) < 9 and time.monotonic() < until_s:
            stored += _stored(heard)
    outcome.notes["blocks_told_as_stored"] = len(stored)
    outcome.demand(len(set(stored)) >= 9, f"events told of {len(set(stored))} blocks")
    return outcome


@contextmanager
def _listener(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    heard = context.socket(zmq.SUB)
    heard.setsockopt(zmq.SUBSCRIBE, b"")
    heard.connect(endpoint)
    try:
        yield heard
    finally:
        heard.close(linger=0)
        context.term()


def _stored(heard: "zmq.Socket[bytes]") -> list[Any]:
    """Return the hashes of the blocks that the next batch tells to be in the store."""
    if not heard.poll(500):
        return []
    batch = msgpack.unpackb(heard.recv_multipart()[2])
    return [
        one
        for event in batch[1]
        if event["type"] == "BlockStored" and event.get("ownership") == "kvstore"
        for one in event["block_hashes"]
    ]


def contract(shop: Workshop) -> Outcome:
    """What vLLM's own tests demand of any connector, asked of this one."""
    outcome = Outcome(ENGINE, "contract")
    file = shop.folder / "contract.json"
    script = Path(__file__).with_name("vllm_contract.py")
    with shop.store("contract") as store, shop.log("contract").open("wb") as log:
        command = [str(shop.python()), str(script), str(shop.model()), address(store), str(file)]
        subprocess.run(command, check=True, env=engine_environ(), stdout=log, stderr=log)
    for what, is_so in json.loads(file.read_text()).items():
        outcome.notes[what] = is_so
        outcome.demand(bool(is_so), f"not so: {what}")
    return outcome


SCENARIOS = (contract, requests_that_say_more, lora, tier_lora)
