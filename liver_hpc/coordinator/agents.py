"""The agents' processes: which launch runs under which, and what is said to it.

The core knows launches: each is an agent to it, with a name of its own. Where agents stay, the
first launch on a node starts a process with its name, and the later ones there go to that process;
on a node that is granted to a run that trains, an agent is started before there is a launch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from liver_hpc.clock import Clock, Deadline
from liver_hpc.cluster.launcher import (
    EXIT_BOOT,
    EXIT_UNHEALTHY,
    KILLED,
    Launcher,
    NotLaunched,
    last_words,
)
from liver_hpc.coordinator.connections import PeerRegistry
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol import messages as m
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import AgentEnded, AgentListens, Seat

log = logging.getLogger(__name__)

GATHER_S = 0.3
"""The nodes of one grant are told one by one; one srun starts agents on all of them."""
MOST_BOOTS = 3
"""So many launches in a row may fail in boot on a node."""


class NodeAgents:
    """Used by the event loop alone.

    silent: agents that have not been heard of for too long; they get no launch. given_up: those
    that were so for `coordinator_s`, which may live on a node that does not answer. stay: agents
    take further launches. end_s: how long a launch that was ended by force may take, until its
    agent is, with all that trains there: so long that only one is which is lost anyway.
    """

    def __init__(
        self,
        launcher: Launcher,
        registry: PeerRegistry,
        run_directory: Path,
        clock: Clock,
        end_s: float,
        stay: bool,
    ) -> None:
        self._launcher = launcher
        self._registry = registry
        self._run_directory = run_directory
        self._clock = clock
        self._end_s = end_s
        self._stay = stay
        self._agent_of: dict[str, str] = {}  # of a launch that has not been seen to end
        self._ended: list[AgentEnded] = []
        self._nodes: dict[str, str] = {}  # of an agent
        self._to_start: dict[str, str] = {}  # agents that are not started yet, and their nodes
        self._start_by: Deadline | None = None
        self._coming: dict[str, list[m.StartWorkers]] = {}  # agents, and what they will be told
        self._leaving: set[str] = set()  # agents that were told to end
        self._killed: dict[str, Deadline] = {}  # launches
        self.silent: set[str] = set()
        self.given_up: set[str] = set()
        self._unhealthy: dict[str, str] = {}  # nodes, and what is wrong with them
        self._failed_boots: dict[str, int] = {}  # in a row, by nodes
        self._failing: dict[str, str] = {}  # nodes, and what the last of these has said

    def start(self, agent: str, node: str) -> None:
        """An agent without a launch on a node where none is. Those of the nodes that come within
        GATHER_S of each other are started together."""
        if self._on(node) is None and node not in self._to_start.values():
            self._to_start[agent] = node
            if self._start_by is None:
                self._start_by = Deadline.after(self._clock, GATHER_S, "more nodes")

    def start_those_due(self) -> None:
        """To be called again and again."""
        if self._start_by is not None and self._start_by.expired():
            self._start_gathered()

    def _start_gathered(self) -> None:
        """Where that fails, a launch will show it."""
        gathered, self._to_start, self._start_by = self._to_start, {}, None
        new = [
            LaunchAgent(agent, Seat(its, ()), Layout(1, 1, 1)) for agent, its in gathered.items()
        ]
        try:
            self._launch_new(new)
        except NotLaunched as error:
            log.warning("agents %s cannot be started: %s", list(error.agents), error)
        self._coming.update({agent: [] for agent in gathered if agent in self._nodes})

    def launch(self, launches: Sequence[LaunchAgent]) -> None:
        """Raises NotLaunched where that is impossible for some."""
        self._start_gathered()
        new = [each for each in launches if not self._is_taken(each)]
        try:
            self._launch_new(new)
        finally:
            self._agent_of.update(
                {each.agent: each.agent for each in new if each.agent in self._nodes}
            )

    def _launch_new(self, new: Sequence[LaunchAgent]) -> None:
        """Starts agents together. Raises NotLaunched for some of them."""
        lost: tuple[str, ...] = ()
        try:
            if new:
                self._launcher.launch(*new)
        except NotLaunched as error:
            lost = error.agents
            raise
        finally:
            its = {each.agent: each.seat.node for each in new}
            self._nodes.update({agent: node for agent, node in its.items() if agent not in lost})

    def _is_taken(self, launch: LaunchAgent) -> bool:
        """Whether an agent that is on the node, or comes to it, gets the launch."""
        agent = self._on(launch.seat.node)
        if agent is None:
            return False
        log.info("agent %s: its workers are started by %s, which is there", launch.agent, agent)
        self._agent_of[launch.agent] = agent
        order = m.StartWorkers(
            launch=launch.agent, slots=launch.seat.slots, layout=str(launch.layout)
        )
        if agent in self._coming:
            self._coming[agent].append(order)
        else:
            self._registry.send((agent,), order)
        return True

    def listens(self, agent: str) -> None:
        """An agent's channel stands: it gets the launches that came before."""
        for order in self._coming.pop(agent, []):
            self._registry.send((agent,), order)

    def adopt(self, agent: str, node: str, listens: AgentListens) -> bool:
        """Takes over an agent that another coordinator has started; false where it has ended."""
        try:
            found = self._launcher.adopt(agent, node, listens.host, listens.pid)
        except LiverError as error:
            log.warning("agent %s: %s", agent, error)
            found = False
        if not found:
            return False
        self._nodes[agent] = node
        return True

    def called(self, agent: str, launches: Iterable[str]) -> None:
        """An agent has called, which runs these launches."""
        self._agent_of.update(dict.fromkeys(launches, agent))

    def declare_lost(self, launch: str) -> None:
        """Of a launch that another coordinator has begun, and that runs under no agent."""
        if launch not in self._agent_of:
            self._ended.append(AgentEnded(launch, KILLED, "its agent is gone"))

    def lives(self, launch: str) -> bool:
        """Whether the agent of a launch, or one of this name, has called and may live: it knows how
        its workers are."""
        agent = self.of(launch)
        known = agent in self._registry and agent in self._nodes
        return known and self._launcher.alive(agent)

    def unreachable(self) -> bool:
        """Whether an agent may live that does not answer."""
        return any(map(self._launcher.alive, self.silent | self.given_up))

    def of(self, launch: str) -> str:
        """The agent of a launch, or one of this name, as far as is known."""
        return self._agent_of.get(launch, launch)

    def _on(self, node: str) -> str | None:
        """An agent that is there to take a launch, or will be."""
        there = [a for a, its in self._nodes.items() if its == node and a not in self.silent]
        return next((one for one in there if self._takes_orders(one) or one in self._coming), None)

    def _takes_orders(self, agent: str) -> bool:
        return self._stay and agent in self._registry and agent not in self._leaving

    def end(self, launch: str, reason: str) -> None:
        """Asks for the end of a launch's workers, where anybody can be asked."""
        agent = self._agent_of.get(launch, "")
        if self._takes_orders(agent):
            self._registry.send((agent,), m.EndWorkers(launch=launch, reason=reason))
        elif agent == launch:
            self._registry.send((agent,), m.Exit(reason=reason))

    def kill(self, launch: str) -> None:
        """Ends a launch by force, and others with it only where its agent does not answer."""
        if launch not in self._agent_of:
            return  # it may have failed
        log.info("agent %s is ended by force, if it has not ended", launch)
        agent = self._agent_of[launch]
        if self._takes_orders(agent):
            order = m.EndWorkers(launch=launch, reason="its time to end is over", at_once=True)
            self._registry.send((agent,), order)
            waits_for = f"agent {agent} to end the workers of {launch}"
            self._killed[launch] = Deadline.after(self._clock, self._end_s, waits_for)
        else:
            self._kill(agent)

    def excuse_all(self) -> None:
        """Gives launches that were ended by force all of their time again."""
        for launch, until in self._killed.items():
            self._killed[launch] = Deadline.after(self._clock, self._end_s, until.waits_for)

    def give_back(self, node: str) -> None:
        """Nothing of the run is to be left there."""
        self._to_start = {agent: its for agent, its in self._to_start.items() if its != node}
        self._dismiss([agent for agent, its in self._nodes.items() if its == node])

    def dismiss_all(self) -> None:
        """Nothing is launched any more."""
        self._to_start.clear()
        self._dismiss(list(self._nodes))

    def _dismiss(self, agents: list[str]) -> None:
        for agent in agents:
            if agent in self._coming:
                self._kill(agent)
            elif self._takes_orders(agent):
                self._leaving.add(agent)
                self._registry.send((agent,), m.Exit(reason="nothing is launched here any more"))

    def _kill(self, agent: str) -> None:
        self._coming.pop(agent, None)
        self._leaving.add(agent)
        self._launcher.kill(agent)

    # ---- what is asked, and heard

    def expects(self, agent: str) -> bool:
        """Whether an agent that says hello is one of those that were launched."""
        return agent in self._nodes and agent not in self._leaving

    def node_of(self, agent: str) -> str | None:
        """The node of an agent; None for one that has ended, or was told to."""
        return self._nodes[agent] if self.expects(agent) else None

    def runs(self, launch: str) -> bool:
        """Whether anything of a launch still runs."""
        return launch in self._agent_of and self._launcher.alive(self._agent_of[launch])

    def leaving(self) -> bool:
        """Whether an agent that was told to end still runs."""
        return any(map(self._launcher.alive, self._leaving))

    def heard(self, ended: m.LaunchEnded) -> None:
        """Of an agent that stays."""
        if self._agent_of.get(ended.launch) == ended.agent:
            node = self._nodes.get(ended.agent, "")
            self._strike_off(ended.launch, node, ended.exit_code, ended.error)

    def ended(self) -> Iterator[AgentEnded]:
        """The launches that have ended since the last call; to be asked again and again."""
        for launch, deadline in list(self._killed.items()):
            if deadline.expired() and launch in self._agent_of:
                log.error("%s: it is killed, and all its workers", deadline.error())
                del self._killed[launch]
                self._kill(self._agent_of[launch])
        for agent in list(self._nodes):
            code = self._launcher.exit_code(agent)
            if code is None:
                continue
            node = self._nodes.pop(agent)
            self._leaving.discard(agent)
            self._coming.pop(agent, None)
            said = last_words(self._run_directory, agent)
            if code == EXIT_UNHEALTHY:
                self._unhealthy[node] = said
            for launch in [each for each, its in self._agent_of.items() if its == agent]:
                self._strike_off(launch, node, code, said)
        ended, self._ended = self._ended, []
        yield from ended

    def unhealthy(self) -> dict[str, str]:
        """Nodes that have failed their check since the last call, and how."""
        found, self._unhealthy = self._unhealthy, {}
        return found

    def failing(self) -> dict[str, str]:
        """Nodes since the last call on which MOST_BOOTS launches in a row have failed in boot, and
        nothing else is."""
        found, self._failing = self._failing, {}
        return found

    def _strike_off(self, launch: str, node: str, exit_code: int, said: str) -> None:
        del self._agent_of[launch]
        failed = self._failed_boots.pop(node, 0) + 1 if exit_code == EXIT_BOOT else 0
        self._failed_boots[node] = failed
        if failed >= MOST_BOOTS and node not in map(self._nodes.get, self._agent_of.values()):
            self._failing[node] = said
        self._killed.pop(launch, None)
        self._ended.append(AgentEnded(launch, exit_code, said))
