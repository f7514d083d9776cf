"""Each notice is recorded once, with what was done and whether it was in time."""

from __future__ import annotations

import math

import pytest

from liver_hpc.run.events import Node, NodeWarned
from liver_hpc.run.notices import NoticeBook
from liver_hpc.run.records import NoticeRecord

BURST = Node("n3", "burst-7", slots=1)


@pytest.fixture
def told() -> list[NoticeRecord]:
    return []


@pytest.fixture
def book(told: list[NoticeRecord]) -> NoticeBook:
    return NoticeBook(told.append)


def test_a_granted_node_is_recorded_when_it_is_used(
    book: NoticeBook, told: list[NoticeRecord]
) -> None:
    book.granted(BURST, 10.0)
    book.used(["n1", "n3"], "joined by tp1 pp1 dp4", 2)
    (record,) = told
    assert (record.kind, record.node, record.at_s) == ("granted", "n3", 10.0)
    assert (record.generation, record.outcome) == (2, "in use")


@pytest.mark.parametrize(("left_s", "outcome"), [(13.0, "in time"), (14.5, "late")])
def test_leaving_before_the_deadline_is_in_time(
    book: NoticeBook, told: list[NoticeRecord], left_s: float, outcome: str
) -> None:
    assert book.warned(NodeWarned("n3", "preempted", 10.0, 14.0), "burst-7")
    book.decided(["n3"], "live to tp1 pp1 dp2", 5, 1.5)
    book.left("n3", left_s)
    book.left("n3", 99.0)
    book.gone("n3", "burst-7", 15.0, had_workers=False)
    (record,) = told
    assert (record.outcome, record.left_s, record.returned_s) == (outcome, left_s, 15.0)
    assert (record.action, record.generation) == ("live to tp1 pp1 dp2", 5)
    assert record.estimate_s == 1.5


def test_a_second_warning_only_moves_the_deadline(
    book: NoticeBook, told: list[NoticeRecord]
) -> None:
    book.warned(NodeWarned("n3", "drained", 10.0), "burst-7")
    assert not book.warned(NodeWarned("n3", "preempted", 12.0, 16.0), "burst-7")
    book.left("n3", 15.0)
    book.stays("n3")
    (record,) = told
    assert (record.kind, record.at_s, record.deadline_s) == ("preempted", 10.0, 16.0)
    assert math.isnan(record.returned_s)


def test_a_signal_that_is_explained_after_the_poll_has_told_counts_from_when_it_came(
    book: NoticeBook, told: list[NoticeRecord]
) -> None:
    book.warned(NodeWarned("n3", "cancelled", 10.3, 25.3), "spare")
    assert not book.warned(NodeWarned("n3", "cancelled", 10.0, 25.0), "spare")
    book.stays("n3")
    assert (told[0].at_s, told[0].deadline_s) == (10.0, 25.0)


def test_workers_on_a_node_that_goes_are_a_loss(book: NoticeBook, told: list[NoticeRecord]) -> None:
    book.gone("n9", "spare", 3.0, had_workers=True)
    book.warned(NodeWarned("n3", "preempted", 10.0, 14.0), "burst-7")
    book.gone("n3", "burst-7", 14.0, had_workers=True)
    assert [record.outcome for record in told] == ["lost", "lost"]


def test_what_is_open_at_the_end_is_recorded_as_open(
    book: NoticeBook, told: list[NoticeRecord]
) -> None:
    book.granted(BURST, 1.0)
    book.warned(NodeWarned("n4", "preempted", 10.0, 14.0), "burst-8")
    book.close()
    assert [(record.node, record.outcome) for record in told] == [("n4", "open")]


def test_a_node_whose_warning_was_withdrawn_keeps_its_record(
    book: NoticeBook, told: list[NoticeRecord]
) -> None:
    book.warned(NodeWarned("n3", "drained", 10.0), "burst-7")
    book.stays("n3")
    book.granted(BURST, 12.0)
    assert [(record.kind, record.outcome) for record in told] == [("drained", "not needed")]


def test_nodes_that_come_into_use_together_are_recorded_in_the_order_in_which_they_came(
    book: NoticeBook, told: list[NoticeRecord]
) -> None:
    """Not in that of a set, which differs from process to process."""
    names = [f"n{number}" for number in (4, 1, 7, 3, 9, 2, 8, 5)]
    for name in names:
        book.granted(Node(name, "burst-7", slots=1), 10.0)
    book.used(frozenset(names), "joined by tp1 pp1 dp8", 2)
    assert [record.node for record in told] == names
