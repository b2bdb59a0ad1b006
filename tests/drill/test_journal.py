"""Journal: what counts as lost."""

import random

from kvstore.drill.blocks import drill_namespace, new_chain
from kvstore.drill.journal import Journal
from kvstore.keys import PrefixChain


def chain(seed: int, num_blocks: int = 4) -> PrefixChain:
    return new_chain(drill_namespace(), num_blocks, random.Random(seed))


def test_a_missing_block_that_nothing_accounts_for_is_lost():
    journal = Journal()
    journal.note_durable(chain(1))

    lost, incomplete = journal.settle([chain(1).keys[2]])

    assert lost == [chain(1).keys[2]]
    assert incomplete == [chain(1)]


def test_a_block_that_the_drill_damaged_is_not_lost():
    journal = Journal()
    journal.note_durable(chain(1))
    journal.excuse([chain(1).keys[2]])

    assert journal.settle([chain(1).keys[2]]) == ([], [chain(1)])


def test_as_many_blocks_may_be_missing_as_evictions_were_counted_and_no_more():
    journal = Journal()
    journal.note_durable(chain(1))
    journal.note_evicted(3)

    assert journal.settle(chain(1).keys) == ([chain(1).keys[3]], [chain(1)])


def test_evictions_are_counted_once():
    journal = Journal()
    journal.note_durable(chain(1))
    journal.note_durable(chain(2))
    journal.note_evicted(4)
    journal.settle(chain(1).keys)

    assert journal.settle(chain(2).keys)[0] == list(chain(2).keys)


def test_nothing_is_promised_about_a_chain_that_was_reported_missing_or_forgotten():
    journal = Journal()
    journal.note_durable(chain(1))
    journal.note_durable(chain(2))
    journal.settle(chain(1).keys[:1])
    journal.forget(chain(2))

    assert journal.durable_chains() == []
    assert journal.num_blocks == 0


def test_all_that_is_remembered_can_be_excused_at_once():
    journal = Journal()
    journal.note_durable(chain(1))
    journal.excuse_all()
    journal.note_durable(chain(2))

    assert journal.is_excused(chain(1).keys[0])
    assert not journal.is_excused(chain(2).keys[0])


def test_what_was_acknowledged_when_the_log_was_longer_is_promised_no_more():
    journal = Journal()
    for seed, position in ((1, 10), (2, 20), (3, 30)):
        journal.position = lambda: position  # noqa: B023
        journal.note_durable(chain(seed))

    journal.forget_after(20)

    assert journal.durable_chains() == [chain(1), chain(2)]
