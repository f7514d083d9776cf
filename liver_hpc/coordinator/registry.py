"""The run's agents and workers, from launch to exit: who is expected, here, leaving, gone."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from liver_hpc.clock import Clock, Deadline
from liver_hpc.cluster.launcher import TERMINATED, Launcher, NodeRequest
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import AgentHello, EndAgent, Exit, Hello, ToWorker
from liver_hpc.rendezvous.base import Identity
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.run.nodes import Seat

log = logging.getLogger(__name__)


@dataclass
class Agent:
    """One launched agent and the ids of its workers, which it gets at the meeting.

    generation: the world that it was launched for. channel: its own, once it has met. kill_at: set
    once it is of no more use; killed: once it was ended by force.
    """

    name: str
    generation: int
    seat: Seat
    workers: tuple[int, ...] = ()
    arrived: set[int] = field(default_factory=set)
    channel: Channel | None = None
    kill_at: Deadline | None = None
    killed: bool = False

    @property
    def count(self) -> int:
        return len(self.seat.slots)

    @property
    def complete(self) -> bool:
        """All of its workers have said Hello."""
        return len(self.arrived) == self.count

    def missing(self) -> str:
        if not self.workers:
            return f"agent {self.name} to meet"
        late = [worker for worker in self.workers if worker not in self.arrived]
        return f"Hello of workers {late}"


@dataclass
class Member:
    """A connected worker. gone_by: set once it was told to exit."""

    worker: int
    agent: Agent
    channel: Channel
    heard_s: float
    gone_by: Deadline | None = None


class WorkerRegistry:
    """Keeps the books of agents and workers; used by the event loop alone.

    Agents are a0, a1, ... and workers 0, 1, ... in the order in which they came; no name or
    number is ever used twice.
    """

    def __init__(self, config: RunConfig, launcher: Launcher, clock: Clock) -> None:
        self._deadlines = config.deadlines
        self._launcher = launcher
        self._clock = clock
        self._next_agent = 0
        self._next_worker = 0
        self._agents: dict[str, Agent] = {}
        self._members: dict[int, Member] = {}
        self._nodes_of_workers: dict[int, str] = {}
        self._finished: set[int] = set()

    # ---- coming

    def launch(self, generation: int, layout: Layout, seats: Sequence[Seat]) -> None:
        """Starts an agent in every seat; raises what the launcher raises."""
        agents = []
        for seat in seats:
            agents.append(Agent(f"a{self._next_agent}", generation, seat))
            self._next_agent += 1
        self._agents.update((agent.name, agent) for agent in agents)
        requests = [
            NodeRequest(a.name, a.count, str(layout), a.seat.slots, a.seat.node) for a in agents
        ]
        try:
            self._launcher.launch(requests)
        except (LiverError, OSError):
            for agent in agents:
                self._forget_or_kill(agent)
            raise

    def _forget_or_kill(self, agent: Agent) -> None:
        """After a launch that failed half-way: the launcher may or may not know this one."""
        try:
            self._launcher.alive(agent.name)
        except LiverError:
            del self._agents[agent.name]
        else:
            agent.kill_at = Deadline.after(self._clock, 0.0, f"agent {agent.name} to end")

    def meet(self, identity: Identity) -> tuple[int, ...]:
        """The ids of an agent's workers; MeetingError for one that is not expected."""
        agent = self._agents.get(identity.agent)
        if agent is None or agent.kill_at is not None:
            raise MeetingError(f"agent {identity.agent} is not expected")
        if agent.workers:
            raise MeetingError(f"agent {identity.agent} has met already")
        if identity.workers != agent.count:
            raise MeetingError(
                f"agent {identity.agent}: wanted {agent.count} workers, got {identity.workers}"
            )
        first = self._next_worker
        self._next_worker += agent.count
        agent.workers = tuple(range(first, self._next_worker))
        self._nodes_of_workers.update(dict.fromkeys(agent.workers, agent.seat.node))
        log.info("agent %s on %s: workers %s", agent.name, identity.host, list(agent.workers))
        return agent.workers

    def join(self, channel: Channel, hello: Hello) -> int | None:
        """The generation that a worker was launched for; None when it is turned away."""
        agent = next((a for a in self._agents.values() if hello.worker in a.workers), None)
        if agent is None or agent.kill_at is not None or hello.worker in agent.arrived:
            log.warning("worker %d on %s is not expected", hello.worker, hello.host)
            channel.close()
            return None
        agent.arrived.add(hello.worker)
        self._members[hello.worker] = Member(hello.worker, agent, channel, self._clock.now_s())
        return agent.generation

    def arrived(self, generation: int) -> tuple[int, ...]:
        """The workers launched for a generation that are connected, sorted."""
        return tuple(
            sorted(m.worker for m in self._members.values() if m.agent.generation == generation)
        )

    def missing(self, generation: int) -> str:
        """Who of a generation's launch has not come yet; empty when all have."""
        return ", ".join(agent.missing() for agent in self._incomplete(generation))

    def fallen(self, generation: int) -> str:
        """Agents that ended before all their workers had come, as text; empty when none."""
        codes = {a.name: self._launcher.exit_code(a.name) for a in self._incomplete(generation)}
        return ", ".join(
            f"agent {name} ended with exit code {code} before its workers were ready; "
            f"see logs/*-{name}.log"
            for name, code in codes.items()
            if code is not None
        )

    def fallen_told(self, generation: int) -> bool:
        """Whether one of the fallen was told to end: its node is being taken away."""
        codes = (self._launcher.exit_code(agent.name) for agent in self._incomplete(generation))
        return any(code == TERMINATED for code in codes)

    def _incomplete(self, generation: int) -> list[Agent]:
        return [a for a in self._agents.values() if a.generation == generation and not a.complete]

    # ---- where they are

    def taken(self, ending: bool = True) -> dict[str, set[int]]:
        """Slots in use, by node: those of all agents that have not ended yet; without `ending`,
        not of those that are about to."""
        taken: dict[str, set[int]] = {}
        for agent in self._agents.values():
            if not ending and agent.kill_at is not None:
                continue
            taken.setdefault(agent.seat.node, set()).update(agent.seat.slots)
        return taken

    def ending(self) -> bool:
        """Whether an agent that is of no more use still holds its slots."""
        return any(agent.kill_at is not None for agent in self._agents.values())

    def node_of(self, worker: int) -> str:
        """The node of a worker that is, or was until a moment ago, connected."""
        return self._nodes_of_workers[worker]

    def workers_on(self, nodes: Container[str], workers: Iterable[int]) -> tuple[int, ...]:
        """Those of `workers` that are on one of the nodes."""
        return tuple(worker for worker in workers if self._nodes_of_workers.get(worker) in nodes)

    def launched_on(self, nodes: Container[str], generation: int) -> bool:
        """Whether an agent that was launched for a generation runs on one of the nodes."""
        return any(
            agent.seat.node in nodes and agent.generation == generation
            for agent in self._agents.values()
        )

    # ---- agents' own channels

    def attach(self, channel: Channel, hello: AgentHello) -> None:
        """An agent's own channel stands; an agent that is of no more use is told to end."""
        agent = self._agents.get(hello.agent)
        if agent is None or agent.channel is not None:
            log.warning("agent %s on %s is not expected", hello.agent, hello.host)
            channel.close()
            return
        agent.channel = channel
        if agent.kill_at is not None:
            self._end(agent, "it is of no more use")

    def detach(self, channel: Channel, name: str) -> None:
        """An agent's own channel has ended."""
        agent = self._agents.get(name)
        if agent is not None and agent.channel is channel:
            agent.channel = None
        channel.close()

    def explains(self, worker: int) -> bool:
        """Whether the agent of a worker that should not have gone can say how it ended."""
        member = self._members.get(worker)
        return member is not None and member.gone_by is None and member.agent.channel is not None

    def agent_node(self, name: str) -> str | None:
        """The node of an agent; None for one that has ended, or is being ended from here."""
        agent = self._agents.get(name)
        return None if agent is None or agent.killed else agent.seat.node

    def _end(self, agent: Agent, reason: str) -> None:
        if agent.channel is not None:
            try:
                agent.channel.send(EndAgent(reason=reason))
            except ChannelClosed:
                agent.channel = None

    # ---- being here

    def send(self, workers: Iterable[int], message: ToWorker) -> None:
        """To those that are still connected; a broken connection shows as its Disconnected."""
        for worker in workers:
            member = self._members.get(worker)
            if member is None:
                continue
            if isinstance(message, Exit):
                self._see_off(member)
            try:
                member.channel.send(message)
            except ChannelClosed as error:
                log.warning("worker %d did not get %s: %s", worker, message.type, error)

    def hear(self, channel: Channel, worker: int) -> bool:
        """Notes a sign of life; False when the channel is not, or no longer, the worker's."""
        member = self._members.get(worker)
        if member is None or member.channel is not channel:
            return False
        member.heard_s = self._clock.now_s()
        return True

    def excuse_all(self) -> None:
        """Counts everybody as heard of now."""
        for member in self._members.values():
            member.heard_s = self._clock.now_s()

    def silent(self) -> list[int]:
        """Workers without a sign of life for `heartbeat_s`."""
        last_s = self._clock.now_s() - self._deadlines.heartbeat_s
        return [
            member.worker
            for member in self._members.values()
            if member.heard_s < last_s and member.gone_by is None
        ]

    def finish(self, worker: int) -> None:
        """The worker has done its last step: from now on it may end when it likes."""
        self._finished.add(worker)

    def finished(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Those of `workers` that have done their last step."""
        return tuple(worker for worker in workers if worker in self._finished)

    def present(self) -> tuple[int, ...]:
        """All connected workers, sorted."""
        return tuple(sorted(self._members))

    def working(self) -> list[str]:
        """Agents whose workers have all come, and that have not ended themselves."""
        complete = [agent.name for agent in self._agents.values() if agent.complete]
        return [name for name in complete if self._launcher.alive(name)]

    # ---- going

    def leave(self, worker: int) -> bool:
        """Strikes a worker off whose connection has ended; False when it was off already."""
        member = self._members.pop(worker, None)
        if member is None:
            return False
        member.channel.close()
        self._see_off_agent(member.agent)
        return True

    def dismiss(self, generation: int) -> None:
        """The handoff to this generation is off: its agents go, at once if not all booted yet."""
        for agent in self._agents.values():
            if agent.generation == generation and agent.kill_at is None:
                limit_s = self._deadlines.exit_s if agent.complete else 0.0
                self._end(agent, f"the handoff to generation {generation} is off")
                agent.kill_at = Deadline.after(self._clock, limit_s, f"agent {agent.name} to end")

    def reap(self) -> list[int]:
        """Ends by force what did not go by itself; returns the workers struck off here."""
        late = [m.worker for m in self._members.values() if m.gone_by and m.gone_by.expired()]
        for worker in late:
            log.warning("worker %d has not ended %g s after Exit", worker, self._deadlines.exit_s)
            self.leave(worker)
        for agent in [a for a in self._agents.values() if a.kill_at]:
            assert agent.kill_at is not None
            if not self._launcher.alive(agent.name):
                del self._agents[agent.name]
            elif agent.kill_at.expired() and not agent.killed:
                log.warning("agent %s has not ended by itself: killed", agent.name)
                agent.killed = True
                self._launcher.kill(agent.name)
        return late

    def _see_off(self, member: Member) -> None:
        if member.gone_by is None:
            limit_s = self._deadlines.exit_s
            member.gone_by = Deadline.after(self._clock, limit_s, f"worker {member.worker} to end")
            self._see_off_agent(member.agent)

    def _see_off_agent(self, agent: Agent) -> None:
        """An agent goes once all of its workers have come, and all are gone or about to go."""
        stays = any(m.agent is agent and m.gone_by is None for m in self._members.values())
        if agent.complete and not stays and agent.kill_at is None:
            limit_s = self._deadlines.exit_s
            agent.kill_at = Deadline.after(self._clock, limit_s, f"agent {agent.name} to end")
