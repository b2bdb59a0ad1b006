"""Records that are read, swept and put at the same time: what was acknowledged stays."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.records import RecordOutcome
from kvstore_tiers.record_change import Change
from kvstore_tiers.record_disk import RecordDisk
from tests.record_kit import Kit, Store


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


class Gates:
    """Holds commits of a disk in the middle: before the disk has them, or after, before anybody is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._commit = RecordDisk.commit
        self.before, self.after = threading.Event(), threading.Event()
        self.is_before, self.is_after = threading.Event(), threading.Event()
        self.open()
        monkeypatch.setattr(RecordDisk, "commit", lambda disk, changes: self._pass(disk, changes))

    def open(self) -> None:
        self.before.set()
        self.after.set()

    def _pass(self, disk: RecordDisk, changes: Sequence[Change]) -> None:
        self.is_before.set()
        self.before.wait()
        self._commit(disk, changes)
        self.is_after.set()
        self.after.wait()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Gates:
    return Gates(monkeypatch)


async def begun(
    store: Store, event: threading.Event, name: str, value: bytes, **more: object
) -> "asyncio.Task":
    event.clear()
    put = asyncio.create_task(store.set(name, value, **more))
    await asyncio.to_thread(event.wait)
    return put


async def test_a_read_between_a_commit_and_its_news_does_not_take_the_record_for_damaged(
    kit: Kit, gates: Gates
) -> None:
    async with kit.store() as store:
        first = await store.set("n", b"one")
        gates.after.clear()
        put = await begun(store, gates.is_after, "n", b"two", if_version=first.version)
        read = asyncio.create_task(store.look("n"))
        await asyncio.wait([read], timeout=0.2)
        gates.open()

        assert (await put).outcome is RecordOutcome.STORED
        found = (await read).record
        assert found is not None
        assert found.value in (b"one", b"two")
        assert await store.value("n") == b"two"
    async with kit.store() as store:
        assert await store.value("n") == b"two"


async def test_a_put_in_place_of_a_record_that_is_over_is_not_swept_with_it(kit: Kit, gates: Gates) -> None:
    async with kit.store() as store:
        await store.set("n", b"one", ttl_s=5.0)
        kit.clock.moved_s += 6.0
        gates.before.clear()
        put = await begun(store, gates.is_before, "n", b"two", if_version=0)
        sweep = asyncio.create_task(store.truth.sweep())
        await asyncio.wait([sweep], timeout=0.2)
        gates.open()
        await sweep

        assert (await put).outcome is RecordOutcome.STORED
        assert await store.value("n") == b"two"
    async with kit.store() as store:
        assert await store.value("n") == b"two"
