"""StoreTier: a sidecar as a lower tier, alone and under an engine's manager."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, KVLayout, Namespace, PrefixChain
from kvstore.arena_link import ArenaCache
from kvstore.async_link import AsyncLink
from kvstore.checksum import checksum
from kvstore.config import Config
from kvstore.hints import Hints
from kvstore.keys import BlockKey
from kvstore.manager import BlockManager
from kvstore.messages import ChainRef, Commit, Fetch, Lent, OpenNamespace, Reserve
from kvstore.miss import MissReason
from kvstore.running import serving
from kvstore.tier import BlockHeader, BlockId, ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_tiers.dram import DramTier
from kvstore_tiers.store import StoreTier
from tests.redis_server import free_port
from tests.store_process import MIB

NAMESPACE = Namespace("tiny", KVLayout.opaque(block_bytes=8192, block_tokens=4))
LAYOUT = NAMESPACE.layout
CHAIN = NAMESPACE.chain(range(16))
SIDECAR = Config.from_dict({"tiers": {"dram": {"capacity_bytes": 4 * MIB, "staging_bytes": MIB}}})


def _soon() -> float:
    return time.monotonic() + 30


def _payload(index: int) -> bytes:
    return bytes([index + 1]) * LAYOUT.block_bytes


def _ids(chain: PrefixChain = CHAIN) -> list[BlockId]:
    return [BlockId(chain.namespace, LAYOUT.whole, key) for key in chain.keys]


def _header(index: int) -> BlockHeader:
    parent = CHAIN.keys[index - 1] if index else BlockKey(CHAIN.namespace)
    payload = _payload(index)
    return BlockHeader(_ids()[index], parent, index, LAYOUT.fingerprint, len(payload), checksum(payload))


def _writes(*indices: int) -> list[WriteRequest]:
    return [WriteRequest(_header(index), memoryview(_payload(index))) for index in indices]


def _reads(*indices: int) -> list[ReadRequest]:
    return [
        ReadRequest(
            _ids()[index],
            LAYOUT.fingerprint,
            LAYOUT.block_bytes,
            memoryview(bytearray(12288)),
            parent=_header(index).parent,
            depth=index,
        )
        for index in indices
    ]


@pytest.fixture
async def tier(tmp_path: Path) -> AsyncIterator[StoreTier]:
    path = tmp_path / "kv.sock"
    made = StoreTier(path)
    async with serving(SIDECAR, socket_path=path):
        await made.open()
        made.open_namespace(NAMESPACE)
        yield made
        await made.close()


async def test_what_was_written_is_probed_and_read_back_with_its_header(tier: StoreTier) -> None:
    assert await tier.write(_writes(0, 1, 2), deadline_s=_soon()) == [WriteStatus.OK] * 3
    reads = _reads(0, 1, 2)

    outcomes = await tier.read(reads, deadline_s=_soon())

    assert (await tier.probe(_ids(), deadline_s=_soon())).tiers == ["dram", "dram", "dram", None]
    assert [outcome.header for outcome in outcomes] == [_header(index) for index in range(3)]
    assert {outcome.origin for outcome in outcomes} == {"dram"}
    assert [bytes(read.buffer[:8192]) for read in reads] == [_payload(index) for index in range(3)]


async def test_reading_ends_at_the_first_absent_block(tier: StoreTier) -> None:
    await tier.write(_writes(0, 1, 3), deadline_s=_soon())

    outcomes = await tier.read(_reads(0, 1, 2, 3), deadline_s=_soon())

    assert [outcome.status for outcome in outcomes] == [
        ReadStatus.OK,
        ReadStatus.OK,
        ReadStatus.ABSENT,
        ReadStatus.UNAVAILABLE,
    ]


async def test_a_second_write_of_a_block_is_ok(tier: StoreTier) -> None:
    await tier.write(_writes(0), deadline_s=_soon())

    assert await tier.write(_writes(0, 1), deadline_s=_soon()) == [WriteStatus.OK] * 2


async def test_a_payload_that_differs_from_its_header_is_not_stored(tier: StoreTier) -> None:
    (good,) = _writes(0)
    bad = WriteRequest(good.header, memoryview(b"x" * 8192))

    assert await tier.write([bad], deadline_s=_soon()) == [WriteStatus.FULL]
    assert (await tier.probe(_ids()[:1], deadline_s=_soon())).tiers == [None]


async def test_a_block_without_room_is_not_taken_for_written_because_others_are_present(
    tier: StoreTier, tmp_path: Path
) -> None:
    await tier.write(_writes(1, 2), deadline_s=_soon())
    link = await AsyncLink.open(tmp_path / "kv.sock", ArenaCache())
    await link.ask(OpenNamespace(NAMESPACE), _soon())
    await link.ask(Fetch(ChainRef(CHAIN[1:3]), 1_000_000), _soon())
    writers, lent = [], None
    while lent is None or lent.slots:
        # Each gets half of what the others left.
        others = NAMESPACE.chain(range(1000 * len(writers) + 1000, 1000 * len(writers) + 5000))
        writers.append(await AsyncLink.open(tmp_path / "kv.sock", ArenaCache()))
        await writers[-1].ask(OpenNamespace(NAMESPACE), _soon())
        lent = await writers[-1].ask(Reserve(ChainRef(others), 10_000), _soon())
        assert isinstance(lent, Lent)

    statuses = await tier.write(_writes(0, 1, 2), deadline_s=time.monotonic() + 0.2)

    # The store cannot say which block it had no room for, so nothing is claimed of any.
    assert statuses[0] is not WriteStatus.OK
    assert (await tier.probe(_ids(), deadline_s=_soon())).tiers == [None] * 4
    for opened in (link, *writers):
        await opened.close()


async def test_a_block_that_somebody_else_stored_meanwhile_is_written(
    tier: StoreTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StoreTier(tier._address)
    await other.open()
    other.open_namespace(NAMESPACE)
    await tier.probe(_ids(), deadline_s=_soon())
    link = tier._client._link
    ask = link.ask

    async def ask_late(request, deadline_s):
        if isinstance(request, Commit):
            assert await other.write(_writes(1), deadline_s=_soon()) == [WriteStatus.OK]
        return await ask(request, deadline_s)

    monkeypatch.setattr(link, "ask", ask_late)

    assert await tier.write(_writes(0, 1), deadline_s=_soon()) == [WriteStatus.OK] * 2
    await other.close()


async def test_blocks_of_a_namespace_it_was_not_told_of_are_no_hits(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    async with serving(SIDECAR, socket_path=path):
        tier = StoreTier(path)
        await tier.open()

        assert (await tier.probe(_ids(), deadline_s=_soon())).tiers == [None] * 4
        assert [at.status for at in await tier.read(_reads(0), deadline_s=_soon())] == [ReadStatus.MISMATCH]
        assert await tier.write(_writes(0), deadline_s=_soon()) == [WriteStatus.REFUSED]
        await tier.drop(_ids())
        await tier.close()


async def test_dropped_blocks_are_absent(tier: StoreTier) -> None:
    await tier.write(_writes(0, 1), deadline_s=_soon())

    await tier.drop(_ids())

    assert (await tier.probe(_ids(), deadline_s=_soon())).tiers == [None] * 4


async def test_without_a_server_it_opens_and_everything_is_unavailable(tmp_path: Path) -> None:
    tier = StoreTier(tmp_path / "none.sock")
    await tier.open()
    tier.open_namespace(NAMESPACE)

    assert (await tier.probe(_ids(), deadline_s=_soon())).tiers == [None] * 4
    assert not tier.health().is_up
    assert "none.sock" in tier.health().reason
    assert await tier.write(_writes(0), deadline_s=_soon()) == [WriteStatus.UNAVAILABLE]
    assert [at.status for at in await tier.read(_reads(0), deadline_s=_soon())] == [ReadStatus.UNAVAILABLE]
    await tier.drop(_ids())
    await tier.close()


async def test_an_engines_manager_finds_in_the_sidecar_what_another_engine_computed(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    async with serving(SIDECAR, socket_path=path):
        managers = []
        for _ in range(2):
            tier = StoreTier(path)
            manager = BlockManager(DramTier(capacity_bytes=MIB, name="vram"), [tier])
            await manager.open()
            manager.open_namespace(NAMESPACE)
            tier.open_namespace(NAMESPACE)
            managers.append(manager)
        first, second = managers
        owner = first.new_owner()
        reserved = await first.reserve(CHAIN, owner=owner, timeout_s=10)
        slots = [at.slot for at in reserved.slots]
        async with first._state.top.writing(slots, LAYOUT.block_bytes) as buffers:
            for index, buffer in enumerate(buffers):
                np.frombuffer(buffer, np.uint8)[:] = index + 1
        sums = [checksum(_payload(index)) for index in range(4)]
        first.commit(CHAIN, slots, owner=owner, checksums=sums)
        assert await first.flush(timeout_s=10)

        found = await second.match(CHAIN, timeout_s=10)
        fetched = await second.fetch(CHAIN, owner=second.new_owner(), timeout_s=10)

        assert found.tiers == ("dram",) * 4
        assert [block.checksum for block in fetched.blocks] == sums
        assert {block.origin for block in fetched.blocks} == {"dram"}
        for manager in managers:
            assert await manager.check() == []
            await manager.close()


async def test_it_reaches_a_store_over_http(tmp_path: Path) -> None:
    config = Config.from_dict(
        {
            "tiers": {"dram": {"capacity_bytes": 4 * MIB, "staging_bytes": MIB}},
            "http": {"listen": f"127.0.0.1:{free_port()}"},
        }
    )
    async with serving(config, socket_path=tmp_path / "kv.sock") as server:
        assert server.http_url is not None
        tier = StoreTier(server.http_url)
        await tier.open()
        tier.open_namespace(NAMESPACE)
        assert await tier.write(_writes(0, 1), deadline_s=_soon()) == [WriteStatus.OK] * 2
        reads = _reads(0, 1)
        assert [outcome.status for outcome in await tier.read(reads, deadline_s=_soon())] == [
            ReadStatus.OK
        ] * 2
        assert bytes(reads[1].buffer[: LAYOUT.block_bytes]) == _payload(1)
        await tier.close()


async def test_without_a_server_over_http_everything_is_unavailable() -> None:
    tier = StoreTier(f"http://127.0.0.1:{free_port()}")
    await tier.open()
    tier.open_namespace(NAMESPACE)
    assert (await tier.probe(_ids(), deadline_s=_soon())).reason is MissReason.UNAVAILABLE
    outcomes = await tier.read(_reads(0), deadline_s=_soon())
    assert [outcome.status for outcome in outcomes] == [ReadStatus.UNAVAILABLE]
    assert await tier.write(_writes(0), deadline_s=_soon()) == [WriteStatus.UNAVAILABLE]
    await tier.drop(_ids())
    await tier.close()


async def test_hints_to_an_engines_manager_reach_the_sidecar(tmp_path: Path) -> None:
    async with (
        serving(SIDECAR, socket_path=tmp_path / "s"),
        await AsyncKVStore.connect(tmp_path / "s") as asker,
    ):
        top = DramTier(capacity_bytes=4 * MIB, staging_bytes=MIB)
        manager = BlockManager(top, [StoreTier(tmp_path / "s")])
        await manager.open()
        manager.open_namespace(NAMESPACE)
        try:
            manager.note_hints(CHAIN, Hints(ends_session=True))
            async with asyncio.timeout(60):
                while not (await asker.stats())["hinted_requests"]:  # noqa: ASYNC110  counted, not announced
                    await asyncio.sleep(0.01)
        finally:
            await manager.close()


async def test_hints_are_no_burden_where_no_sidecar_is(tmp_path: Path) -> None:
    tier = StoreTier(tmp_path / "nobody")
    await tier.open()
    tier.open_namespace(NAMESPACE)

    assert not await tier.note_hints(CHAIN, Hints(ends_session=True))
    await tier.close()
