"""Ledger and report: what makes a drill fail, and the shape of its result."""

from kvstore.drill.drill import DrillReport
from kvstore.drill.ledger import SLACK_S, KindReport, Ledger
from kvstore.drill.report import report_table
from kvstore.testing import FakeClock


def told() -> tuple[Ledger, list[str]]:
    lines: list[str] = []
    return Ledger(lines.append), lines


def test_a_call_within_its_time_and_the_slack_is_not_over_its_deadline():
    clock = FakeClock()
    ledger = Ledger(print, clock=clock)
    with ledger.timing("get", 0.05):
        clock.advance(0.05 + SLACK_S)

    assert (ledger.report.calls, ledger.report.over_deadline) == (1, 0)


def test_a_call_beyond_its_time_and_the_slack_is_over_its_deadline():
    clock, lines = FakeClock(), []
    ledger = Ledger(lines.append, clock=clock)
    with ledger.timing("get of 2 blocks", 0.05):
        clock.advance(0.051 + SLACK_S)

    assert ledger.report.over_deadline == 1
    assert lines == ["get of 2 blocks: took 0.301 s, its time was 0.050 s"]


def test_each_broken_promise_makes_the_kind_fail_and_is_told():
    for break_promise in (
        lambda ledger: ledger.note_wrong("get", 3),
        lambda ledger: ledger.note_lost("block"),
        lambda ledger: ledger.note_violation("check: a line"),
    ):
        ledger, lines = told()
        ledger.report.tries = 1
        assert ledger.report.is_ok

        break_promise(ledger)

        assert not ledger.report.is_ok
        assert ledger.report.notes == lines
        assert len(lines) == 1


def test_a_kind_that_was_neither_tried_nor_skipped_for_a_reason_fails():
    assert not KindReport().is_ok
    assert KindReport(skipped="no such program").is_ok
    assert not DrillReport(1).is_ok


def test_notes_are_bounded_and_counts_are_not():
    ledger, lines = told()
    for _ in range(100):
        ledger.note_violation("again")

    assert (len(ledger.report.notes), ledger.report.violations, len(lines)) == (20, 100, 100)


def test_the_report_sums_the_kinds_and_names_what_was_skipped():
    report = DrillReport(7, seconds=3.0)
    report.faults["one"] = KindReport(tries=3, wrong_bytes=2, lost=1, seconds=1.5, notes=["a"])
    report.faults["two"] = KindReport(skipped="no Redis")

    found = report.as_dict()

    assert [found[key] for key in ("ok", "seed", "tries", "wrong_bytes", "lost_durable")] == [
        False,
        7,
        3,
        2,
        1,
    ]
    assert found["faults"]["one"]["notes"] == ["a"]
    assert found["faults"]["two"]["skipped"] == "no Redis"
    assert "A PROMISE WAS BROKEN" in report_table(report)
    assert "skipped two: no Redis" in report_table(report)
    assert (found["kinds_tried"], found["kinds_skipped"]) == (1, 1)


def test_the_last_line_does_not_speak_for_kinds_that_were_skipped():
    report = DrillReport(7)
    report.faults["one"] = KindReport(skipped="no time left")
    assert "nothing was tried, 1 kinds of fault skipped" in report_table(report).splitlines()[-1]

    report.faults["two"] = KindReport(tries=3)
    last = report_table(report).splitlines()[-1]
    assert "every promise was kept in the 1 kinds of fault tried, 1 skipped" in last

    del report.faults["one"]
    assert "every promise was kept in all 1 kinds of fault" in report_table(report).splitlines()[-1]
