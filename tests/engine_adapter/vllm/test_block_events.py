"""What the connector tells of blocks that it has stored, and that have left the store."""

from kvstore.keys import BlockKey
from kvstore_engine_adapter.vllm.block_events import BlockEvents, RemovedBlocks, StoredBlocks


def key(at: int) -> BlockKey:
    return BlockKey(bytes([at]) * 32)


def block(at: int, *, session: str | None = None) -> StoredBlocks:
    parent = bytes([at - 1]) if at else None
    return StoredBlocks((bytes([at]),), parent, (at, at), 0, session=session)


def test_blocks_that_follow_one_another_are_told_together() -> None:
    events = BlockEvents(num_ranks=1)
    for at in range(3):
        events.note_planned(key(at), block(at))
    events.note_stored({key(0): 1, key(1): 1, key(2): 1, key(9): 1})
    assert events.take() == [StoredBlocks((b"\0", b"\1", b"\2"), None, (0, 0, 1, 1, 2, 2), 0)]
    assert events.take() == []


def test_blocks_of_other_sessions_are_told_apart() -> None:
    events = BlockEvents(num_ranks=1)
    events.note_planned(key(0), block(0))
    events.note_planned(key(1), block(1, session="a"))
    events.note_stored({key(0): 1, key(1): 1})
    assert events.take() == [block(0), block(1, session="a")]


def test_a_block_is_stored_when_every_rank_has_stored_its_part() -> None:
    events = BlockEvents(num_ranks=2)
    events.note_planned(key(0), block(0))
    events.note_stored({key(0): 1})
    assert events.take() == []
    events.note_stored({key(0): 1})
    assert events.take() == [block(0)]


def test_only_a_block_that_was_told_is_told_to_be_gone_and_once() -> None:
    events = BlockEvents(num_ranks=1)
    events.note_planned(key(0), block(0))
    events.note_gone([key(0)])
    events.note_stored({key(0): 1})
    events.note_gone([key(1), key(0)])
    events.note_gone([key(0)])
    assert events.take() == [block(0), RemovedBlocks((b"\0",), 0)]
