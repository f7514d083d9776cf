"""The run's agents and workers, from launch to exit: who is expected, here, leaving, gone."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field

from liver_hpc.clock import Clock, Deadline
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.layout.coordinates import Layout, ids_text
from liver_hpc.protocol.messages import Exit, Hello, ToWorker
from liver_hpc.run import actions as a
from liver_hpc.run.events import Seat

STANDBY = -1
"""In the place of a generation: launched for no world, but as a spare."""
TERMINATED = 143
"""Exit code of an agent that was told to end by SIGTERM before it had met."""


@dataclass
class Agent:
    """One launched agent and the ids of its workers, which it gets at the meeting.

    generation: the world that it was launched for. gone: workers that have ended. exit_code: set
    once nothing of it runs any more; said: its last error then. end_by: set once it is of no more
    use; killed: once it was ended by force.
    """

    name: str
    generation: int
    seat: Seat
    workers: tuple[int, ...] = ()
    arrived: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    exit_code: int | None = None
    said: str = ""
    end_by: Deadline | None = None
    killed: bool = False

    @property
    def complete(self) -> bool:
        """All of its workers have said Hello."""
        return len(self.arrived) == len(self.seat.slots)

    def slots(self) -> set[int]:
        """Those that it holds: once it is of no more use, all of them until it has ended."""
        if not self.gone or self.end_by is not None:
            return {*self.seat.slots}
        at = zip(self.seat.slots, self.workers, strict=False)
        return {*self.seat.slots} - {slot for slot, worker in at if worker in self.gone}

    def missing(self) -> str:
        if not self.workers:
            return f"agent {self.name} to meet"
        return f"Hello of workers {ids_text({*self.workers} - {*self.arrived})}"


class Agents:
    """The book of agents and workers.

    Agents are a0, a1, ... in the order in which they came, in all starts of the run, and workers 0,
    1, ... in this one; no name or number is ever used twice. What has to be done about them goes to
    `out`, in order.

    started: how many agents were, in all starts of the run. finished: workers that have done their
    last step; they may end when they like. exit_s: how long an agent may take to end. kept: joiners
    whose handoff was called off and that the next one may have, each with the end of its stay.
    lingering: workers without a seat that stay with their snapshots, each with the end of that.
    agents_apart: where the node has no name, as this machine, each agent's workers count as on one
    of their own.
    """

    def __init__(
        self,
        deadlines: DeadlineSection,
        clock: Clock,
        out: list[a.Action],
        agents_apart: bool = False,
    ) -> None:
        self.started = 0
        self.finished: set[int] = set()
        self.exit_s = deadlines.exit_s
        self.kept: dict[int, Deadline] = {}
        self.lingering: dict[int, Deadline] = {}
        self._keep_s = deadlines.boot_s
        self._agents_apart = agents_apart
        self._clearing: dict[int, Deadline] = {}  # who is kept once it has let its handoff go
        self._clock = clock
        self._out = out
        self._next_worker = 0
        self._first: Hello | None = None  # of those that say with which code they compute
        self._agents: dict[str, Agent] = {}
        self._without_launch: set[str] = set()  # agents that have not met yet
        self._launch_of: dict[int, str] = {}  # of each worker: its agent's name
        self._workers: dict[int, Agent] = {}  # those that are connected
        self._leave_by: dict[int, Deadline] = {}  # those of them that were told to exit
        self._nodes_of_workers: dict[int, str] = {}
        self._numbers_of_workers: dict[int, int] = {}  # of their nodes
        self._numbers_of_nodes: dict[str, int] = {}

    # ---- coming

    def launch(self, generation: int, layout: Layout, seats: Sequence[Seat]) -> None:
        """An agent for every seat."""
        numbered = enumerate(seats, start=self.started)
        agents = [Agent(f"a{number}", generation, seat) for number, seat in numbered]
        self.started += len(agents)
        self._agents.update((agent.name, agent) for agent in agents)
        self._out.append(
            a.Launch(tuple(a.LaunchAgent(agent.name, agent.seat, layout) for agent in agents))
        )

    def start(self, node: str) -> None:
        """An agent without a launch; all that is known of it later is its node's."""
        name = f"a{self.started}"
        self.started += 1
        self._without_launch.add(name)
        self._out.append(a.StartAgent(name, node))

    def launch_failed(self, agents: Iterable[str], lost: Container[str]) -> tuple[int, int]:
        """The generation that agents were launched for, -1 where they are known no longer, and how
        many workers they were to start. Those of which nothing runs are forgotten, the others are
        ended."""
        generation, workers = -1, 0
        for name in agents:
            agent = self._agents.get(name)
            if agent is None:
                continue
            generation = agent.generation
            workers += len(agent.seat.slots)
            if name in lost:
                del self._agents[name]
            else:
                self._retire(agent, 0.0)
        return generation, workers

    def next_workers(self, number: int) -> tuple[int, ...]:
        """The ids that the next workers get, if these meet before all others."""
        return tuple(range(self._next_worker, self._next_worker + number))

    def meet(self, name: str, workers: int) -> a.Admit | a.TurnAway:
        """What an agent is told that has come with so many workers: their ids, or to go."""
        agent = self._agents.get(name)
        if name in self._without_launch and workers == 0:
            self._without_launch.discard(name)
            return a.Admit(name, ())
        if agent is None or agent.end_by is not None:
            return a.TurnAway(name, f"agent {name} is not expected")
        if agent.workers:
            return a.TurnAway(name, f"agent {name} has met already")
        wanted = len(agent.seat.slots)
        if workers != wanted:
            return a.TurnAway(name, f"agent {name}: wanted {wanted} workers, got {workers}")
        agent.workers = self.next_workers(workers)
        self._next_worker += workers
        self._launch_of.update(dict.fromkeys(agent.workers, name))
        node = agent.seat.node
        self._nodes_of_workers.update(dict.fromkeys(agent.workers, node))
        number = self.number_of(node or name if self._agents_apart else node)
        self._numbers_of_workers.update(dict.fromkeys(agent.workers, number))
        return a.Admit(name, agent.workers)

    def expects(self, worker: int) -> bool:
        """Whether a worker that says Hello now would be let in."""
        agent = self._agent_of(worker)
        return agent is not None and agent.end_by is None and worker not in agent.arrived

    def join(self, hello: Hello) -> int:
        """The generation that a worker, which must be expected, was launched for."""
        agent = self._agent_of(hello.worker)
        assert agent is not None
        agent.arrived.add(hello.worker)
        self._workers[hello.worker] = agent
        return agent.generation

    def other_code(self, hello: Hello) -> str:
        """By what a worker computes with other code, or on other samples, than the first one that
        said with which; empty where it does not. All that were let in have the same, so that one
        may have gone."""
        if self._first is None:
            self._first = hello if hello.code else None
            return ""
        first = self._first
        differ = [
            f"{name} is {hello.code[name]}, {its} there"
            for name, its in first.code.items()
            if hello.code.get(name, its) != its
        ]
        if not differ:
            return ""
        who, other = (f"worker {each.worker} on {each.host}" for each in (hello, first))
        return f"{who} has other code or samples than {other}: {'; '.join(differ)}"

    def _agent_of(self, worker: int) -> Agent | None:
        return self._agents.get(self._launch_of.get(worker, ""))

    def arrived(self, generation: int) -> tuple[int, ...]:
        """The workers launched for a generation that are connected, sorted."""
        here = self._workers.items()
        return tuple(sorted(w for w, agent in here if agent.generation == generation))

    def completes(self, worker: int) -> bool:
        """Whether all of its generation's launch have come, now that this worker has."""
        agent = self._workers[worker]
        return agent.complete and not self._incomplete(agent.generation)

    def missing(self, generation: int) -> str:
        """Who of a generation's launch has not come yet; empty when all have."""
        return ", ".join(agent.missing() for agent in self._incomplete(generation))

    def fallen(self, generation: int) -> str:
        """Agents that ended before all their workers had come, as text; empty when none."""
        return ", ".join(
            f"agent {agent.name} ended with exit code {agent.exit_code} before its workers were "
            f"ready{f': {agent.said}' if agent.said else ''}; see logs/*{agent.name}*.log"
            for agent in self._incomplete(generation)
            if agent.exit_code is not None
        )

    def fallen_told(self, generation: int) -> bool:
        """Whether one of the fallen was told to end: its node is being taken away."""
        return any(each.exit_code == TERMINATED for each in self._incomplete(generation))

    def booting(self, generation: int) -> bool:
        """Whether of a generation's launch somebody has not come yet who may still come."""
        return any(agent.end_by is None for agent in self._incomplete(generation))

    def _incomplete(self, generation: int) -> list[Agent]:
        launched = (each for each in self._agents.values() if each.generation == generation)
        return [agent for agent in launched if not agent.complete]

    # ---- where they are

    def taken(self, ending: bool = True) -> dict[str, set[int]]:
        """Slots in use, by node: those of all agents that have not ended yet; without `ending`,
        not of those that are about to, nor of those that boot as spares."""
        taken: dict[str, set[int]] = {}
        for agent in self._agents.values():
            boots = agent.generation == STANDBY and not agent.complete
            if ending or not (boots or agent.end_by is not None):
                taken.setdefault(agent.seat.node, set()).update(agent.slots())
        return taken

    def nodes_in_use(self) -> set[str]:
        """Those on which an agent has a slot."""
        agents = self._agents.values()
        return {each.seat.node for each in agents if not each.gone or each.slots()}

    def ending(self, lingering: bool = True) -> bool:
        """Whether slots will soon be free: of agents that are of no more use, of joiners that let
        their handoff go, or of workers that have left, which may take long (`lingering`)."""
        ends = any(agent.end_by for agent in self._agents.values())
        return ends or bool(self._clearing or (lingering and self.lingering))

    def spare(self, clearing: bool) -> list[int]:
        """Workers that have no seat and may have one: kept ones, and maybe those that will be."""
        return sorted({*self.kept, *(self._clearing if clearing else ())})

    def node_of(self, worker: int) -> str:
        """The node of a worker that is, or was, connected; empty for one that never was."""
        return self._nodes_of_workers.get(worker, "")

    def number_of(self, node: str) -> int:
        """The number of a node, as rank maps have it."""
        return self._numbers_of_nodes.setdefault(node, len(self._numbers_of_nodes))

    def nodes_of(self, workers: Iterable[int]) -> dict[int, int]:
        """The numbers of the nodes of those of the workers that are, or were, connected."""
        numbers = self._numbers_of_workers
        return {worker: numbers[worker] for worker in workers if worker in numbers}

    def workers_on(self, nodes: Container[str], workers: Iterable[int]) -> tuple[int, ...]:
        """Those of `workers` that are on one of the nodes."""
        return tuple(worker for worker in workers if self._nodes_of_workers.get(worker) in nodes)

    def launched_on(self, nodes: Container[str], generation: int) -> bool:
        """Whether an agent that was launched for a generation runs on one of the nodes."""
        return any(
            agent.seat.node in nodes and agent.generation == generation
            for agent in self._agents.values()
        )

    def agent_of(self, worker: int) -> str:
        """The agent of a connected worker that was not told to go; empty for any other."""
        agent = None if worker in self._leave_by else self._workers.get(worker)
        return "" if agent is None else agent.name

    def running(self) -> list[str]:
        """Those of which something may run."""
        return [agent.name for agent in self._agents.values() if agent.exit_code is None]

    def end_again(self) -> None:
        """Who was told to end may not have heard it."""
        for agent in self._agents.values():
            if agent.killed:
                self._out.append(a.KillAgent(agent.name))
            elif agent.end_by is not None:
                self._out.append(a.EndAgent(agent.name, "it is of no more use"))

    def listens(self, name: str) -> None:
        """An agent that is of no more use is told so as soon as it can be told anything."""
        agent = self._agents.get(name)
        if agent is not None and agent.end_by is not None:
            self._out.append(a.EndAgent(name, "it is of no more use"))

    # ---- being here

    def send(self, workers: Iterable[int], message: ToWorker) -> None:
        """A message to those that are still connected; Exit starts their last deadline."""
        here = tuple(worker for worker in workers if worker in self._workers)
        if here:
            self._out.append(a.Send(here, message))
        if isinstance(message, Exit):
            for worker in here:
                self._forget_spare(worker)
                if worker not in self._leave_by:
                    deadline = Deadline.after(self._clock, self.exit_s, f"worker {worker} to end")
                    self._leave_by[worker] = deadline
                    self._see_off(self._workers[worker])

    def complete(self) -> list[str]:
        """Agents whose workers have all come."""
        return [agent.name for agent in self._agents.values() if agent.complete]

    def present(self) -> tuple[int, ...]:
        """All connected workers, sorted."""
        return tuple(sorted(self._workers))

    # ---- staying without a seat

    def keep(self, workers: Iterable[int], aborting: bool) -> None:
        """Joiners stay for the next handoff, once they have let go of the last one; but not those
        of an agent that is not complete, as it ends."""
        for worker in workers:
            agent = self._workers.get(worker)
            if agent is None or not agent.complete or worker in self._leave_by:
                self.send((worker,), Exit(reason="not all workers of its launch have come"))
                continue
            waits_for = f"worker {worker} to let its handoff go"
            self._clearing[worker] = Deadline.after(self._clock, self.exit_s, waits_for)
            if not aborting:
                self.cleared(worker)

    def cleared(self, worker: int) -> None:
        """A worker has let its handoff go: one that is kept stays for as long as booting another
        may take."""
        if self._clearing.pop(worker, None) is not None:
            waits_for = f"a handoff for worker {worker}"
            self.kept[worker] = Deadline.after(self._clock, self._keep_s, waits_for)

    def take(self, workers: Iterable[int]) -> None:
        """A handoff begins that has these kept ones."""
        for worker in workers:
            del self.kept[worker]

    def let_go(self, workers: Iterable[int], reason: str) -> None:
        """Those of the workers that are kept, or will be, exit."""
        if leave := tuple(w for w in workers if w in self.kept or w in self._clearing):
            self.send(leave, Exit(reason=reason))

    def linger(self, worker: int, limit_s: float) -> None:
        """A worker without a seat stays for the snapshots it has, unless it was told to go."""
        if worker in self._workers and worker not in self._leave_by:
            waits_for = "the world that trains to have a snapshot"
            self.lingering[worker] = Deadline.after(self._clock, limit_s, waits_for)

    def rejoin(self, workers: Collection[int]) -> list[int]:
        """Those of them that linger do so no longer, and may have a seat again."""
        back = [worker for worker in self.lingering if worker in workers]
        for worker in back:
            del self.lingering[worker]
        return back

    def end_lingering(self, reason: str) -> None:
        if self.lingering:
            self.send(tuple(self.lingering), Exit(reason=reason))

    def _forget_spare(self, worker: int) -> None:
        for without_seat in (self.kept, self._clearing, self.lingering):
            without_seat.pop(worker, None)

    # ---- going

    def leave(self, worker: int, ended: bool = True) -> bool:
        """Strikes a worker off whose connection has ended; False when it was off already. Its slot
        is free, unless its process may not have ended; then it is once that is told, too."""
        agent = self._workers.pop(worker, None)
        its = self._agent_of(worker) if agent is None else agent
        if ended and its is not None:
            its.gone.add(worker)
        if agent is None:
            return False
        self._forget_spare(worker)
        self._leave_by.pop(worker, None)
        self._out.append(a.Disconnect(worker))
        self._see_off(agent)
        return True

    def ended(self, name: str, exit_code: int, said: str = "") -> Agent | None:
        """Nothing of an agent runs any more; None for one that was struck off before."""
        agent = self._agents.get(name)
        if agent is not None:
            agent.exit_code, agent.said = exit_code, said
            if agent.end_by is not None:
                del self._agents[name]
        return agent

    def dismiss(self, generation: int, reason: str, nodes: Container[str] | None = None) -> None:
        """Agents of a generation whose workers have not all booted yet go at once, all of them or
        those on these nodes."""
        for agent in self._incomplete(generation):
            if agent.end_by is None and (nodes is None or agent.seat.node in nodes):
                if agent.exit_code is None:
                    self._out.append(a.EndAgent(agent.name, reason))
                self._retire(agent, 0.0)

    def reap(self, standbys: Container[int] = ()) -> list[int]:
        """Ends what was kept for too long, but for `standbys`, and by force what did not go by
        itself; returns the workers struck off here."""
        for waiting, stay in ((self.kept, standbys), (self._clearing, ())):
            for worker in [w for w, until in waiting.items() if until.expired() and w not in stay]:
                self.let_go((worker,), str(waiting[worker].error()))
        for worker in [w for w, until in self.lingering.items() if until.expired()]:
            self.send((worker,), Exit(reason=str(self.lingering[worker].error())))
        told = self._leave_by
        late = [w for w in self._workers if w in told and told[w].expired()]
        for worker in late:
            self.leave(worker, ended=False)
        for agent in self._agents.values():
            if agent.end_by is not None and agent.end_by.expired() and not agent.killed:
                agent.killed = True
                self._out.append(a.KillAgent(agent.name))
        return late

    def _see_off(self, agent: Agent) -> None:
        """An agent goes once all of its workers have come, and all are gone or about to go."""
        stays = any(w in self._workers and w not in self._leave_by for w in agent.workers)
        if agent.complete and not stays and agent.end_by is None:
            self._retire(agent, self.exit_s)

    def _retire(self, agent: Agent, limit_s: float) -> None:
        """An agent is of no more use, and is forgotten once nothing of it runs."""
        agent.end_by = Deadline.after(self._clock, limit_s, f"agent {agent.name} to end")
        if agent.exit_code is not None:
            self._agents.pop(agent.name, None)
