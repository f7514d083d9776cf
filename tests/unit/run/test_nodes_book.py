"""The book of nodes: where workers can be started, and who goes first."""

from __future__ import annotations

from typing import Any

import pytest

from liver_hpc.errors import LiverError
from liver_hpc.run.events import Node, NodeWarned, Seat
from liver_hpc.run.nodes import HeldNodes


class Somebody:
    """Agents that hold these slots, and workers on these nodes."""

    def __init__(self, taken: dict[str, set[int]], on: dict[int, str]) -> None:
        self._taken = taken
        self.asked = 0  # how often who holds what was counted, over all agents
        self.node_of = on.__getitem__
        self.number_of = len
        self.spare = lambda clearing: []

    def taken(self, ending: bool = True) -> dict[str, set[int]]:
        self.asked += 1
        return self._taken


def book(
    *nodes: Node,
    per_agent: int | None = None,
    taken: dict[str, set[int]] | None = None,
    on: dict[int, str] | None = None,
) -> HeldNodes:
    agents: Any = Somebody(taken or {}, on or {})
    capacity = HeldNodes(agents, per_agent)
    for node in nodes:
        assert capacity.grant(node)
    return capacity


MAIN = Node("n1", "main", slots=2)
SPARE = Node("n2", "spare", slots=2, automatic=False)
BURST = Node("n3", "burst-7", slots=2, preemptible=True, burst=True)


def test_lasting_nodes_are_filled_first_and_those_to_be_asked_for_last() -> None:
    capacity = book(SPARE, BURST, MAIN)
    assert capacity.seats(5) == [
        Seat("n1", (0, 1)),
        Seat("n3", (0, 1)),
        Seat("n2", (0,)),
    ]


def test_slots_in_use_are_left_alone() -> None:
    capacity = book(MAIN, BURST, taken={"n1": {0}})
    assert capacity.seats(2) == [Seat("n1", (1,)), Seat("n3", (0,))]
    assert capacity.free_slots() == 3


def test_who_holds_what_is_counted_once_for_all_nodes() -> None:
    capacity = book(*(Node(f"n{number}", "main", slots=2) for number in range(9)))
    agents: Any = capacity.agents
    assert len(capacity.seats(18)) == 9
    assert len(capacity.standby_seats(18)) == 18
    assert agents.asked == 2


def test_what_does_not_fit_is_refused_with_what_is_held() -> None:
    with pytest.raises(LiverError) as refused:
        book(MAIN, taken={"n1": {1}}).seats(2)
    assert str(refused.value) == (
        "wanted free slots for 2 workers, got 1; n1 (main): 1 of 2 slots taken"
    )


def test_a_machine_without_bound_splits_a_launch_into_agents() -> None:
    machine = Node("", "machine")
    assert book(machine, per_agent=2).seats(3) == [Seat("", (0, 1)), Seat("", (2,))]
    assert book(machine, taken={"": {0, 2}}).seats(3) == [Seat("", (1, 3, 4))]
    assert book(machine).room(()) is None


def test_a_node_that_has_to_be_left_takes_nobody() -> None:
    capacity = book(MAIN, BURST)
    capacity["n3"].warning = NodeWarned("n3", "preempted", 0.0, 4.0)
    assert (capacity["n3"].deadline_s, capacity["n1"].deadline_s) == (4.0, None)
    assert capacity.room(()) == 2
    assert [node.name for node in capacity.usable()] == ["n1"]


def test_nobody_is_started_on_a_burst_allocation_that_goes_back() -> None:
    """Its pool returns it once all its nodes are empty; a part of it is held still."""
    capacity = book(MAIN, BURST, Node("n4", "burst-7", slots=2, preemptible=True, burst=True))
    for name in ("n1", "n3"):
        capacity[name].given_back = True
    assert [node.name for node in capacity.usable()] == ["n1", "n3", "n4"]
    capacity["n4"].given_back = True
    assert [node.name for node in capacity.usable()] == ["n1"]
    assert capacity.free_slots() == 2


def test_a_node_that_comes_again_is_as_new() -> None:
    capacity = book(BURST)
    capacity["n3"].warning = NodeWarned("n3", "drained", 0.0)
    assert capacity.grant(BURST)
    assert not capacity.grant(BURST)
    assert capacity.room(()) == 2


def test_nodes_to_be_asked_for_count_where_workers_are() -> None:
    capacity = book(MAIN, SPARE)
    assert capacity.room(()) == 2
    assert capacity.room({"n2"}) == 4


def test_the_most_lasting_nodes_stay_whole() -> None:
    on = {0: "n1", 1: "n1", 2: "n3", 3: "n3", 4: "n2", 5: "n2"}
    capacity = book(BURST, MAIN, SPARE, on=on)
    assert capacity.stayers([*on], 2) == [0, 1]
    assert capacity.stayers([*on], 4) == [0, 1, 2, 3]


def test_among_equal_nodes_all_may_stay() -> None:
    assert book(MAIN, on={0: "n1", 1: "n1"}).stayers([0, 1], 1) == [0, 1]
