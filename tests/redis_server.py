"""The Redis-protocol server of the drill, for tests."""

from kvstore.drill.redis_server import RedisServer, find_binary, free_port

__all__ = ["RedisServer", "find_binary", "free_port"]
