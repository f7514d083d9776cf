"""A whole run in memory: its core, a shell that performs what it decides, and the world outside.

What happens next is drawn; messages of one sender arrive in order, those of different ones in any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.actions import Ending
from liver_hpc.run.codec import encode
from liver_hpc.run.entries import Entry
from liver_hpc.run.events import Node, NodeGone, NodeGranted, PoolEvent
from liver_hpc.run.lifecycle import RunState
from liver_hpc.run.machine import Run
from tests.fakes import Fault
from tests.unit.run.choices import Choices
from tests.unit.run.outside import (
    KILLED,
    Closed,
    PlannedFaults,
    PlayedAgent,
    PlayedNode,
    PlayedWorker,
    Saved,
    training_world,
)
from tests.unit.run.remembered import remembered
from tests.unit.run.replay import plain
from tests.unit.run.scenes import LONGEST_WAIT_S, Scene
from tests.unit.run.watch import Watch

EVENT_S = 2.0**-10
"""Time that one event takes."""
WAITS_S = (0.1, 1.0, 1.0, 2.5, 2.5, 5.0, 5.0, 7.0, 13.0, 31.0, LONGEST_WAIT_S)
WINDOWS_S = (None, None, 0.5, 10.0, 25.0, 100.0, 600.0)
REASONS = ("preempted", "time limit", "drained", "cancelled", "node hours")
FAULTS = (
    (Phase.BOOT, Fault.DIE),
    (Phase.BOOT, Fault.SILENT),
    (Phase.BOOT, Fault.FAIL),
    *((phase, fault) for phase in (Phase.PREPARE, Phase.ARMED, Phase.TRANSFER, Phase.RELEASE)
        for fault in (Fault.DIE, Fault.FAIL, Fault.SILENT)),
    *((Phase.TRANSFER, fault) for fault in (Fault.VOTE_NO, Fault.WRONG_DIGEST)),
)  # fmt: skip

Said = m.FromWorker | Saved | Closed
Task = Callable[[], None]


class Play:
    """One schedule. `entries` is its journal: times, events, and what came of them. frozen: workers
    that stand still, mute ones, and will hear later what they are told now. code: of workers that
    boot."""

    def __init__(self, scene: Scene, choices: Choices, compare_ticks: bool = True) -> None:
        self.scene = scene
        self.choices = choices
        self.now_s = 1_000.0
        self.entries: list[tuple[float, e.Event, list[a.Action]]] = []
        self.nodes: dict[str, PlayedNode] = {}
        self.starts = 0
        self.code: dict[str, str] = {}
        self._compare_ticks = compare_ticks
        self._performing = False
        self._asked = 0
        self._turn = 0
        self._clear()

    def _clear(self) -> None:
        """All but the nodes is as at a start of the run."""
        self.run: Run = self.scene.new_run()
        self.watch = Watch(self.run, self.scene.config)
        self.agents: dict[str, PlayedAgent] = {}
        self.workers: dict[int, PlayedWorker] = {}
        self.faults = PlannedFaults()
        self.registered: set[int] = set()
        self.frozen: set[int] = set()
        self.journal_error = ""
        self.launches_fail = self.rogue = False
        self._slow_journal = False
        self._disk_fills = True
        self._held: deque[a.Action] = deque()
        self._pool: deque[PoolEvent] = deque()
        self._down: dict[int, deque[m.ToWorker]] = {}
        self._up: dict[int, deque[Said]] = {}
        self._crossed: set[int] = set()
        self._saved: dict[tuple[int, int], set[int]] = {}
        self._restored: set[int] = set()
        self._resumed: e.Resumed | None = None

    # ---- the shell

    def feed(self, event: e.Event) -> list[a.Action]:
        """One event into the core; what it decides is performed, at once or a little later."""
        self.now_s += EVENT_S
        quiet = self._compare_ticks and isinstance(event, e.Tick)
        before = remembered(self.run) if quiet else None
        self.watch.heard(event, self.now_s)
        actions = self.run.handle(event, self.now_s)
        if not actions and isinstance(event, e.Tick):
            assert not quiet or remembered(self.run) == before, (
                "a tick without actions did something"
            )
        else:
            self.entries.append((self.now_s, event, actions))
        self.watch.did(event, actions)
        for action in actions:
            if isinstance(action, a.End) and not self.rogue:
                assert "events so far" not in action.reason, action.reason
        self._held += actions
        if not self._slow_journal:
            self.perform()
        return actions

    def perform(self) -> None:
        """What is in the journal is done, in order."""
        if self._performing:
            return
        self._performing = True
        while self._held:
            self._perform(self._held.popleft())
        self._performing = False

    def _perform(self, action: a.Action) -> None:
        match action:
            case a.Launch():
                self._launch(action)
            case a.Admit():
                self._boot(self.agents[action.agent], action.workers)
            case a.TurnAway():
                agent = self.agents.get(action.agent)  # else somebody who took its name
                if agent is not None and not agent.workers:
                    agent.end(4)
            case a.Send():
                for worker in action.workers:
                    if worker in self.registered:
                        self._down[worker].append(action.message)
            case a.Disconnect():
                self.registered.discard(action.worker)
                self.workers[action.worker].dead = True
            case a.EndAgent():
                if action.agent in self.agents and self.agents[action.agent].listens:
                    self.end_agent(self.agents[action.agent], 0)
            case a.KillAgent():
                if action.agent in self.agents:  # else its launch has failed meanwhile
                    self.end_agent(self.agents[action.agent], KILLED)
            case a.GiveBack():
                self._given_back(action.node)

    def _launch(self, launch: a.Launch) -> None:
        """As a launcher does: one agent after the other, until one cannot be launched."""
        names = [each.agent for each in launch.agents]
        for position, each in enumerate(launch.agents):
            node = self.nodes.get(each.seat.node)
            fails = self.launches_fail and position == len(names) - 1
            if node is None or node.returning or fails:
                self.launches_fail = False
                lost = tuple(names[position:])
                failed = e.LaunchFailed(tuple(names), lost, f"node {each.seat.node} is away")
                self.feed(failed)
                return
            self.agents[each.agent] = PlayedAgent(each.agent, each.seat)

    def _boot(self, agent: PlayedAgent, workers: Sequence[int]) -> None:
        if agent.ended:
            return
        agent.says.append("listens")
        for number in workers:
            fault = self.faults.take(number, Phase.BOOT)
            worker = PlayedWorker(number, self.faults, mute=fault is Fault.SILENT)  # type: ignore[arg-type]
            worker.fails_to_restore = fault is Fault.FAIL
            worker.resumed_step = self._resumed.step if self._resumed is not None else 0
            self.workers[number] = worker
            self._up[number], self._down[number] = deque(), deque()
            agent.workers.append(worker)
            if fault is Fault.DIE:
                worker.dead = True
            elif not worker.mute:
                hello = m.Hello(
                    worker=number, pid=number, host="h", booted_s=self.now_s, code=self.code
                )
                self._up[number].append(hello)
        agent.look()

    def end_agent(self, agent: PlayedAgent, code: int) -> None:
        agent.end(code)
        for worker in agent.workers:
            self.close(worker, "killed")

    def _given_back(self, name: str) -> None:
        node = self.nodes.get(name)
        goes = node is not None and (node.node.burst or node.deadline_s is not None)
        if node is not None and goes and not node.returning:
            node.returning = True
            self.tell(NodeGone(name, "given back"))

    # ---- what can happen next without anybody's doing

    def tasks(self) -> Iterator[Task]:
        """What is on its way, in a fixed order; whoever calls draws one of them."""
        if self._held:
            yield self.perform
        if self._pool:
            yield self.hear_pool
        for agent in self.agents.values():
            if agent.says:
                yield lambda agent=agent: self._hear_agent(agent)  # type: ignore[misc]
        for number in self.workers:
            if number in self.frozen:
                continue
            if self._down[number]:
                yield lambda number=number: self._deliver(number)  # type: ignore[misc]
            if self._up[number]:
                yield lambda number=number: self._hear(number)  # type: ignore[misc]
            if self.workers[number].preparing:
                yield lambda number=number: self._prepare(number)  # type: ignore[misc]

    def hear_pool(self) -> None:
        event = self._pool.popleft()
        if isinstance(event, NodeGone):
            self.nodes.pop(event.node, None)
            for agent in self.agents.values():
                if agent.seat.node == event.node:
                    self.end_agent(agent, KILLED)
        self.feed(event)

    def _hear_agent(self, agent: PlayedAgent) -> None:
        word = agent.says.popleft()
        if word == "meets":
            self.feed(e.AgentMet(agent.name, len(agent.seat.slots)))
        elif word == "listens":
            known = self.run.agents._agents.get(agent.name)
            agent.listens = known is not None and not known.killed
            if agent.listens:
                self.feed(e.AgentListens(agent.name))
        else:
            self.feed(e.AgentEnded(agent.name, agent.code))

    def _deliver(self, number: int) -> None:
        worker = self.workers[number]
        self._says(worker, worker.receive(self._down[number].popleft()))
        self._cross_joiners()

    def _prepare(self, number: int) -> None:
        worker = self.workers[number]
        self._says(worker, worker.prepare())

    def _says(self, worker: PlayedWorker, words: Sequence[Said]) -> None:
        if not worker.mute:
            self._up[worker.worker] += words
        if worker.step >= self.scene.config.train.steps and any(
            isinstance(word, m.FirstStep) for word in words
        ):
            saved = Saved(worker.worker, worker.world_generation, worker.step)
            self._up[worker.worker] += [saved, *worker.finish()]
        if worker.dead:
            self.close(worker, "its process ended")

    def say(self, worker: int, word: m.FromWorker) -> None:
        """Something that a worker was not asked for is on its way."""
        self._up[worker].append(word)

    def close(self, worker: PlayedWorker, reason: str) -> None:
        """Once: the end of its channel, after all that it has said."""
        worker.dead, worker.preparing = True, False
        self._down[worker.worker].clear()
        up = self._up[worker.worker]
        if not up or not isinstance(up[-1], Closed):
            up.append(Closed(worker.worker, reason))
        for agent in self.agents.values():
            if worker in agent.workers:
                agent.look()

    def _hear(self, number: int) -> None:
        """What a worker has said reaches the core, as far as it is anybody's business."""
        word = self._up[number].popleft()
        match word:
            case m.Hello():
                if self.run.expects(number):
                    self.registered.add(number)
                    self.feed(word)
                else:
                    self.workers[number].dead = True
            case Closed():
                self.feed(e.WorkerGone(number, word.reason))
            case _ if number not in self.registered:
                pass
            case Saved():
                self._part_saved(word)
            case m.Restored():
                self.feed(word)
                self._restored.add(number)
                world = self.run.world
                if world is not None and self._restored == {*world.rank_map.workers}:
                    self.feed(e.StateRestored(word.generation))
            case _:
                self.feed(word)

    def _part_saved(self, saved: Saved) -> None:
        world = self.run.world_of(saved.generation)
        if world is None:
            return
        parts = self._saved.setdefault((saved.generation, saved.step), set())
        parts.add(saved.worker)
        if parts == {*world.rank_map.workers}:
            if self._disk_fills and self.choices.now_and_then(4):
                full = f"checkpoint of step {saved.step} given up: full"
                self.feed(e.CheckpointFailed(saved.step, full))
            else:
                path = f"/checkpoints/step-{saved.step}"
                self.feed(e.CheckpointWritten(saved.step, path, 100, 0.5, 200))

    def train(self) -> None:
        """One step of the world that trains, where there is one."""
        world = training_world(self.workers)
        if world is None:
            return
        said = world.step(self.scene.config.train.steps)
        if any(isinstance(word, m.AtBoundary) for words in said.values() for word in words):
            self._crossed.add(world.members[0].generation)
        for member in world.members:
            self._says(member, said[member.worker])
        self._cross_joiners()

    def _cross_joiners(self) -> None:
        for worker in [*self.workers.values()]:
            arrives = worker.armed and worker.joins and worker.doing == "nothing"
            able = not worker.dead and worker.worker not in self.frozen
            if arrives and worker.generation in self._crossed and able:
                self._says(worker, worker.cross())

    def wait(self, seconds: float) -> None:
        """Time passes; nodes whose deadline has come are taken."""
        self.now_s += seconds
        for name, node in self.nodes.items():
            if node.deadline_s is not None and node.deadline_s <= self.now_s:
                self.withdraw(name, "preempted")
        self.feed(e.Tick())

    def withdraw(self, name: str, reason: str) -> None:
        """The cluster ends what runs on a node, and takes it."""
        if not self.nodes[name].returning:
            self.nodes[name].returning = True
            for agent in self.agents.values():
                if agent.seat.node == name:
                    self.end_agent(agent, KILLED)
            self._pool.append(NodeGone(name, reason))

    # ---- what somebody does, drawn

    def begin(self) -> None:
        """The first start of the run, maybe one that goes on from another process's."""
        draw, resumed, memory = self.choices, None, e.Memory()
        if draw.now_and_then(6):
            resumed = e.Resumed("/checkpoints/step-5", 5, 3, "tp1 pp1 dp2")
        if draw.now_and_then(6):
            drained = (self.scene.first[-1].name,) if draw.now_and_then(3) else ()
            memory = e.Memory(4, draw.one_of((None, 1, 2, 4)), tuple(filter(None, drained)))
        self._start(resumed, memory, self.scene.first)

    def _start(self, resumed: e.Resumed | None, memory: e.Memory, nodes: Iterable[Node]) -> None:
        self.starts += 1
        self._resumed = resumed
        self._slow_journal = self.choices.now_and_then(4)
        self.feed(e.CoordinatorStarted({"name": "t"}, "/checkpoints", resumed, memory))
        for node in nodes:
            self.grant(node)
            self.hear_pool()
        self.feed(e.LaunchAllowed())

    @property
    def may_begin_again(self) -> bool:
        ending = self.run.ending
        return ending is not None and ending.state in (Ending.RESTART, Ending.REQUEUE)

    def begin_again(self) -> None:
        """The next start, from the last checkpoint, with what the one before has left."""
        memory, written = self.run.memory, self.watch.checkpointed
        resumed = self._resumed
        if written is not None:
            resumed = e.Resumed(written.path, written.step, memory.last_generation, "tp1 pp1 dp2")
        nodes = [held.node for held in self.nodes.values() if not held.returning]
        self._clear()
        self.nodes.clear()
        self._start(resumed, memory, nodes or self.scene.first)

    def grant(self, node: Node) -> None:
        self.nodes[node.name] = PlayedNode(node)
        self.tell(NodeGranted(node))

    def tell(self, event: PoolEvent) -> None:
        """The pool will tell the run of it, after all that it has told before."""
        self._pool.append(event)

    def ask(
        self, request: m.ResizeRequest | m.ReplaceRequest | m.DrainRequest | m.StopRequest
    ) -> a.Answer:
        self._asked += 1
        actions = self.feed(e.OperatorAsked(self._asked, request))
        (answer,) = (action for action in actions if isinstance(action, a.Answer))
        return answer

    def go_on(self, draw: bool = True) -> bool:
        """One thing that is on its way arrives, or a step is done; False where nothing is left."""
        tasks = [*self.tasks()]
        if not tasks:
            return False
        self._turn += 1
        tasks[self.choices.below(len(tasks)) if draw else self._turn % len(tasks)]()
        return True

    def settle(self, most: int = 2_000) -> None:
        """All that is on its way arrives."""
        while most and self.go_on(draw=False):
            most -= 1
        assert most, "it does not come to rest"

    def calm(self, until_s: float = 0.0) -> None:
        """Nothing comes from outside any more; time passes until all is done that is to be."""
        self._slow_journal = self.launches_fail = self._disk_fills = False
        self.faults.planned.clear()
        self.perform()
        for worker in self.workers.values():
            if worker.mute and not worker.dead:
                self.close(worker, "it was stuck for too long")
        if self.journal_error:
            self.journal_recovers()
        idle_s = 0.0
        while self.run.state is not RunState.ENDED and idle_s <= until_s:
            self.settle()
            before = len(self.entries)
            for _ in range(2):
                self.train()
                self.settle()
            stands = training_world(self.workers) is None
            self.wait(WAITS_S[-1] if stands or idle_s else WAITS_S[3])
            quiet = all(
                isinstance(event, m.StepDone | m.Evaluated) for _, event, _ in self.entries[before:]
            )
            idle_s = idle_s + WAITS_S[-1] if quiet and not self._pool else 0.0
        self.settle()

    def journal_recovers(self) -> None:
        self.journal_error = ""
        self.feed(e.JournalFailed(""))

    # ---- afterwards

    def journal(self) -> list[Entry]:
        """The schedule as a reader of its journal gets it."""
        return [
            Entry(number, at_s, plain(encode(event)), [plain(encode(each)) for each in actions])
            for number, (at_s, event, actions) in enumerate(self.entries)
        ]
