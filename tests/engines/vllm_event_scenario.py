"""A store's KV events, decoded with the classes of vLLM itself, while an engine fills the store."""

import json
import select
import subprocess
import time
from pathlib import Path
from typing import Any

from kvstore import KVLayout, KVStore, Namespace
from kvstore.drill.redis_server import free_port
from kvstore.kv_events import HashForm
from tests.engines.replica_process import engine_environ, transfer_config
from tests.engines.scenario import Outcome, Workshop, batches
from tests.engines.stored import address, await_blocks
from tests.metrics.vllm_events import field_names
from tests.store_process import StoreProcess

SPACE = Namespace("told", KVLayout.opaque(block_bytes=4096, block_tokens=16))
TOPIC = "kv@pod@told"
_PATIENCE_S = 120.0


class EventsReader:
    """``events_reader.py`` in the engine's own environment."""

    def __init__(self, shop: Workshop, endpoint: str, replay: str) -> None:
        script = Path(__file__).with_name("events_reader.py")
        self._process = subprocess.Popen(
            [str(shop.python()), str(script), endpoint, replay],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=shop.log("events-reader").open("wb"),
            env=engine_environ(),
            text=True,
        )

    def __enter__(self) -> "EventsReader":
        assert self.line() == "listening"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def line(self) -> str:
        """Return the next line it prints; empty if it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def has_line(self, timeout_s: float = 0.2) -> bool:
        """Whether it has printed more, or ended."""
        return bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def told(self) -> dict[str, Any]:
        """Have it end, and return what it decoded."""
        assert self._process.stdin is not None
        self._process.stdin.write("end\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self.line())
        return found


def events(shop: Workshop) -> Outcome:
    """What a store publishes while an engine fills it, read by vLLM's classes, live and replayed."""
    outcome = Outcome("vllm", "events")
    wanted = shop.reference("llama", lambda: batches(1))
    ports = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    store = shop.store("events")
    store.start(more=("--events", ports[0], "--events-replay", ports[1], "--events-topic", TOPIC))
    try:
        with EventsReader(shop, *ports) as reader:
            _join(store, reader)
            with shop.replica("events", transfer=transfer_config(address(store))) as replica:
                outcome.compare(replica.ask(batches(1)[0]), wanted[0])
            await_blocks(store, 9)
            hashes = _put_and_drop(store)
            told = reader.told()
    finally:
        store.kill()
    _judge(outcome, told, hashes)
    return outcome


def _join(store: StoreProcess, reader: EventsReader) -> None:
    """Store blocks until the subscription has reached the store."""
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(SPACE)
        until_s, number = time.monotonic() + _PATIENCE_S, 0
        while not reader.has_line() and time.monotonic() < until_s:
            number += 1
            client.put(SPACE.chain([1000 + number] * 16), bytes(4096))
    assert reader.line() == "heard"


def _put_and_drop(store: StoreProcess) -> list[int]:
    """Store four blocks and drop them; returns their hashes."""
    chain = SPACE.chain(range(64))
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(SPACE)
        for change in (lambda: client.put(chain, bytes(4 * 4096)), lambda: client.drop(chain)):
            wanted = _blocks_told(client) + len(chain)
            change()
            until_s = time.monotonic() + _PATIENCE_S
            while _blocks_told(client) < wanted and time.monotonic() < until_s:
                time.sleep(0.05)
    return [int(HashForm.INT.of(key)) for key in chain.keys]


def _blocks_told(client: KVStore) -> int:
    return int(client.stats()["server"]["events"]["blocks"])


def _judge(outcome: Outcome, told: dict[str, Any], hashes: list[int]) -> None:
    live, replayed = told["live"], told["replayed"]
    of = {
        name: [event for batch in replayed for event in batch["events"] if event["class"] == name]
        for name in ("AllBlocksCleared", "BlockStored", "BlockRemoved")
    }
    mine = [event for event in of["BlockStored"] if event["block_hashes"] == hashes]
    engines = [event for event in of["BlockStored"] if event["block_size"] == 32]
    removed = [event for event in of["BlockRemoved"] if set(hashes) <= set(event["block_hashes"])]
    outcome.notes |= {"batches": len(replayed), **{name: len(found) for name, found in of.items()}}
    outcome.demand(told["topics"] == [TOPIC], f"topics {told['topics']}")
    outcome.demand(
        [batch["number"] for batch in replayed] == list(range(len(replayed))), "numbers of the replay"
    )
    outcome.demand(bool(live) and all(batch in replayed for batch in live), "live is not as replayed")
    outcome.demand([batch["rank"] for batch in replayed] == [0] * len(replayed), "ranks")
    outcome.demand(replayed[0]["events"] == [of["AllBlocksCleared"][0]], "no AllBlocksCleared first")
    outcome.demand(
        [(event["medium"], event["block_size"], event["parent_block_hash"]) for event in mine]
        == [("CPU", 16, None)],
        "the chain that was put",
    )
    outcome.demand([event["medium"] for event in removed] == ["CPU"], "the chain that was dropped")
    outcome.demand(
        sum(len(event["block_hashes"]) for event in engines) >= 9, "blocks that the engine computed"
    )
    recorded = field_names()
    outcome.demand(
        told["fields"] == recorded, f"vLLM's classes are not as recorded: {told['fields']} != {recorded}"
    )
