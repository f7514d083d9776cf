"""The run's agents and workers, from launch to exit: who is expected, here, leaving, gone."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from liver_hpc.clock import Clock, Deadline
from liver_hpc.cluster.launcher import Launcher, NodeRequest
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import MeetingError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import Exit, Hello, ToWorker
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.rendezvous.meeting import Identity

log = logging.getLogger(__name__)


@dataclass
class Agent:
    """One launched agent and the ids of its workers, which it gets at the meeting.

    generation: the world that it was launched for. kill_at: set once it is of no more use.
    """

    name: str
    count: int
    generation: int
    workers: tuple[int, ...] = ()
    arrived: set[int] = field(default_factory=set)
    kill_at: Deadline | None = None

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


class Crew:
    """Keeps the books of agents and workers; used by the event loop alone.

    Agents are a0, a1, ... and workers 0, 1, ... in the order in which they came; no name or
    number is ever used twice.
    """

    def __init__(self, config: RunConfig, launcher: Launcher, clock: Clock) -> None:
        self._deadlines = config.deadlines
        self._workers_per_agent = config.cluster.workers_per_node
        self._launcher = launcher
        self._clock = clock
        self._next_agent = 0
        self._next_worker = 0
        self._agents: dict[str, Agent] = {}
        self._members: dict[int, Member] = {}
        self._finished: set[int] = set()

    # ---- coming

    def launch(self, generation: int, count: int, layout: Layout) -> None:
        """Starts agents for `count` workers; raises what the launcher raises."""
        per_agent = self._workers_per_agent or count
        agents = []
        for first in range(0, count, per_agent):
            name = f"a{self._next_agent}"
            self._next_agent += 1
            agents.append(Agent(name, min(per_agent, count - first), generation))
        self._launcher.launch([NodeRequest(a.name, a.count, str(layout)) for a in agents])
        self._agents.update((agent.name, agent) for agent in agents)

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
            f"see logs/agent-{name}.log"
            for name, code in codes.items()
            if code is not None
        )

    def _incomplete(self, generation: int) -> list[Agent]:
        return [a for a in self._agents.values() if a.generation == generation and not a.complete]

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
                agent.kill_at = Deadline.after(self._clock, limit_s, f"agent {agent.name} to end")

    def reap(self) -> list[int]:
        """Ends by force what did not go by itself; returns the workers struck off here."""
        late = [m.worker for m in self._members.values() if m.gone_by and m.gone_by.expired()]
        for worker in late:
            log.warning("worker %d has not ended %g s after Exit", worker, self._deadlines.exit_s)
            self.leave(worker)
        for agent in [a for a in self._agents.values() if a.kill_at and a.kill_at.expired()]:
            del self._agents[agent.name]
            if self._launcher.alive(agent.name):
                log.warning("agent %s has not ended by itself: killed", agent.name)
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
