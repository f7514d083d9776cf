"""A launch goes to the agent that stays on its node; an agent's end is that of all its launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.cluster.launcher import EXIT_BOOT, EXIT_UNHEALTHY, KILLED, NotLaunched
from liver_hpc.coordinator.agents import GATHER_S, NodeAgents
from liver_hpc.coordinator.connections import PeerRegistry
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol import messages as m
from liver_hpc.rendezvous.channel import Channel
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import AgentEnded, Seat
from tests.memory_channel import MemoryChannel
from tests.memory_launcher import MemoryLauncher

END_S = 5.0


class Book:
    """NodeAgents over a launcher that plays, and lines that note."""

    def __init__(self, directory: Path, stay: bool = True) -> None:
        self.clock = FakeClock()
        self.started: list[str] = []
        self.launcher = MemoryLauncher(lambda launch: self.started.append(launch.agent))
        self.registry = PeerRegistry(self.clock)
        self.agents = NodeAgents(
            self.launcher, self.registry, directory, self.clock, END_S, stay=stay
        )

    def launch(self, name: str, node: str = "n1", slots: tuple[int, ...] = (0,)) -> None:
        self.agents.launch([LaunchAgent(name, Seat(node, slots), Layout(1, 1, 1))])

    def listens(self, agent: str) -> MemoryChannel:
        """What an agent is sent from now on."""
        channel = MemoryChannel()
        assert self.agents.expects(agent)
        self.registry.connect(cast(Channel, channel), m.Calls(agent=agent), epoch=1)
        channel.posted.clear()
        return channel

    def sent(self, channel: MemoryChannel) -> list[m.AnyMessage]:
        self.registry.flush()
        return [message for _, message in channel.messages]

    def come(self) -> None:
        """No more nodes come for a while."""
        self.clock.advance(GATHER_S)
        self.agents.start_those_due()

    def ended(self) -> list[Any]:
        return list(self.agents.ended())


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def said(launch: str, code: int = 0, error: str = "") -> m.LaunchEnded:
    return m.LaunchEnded(agent="a0", launch=launch, exit_code=code, error=error)


def test_a_later_launch_goes_to_the_agent_that_stays_on_the_node(book: Book) -> None:
    book.launch("a0")
    sent = book.listens("a0")
    book.launch("a1", slots=(2, 3))
    book.launch("a2", node="n2")
    assert book.started == ["a0", "a2"]
    assert book.sent(sent) == [m.StartWorkers(launch="a1", slots=(2, 3), layout="tp1 pp1 dp1")]


def test_an_agent_that_is_silent_gets_no_launch_before_it_is_heard_again(book: Book) -> None:
    book.launch("a0")
    sent = book.listens("a0")
    book.agents.silent = {"a0"}
    book.launch("a1")
    assert (book.started, book.sent(sent)) == (["a0", "a1"], [])
    book.agents.silent = set()
    book.launch("a2")
    assert (book.started, len(book.sent(sent))) == (["a0", "a1"], 1)


def test_before_an_agent_can_be_told_another_one_is_started(book: Book) -> None:
    book.launch("a0")
    book.launch("a1")
    assert book.started == ["a0", "a1"]


def test_agents_that_do_not_stay_get_no_second_launch(tmp_path: Path) -> None:
    book = Book(tmp_path, stay=False)
    book.launch("a0")
    sent = book.listens("a0")
    book.launch("a1")
    book.agents.end("a0", "of no more use")
    book.agents.kill("a1")
    assert book.started == ["a0", "a1"]
    assert book.sent(sent) == [m.Exit(reason="of no more use")]
    assert book.ended() == [AgentEnded("a1", KILLED, "")]


def test_a_launch_has_ended_when_its_agent_says_so(book: Book) -> None:
    book.launch("a0")
    book.listens("a0")
    book.launch("a1")
    book.agents.heard(said("a0"))
    assert not book.agents.runs("a0")
    assert book.agents.runs("a1")
    book.agents.heard(said("a1", 87, "worker 0 ended in boot"))
    assert book.ended() == [AgentEnded("a0", 0, ""), AgentEnded("a1", 87, "worker 0 ended in boot")]
    book.agents.heard(said("a1", 1))  # once
    assert book.ended() == []


def test_with_an_agent_all_its_launches_have_ended(book: Book, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "agent-a0.log").write_text("12:00 ERROR [agent a0] out of memory\n")
    book.launch("a0")
    book.listens("a0")
    book.launch("a1")
    book.launch("a2", node="n2")
    book.agents.heard(said("a0"))
    book.launcher.end("a0", 137)
    assert book.ended() == [AgentEnded("a0", 0, ""), AgentEnded("a1", 137, "out of memory")]
    assert not book.agents.expects("a0")
    assert book.agents.node_of("a0") is None
    book.registry.drop("a0", "it has ended")
    book.launch("a3")
    assert book.started == ["a0", "a2", "a3"]


def test_one_launch_is_ended_and_the_others_are_not(book: Book) -> None:
    book.launch("a0")
    sent = book.listens("a0")
    book.launch("a1")
    book.agents.end("a1", "of no more use")
    book.agents.kill("a1")
    assert book.sent(sent)[1:] == [
        m.EndWorkers(launch="a1", reason="of no more use"),
        m.EndWorkers(launch="a1", reason="its time to end is over", at_once=True),
    ]
    assert book.launcher.alive("a0")
    book.agents.heard(said("a1", 0))
    book.clock.advance(2 * END_S)
    assert book.ended() == [AgentEnded("a1", 0, "")]
    assert book.launcher.alive("a0")


def test_an_agent_that_does_not_end_a_launch_is_killed(book: Book) -> None:
    book.launch("a0")
    book.listens("a0")
    book.launch("a1")
    book.agents.kill("a1")
    assert book.ended() == []
    book.clock.advance(END_S)
    assert [end.exit_code for end in book.ended()] == [KILLED, KILLED]


def test_a_launch_whose_agent_cannot_be_told_is_killed_with_it(book: Book) -> None:
    book.launch("a0")
    book.agents.end("a0", "nobody hears it")
    book.agents.kill("a0")
    book.agents.kill("ghost")
    assert not book.agents.expects("a0")
    assert book.ended() == [AgentEnded("a0", KILLED, "")]


def test_a_node_that_goes_back_is_left_by_its_agent(book: Book) -> None:
    book.launch("a0")
    sent = book.listens("a0")
    book.launch("a1", node="n2")
    other = book.listens("a1")
    book.agents.heard(said("a0"))
    book.agents.give_back("n1")
    assert book.sent(sent) == [m.Exit(reason="nothing is launched here any more")]
    assert book.sent(other) == []
    assert book.agents.leaving()
    book.launch("a2")  # the node was granted again at once
    assert book.started == ["a0", "a1", "a2"]
    book.launcher.end("a0", 0)
    assert [end.agent for end in book.ended()] == ["a0"]
    assert not book.agents.leaving()


def test_at_the_end_all_agents_are_told(book: Book) -> None:
    book.launch("a0")
    book.launch("a1", node="n2")
    lines = [book.listens("a0"), book.listens("a1")]
    book.agents.dismiss_all()
    got = [[type(message) for message in book.sent(line)] for line in lines]
    assert got == [[m.Exit], [m.Exit]]


def test_warnings_of_an_agent_count_as_long_as_it_is_there(book: Book) -> None:
    book.launch("a0")
    book.listens("a0")
    book.agents.heard(said("a0"))
    assert book.agents.node_of("a0") == "n1"
    assert book.agents.node_of("a7") is None
    assert book.agents.lives("a0")
    assert not book.agents.lives("a7")


# ---- agents that are there before a launch


def test_launches_wait_for_an_agent_that_comes(book: Book) -> None:
    book.agents.start("a0", "n1")
    book.agents.start("a1", "n1")  # once is enough
    book.launch("a2")
    book.launch("a3")
    assert book.started == ["a0"]
    sent = book.listens("a0")
    book.agents.listens("a0")
    assert [message.launch for message in book.sent(sent)] == ["a2", "a3"]  # type: ignore[union-attr]
    book.launch("a4")
    assert len(book.sent(sent)) == 3


def test_an_agent_that_does_not_come_fails_its_launches(book: Book) -> None:
    book.agents.start("a0", "n1")
    book.launch("a1")
    book.launcher.end("a0", 82)
    assert book.ended() == [AgentEnded("a1", 82, "")]
    book.agents.start("a2", "n2")
    book.launch("a3", node="n2")
    book.agents.kill("a3")
    assert book.ended() == [AgentEnded("a3", KILLED, "")]
    book.launch("a4")
    assert book.started == ["a0", "a2", "a4"]


def test_a_node_that_goes_back_before_its_agent_has_come(book: Book) -> None:
    book.agents.start("a0", "n1")
    book.come()
    book.agents.give_back("n1")
    assert not book.launcher.alive("a0")
    book.agents.start("a1", "n2")
    book.agents.give_back("n2")  # before it was even started
    book.come()
    assert book.started == ["a0"]
    assert book.ended() == []


def test_agents_on_the_nodes_of_one_grant_are_started_together(book: Book) -> None:
    together: list[int] = []
    launch = book.launcher.launch
    book.launcher.launch = lambda *new: (together.append(len(new)), launch(*new))[1]  # type: ignore[method-assign]
    for number in range(8):
        book.agents.start(f"a{number}", f"n{number}")
        book.clock.advance(GATHER_S / 10)
        book.agents.start_those_due()
    assert together == []
    book.come()
    assert together == [8]
    book.agents.launch(
        [LaunchAgent(f"b{n}", Seat(f"n{n}", (0,)), Layout(1, 1, 1)) for n in range(6, 12)]
    )
    assert together == [8, 4], "the others go to the agents that come"


def test_of_launches_that_fail_those_that_run_are_known(book: Book) -> None:
    book.launch("a0")

    def refuse(*new: LaunchAgent) -> None:
        raise NotLaunched(["a2"], "no such node")

    book.launcher.launch = refuse  # type: ignore[method-assign]
    launches = [LaunchAgent(name, Seat(name, (0,)), Layout(1, 1, 1)) for name in ("a1", "a2")]
    with pytest.raises(NotLaunched, match="no such node"):
        book.agents.launch(launches)
    assert book.agents.expects("a1")
    assert not book.agents.expects("a2")


def test_an_agent_that_cannot_be_started_leaves_it_to_the_launch(book: Book) -> None:
    book.launcher.close()
    book.agents.start("a0", "n1")
    book.come()
    with pytest.raises(LiverError, match="closed"):
        book.launch("a1")


def test_a_node_on_which_nothing_boots_is_told_where_nothing_else_is_on_it(book: Book) -> None:
    book.launch("a0")
    book.listens("a0")
    for number, code in enumerate([EXIT_BOOT, EXIT_BOOT, 0, *[EXIT_BOOT] * 3], 1):
        book.launch(f"a{number}")
        book.agents.heard(said(f"a{number}", code, f"no GPU, {number}"))
    assert book.agents.failing() == {}, "another launch is there"
    book.agents.heard(said("a0"))
    for number in (7, 8, 9):
        assert book.agents.failing() == {}
        book.launch(f"a{number}")
        book.agents.heard(said(f"a{number}", EXIT_BOOT, f"no GPU, {number}"))
    assert book.agents.failing() == {"n1": "no GPU, 9"}
    assert book.agents.failing() == {}


def test_a_node_that_is_not_well_is_told_with_what_its_agent_said(
    book: Book, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "agent-a0.log").write_text("12:00 ERROR [agent a0] no GPU\n")
    book.agents.start("a0", "n1")
    book.come()
    book.launch("a1")
    book.launch("a2", node="n2")
    book.launcher.end("a0", EXIT_UNHEALTHY)
    book.launcher.end("a2", 87)
    assert book.ended() == [AgentEnded("a1", EXIT_UNHEALTHY, "no GPU"), AgentEnded("a2", 87, "")]
    assert book.agents.unhealthy() == {"n1": "no GPU"}
    assert book.agents.unhealthy() == {}
