"""A real store that publishes its events, and the blocks that tests put into it."""

from kvstore import KVLayout, KVStore, Namespace
from kvstore.client_state import Timeouts
from kvstore.drill.store_process import StoreProcess, StoreSettings
from kvstore.kv_events import HashForm
from tests.redis_server import free_port

MIB = 1 << 20
BLOCK_BYTES = 4096
SPACE = Namespace("m", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=16))
PATIENT = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=60)


def chain_of(number, num_blocks=4, space=SPACE):
    return space.chain([number] * 8 + list(range(num_blocks * 16 - 8)))


def put(client, number, num_blocks=4, space=SPACE):
    chain = chain_of(number, num_blocks, space)
    client.put(chain, bytes(num_blocks * BLOCK_BYTES))
    return chain


def hashes(chain):
    return [HashForm.INT.of(key) for key in chain.keys]


class PublishingStore(StoreProcess):
    """A store that publishes on loopback, over ssd and, if there is one, a Redis server."""

    def __init__(self, folder, *, redis=None, more=(), endpoint="", http_port=0, dram_bytes=16 * MIB):
        (folder / "disk").mkdir(parents=True, exist_ok=True)
        settings = StoreSettings(
            dram_bytes=dram_bytes,
            ssd_bytes=32 * MIB,
            ssd_folder=folder / "disk",
            redis_url=redis.url if redis else "",
            http_port=http_port,
        )
        super().__init__(folder, settings)
        self.endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
        self.replay = f"tcp://127.0.0.1:{free_port()}"
        self._words = ("--events", self.endpoint, "--events-replay", self.replay, *more)

    def __enter__(self):
        self.start(more=self._words)
        return self

    def connect(self, space=SPACE):
        client = KVStore.connect(self.socket_path, timeouts=PATIENT)
        client.open_namespace(space)
        return client
