"""A store with its HTTP face on a free port, and a small client that says exactly what it is told to."""

import contextlib
import io
import json
import struct
import time
from dataclasses import dataclass

import aiohttp
import numpy as np

from kvstore.branches import Branches
from kvstore.checksum import checksum
from kvstore.doors import Doors
from kvstore.http import HttpFace, Limits
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.size_curve import SizeCurve
from kvstore.state import ManagerSettings
from kvstore_tiers.dram import DramTier
from tests.record_kit import memory_records

BLOCK_BYTES = 8192
BLOCK_TOKENS = 4
LAYOUT = KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
SPACE = Namespace(model="m", layout=LAYOUT)


def payload(key, length_bytes=BLOCK_BYTES):
    return np.frombuffer(bytes(key) * (length_bytes // len(key)), dtype=np.uint8).tobytes()


def sum_text(data):
    return f"{checksum(data):016x}"


def chain_of(*tokens, space=SPACE):
    return space.chain(list(tokens))


def long_chain(blocks, *, first=0, space=SPACE):
    return space.chain(list(range(first, first + blocks * space.block_tokens)))


def layout_fields(layout=LAYOUT):
    names = ("dtype", "num_layers", "block_tokens", "num_kv_heads", "head_dim", "kv_planes", "order")
    return {name: getattr(layout, name) for name in names}


def hex_keys(chain):
    return [key.hex() for key in chain.keys]


def framed(head, body=b""):
    data = json.dumps(head).encode()
    return struct.pack("<I", len(data)) + data + body


def unframed(data):
    (length,) = struct.unpack_from("<I", data)
    head = json.loads(data[4 : 4 + length])
    body, size = data[4 + length :], head["length_bytes"]
    return head, [body[start : start + size] for start in range(0, len(body), size)]


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        return self.json["error"]["code"]


class HttpClient:
    """Speaks the API by hand; ``key`` goes into every request."""

    def __init__(self, session, key=None):
        self.session = session
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def ask(self, method, path, *, headers=None, **options):
        headers = {**self._headers, **(headers or {})}
        async with self.session.request(method, path, headers=headers, **options) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def get(self, path, **options):
        return await self.ask("GET", path, **options)

    async def post(self, path, **fields):
        return await self.ask("POST", path, json=fields)

    async def open(self, space=SPACE, **more):
        fields = {"model": space.model, "layout": layout_fields(space.layout), **more}
        return await self.post("/v1/namespaces", **fields)

    def block_path(self, chain, index=0, **query):
        key = chain.keys[index]
        if chain.start + index:
            parent = chain.parent if index == 0 else chain.keys[index - 1]
            query = {"start": chain.start + index, "parent": parent.hex(), **query}
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return f"/v1/blocks/{chain.namespace.hex()}/{key.hex()}" + (f"?{text}" if text else "")

    async def put_block(self, chain, index=0, data=None, **options):
        data = payload(chain.keys[index]) if data is None else data
        return await self.ask("PUT", self.block_path(chain, index), data=data, **options)

    async def get_block(self, chain, index=0, **query):
        return await self.get(self.block_path(chain, index, **query))

    async def store(self, chain, payloads=None, **head):
        payloads = [payload(key) for key in chain.keys] if payloads is None else payloads
        fields = {"namespace": chain.namespace.hex(), "keys": hex_keys(chain), **head}
        return await self.ask("POST", "/v1/store", data=io.BytesIO(framed(fields, b"".join(payloads))))

    async def fetch(self, chain, **more):
        answer = await self.post("/v1/fetch", namespace=chain.namespace.hex(), keys=hex_keys(chain), **more)
        assert answer.status == 200, answer.body
        return unframed(answer.body)


class HttpStore:
    """A running store and its face."""

    def __init__(self, manager, dram, face):
        self.manager = manager
        self.dram = dram
        self.face = face

    @property
    def counters(self):
        return self.face.counters

    @contextlib.asynccontextmanager
    async def client(self, key=None, **options):
        async with aiohttp.ClientSession(self.face.url, **options) as session:
            yield HttpClient(session, key)

    def free_bytes(self):
        return self.dram.capacity_bytes - self.dram.used_bytes


@contextlib.asynccontextmanager
async def http_store(
    *lower,
    blocks=64,
    limits=None,
    doors=None,
    is_started=True,
    lease_s=30.0,
    record_quota_bytes=16 << 20,
    **settings,
):
    """Run a store with a face; afterwards nothing may be held by anyone, and every invariant holds."""
    dram = DramTier(capacity_bytes=blocks * BLOCK_BYTES)
    records = memory_records(quota_bytes=record_quota_bytes)
    manager = BlockManager(
        dram,
        lower,
        settings=ManagerSettings(timeout_s=5.0, lease_s=lease_s, **settings),
        branches=Branches(clock=time.monotonic),
        new_size_curve=lambda limit_bytes: SizeCurve(
            multipliers=(1, 3, 5, 7), limit_bytes=limit_bytes, clock=time.monotonic
        ),
    )
    face = HttpFace(
        manager,
        dram,
        ("127.0.0.1", 0),
        limits=limits or Limits(),
        doors=doors or Doors(),
        lease_s=lease_s,
        records=records,
    )
    await face.listen()
    await manager.open()
    await records.open()
    if is_started:
        face.start()
    try:
        yield HttpStore(manager, dram, face)
        await face.stop()
        assert manager.stats()["owners"] == 0
        assert manager.stats()["live_leases"] == 0
        assert await manager.check() == []
        assert face.counters.errors["internal"] == 0
    finally:
        await face.stop()
        await records.close()
        await manager.close()
