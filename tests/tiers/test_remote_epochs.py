"""Epochs of models, shared between nodes through a real server."""

from pathlib import Path

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore_tiers.dram import DramTier
from kvstore_tiers.remote import RemoteTier
from tests.redis_server import RedisServer

SPACE = Namespace(model="m", layout=KVLayout.opaque(block_bytes=4096, block_tokens=4))


async def opened_manager(url: str) -> BlockManager:
    manager = BlockManager(DramTier(capacity_bytes=1 << 20), [RemoteTier(url, timeout_s=5)])
    await manager.open()
    manager.open_namespace(SPACE)
    return manager


async def test_two_nodes_agree_on_an_epoch_through_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start()
    one, other = await opened_manager(server.url), await opened_manager(server.url)
    try:
        assert await one.advance_epoch("m") == 1
        await other._epochs._follow()
        assert await other.advance_epoch("m") == 2
        await one._epochs._follow()

        assert (one.epoch("m"), other.epoch("m")) == (2, 2)
        assert (await one.match(SPACE.chain(range(8)))).reason is MissReason.OTHER_EPOCH
    finally:
        await one.close()
        await other.close()
        server.stop()
