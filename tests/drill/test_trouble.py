"""Trouble: which operation is harmed, and how long it is held up."""

import threading
from pathlib import Path

from kvstore.drill.trouble import Harm, Operation, Trouble, TroubleOrder

WAIT_S = 30.0


def test_an_order_survives_its_way_as_json():
    order = TroubleOrder(fail_at=3, harm="tear", error=28, delay_s=0.5, concerns=("sync",), log_path="/l")

    assert TroubleOrder.from_json(order.to_json()) == order


def test_only_the_chosen_operation_is_harmed():
    trouble = Trouble(TroubleOrder(fail_at=2, harm="tear"))

    assert [trouble.begin(Operation.WRITE) for _ in range(3)] == [Harm.NONE, Harm.TEAR, Harm.NONE]
    status = trouble.status()
    assert (status.num_operations, status.num_harmed) == (3, 1)


def test_an_order_counts_from_its_beginning_and_returns_what_was_before():
    trouble = Trouble(TroubleOrder())
    trouble.begin(Operation.OPEN)

    before = trouble.take(TroubleOrder(fail_at=1))

    assert before.num_operations == 1
    assert trouble.begin(Operation.READ) is Harm.FAIL


def test_a_stuck_operation_goes_on_with_the_next_order_and_others_are_not_held_up():
    trouble = Trouble(TroubleOrder(is_stuck=True, concerns=("sync",)))
    stuck = threading.Thread(target=trouble.begin, args=(Operation.SYNC,))
    stuck.start()
    while not trouble.status().num_stuck:
        assert trouble.begin(Operation.WRITE) is Harm.NONE

    trouble.take(TroubleOrder())
    stuck.join(WAIT_S)

    assert not stuck.is_alive()
    assert trouble.status().num_stuck == 0


def test_a_slow_operation_is_held_up_and_ends_by_itself():
    trouble = Trouble(TroubleOrder(delay_s=0.001))

    trouble.begin(Operation.READ)

    status = trouble.status()
    assert (status.num_held, status.num_stuck) == (1, 0)


def test_a_log_is_kept_while_an_order_asks_for_it(tmp_path: Path) -> None:
    trouble = Trouble(TroubleOrder(log_path=str(tmp_path / "log")))
    assert trouble.log is not None

    trouble.take(TroubleOrder())

    assert trouble.log is None
    assert (tmp_path / "log").exists()
