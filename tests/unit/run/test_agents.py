"""The book of agents and workers: who is expected, who is refused, and how everybody goes."""

from __future__ import annotations

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import Exit, Hello, Stop
from liver_hpc.run.actions import (
    Action,
    Admit,
    Disconnect,
    EndAgent,
    KillAgent,
    Launch,
    Send,
    StartAgent,
    TurnAway,
)
from liver_hpc.run.agents import TERMINATED, Agents
from liver_hpc.run.events import Node, Seat
from liver_hpc.run.nodes import HeldNodes
from tests.fakes import tiny_run

DP2 = Layout(1, 1, 2)
BYE = Exit(reason="test")


class Scene:
    """A book of two workers to an agent, with a limit of 10 s for an exit."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.out: list[Action] = []
        self.agents = Agents(tiny_run().deadlines, self.clock, self.out)
        self.nodes = HeldNodes(self.agents, workers_per_agent=2)
        self.nodes.grant(Node("", "machine"))

    def launch(self, generation: int, count: int) -> None:
        self.agents.launch(generation, DP2, self.nodes.seats(count))

    def met(self, agent: str, workers: int = 2) -> None:
        """The agent's workers have come, too."""
        meeting = self.agents.meet(agent, workers)
        assert isinstance(meeting, Admit)
        for worker in meeting.workers:
            self.join(worker)

    def turned_away(self, agent: str, workers: int) -> str:
        """Why the agent is."""
        meeting = self.agents.meet(agent, workers)
        assert isinstance(meeting, TurnAway)
        return meeting.reason

    def join(self, worker: int) -> int:
        return self.agents.join(Hello(worker=worker, pid=1, host="h", booted_s=0.0))

    def done(self, kind: type[Action]) -> list[Action]:
        """What has been asked for of a kind, and is not asked about again."""
        found = [action for action in self.out if isinstance(action, kind)]
        self.out[:] = [action for action in self.out if not isinstance(action, kind)]
        return found


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_ids_are_given_in_the_order_of_the_meetings_and_never_again(scene: Scene) -> None:
    scene.launch(0, 4)
    assert scene.agents.next_workers(2) == (0, 1)
    assert scene.agents.meet("a1", 2) == Admit("a1", (0, 1))
    assert scene.agents.meet("a0", 2) == Admit("a0", (2, 3))
    scene.join(0)
    scene.agents.leave(0)
    scene.launch(1, 1)
    assert scene.agents.meet("a2", 1) == Admit("a2", (4,))
    assert [len(launch.agents) for launch in scene.done(Launch)] == [2, 1]  # type: ignore[union-attr]


def test_the_last_worker_of_a_launch_completes_it(scene: Scene) -> None:
    scene.launch(0, 4)
    for agent in ("a0", "a1"):
        scene.agents.meet(agent, 2)
    completes = []
    for worker in (0, 2, 1, 3):
        scene.join(worker)
        completes.append(scene.agents.completes(worker))
    assert completes == [False, False, False, True]


def test_missing_names_agents_first_and_then_workers(scene: Scene) -> None:
    scene.launch(0, 3)
    assert scene.agents.missing(0) == "agent a0 to meet, agent a1 to meet"
    scene.agents.meet("a0", 2)
    scene.join(1)
    assert scene.agents.missing(0) == "Hello of workers 0, agent a1 to meet"
    scene.join(0)
    scene.met("a1", workers=1)
    assert scene.agents.missing(0) == ""
    assert scene.agents.arrived(0) == (0, 1, 2)


def test_agents_that_are_not_expected_are_turned_away(scene: Scene) -> None:
    scene.launch(0, 2)
    assert "agent a7 is not expected" in scene.turned_away("a7", 2)
    assert "wanted 2 workers, got 3" in scene.turned_away("a0", 3)
    scene.agents.meet("a0", 2)
    assert "has met already" in scene.turned_away("a0", 2)
    scene.launch(1, 2)
    scene.agents.dismiss(1, "test")
    assert "agent a1 is not expected" in scene.turned_away("a1", 2)


