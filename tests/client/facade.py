"""One asynchronous face for every client, so that one suite holds for all."""

import asyncio
from typing import Any

from kvstore import AsyncKVStore, KVStore


class SyncFace:
    """A KVStore whose calls run on a thread."""

    def __init__(self, client: KVStore) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call

    def client_stats(self) -> Any:
        return self.client.client_stats()


Face = SyncFace | AsyncKVStore
