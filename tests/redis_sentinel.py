"""The sentinels of the drill, for tests."""

from kvstore.drill.redis_sentinel import MASTER, RedisSentinels, Sentinel

__all__ = ["MASTER", "RedisSentinels", "Sentinel"]
