"""The write budget of the ssd tier: bytes per day, second-hit admission, restarts."""

import time
from pathlib import Path

from kvstore.testing import FakeClock
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.write_budget import WriteBudget
from tests.tiers.blocks import to_read, to_write

SLOT = 8192
DAY_S = 86_400.0


def key(number: int) -> bytes:
    return number.to_bytes(40, "little")


def test_without_a_limit_everything_is_admitted() -> None:
    budget = WriteBudget(0, clock=FakeClock())
    assert all(budget.admit(key(number), 1 << 40) for number in range(10))
    assert not budget.is_tight


def test_a_full_bucket_admits_blocks_at_first_sight_down_to_its_half() -> None:
    budget = WriteBudget(10 * SLOT, clock=FakeClock())
    assert [budget.admit(key(number), SLOT) for number in range(8)] == [True] * 6 + [False] * 2
    assert budget.is_tight


def test_while_it_is_tight_the_second_sight_of_a_block_admits_it() -> None:
    budget = WriteBudget(10 * SLOT, clock=FakeClock())
    for number in range(8):
        budget.admit(key(number), SLOT)
    assert budget.admit(key(6), SLOT)
    assert not budget.admit(key(9), SLOT)


def test_an_empty_bucket_admits_nothing_and_fills_evenly() -> None:
    clock = FakeClock()
    budget = WriteBudget(10 * SLOT, clock=clock)
    budget.restore(0)
    assert [budget.admit(key(1), SLOT) for _ in range(3)] == [False] * 3
    clock.advance(DAY_S / 10 + 1)
    assert budget.admit(key(1), SLOT)
    assert not budget.admit(key(1), SLOT)
    clock.advance(100 * DAY_S)
    assert budget.left_bytes == 10 * SLOT


def test_the_ghost_window_is_bounded_and_forgets_the_oldest() -> None:
    budget = WriteBudget(10 * SLOT, clock=FakeClock(), ghost_keys=2)
    budget.restore(4 * SLOT)
    for number in (1, 2, 3):
        assert not budget.admit(key(number), SLOT)
    assert not budget.admit(key(1), SLOT)
    assert budget.admit(key(3), SLOT)


def test_a_write_that_did_not_happen_is_not_charged() -> None:
    budget = WriteBudget(10 * SLOT, clock=FakeClock())
    budget.admit(key(1), SLOT)
    budget.give_back(SLOT)
    assert budget.left_bytes == 10 * SLOT


async def opened(folder: Path, clock: FakeClock, *, blocks: int = 10) -> SsdTier:
    tier = SsdTier(
        folder, capacity_bytes=1 << 20, write_budget_bytes_per_day=blocks * SLOT, clock=clock, name="ssd"
    )
    await tier.open()
    return tier


async def put(tier: SsdTier, clock: FakeClock, *numbers: int) -> list[WriteStatus]:
    return await tier.write([to_write(number, SLOT) for number in numbers], deadline_s=clock.now_s + 30)


async def test_a_tier_over_its_budget_answers_not_admitted_and_counts_it(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = await opened(tmp_path / "a", clock)
    assert await put(tier, clock, *range(6)) == [WriteStatus.OK] * 6
    assert await put(tier, clock, 7) == [WriteStatus.NOT_ADMITTED]
    assert await put(tier, clock, 7) == [WriteStatus.OK]
    assert tier.counters["not_admitted"] == 1
    assert tier.used_bytes == 7 * SLOT
    await tier.close()


async def test_a_restart_does_not_renew_the_budget(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = await opened(tmp_path / "a", clock)
    await put(tier, clock, *range(6))
    left_bytes = tier.budget_left_bytes
    await tier.close()
    for _ in range(3):
        tier = await opened(tmp_path / "a", FakeClock())
        assert tier.budget_left_bytes == left_bytes == 4 * SLOT
        await tier.close()


async def test_a_kill_does_not_renew_the_budget(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = await opened(tmp_path / "a", clock)
    await put(tier, clock, *range(5))
    assert tier._store._index.budget_left_bytes() == 5 * SLOT
    await tier.close()


async def test_an_exhausted_budget_asks_nobody_to_make_room(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = await opened(tmp_path / "a", clock, blocks=4)
    for number in range(10):
        await put(tier, clock, number, number)
    assert tier.budget_left_bytes == 0
    assert tier.has_room(SLOT, 1000)
    assert await put(tier, clock, 50) == [WriteStatus.NOT_ADMITTED]
    (outcome,) = await tier.read([to_read(0, SLOT)], deadline_s=clock.now_s + 30)
    assert outcome.status is ReadStatus.OK
    await tier.close()


async def test_a_damaged_budget_counts_as_used_up(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = await opened(tmp_path / "a", clock)
    await put(tier, clock, 1)
    with tier._store._index._env.begin(write=True) as transaction:
        transaction.put(b"w", b"\xff" * 16)
    await put(tier, clock)
    store, tier._budget = tier._store, WriteBudget(0, clock=clock)
    assert store.budget_left_bytes() == 0
    await tier.close()
    again = await opened(tmp_path / "a", FakeClock(time.monotonic()))
    assert again.budget_left_bytes == 0
    await again.close()