def test_a_worker_is_expected_once(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.agents.meet("a0", 2)
    assert not scene.agents.expects(5)
    assert scene.agents.expects(0)
    assert scene.join(0) == 0
    assert not scene.agents.expects(0)


def test_a_launch_that_fails_leaves_nothing_to_wait_for(scene: Scene) -> None:
    scene.launch(1, 4)
    assert scene.agents.launch_failed(("a0", "a1"), lost=("a0", "a1")) == (1, 4)
    assert scene.agents.missing(1) == ""
    assert scene.agents.taken() == {}


def test_of_a_launch_that_fails_half_way_the_other_half_is_ended(scene: Scene) -> None:
    scene.launch(1, 4)
    scene.agents.launch_failed(("a0", "a1"), lost=("a1",))
    scene.agents.reap()
    assert scene.done(KillAgent) == [KillAgent("a0")]
    assert scene.agents.ending()
    scene.agents.ended("a0", 137)
    assert scene.agents.taken() == {}


def test_a_leaver_with_snapshots_stays_for_a_while_unless_told_to_go(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.met("a0")
    scene.agents.send((0,), BYE)
    for worker, limit_s in ((0, 30.0), (1, 30.0)):
        scene.agents.linger(worker, limit_s)
    assert [*scene.agents.lingering] == [1]
    assert scene.agents.ending()
    scene.done(Send)
    scene.clock.advance(29.0)
    scene.agents.reap()
    assert scene.done(Send) == []
    scene.clock.advance(1.0)
    scene.agents.reap()
    (send,) = scene.done(Send)
    assert send.workers == (1,)  # type: ignore[union-attr]
    assert "the world that trains to have a snapshot" in send.message.reason  # type: ignore[union-attr]
    assert not scene.agents.lingering


def test_a_worker_that_was_told_to_exit_has_exit_s_for_it(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.met("a0")
    scene.agents.send((0,), BYE)
    scene.clock.advance(9.0)
    assert scene.agents.reap() == []
    scene.clock.advance(1.0)
    assert scene.agents.reap() == [0]
    assert scene.done(Disconnect) == [Disconnect(0)]
    assert not scene.agents.ending(), "worker 1 is still there"

    scene.agents.send((1,), BYE)
    assert scene.agents.leave(1)
    assert scene.agents.reap() == []
    scene.clock.advance(10.0)
    scene.agents.reap()
    scene.agents.reap()
    assert scene.done(KillAgent) == [KillAgent("a0")]


def test_agents_of_an_aborted_handoff_go_at_once_unless_all_their_workers_came(
    scene: Scene,
) -> None:
    scene.launch(1, 4)
    scene.met("a0")
    scene.agents.dismiss(1, "test")
    assert [end.agent for end in scene.done(EndAgent)] == ["a1"]  # type: ignore[union-attr]
    scene.agents.reap()
    assert scene.done(KillAgent) == [KillAgent("a1")]


def exits(scene: Scene) -> list[int]:
    """Workers that were told to exit."""
    sent = [each for each in scene.done(Send) if isinstance(each.message, Exit)]  # type: ignore[union-attr]
    return [worker for each in sent for worker in each.workers]  # type: ignore[union-attr]


def test_joiners_are_kept_until_they_are_taken_or_it_takes_too_long(scene: Scene) -> None:
    scene.launch(1, 4)
    scene.met("a0")
    scene.met("a1")
    scene.agents.keep((0, 1, 2), aborting=False)
    scene.agents.take((1, 2))
    scene.clock.advance(179.0)
    scene.agents.keep((2,), aborting=False)
    scene.agents.reap()
    assert exits(scene) == []
    scene.clock.advance(1.0)
    scene.agents.reap()
    assert exits(scene) == [0], "worker 1 has a seat, worker 2 was of use a second ago"
    scene.agents.let_go((1, 2), "test")
    assert exits(scene) == [2]
    assert not scene.agents.kept


def test_a_joiner_that_does_not_let_its_handoff_go_is_not_kept(scene: Scene) -> None:
    scene.launch(1, 2)
    scene.met("a0")
    scene.agents.keep((0, 1), aborting=True)
    scene.clock.advance(9.0)
    scene.agents.cleared(1)
    scene.clock.advance(1.0)
    scene.agents.reap()
    assert exits(scene) == [0]
    scene.agents.cleared(0)
    assert list(scene.agents.kept) == [1]


def test_joiners_of_a_launch_that_is_not_complete_are_not_kept(scene: Scene) -> None:
    scene.launch(1, 2)
    scene.agents.meet("a0", 2)
    scene.join(0)
    scene.agents.keep((0,), aborting=False)
    assert exits(scene) == [0]
    assert not scene.agents.kept


def test_a_kept_joiner_leaves_its_slot_to_others_once_it_has_ended(scene: Scene) -> None:
    scene.nodes.grant(Node("n1", "main", slots=2))
    del scene.nodes[""]
    scene.launch(1, 2)
    scene.met("a0")
    assert scene.nodes.free_slots() == 0
    scene.agents.keep((0, 1), aborting=True)
    assert scene.agents.ending()
    assert (scene.nodes.free_slots(), scene.nodes.free_slots(ending=False)) == (0, 2)
    scene.agents.cleared(0)
    scene.agents.cleared(1)
    assert not scene.agents.ending()
    assert scene.nodes.free_slots() == 2
    assert scene.nodes.joiners(3) == (0, 1, 2)
    scene.agents.leave(0)
    assert scene.agents.taken() == {"n1": {1}}
    assert scene.nodes.free_slots() == 2
    assert scene.nodes.joiners(2) == (1, 2)
    assert scene.nodes.nodes_of((), (1, 2)) == dict.fromkeys((1, 2), scene.agents.number_of("n1"))
    scene.agents.let_go((1,), "test")
    assert scene.nodes.free_slots() == 0, "whoever ends holds all slots until its agent has ended"


def test_the_slot_of_a_leaver_that_ended_late_is_free_once_it_has_ended(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.met("a0")
    scene.agents.send((0,), BYE)
    scene.clock.advance(10.0)
    assert scene.agents.reap() == [0]
    assert scene.agents.taken() == {"": {0, 1}}
    assert not scene.agents.leave(0), "it was struck off before"
    assert scene.agents.taken() == {"": {1}}


def test_an_agent_that_listens_too_late_is_told_that_it_is_of_no_more_use(scene: Scene) -> None:
    scene.launch(1, 2)
    scene.agents.listens("a0")
    assert scene.done(EndAgent) == []
    scene.agents.dismiss(1, "test")
    scene.done(EndAgent)
    scene.agents.listens("a0")
    assert scene.done(EndAgent) == [EndAgent("a0", "it is of no more use")]


def test_sending_to_those_who_are_gone_is_no_error(scene: Scene) -> None:
    scene.launch(0, 2)
    scene.met("a0")
    scene.agents.leave(1)
    scene.agents.send((0, 1, 9), Stop())
    assert scene.done(Send) == [Send((0,), Stop())]
    assert scene.agents.agent_of(0) == "a0"
    scene.agents.send((0,), BYE)
    assert scene.agents.agent_of(0) == "", "it was told to go"


def test_fallen_agents_are_named(scene: Scene) -> None:
    scene.launch(0, 4)
    scene.met("a0")
    assert scene.agents.fallen(0) == ""
    scene.agents.ended("a0", 1)
    assert scene.agents.fallen(0) == "", "its workers had come; their connections tell"
    scene.agents.ended("a1", TERMINATED)
    wanted = "agent a1 ended with exit code 143 before its workers were ready; see logs/*a1*.log"
    assert scene.agents.fallen(0) == wanted
    assert scene.agents.fallen_told(0)


def test_fallen_agents_say_why(scene: Scene) -> None:
    scene.launch(0, 4)
    scene.agents.ended("a0", 87, "worker 0 failed in boot: PlanError: no")
    assert "were ready: worker 0 failed in boot: PlanError: no; see" in scene.agents.fallen(0)


def test_an_agent_without_a_launch_meets_once_and_takes_no_slots() -> None:
    scene = Scene()
    scene.agents.start("n1")
    assert scene.done(StartAgent) == [StartAgent("a0", "n1")]
    assert scene.turned_away("a0", 2) == "agent a0 is not expected"
    assert scene.agents.meet("a0", 0) == Admit("a0", ())
    assert scene.turned_away("a0", 0) == "agent a0 is not expected"
    assert scene.agents.taken() == {}
    scene.launch(0, 2)
    assert scene.agents.meet("a1", 2) == Admit("a1", (0, 1))


@pytest.mark.parametrize("apart", [False, True])
def test_agents_of_a_machine_may_count_as_its_nodes(apart: bool) -> None:
    """So copies of a share are not lost with the agent that holds it."""
    agents = Agents(tiny_run().deadlines, FakeClock(), [], agents_apart=apart)
    agents.launch(0, DP2, (Seat("", (0, 1)), Seat("", (2, 3)), Seat("n1", (0,))))
    for agent, workers in (("a0", 2), ("a1", 2), ("a2", 1)):
        assert isinstance(agents.meet(agent, workers), Admit)
    numbers = agents.nodes_of(range(6))
    assert [*numbers] == [0, 1, 2, 3, 4], "of the last one no node is known"
    assert numbers[0] == numbers[1]
    assert numbers[2] == numbers[3]
    assert (numbers[0] != numbers[2]) == apart
    assert numbers[4] == agents.number_of("n1")
    assert {*map(agents.node_of, range(4))} == {""}
