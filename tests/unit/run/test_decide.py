"""One decision at a time: what `decide` says of nodes, a world and a queue, and that it only says
it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.config.schema import NoticeSection
from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.policy import LayoutPolicy
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import Exit, Hello, Prepare, ResizeRequest
from liver_hpc.run import actions as a
from liver_hpc.run.agents import Agents
from liver_hpc.run.decide import (
    MOST_LEAVES,
    Begin,
    Decider,
    Decision,
    Decline,
    Drop,
    Estimates,
    Stay,
    ToDisk,
    Wait,
)
from liver_hpc.run.events import CoordinatorStarted, Node, NodeWarned
from liver_hpc.run.machine import Run
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.requests import GROWTH, OPERATOR, ReconfigurationRequest, RequestQueue
from tests.fakes import tiny_recipe, tiny_run
from tests.unit.coordinator.nodes import FixedEstimates
from tests.unit.run.choices import Choices
from tests.unit.run.play import Play
from tests.unit.run.remembered import remembered
from tests.unit.run.scenes import ANY_NUMBER, SCENES, SPEC, place_once

DP1, DP2, TP2, TP2_DP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(2, 1, 1), Layout(2, 1, 2)
N1, N2 = Node("n1", "main", 1), Node("n2", "main", 1)
BURST = Node("b3", "burst-3", 2, preemptible=True, burst=True)
ASKED = Node("s5", "spare", 2, automatic=False)
NOW_S = 1_000.0


class Situation:
    """Two workers on n1 and n2, an empty queue, and estimates of 2 s, or 9 s with joiners, and of
    4 s to the disk."""

    def __init__(
        self, *more: Node, layouts: dict[int, Any] | None = None, policy: str = "table"
    ) -> None:
        config = tiny_run(layouts=layouts or ANY_NUMBER, policy={"layout": policy})
        self.clock = FakeClock(NOW_S)
        self.agents = Agents(config.deadlines, self.clock, [])
        held = HeldNodes(self.agents, None)
        for node in (N1, N2):
            held.grant(node)
        self.agents.launch(0, DP2, held.seats(2))
        for agent in ("a0", "a1"):
            self.join(agent)
        for node in more:
            held.grant(node)
        self.world = WorldRef(0, RankMap(DP2, (0, 1)))
        self.nodes = held
        self.queue = RequestQueue(config, tiny_recipe(config).check_layout)
        estimator: Any = FixedEstimates()
        self.estimates = Estimates(LayoutPolicy(config, SPEC), estimator, SPEC, place_once)
        self.lasts = (math.inf, 1800.0)  # steps that are left, and the horizon in seconds
        self.catching_up = False
        self.redone_steps = math.inf

    def join(self, agent: str) -> None:
        meeting = self.agents.meet(agent, 1)
        assert isinstance(meeting, a.Admit)
        self.agents.join(Hello(worker=meeting.workers[0], pid=1, host="h", booted_s=0.0))

    def warn(self, node: str, window_s: float | None = None) -> None:
        deadline_s = None if window_s is None else NOW_S + window_s
        self.nodes[node].warning = NodeWarned(node, "preempted", NOW_S - 1.0, deadline_s)

    def disk_takes(self, seconds: float) -> None:
        estimator: Any = self.estimates.handoffs
        estimator.checkpoint_s = lambda rank_map: seconds

    def ask(self, layout: Layout) -> ReconfigurationRequest:
        request = ReconfigurationRequest(OPERATOR, NOW_S, layout=layout)
        self.queue.add(request)
        return request

    def may_grow(self) -> None:
        self.nodes.granted_s, self.nodes.grow_at_s = NOW_S - 5.0, NOW_S - 3.0

    def agent_is_ending(self) -> None:
        """A third worker is told to exit, and its agent holds a slot until it has ended."""
        self.agents.launch(1, DP1, self.nodes.seats(1))
        self.join("a2")
        self.agents.send((2,), Exit(reason="test"))

    def begins(self) -> Begin:
        """What it decides, which is a handoff."""
        decision = self.decide()
        assert isinstance(decision, Begin)
        return decision

    def decide(self) -> Decision:
        """Which changes nothing, and says the same again."""
        everything = (self.nodes, self.world, self.queue, self.estimates, self.agents)
        before = [remembered(each) for each in everything]
        now_s = self.clock.now_s()
        situation = (self.nodes, self.world, self.queue, self.estimates, now_s)
        decider = Decider(*situation, *self.lasts, self.catching_up, self.redone_steps)
        decision = decider.decide()
        assert decider.decide() == decision
        assert [remembered(each) for each in everything] == before
        return decision


def test_nothing_is_done_without_a_reason() -> None:
    assert Situation().decide() == Wait()


# ---- growing


def test_a_run_grows_onto_nodes_that_came() -> None:
    situation = Situation(BURST)
    situation.may_grow()
    decision = situation.begins()
    assert decision.request == ReconfigurationRequest(GROWTH, NOW_S - 5.0, layout=Layout(1, 1, 4))
    assert {*decision.target.workers} == {0, 1, 2, 3}


def test_growing_waits_for_more_nodes_to_come() -> None:
    situation = Situation(BURST)
    situation.nodes.grow_at_s = NOW_S + 1.0
    assert situation.decide() == Wait()
    situation.clock.advance(1.0)
    assert situation.begins().request.origin == GROWTH


def test_what_was_lost_is_done_again_before_anybody_joins_unasked() -> None:
    situation = Situation(BURST)
    situation.may_grow()
    situation.catching_up = True
    assert situation.decide() == Wait()
    situation.warn("n1", window_s=100.0)
    assert situation.begins().nodes == ("n1",)
    situation.nodes["n1"].warning = None
    situation.ask(TP2)
    assert situation.begins().request.origin == OPERATOR


def test_a_run_does_not_grow_beyond_what_was_asked_for_last() -> None:
    situation = Situation(BURST)
    situation.may_grow()
    situation.queue.asked = 2
    assert situation.decide() == Wait()
    situation.queue.asked = 3
    decision = situation.begins()
    assert decision.target.layout.workers == 3


def choosing() -> Situation:
    """Room for four workers, who are seen to be twice as fast as two; steps of 1 s, a handoff that
    takes 9 s and costs 3 s of training."""
    situation = Situation(BURST, policy="auto")
    situation.may_grow()
    situation.estimates.policy.observe(DP2, 1.0)
    situation.estimates.policy.observe(Layout(1, 1, 4), 0.5)
    situation.estimates.policy.best(4)  # which fits, once, what others are expected to take
    return situation


def test_a_run_that_chooses_grows_where_that_repays_the_handoff() -> None:
    situation = choosing()
    assert situation.begins().target.layout == Layout(1, 1, 4)
    situation.lasts = (16, 1800.0)
    assert situation.begins().request.origin == GROWTH


@pytest.mark.parametrize(
    ("lasts", "said", "for_good"),
    [
        ((15, 1800.0), "it saves 3.0 s in the next 6 s, and costs 3.0 s", True),
        ((5, 1800.0), "it saves nothing in the next 0 s, and costs 3.0 s", True),
        ((math.inf, 5.0), "it saves 2.5 s in the next 5 s, and costs 3.0 s", False),
    ],
)
def test_growth_that_does_not_repay_the_handoff_is_declined(
    lasts: tuple[float, float], said: str, for_good: bool
) -> None:
    """Until the run ends, or the run file wants something else, or for the horizon."""
    situation = choosing()
    situation.lasts = lasts
    assert situation.decide() == Decline(Layout(1, 1, 4), said, for_good)
    situation.queue._notices = [NoticeSection(at_step=50, replace=0)]
    assert situation.decide() == Decline(Layout(1, 1, 4), said, for_good=False)


def test_what_is_asked_for_or_forced_is_not_weighed() -> None:
    situation = choosing()
    situation.lasts = (0, 1.0)
    situation.ask(TP2)
    assert situation.begins().request.origin == OPERATOR
    situation.warn("n1", window_s=100.0)
    assert situation.begins().nodes == ("n1",)


def test_nodes_to_be_asked_for_are_not_grown_onto() -> None:
    situation = Situation(ASKED)
    situation.may_grow()
    assert situation.decide() == Wait()


def test_slots_of_agents_that_are_ending_are_not_grown_onto() -> None:
    situation = Situation(Node("b3", "burst-3", 1, burst=True))
    situation.agent_is_ending()
    situation.may_grow()
    assert situation.decide() == Wait()


# ---- what was asked for


def test_a_request_is_granted_before_the_run_grows() -> None:
    situation = Situation(BURST)
    situation.may_grow()
    request = situation.ask(TP2)
    assert situation.decide() == Begin(request, RankMap(TP2, (0, 1)))


def test_a_replacement_takes_the_seat_of_whom_it_replaces() -> None:
    situation = Situation(BURST)
    request = ReconfigurationRequest(OPERATOR, NOW_S, replace=1)
    situation.queue.add(request)
    assert situation.decide() == Begin(request, RankMap(DP2, (0, 2)))


def test_a_request_without_a_point_is_dropped() -> None:
    situation = Situation()
    request = situation.ask(DP2)
    assert situation.decide() == Drop(request, "the run already has layout tp1 pp1 dp2")


def test_a_request_that_cannot_be_placed_is_dropped() -> None:
    situation = Situation(BURST)

    def fails(
        model: ModelSpec,
        source: RankMap,
        target: Layout,
        who: Sequence[int],
        nodes: Mapping[int, int],
    ) -> RankMap:
        raise ConfigError("there is no such seat")

    situation.estimates.place = fails
    request = situation.ask(TP2_DP2)
    assert situation.decide() == Drop(request, "it cannot be placed: there is no such seat")


def test_a_request_waits_for_agents_that_hold_the_slots_that_it_needs() -> None:
    situation = Situation(BURST)
    situation.agent_is_ending()
    situation.ask(TP2_DP2)
    decision = situation.decide()
    assert isinstance(decision, Wait)
    assert decision.reason.endswith("agents that are ending or booting hold slots that it needs")
    situation.agents.leave(2)
    situation.agents.ended("a2", 0)
    assert situation.begins().request.origin == OPERATOR


# ---- leaving


def test_a_node_is_left_before_anything_is_granted() -> None:
    situation = Situation()
    situation.ask(TP2)
    situation.warn("n2", 60.0)
    decision = situation.begins()
    assert decision.target == RankMap(DP1, (0,))
    assert decision.nodes == ("n2",)
    assert (decision.action, decision.estimate_s, decision.late) == (
        "live to tp1 pp1 dp1", 2.0, False,
    )  # fmt: skip
    request = decision.request
    assert (request.origin, request.made_s) == ("leaving n2: preempted", NOW_S - 1.0)
    assert (request.without, request.deadline_s) == ((1,), NOW_S + 60.0)


def test_other_nodes_take_the_place_of_those_that_go_where_there_is_time_to_boot() -> None:
    situation = Situation(BURST)
    situation.warn("n2", 60.0)
    decision = situation.begins()
    assert decision.target == RankMap(DP2, (0, 2))
    situation.warn("n2", 15.0)  # 9 s are more than half of it
    decision = situation.begins()
    assert decision.target == RankMap(DP1, (0,))


def test_a_window_that_is_too_short_for_either_way_is_said_to_be() -> None:
    situation = Situation()
    situation.warn("n2", 1.0)
    decision = situation.begins()
    assert decision.late
    assert decision.action == "live to tp1 pp1 dp1, estimated 2.0 s for a window of 1.0 s"


def test_the_state_goes_to_disk_where_only_that_is_in_time() -> None:
    situation = Situation()
    situation.disk_takes(0.5)
    situation.warn("n2", 1.0)
    decision = situation.decide()
    assert isinstance(decision, ToDisk)
    assert decision.action == "to disk (live: 2.0 s, disk: 0.5 s, window: 1.0 s)"
    estimator: Any = situation.estimates.handoffs
    estimator.measured = False  # what is only assumed does not send a run to the disk
    assert situation.begins().nodes == ("n2",)


def test_a_handoff_is_tried_where_its_failure_would_cost_less_than_the_disk() -> None:
    """Steps take 1 s, a start from disk 20 s."""
    situation = Situation()
    situation.disk_takes(0.5)
    situation.warn("n2", 1.0)
    situation.redone_steps = 20
    decision = situation.begins()
    assert decision.late
    assert decision.target == RankMap(DP1, (0,))
    situation.redone_steps = 21
    assert isinstance(situation.decide(), ToDisk)


def test_the_state_goes_to_disk_where_a_loss_would_leave_no_layout() -> None:
    situation = Situation(BURST, layouts={2: [{"dp": 2}], 4: [{"dp": 4}]})
    situation.disk_takes(0.5)
    situation.redone_steps = 1
    situation.warn("n2", 1.0)
    assert isinstance(situation.decide(), ToDisk)


@pytest.mark.parametrize(("doomed", "to_disk"), [(("n2", "n3"), True), (("n2", "n4"), False)])
def test_the_state_goes_to_disk_where_a_snapshot_would_be_lost_with_its_copy(
    doomed: tuple[str, ...], to_disk: bool
) -> None:
    """Four workers on a node each: the next one has the copy."""
    situation = Situation(Node("n3", "main", 1), Node("n4", "main", 1))
    situation.agents.launch(0, DP2, situation.nodes.seats(2))
    for agent in ("a2", "a3"):
        situation.join(agent)
    situation.world = WorldRef(0, RankMap(Layout(1, 1, 4), (0, 1, 2, 3)))
    situation.disk_takes(0.5)
    situation.redone_steps = 1
    for node in doomed:
        situation.warn(node, 1.0)
    assert isinstance(situation.decide(), ToDisk) is to_disk


def test_the_state_goes_to_disk_where_no_layout_is_left() -> None:
    situation = Situation(layouts={2: [{"dp": 2}]})
    situation.warn("n2", 60.0)
    decision = situation.decide()
    assert isinstance(decision, ToDisk)
    assert (decision.nodes, decision.estimate_s) == (("n2",), 4.0)
    assert decision.action == "to disk (live: none, disk: 4.0 s, window: 60.0 s)"


def test_the_state_goes_to_disk_after_handoffs_that_failed() -> None:
    situation = Situation()
    situation.warn("n2", 60.0)
    situation.estimates.failed_leaves = MOST_LEAVES
    decision = situation.decide()
    assert isinstance(decision, ToDisk)
    assert f"{MOST_LEAVES} handoffs have failed" in decision.reason


def test_nodes_that_nobody_takes_are_stayed_on_where_there_is_nowhere_to_go() -> None:
    situation = Situation(layouts={2: [{"dp": 2}, {"tp": 2}]})
    situation.warn("n2")
    decision = situation.decide()
    assert isinstance(decision, Stay)
    assert decision.nodes == ("n2",)
    assert "stays: there is nowhere else to run" in decision.reason
    situation.nodes.stuck = situation.nodes.situation(situation.world)
    assert situation.decide() == Wait()
    request = situation.ask(TP2)
    assert situation.begins().request == request, "it does not wait behind that"
    situation.nodes.grant(BURST)
    assert situation.begins().nodes == ("n2",), "there is somewhere to go now"


def test_a_long_window_is_used_to_wait_for_agents_that_are_ending() -> None:
    situation = Situation(BURST)
    situation.agent_is_ending()
    situation.warn("n2", 60.0)
    decision = situation.decide()
    assert decision == Wait("agents that are ending hold slots that may be needed")
    situation.warn("n2", 39.0)  # four exits of 10 s do not fit
    assert situation.begins().nodes == ("n2",)


def test_an_empty_node_that_has_to_be_left_is_nobodys_concern() -> None:
    situation = Situation(BURST)
    situation.warn("b3", 1.0)
    assert situation.decide() == Wait()


# ---- what is estimated is what is done


class Spied:
    """A run of two workers whose every placement is noted."""

    def __init__(self) -> None:
        self.placed: list[RankMap] = []
        scene = SCENES[2]
        self.play = Play(scene, Choices(b""))
        self.play.run = Run(scene.config, SPEC, place=self.place)
        self.play.watch.run = self.play.run
        self.play.begin()
        self.play.settle()

    def place(
        self,
        model: ModelSpec,
        source: RankMap,
        target: Layout,
        available: Sequence[int],
        nodes: Mapping[int, int],
    ) -> RankMap:
        self.placed.append(place_once(model, source, target, available, nodes))
        return self.placed[-1]

    def prepared(self) -> RankMap:
        """The target that all are told to prepare."""
        while self.play.go_on(draw=False):
            for _, _, actions in self.play.entries[-1:]:
                for action in actions:
                    if isinstance(action, a.Send) and isinstance(action.message, Prepare):
                        return action.message.target.rank_map()
        raise AssertionError("nobody was told to prepare")


def test_the_placement_of_a_request_is_made_once_and_is_the_one_that_is_used() -> None:
    spied = Spied()
    assert spied.play.ask(ResizeRequest(layout="tp=2,dp=2")).ok
    (placed,) = spied.placed
    assert spied.prepared() == placed
    assert spied.placed == [placed]


def test_joiners_take_the_seats_that_were_meant_for_them_under_the_ids_that_they_get() -> None:
    spied = Spied()
    assert spied.play.ask(ResizeRequest(layout="tp=2,dp=2")).ok
    spied.play.run.agents._next_worker += 5  # somebody else has met before them
    (placed,) = spied.placed
    ids = {0: 0, 1: 1, 2: 7, 3: 8}
    assert spied.prepared() == RankMap(placed.layout, tuple(ids[w] for w in placed.workers))


def test_the_placement_of_a_growth_is_made_once_and_is_the_one_that_is_used() -> None:
    spied = Spied()
    spied.play.grant(BURST)
    spied.play.hear_pool()
    spied.play.wait(5.0)
    assert spied.placed
    before = [*spied.placed]
    assert spied.prepared() == before[-1]
    assert spied.placed == before


def test_the_placement_that_is_estimated_for_a_way_out_is_the_one_that_is_used() -> None:
    spied = Spied()
    spied.play.feed(NodeWarned("w1", "preempted", spied.play.now_s, spied.play.now_s + 300.0))
    tried = [*spied.placed]
    assert tried
    assert spied.prepared().layout in {placed.layout for placed in tried}
    assert spied.placed == tried, "nothing is placed again"


def test_a_core_without_a_placement_of_its_own_places_for_the_fewest_bytes() -> None:
    run = Run(SCENES[0].config, SPEC)
    assert run.handle(CoordinatorStarted(), NOW_S) is not None
    assert run.elastic.estimates.place.__name__ == "place"
