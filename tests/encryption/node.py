"""A store as its configuration describes it, with encryption, and what lies on its media."""

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from kvstore.assembly import assemble
from kvstore.checksum import checksum
from kvstore.config import Config
from kvstore.drill.blocks import payload_of
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore.tenant import TenantId, tenant_of
from kvstore.testing import FaultyTier
from kvstore.tier import Slot, Tier
from kvstore.vault import Vault
from kvstore_tiers.dram import DramTier
from kvstore_tiers.sealed import SealedTier
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_array import SsdArray
from tests.redis_server import RedisServer

BLOCK_BYTES = 8192
WINDOW_BYTES = 64
MASTER = "aa" * 32
OTHER_MASTER = "bb" * 32


def space_of(salt: bytes, model: str = "m") -> Namespace:
    return Namespace(
        model=model, layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4), tenant_salt=salt
    )


ANN, BOB = space_of(b"salt of ann"), space_of(b"salt of bob")


def tenant(space: Namespace) -> TenantId:
    return tenant_of(space.tenant_salt)


class Node:
    """One open store, and a few verbs that copy payloads as a client would."""

    def __init__(self, manager: BlockManager, dram: DramTier) -> None:
        self.manager = manager
        self.dram = dram
        self.owner = manager.new_owner()

    @property
    def lower(self) -> Sequence[Tier]:
        return self.manager._state.lower

    @property
    def vault(self) -> Vault:
        assert self.manager._eraser is not None
        return self.manager._eraser._vault

    @property
    def is_clearing(self) -> bool:
        assert self.manager._eraser is not None
        return bool(self.manager._eraser._clearing)

    def hold_tier(self, index: int) -> FaultyTier:
        """Let calls of the medium below a sealed tier wait until ``let_go``."""
        sealed = self.lower[index]
        assert isinstance(sealed, SealedTier)
        gate = FaultyTier(sealed.inner)
        sealed._inner = gate
        gate.hold()
        return gate

    async def put(self, space: Namespace, chain: PrefixChain) -> int:
        self.manager.open_namespace(space)
        reserved = await self.manager.reserve(chain, owner=self.owner, timeout_s=5)
        stored = 0
        for at in reserved.slots:
            data = payload_of(chain.keys[at.position], BLOCK_BYTES)
            async with self.dram.writing([at.slot], BLOCK_BYTES) as (buffer,):
                np.asarray(buffer)[:BLOCK_BYTES] = data
            block = chain[at.position : at.position + 1]
            done = self.manager.commit(block, [at.slot], owner=self.owner, checksums=[checksum(data)])
            stored += done[0]
            self.manager.return_slots([at.slot], owner=self.owner)
        return stored

    async def store(self, space: Namespace, chain: PrefixChain) -> None:
        """Put blocks, and have them in every tier."""
        assert await self.put(space, chain) == len(chain)
        assert await self.manager.flush(timeout_s=30)

    async def fetch(self, space: Namespace, chain: PrefixChain) -> tuple[list[str], MissReason | None]:
        """Fetch, compare every payload, and release; returns (origins, reason)."""
        self.manager.open_namespace(space)
        fetched = await self.manager.fetch(chain, owner=self.owner, timeout_s=5)
        for key, block in zip(chain.keys, fetched.blocks, strict=False):
            assert self.bytes_in(block.slot) == payload_of(key, BLOCK_BYTES).tobytes()
        if fetched.lease is not None:
            self.manager.release(fetched.lease, owner=self.owner)
        return [block.origin for block in fetched.blocks], fetched.reason

    async def origins(self, space: Namespace, chain: PrefixChain) -> list[str]:
        """Fetch, and return where the blocks came from."""
        return (await self.fetch(space, chain))[0]

    @property
    def disks(self) -> Sequence[SsdTier]:
        """The folders that are in use."""
        sealed = self.lower[0]
        assert isinstance(sealed, SealedTier)
        assert isinstance(sealed.inner, SsdArray)
        return sealed.inner.disks

    async def empty_dram(self, chain: PrefixChain) -> None:
        """Have blocks that are in a tier below leave memory."""
        assert await self.manager.demote(chain, timeout_s=30) == len(chain)

    def bytes_in(self, slot: Slot) -> bytes:
        return bytes(self.dram.arena.view.slot(slot, BLOCK_BYTES))

    def arena_bytes(self) -> bytes:
        view = self.dram.arena.view
        return bytes(view.slot(view.format.slots_offset, view.capacity_bytes))


def tree(
    folder: Path, *, redis: RedisServer | None = None, master: str | None = MASTER, ssd: bool = True
) -> dict[str, object]:
    """Return a configuration with everything of the node in one folder."""
    folder.mkdir(exist_ok=True)
    tiers: dict[str, object] = {"dram": {"capacity_bytes": "2MiB", "staging_bytes": 0}}
    if ssd:
        tiers["ssd"] = {"path": str(folder / "ssd"), "capacity_bytes": "4MiB"}
    if redis is not None:
        tiers["remote"] = {"url": redis.url, "timeout_s": 5, "breaker_backoff_s": 0.05}
    made: dict[str, object] = {"tiers": tiers}
    if master is not None:
        (folder / "master").write_text(master)
        made["encryption"] = {"keys": f"file:{folder / 'master'}"}
    return made


@contextlib.asynccontextmanager
async def node(
    folder: Path, *, redis: RedisServer | None = None, master: str | None = MASTER, ssd: bool = True
) -> AsyncIterator[Node]:
    """Run a node; its invariants are checked before it is closed."""
    store = assemble(Config.from_dict(tree(folder, redis=redis, master=master, ssd=ssd)))
    await store.manager.open()
    try:
        await store.records.open()
        yield Node(store.manager, store.dram)
        problems = await store.manager.check()
        assert problems == []
    finally:
        await store.records.close()
        await store.manager.close()


def plaintext_windows(data: bytes, keys: Sequence[BlockKey]) -> int:
    """Count windows of blocks' plaintext that stand somewhere in bytes."""
    count = 0
    for key in keys:
        plain = payload_of(key, BLOCK_BYTES).tobytes()
        count += sum(plain[at : at + WINDOW_BYTES] in data for at in range(0, BLOCK_BYTES, 512))
    return count


def files_in(folder: Path) -> bytes:
    """Return all that is in files below a folder."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def values_in(redis: RedisServer) -> dict[bytes, bytes]:
    """Return every key of a server with its value."""
    with socket.create_connection(("127.0.0.1", redis.port), timeout=5) as stream:
        stream.sendall(b"*2\r\n$4\r\nKEYS\r\n$1\r\n*\r\n")
        lines = stream.makefile("rb")
        names = []
        for _ in range(int(lines.readline()[1:])):
            length = int(lines.readline()[1:])
            names.append(lines.read(length + 2)[:length])
        lines.close()
    return {name: redis.ask(b"GET", name) for name in names}
