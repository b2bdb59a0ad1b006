"""What policies learned survives a restart; what is doubtful of it is ignored and harms nobody."""

import asyncio
import contextlib
import itertools
import logging
import threading

import pytest

from kvstore import policy_keeping
from kvstore.assembly import assemble
from kvstore.checksum import checksum
from kvstore.config import Config
from kvstore.errors import InvalidRequest
from kvstore.manager import BlockManager
from kvstore.policy import POLICIES, LruPolicy
from kvstore.policy_file import PolicyFile
from kvstore_tiers.dram import DramTier
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, Harness, running

MIB = 1 << 20


def _kept(folder, **settings):
    return running(GatedTier("ssd"), policy_file=PolicyFile(folder / "policies"), **settings)


async def _use(harness, *, rounds=3):
    fresh = itertools.count(1)
    for _ in range(rounds):
        chain = SPACE.chain([next(fresh) for _ in range(16)])
        await harness.put(chain)
        await harness.fetch(chain)


def _learned(harness):
    return sum(sum(used) for _, used, _ in harness.manager.policy_of("dram").to_state()["classes"])


async def test_a_manager_goes_on_with_what_its_policies_learned(tmp_path):
    async with _kept(tmp_path) as first:
        await _use(first)
        learned = _learned(first)

    async with _kept(tmp_path) as second:
        assert _learned(second) == learned > 0


async def test_what_was_learned_does_not_grow_by_being_kept(tmp_path):
    async with _kept(tmp_path) as first:
        await _use(first)
        learned = _learned(first)
    for _ in range(3):
        async with _kept(tmp_path):
            pass

    async with _kept(tmp_path) as last:
        assert _learned(last) == learned


def _cut(data):
    return data[:-7]


def _flip(data):
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def _other_version(data):
    return data.replace(b"kvstore.policies.1", b"kvstore.policies.9", 1)


def _signed(body):
    return f"kvstore.policies.1 {checksum(body):016x}\n".encode() + body


DOUBTFUL = {
    "cut": _cut,
    "flipped": _flip,
    "other version": _other_version,
    "empty": lambda _: b"",
    "not msgpack": lambda _: _signed(b"\xc1"),
    "a list": lambda _: _signed(b"\x90"),
    "tier without state": lambda _: _signed(b"\x81\xa4dram\x91\xc0"),
    "key of a wrong type": lambda _: _signed(b"\x81\x91\x90\xc0"),
    "state of no class": lambda _: _signed(b"\x81\xa4dram\x92\xa7gittins\x80"),
    "huge": lambda data: data + b"\0" * (16 << 20),
}


@pytest.mark.parametrize("kind", DOUBTFUL)
async def test_doubtful_statistics_are_ignored_with_one_line(tmp_path, caplog, kind):
    async with _kept(tmp_path) as first:
        await _use(first)
    path = tmp_path / "policies"
    path.write_bytes(DOUBTFUL[kind](path.read_bytes()))
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        async with _kept(tmp_path) as second:
            assert _learned(second) == 0
            lines = [record for record in caplog.records if "statistics" in record.message]
            assert len(lines) == 1


async def test_statistics_of_another_policy_are_ignored(tmp_path, caplog):
    async with _kept(tmp_path) as first:
        await _use(first)
    dram = DramTier(capacity_bytes=16 * BLOCK_BYTES)
    manager = BlockManager(
        dram, [GatedTier("ssd")], new_policy=LruPolicy, policy_file=PolicyFile(tmp_path / "policies")
    )

    with caplog.at_level(logging.INFO):
        await manager.open()
        await manager.close()

    assert "are of gittins: not taken over" in caplog.text


async def test_a_file_that_is_no_file_stops_nobody(tmp_path, caplog):
    (tmp_path / "policies").mkdir()

    async with _kept(tmp_path) as harness:
        await _use(harness)

    assert "not kept" in caplog.text


async def test_the_disk_of_a_tier_that_is_down_is_left_alone(tmp_path):
    tier = GatedTier("ssd")
    tier.is_up = False

    async with running(tier, policy_file=PolicyFile(tmp_path / "policies")) as harness:
        await _use(harness)

    assert not (tmp_path / "policies").exists()


class HungFile(PolicyFile):
    """On a disk that does not answer until ``answers`` is set."""

    def __init__(self, path):
        super().__init__(path)
        self.answers = threading.Event()
        self.num_calls = 0

    def read(self):
        self.num_calls += 1
        self.answers.wait()
        return super().read()


async def test_a_hung_disk_delays_start_and_end_by_a_bounded_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(policy_keeping, "PATIENCE_S", 0.05)
    file = HungFile(tmp_path / "policies")
    with contextlib.closing(_Releasing(file)):
        async with asyncio.timeout(60):
            async with running(GatedTier("ssd"), policy_file=file) as harness:
                await _use(harness)

    assert "has taken more than" in caplog.text
    assert file.num_calls == 1


class _Releasing:
    def __init__(self, file):
        self._file = file

    def close(self):
        self._file.answers.set()


async def test_a_store_with_an_ssd_keeps_its_statistics_in_its_first_folder(tmp_path):
    tree = {
        "tiers": {
            "dram": {"capacity_bytes": 16 * MIB},
            "ssd": {"path": [str(tmp_path / "a"), str(tmp_path / "b")], "capacity_bytes": 16 * MIB},
        }
    }

    async def lived():
        store = assemble(Config.from_dict(tree))
        await store.manager.open()
        before = sum(sum(used) for _, used, _ in store.manager.policy_of("dram").to_state()["classes"])
        store.manager.open_namespace(SPACE)
        await _use(Harness(store.manager, store.dram, []))
        await store.manager.close()
        return before

    assert await lived() == 0
    path = tmp_path / "a" / "policies"
    assert path.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "b" / "policies").exists()
    assert await lived() > 0


@pytest.mark.parametrize("name", POLICIES)
async def test_another_policy_keeps_every_block_and_every_lease(name):
    chains = [SPACE.chain(list(range(start, start + 16))) for start in (0, 100, 200)]
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=16, high_water_ratio=1.0) as harness:
        manager = harness.manager
        for chain in chains:
            await harness.put(chain)
        await manager.flush(timeout_s=30)
        leased = await manager.fetch(chains[0], owner=harness.owner)

        assert await manager.change_policy(name) == "gittins"

        assert manager.stats()["policy"] == name
        assert await manager.check() == []
        assert [(await manager.match(chain)).blocks for chain in chains] == [4, 4, 4]
        # More than there is room for: others leave, and what is leased does not.
        for start in (300, 400, 500):
            await harness.put(SPACE.chain(list(range(start, start + 16))))
        assert (await manager.match(chains[0])).tiers == ("dram",) * 4
        manager.release(leased.lease, owner=harness.owner)


async def test_the_order_of_the_policy_before_is_gone_on_with():
    first, second = SPACE.chain(list(range(16))), SPACE.chain(list(range(100, 116)))
    async with running(blocks=16) as harness:
        await harness.manager.change_policy("lru")
        await harness.put(first)
        await harness.put(second)
        await harness.fetch(first)

        before = list(harness.manager.policy_of("dram").candidates(now_s=1e9))

        await harness.manager.change_policy("fifo")

        assert list(harness.manager.policy_of("dram").candidates(now_s=1e9)) == before
        assert {name[:32] for name in before[:4]} == set(second.keys)


async def test_a_policy_that_there_is_not_changes_nothing():
    async with running(blocks=16) as harness:
        with pytest.raises(InvalidRequest, match="'none' is unknown"):
            await harness.manager.change_policy("none")

        assert harness.manager.stats()["policy"] == "gittins"
