"""One asynchronous face for every client, so that one suite holds for all."""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

from kvstore import AsyncKVStore, KVStore, Lease, LeasedMatch, Reservation, WritableBlock

_CALLS = ("renew", "release", "commit", "abandon")


class SyncHeld:
    """A lease or reservation of a KVStore whose calls run on a thread."""

    def __init__(self, held: Lease | Reservation) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.held, name)
        if name not in _CALLS:
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(found, *args, **kwargs)

        return call

    async def __aenter__(self) -> "SyncHeld":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self.held.__exit__, *error)

    def __len__(self) -> int:
        assert isinstance(self.held, Reservation)
        return len(self.held)

    def __iter__(self) -> Iterator[WritableBlock]:
        assert isinstance(self.held, Reservation)
        return iter(self.held)


class SyncFace:
    """A KVStore whose calls run on a thread."""

    def __init__(self, client: KVStore) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            plain = [given.held if isinstance(given, SyncHeld) else given for given in args]
            return _wrapped(await asyncio.to_thread(method, *plain, **kwargs))

        return call

    def client_stats(self) -> Any:
        return self.client.client_stats()


def _wrapped(result: Any) -> Any:
    if isinstance(result, (Lease, Reservation)):
        return SyncHeld(result)
    if isinstance(result, LeasedMatch):
        return dataclasses.replace(result, lease=SyncHeld(result.lease))
    return result


Face = SyncFace | AsyncKVStore
