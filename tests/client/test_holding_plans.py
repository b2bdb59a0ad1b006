"""Plans of what is held, step by step against an arena: slots that are none, and renewals that end."""

from collections.abc import Iterator

import pytest

from kvstore.arena_link import MappedArena
from kvstore.arena_view import ArenaView
from kvstore.calls import Ask, Connection
from kvstore.errors import ProtocolMismatch
from kvstore.holding_calls import Grant, lease_plan, match_and_lease_plan, renew_plan, reserve_plan
from kvstore.messages import Count, Leased, Lent, LentSlot, ReadySlot, Renewed, TierNames
from kvstore_tiers.arena import Arena
from tests.client.conftest import BLOCK_BYTES, NAMESPACE

CHAIN = NAMESPACE.chain(range(8))


class OpenLink:
    """A connection that stands."""

    is_lost = False


class PlainSession:
    """A session over an arena of this process."""

    def __init__(self, view: ArenaView) -> None:
        self._view = view
        self.connection: Connection = OpenLink()

    def remaining_s(self) -> float:
        return 1.0

    def reading_arena(self) -> ArenaView:
        return self._view

    def writing_arena(self) -> ArenaView:
        return self._view

    def mapped_arena(self) -> MappedArena:
        return MappedArena(bytes(16), self._view, self._view)

    @property
    def stock(self) -> None:
        return None

    def note_corrupt(self) -> None:
        raise AssertionError


@pytest.fixture
def session() -> Iterator[PlainSession]:
    arena = Arena.create(1 << 20)
    yield PlainSession(arena.view)
    arena.close()


def _leased(offset: int, stored: int = 1) -> Leased:
    return Leased(
        1, 5_000_000, BLOCK_BYTES, (ReadySlot(offset, 0, 0),), TierNames.of(["dram"] * stored), None
    )


@pytest.mark.parametrize("offset", [0, 4096 + 1, 1 << 40], ids=["header", "unaligned", "beyond"])
def test_slots_outside_the_arena_break_the_protocol(session: PlainSession, offset: int) -> None:
    plans = {
        "lease": lease_plan(session, CHAIN, part=None, length_bytes=BLOCK_BYTES, now_s=0.0),
        "match": match_and_lease_plan(session, CHAIN, part=None, length_bytes=BLOCK_BYTES, now_s=0.0),
        "reserve": reserve_plan(session, CHAIN, part=None, length_bytes=BLOCK_BYTES),
    }
    for name, plan in plans.items():
        assert isinstance(next(plan), Ask)
        with pytest.raises(ProtocolMismatch, match="arena"):
            plan.send(Lent((LentSlot(0, offset, 0),), 0) if name == "reserve" else _leased(offset))


def test_a_lease_on_fewer_blocks_than_were_made_ready_breaks_the_protocol(session: PlainSession) -> None:
    plan = lease_plan(session, CHAIN, part=None, length_bytes=BLOCK_BYTES, now_s=0.0)
    next(plan)

    with pytest.raises(ProtocolMismatch, match="not leased"):
        plan.send(_leased(session.reading_arena().format.slots_offset, stored=2))


def test_a_granted_lease_is_valid_until_its_deadline_or_another_generation(session: PlainSession) -> None:
    view = session.reading_arena()
    plan = lease_plan(session, CHAIN, part=None, length_bytes=BLOCK_BYTES, now_s=10.0)
    next(plan)
    with pytest.raises(StopIteration) as end:
        plan.send(_leased(view.format.slots_offset))
    grant: Grant = end.value.value

    assert (grant.chain, grant.deadline_s) == (CHAIN[:1], 15.0)
    assert grant.is_valid(14.9)
    assert not grant.is_valid(15.0)
    view.advance_generation(view.format.slots_offset)
    assert not grant.is_valid(14.9)


@pytest.mark.parametrize(
    ("answer_us", "is_renewed", "deadline_s"), [(9_000_000, True, 29.0), (0, False, 5.0)]
)
def test_a_renewal_moves_the_deadline_only_if_it_was_granted(
    answer_us: int, is_renewed: bool, deadline_s: float
) -> None:
    grant = Grant(CHAIN, None, None, lease=3, deadline_s=5.0)
    plan = renew_plan(grant, 3, now_s=20.0)
    next(plan)
    with pytest.raises(StopIteration) as end:
        plan.send(Renewed(answer_us))

    assert (end.value.value, grant.deadline_s) == (is_renewed, deadline_s)


def test_another_answer_to_a_renewal_breaks_the_protocol() -> None:
    plan = renew_plan(Grant(CHAIN, None, None), 3, now_s=0.0)
    next(plan)

    with pytest.raises(ProtocolMismatch, match="Count to Renew"):
        plan.send(Count(1))
