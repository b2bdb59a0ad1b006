"""What a put may say of each block: stored, or in doubt."""

from kvstore.calls import PutTally
from kvstore.messages import Lent, LentSlot, WrittenSlot
from kvstore.results import PutResult


def _lent(*positions: int, present: int) -> Lent:
    return Lent(tuple(LentSlot(at, 4096 * at, 1) for at in positions), present)


def _written(*positions: int) -> list[WrittenSlot]:
    return [WrittenSlot(at, 4096 * at, 1, 0) for at in positions]


def test_with_room_for_all_that_is_missing_the_rest_is_present() -> None:
    tally = PutTally(4)
    tally.note_lent(0, 4, _lent(1, 3, present=2))
    tally.note_stored(0, _written(1, 3), 2)

    assert tally.result() == PutResult(2, 2, 0)


def test_a_block_without_room_is_not_taken_for_one_that_is_present_behind_it() -> None:
    tally = PutTally(3)
    tally.note_lent(0, 3, _lent(present=2))

    assert tally.result() == PutResult(0, 2, 1, doubtful=(0, 1, 2))


def test_what_lies_before_the_last_lent_block_is_certain() -> None:
    tally = PutTally(6)
    tally.note_lent(0, 6, _lent(1, 3, present=3))
    tally.note_stored(0, _written(1, 3), 2)

    assert tally.result() == PutResult(2, 3, 1, doubtful=(4, 5))


def test_what_was_not_written_or_not_reached_is_in_doubt() -> None:
    tally = PutTally(6)
    tally.note_lent(0, 3, _lent(0, 1, 2, present=0))
    tally.note_stored(0, _written(0), 1)

    assert tally.result() == PutResult(1, 0, 5, doubtful=(1, 2, 3, 4, 5))


def test_of_a_commit_that_stored_fewer_every_block_is_in_doubt() -> None:
    tally = PutTally(4)
    tally.note_lent(2, 2, _lent(0, 1, present=0))
    tally.note_stored(2, _written(0, 1), 1)

    assert tally.result() == PutResult(1, 1, 2, doubtful=(0, 1, 2, 3))
