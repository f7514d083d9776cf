"""What must hold of a run after every event, whoever asks: read from its events and actions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from liver_hpc.config.schema import RunConfig
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.actions import Ending
from liver_hpc.run.decide import PATIENT_EXITS
from liver_hpc.run.events import NodeGone, NodeGranted, NodeWarned, Seat
from liver_hpc.run.lifecycle import RunState
from liver_hpc.run.machine import Run
from liver_hpc.run.notices import GRANTED, LOST
from liver_hpc.run.records import NoticeRecord, ReconfigurationRecord
from tests.fakes import WRONG_DIGEST
from tests.unit.protocol.play import check

AFTER_THE_END = (
    a.TurnAway, a.Answer, a.Disconnect, a.EndAgent, a.KillAgent, a.Log
)  # fmt: skip


@dataclass
class SeenAgent:
    """An agent as the run can know it."""

    seat: Seat
    workers: tuple[int, ...] = ()
    came: set[int] = field(default_factory=set)
    ended: bool = False
    killed: bool = False


@dataclass
class SeenNode:
    """A held node. warned: what its pool has said last."""

    warned: NodeWarned | None = None
    given_back: bool = False


class Watch:
    """The events of one run and what came of them, held against what must never happen."""

    def __init__(self, run: Run, config: RunConfig) -> None:
        self.run = run
        self.config = config
        self.connected: set[int] = set()
        self.agents: dict[str, SeenAgent] = {}
        self.nodes: dict[str, SeenNode] = {}
        self.drains: dict[str, float | None] = {}
        self.finished: set[int] = set()
        self.checkpointed: e.CheckpointWritten | None = None
        self.records: list[ReconfigurationRecord] = []
        self.notices: list[NoticeRecord] = []
        self.ends: list[a.End] = []
        self._verdicts: dict[int, str] = {}
        self._attempt = -1  # the generation whose Prepare has gone out, -1 for none
        self.generations: list[int] = []
        self._wanted = -1
        self._to_be_recorded: set[str] = set()  # nodes whose notices are open
        self._answered: set[int] = set()
        self._journal_error = ""
        self._prepared: set[int] = set()
        self._yes: set[tuple[int, int]] = set()  # generation, worker
        self._granted: dict[str, float] = {}
        self._known_workers = 0
        self._at_s = 0.0

    # ---- one event

    def heard(self, event: e.Event, at_s: float) -> None:
        """Before the run handles an event: what everybody knows by it."""
        self._at_s = at_s
        match event:
            case e.CoordinatorStarted():
                self.generations.append(event.memory.last_generation)
                self.drains = dict.fromkeys(event.memory.drained)
            case m.Hello():
                self.connected.add(event.worker)
                for agent in self.agents.values():
                    if event.worker in agent.workers:
                        agent.came.add(event.worker)
            case e.CheckpointWritten():
                self.checkpointed = event
            case m.Vote():
                self._voted(event)
            case e.JournalFailed():
                self._journal_error = event.reason
            case e.TookOver():
                self._journal_error = ""
            case m.Finished():
                self.finished.add(event.worker)
            case e.AgentEnded():
                self.agents[event.agent].ended = True
            case e.LaunchFailed():
                for name in event.lost:
                    self.agents[name].ended = True
            case NodeGranted():
                self.nodes[event.node.name] = SeenNode()
            case NodeWarned() if event.node in self.nodes:
                self.nodes[event.node].warned = event
                if not self.ends:
                    self._to_be_recorded.add(event.node)
            case NodeGone():
                self.nodes.pop(event.node, None)

    def did(self, event: e.Event, actions: list[a.Action]) -> None:
        """After the run has handled it."""
        self._answers(event, actions)
        ended = bool(self.ends)
        for action in actions:
            assert not ended or isinstance(action, AFTER_THE_END), f"after the end: {action}"
            self._action(event, action)
        if isinstance(event, NodeGranted) and event.node.name in self.drains and not ended:
            self._to_be_recorded.add(event.node.name)  # what it was told of before is recorded
        assert (self.run.state is RunState.ENDED) == bool(self.ends)
        if not self.ends:
            self._world()
            self._windows()
            self._kept(event, actions)
        self._consistent()

    def _consistent(self) -> None:
        """What the run's parts say of one another."""
        run, handoffs = self.run, self.run.handoffs
        assert (run._state is RunState.ENDED) == (run.ending is not None), run._story()
        assert not run._out
        if run.ending is None:
            check(handoffs._machine)
            assert (handoffs.attempt is None) == (run.recorder.attempt is None)
            assert run.world is not None or run._state is RunState.STARTING, run._story()
            assert run._state is not RunState.STOPPING or run._deadline or not handoffs.idle

    def _answers(self, event: e.Event, actions: list[a.Action]) -> None:
        """Every question is answered once, at once, and nobody else is."""
        answers = [action for action in actions if isinstance(action, a.Answer)]
        meetings = [action for action in actions if isinstance(action, a.Admit | a.TurnAway)]
        if isinstance(event, e.OperatorAsked):
            (answer,) = answers
            assert answer.number == event.number
            assert answer.text
            assert answer.number not in self._answered
            self._answered.add(answer.number)
            self._drained(event, answer)
        else:
            assert not answers, answers
        if isinstance(event, e.AgentMet):
            (meeting,) = meetings
            assert meeting.agent == event.agent
        else:
            assert not meetings, meetings

    def _voted(self, vote: m.Vote) -> None:
        """Of what the played workers report all is well, or one digest is a `WRONG_DIGEST`."""
        digests = (*vote.sent, *vote.received)
        right = not any(told.values.startswith(WRONG_DIGEST) for told in digests)
        if vote.ok and right:
            self._yes.add((vote.generation, vote.worker))

    def _drained(self, event: e.OperatorAsked, answer: a.Answer) -> None:
        request = event.request
        if not isinstance(request, m.DrainRequest) or not answer.ok:
            return
        if request.undo:
            assert request.node in self.drains, f"{request.node} was not drained"
            del self.drains[request.node]
        else:
            self.drains.setdefault(request.node, None)
            self._to_be_recorded.add(request.node)

    def to_be_left(self, node: str) -> bool:
        return node in self.drains or self.nodes[node].warned is not None

    def _action(self, event: e.Event, action: a.Action) -> None:
        match action:
            case a.Launch():
                self._launch(action)
            case a.Admit():
                agent = self.agents[action.agent]
                assert not agent.workers, f"{action.agent} was admitted before"
                assert len(action.workers) == len(agent.seat.slots)
                assert action.workers[0] >= self._known_workers, "a worker's id came again"
                self._known_workers = action.workers[-1] + 1
                agent.workers = action.workers
            case a.Send():
                self._send(action)
            case a.Disconnect():
                assert action.worker in self.connected
                self.connected.discard(action.worker)
            case a.EndAgent() | a.KillAgent():
                agent = self.agents[action.agent]
                assert not agent.ended, f"{action} of an agent that has ended"
                assert not agent.killed, f"{action} of an agent that was killed"
                agent.killed = isinstance(action, a.KillAgent)
            case a.Avoid() if isinstance(event, e.NodeStraggles):
                self.drains.setdefault(action.node, None)
                self._to_be_recorded.add(action.node)
            case a.GiveBack():
                assert not self._used(action.node), f"{action}: somebody is still there"
                node = self.nodes[action.node]
                node.given_back = True
            case a.WantWorkers():
                assert 0 <= action.workers != self._wanted
                self._wanted = action.workers
            case a.ForgetGeneration():
                assert self.run.world is None or action.generation != self.run.world.generation
                assert action.generation != self._attempt
            case a.Record(row=ReconfigurationRecord() as row):
                assert row.generation not in [known.generation for known in self.records]
                assert self._attempt in (-1, row.generation)
                self._attempt = -1
                self.records.append(row)
                self._in_turn(row)
            case a.Record(row=NoticeRecord() as row):
                self._notice(event, row)
            case a.StepPhase():
                assert isinstance(event, m.StepDone)
            case a.End():
                assert not self.ends, "ended twice"
                assert action.reason
                assert not self._to_be_recorded, f"of {self._to_be_recorded} nothing is recorded"
                self.ends.append(action)

    def _in_turn(self, row: ReconfigurationRecord) -> None:
        """Who asked first is granted first. A later layout takes the place of an earlier one, a
        replacement that of one of the same worker."""
        what, _, origin = row.notice.rpartition(" (")
        if not origin.startswith(("operator", "step")):
            return
        if origin.startswith("step"):
            what = "scripted"
        elif what.startswith("resize"):
            what = "resize"
        before_s = self._granted.get(what, 0.0)
        assert row.notice_s >= before_s, f"{row.notice} comes after its turn"
        self._granted[what] = row.notice_s

    # ---- nodes and agents

    def _used(self, node: str) -> list[str]:
        """Agents that have not ended on a node."""
        return [
            n for n, agent in self.agents.items() if agent.seat.node == node and not agent.ended
        ]

    def _launch(self, launch: a.Launch) -> None:
        assert launch.agents
        begins = self.run.world is not None
        assert not (begins and self._journal_error), "a handoff, and nobody could read of it"
        for each in launch.agents:
            assert each.agent not in self.agents, "an agent's name came again"
            node = each.seat.node
            assert node in self.nodes, f"{each.agent} on {node}, which is not held"
            assert not self.to_be_left(node), f"{each.agent} on {node}, which has to be left"
            assert each.seat.slots
            for other in self._used(node):
                shared = self._slots(self.agents[other]) & {*each.seat.slots}
                assert not shared, f"slots {shared} of {node} for {other} and {each.agent}"
            self.agents[each.agent] = SeenAgent(each.seat)
            self.nodes[node].given_back = False

    def _slots(self, agent: SeenAgent) -> set[int]:
        """Those that its workers have not left."""
        left = {*agent.came} - self.connected
        pairs = zip(agent.seat.slots, agent.workers, strict=False)
        return {*agent.seat.slots} - {slot for slot, worker in pairs if worker in left}

    def node_of(self, worker: int) -> str:
        (agent,) = (agent for agent in self.agents.values() if worker in agent.workers)
        return agent.seat.node

    def workers_on(self, node: str) -> list[int]:
        return [worker for worker in self.connected if self.node_of(worker) == node]

    # ---- messages

    def _send(self, send: a.Send) -> None:
        message, workers = send.message, send.workers
        assert workers
        assert len(set(workers)) == len(workers)
        unknown = {*workers} - self.connected
        assert not unknown, f"{message.type} to {unknown}, who are not connected"
        match message:
            case m.Begin():
                self._new_generation(message.generation)
            case m.Prepare():
                self._prepare(message, workers)
            case m.Verdict():
                self._verdict(message.generation, "commit")
                no = {w for w in self._prepared if (message.generation, w) not in self._yes}
                assert not no, f"committed, and {sorted(no)} did not say yes"
            case m.Abort():
                self._verdict(message.generation, "abort")
            case m.Resume(rebuild_generation=int() as generation):
                self._new_generation(generation)

    def _new_generation(self, generation: int) -> None:
        assert generation > max(self.generations), f"{generation} after {self.generations}"
        self.generations.append(generation)

    def _verdict(self, generation: int, verdict: str) -> None:
        assert generation == self._attempt
        assert generation not in self._verdicts, f"{verdict} after {self._verdicts[generation]}"
        self._verdicts[generation] = verdict

    def _prepare(self, prepare: m.Prepare, workers: tuple[int, ...]) -> None:
        assert self._attempt == -1, f"{prepare} while {self._attempt} goes on"
        self._new_generation(prepare.generation)
        self._attempt = prepare.generation
        world = self.run.world
        assert world is not None
        assert prepare.source.rank_map() == world.rank_map
        assert prepare.source_generation == world.generation
        self._prepared = {*workers}
        assert self._prepared == {*prepare.source.workers, *prepare.target.workers}
        for worker in prepare.target.workers:
            node = self.node_of(worker)
            held = self.nodes.get(node)
            assert held is not None, f"a seat for {worker} on {node}, which is gone"

    # ---- the world, and nodes that go

    def _world(self) -> None:
        """Who trains is connected, and of agents of which nobody is missing."""
        world = self.run.handoffs.committed_world or self.run.world
        if world is None or self.run.state is RunState.RECOVERING:
            return
        members = {*world.rank_map.workers}
        assert members - self.finished <= self.connected
        for agent in self.agents.values():
            if members & {*agent.workers}:
                assert agent.came == {*agent.workers}, f"{agent} is not complete"

    def _kept(self, event: e.Event, actions: list[a.Action]) -> None:
        """Who waits for another handoff is connected, has no seat, is on a node that stays, and did
        not have the last one called off."""
        run, kept = self.run, {*self.run.agents.kept}
        machine = run.handoffs._machine
        assert kept <= self.connected
        assert run.world is None or not kept & {*run.world.rank_map.workers}
        if machine.attempt is not None and machine.phase is not Phase.ABORT:
            assert not kept & {*machine.attempt.joiners}
        for worker in kept:
            assert not self.to_be_left(self.node_of(worker)), f"{worker} is kept there"
        off = any(
            isinstance(each, a.Send) and isinstance(each.message, m.Abort) for each in actions
        )
        if off and isinstance(event, m.Failed | m.Vote):
            assert event.worker not in kept, f"{event.worker} is kept after {event}"

    def hurried(self) -> dict[str, float]:
        """Nodes that somebody takes away, and when."""
        held = self.run.elastic.nodes
        known = {name: held[name].deadline_s for name in self.nodes if name in held}
        return {name: at_s for name, at_s in known.items() if at_s is not None}

    def _windows(self) -> None:
        """Nobody waits while the window of a node passes that the run could leave."""
        run, hurried = self.run, self.hurried()
        if run.world is None or not hurried or run._journal_error or run._stop_reason:
            return
        stays = {*run.world.rank_map.workers}
        if run.state is RunState.TRAINING:
            left_s = min((at_s - self._at_s for at_s in self._of(stays, hurried)), default=None)
            patience_s = PATIENT_EXITS * self.config.deadlines.exit_s
            waits = run.agents.ending() and left_s is not None and left_s > patience_s
            assert left_s is None or waits, f"{hurried} pass, and nothing is done"
        elif run.state is RunState.HANDING_OVER and run.handoffs.can_be_cancelled:
            assert run.handoffs.request is not None
            assert run.handoffs.attempt is not None
            stays -= {*run.handoffs.request.without}
            stays = {*run.handoffs.attempt.target_workers} or stays
            assert not self._of(stays, hurried), f"{hurried} pass behind another handoff"

    def _of(self, workers: Iterable[int], hurried: dict[str, float]) -> list[float]:
        nodes = {self.node_of(worker) for worker in workers}
        return [at_s for node, at_s in hurried.items() if node in nodes]

    def _notice(self, event: e.Event, row: NoticeRecord) -> None:
        """No window is missed without a word."""
        self.notices.append(row)
        if row.kind in (GRANTED, LOST) or row.kind in (Ending.RESTART, Ending.REQUEUE):
            return
        assert row.node in self._to_be_recorded, f"{row} is recorded again"
        self._to_be_recorded.discard(row.node)
        if row.outcome == "in time":
            assert not row.left_s > row.deadline_s
        if row.outcome in ("in time", "late"):
            assert not self._used(row.node), f"{row}, and somebody is still there"
        if row.outcome == "not needed" and isinstance(event, NodeGone):
            assert not self.workers_on(row.node), f"{row}, and workers are still there"
        if row.outcome == "to disk":
            assert self.run.ending is not None
            assert self.run.ending.state in (Ending.REQUEUE, Ending.RESTART)
