"""A run, from its first launch to its end: events go in, actions come out; no I/O.

    STARTING -> TRAINING <-> HANDING_OVER
        |           |             |
        +-----------+-------------+--> STOPPING --> ENDED

One start of a run is one `Run`; what the next start needs to know is in `Memory`. What `handle`
returns depends on the events and their times alone: a journal of them gives the same actions again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError, MeetingError, ProtocolError, RequestRefused
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.placement import place
from liver_hpc.layout.policy import LayoutPolicy
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.run import events as e
from liver_hpc.run.actions import (
    Action,
    Admit,
    Answer,
    End,
    ForgetGeneration,
    Log,
    Note,
    Record,
    StepPhase,
    TurnAway,
)
from liver_hpc.run.agents import Agents
from liver_hpc.run.decide import Estimates, NodesAtHand, Place
from liver_hpc.run.elastic import ElasticPolicy
from liver_hpc.run.estimates import HandoffEstimator
from liver_hpc.run.handoffs import Handoffs, OfAttempt, Owner
from liver_hpc.run.node_events import EndNear, NodeGone, NodeGranted, NodeWarned, PoolNote
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.notices import NoticeBook
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.requests import ReconfigurationRequest, RequestQueue
from liver_hpc.run.state import Ending, RunState

HISTORY_EVENTS = 40
EVENT_TEXT_LENGTH = 200
OPERATORS_STOP = "an operator's request"
STARTING, TRAINING, HANDING_OVER, STOPPING, ENDED = RunState


class EventClock:
    """The time of the event that is being handled."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


class Run:
    """One start of a run. `world` is None until there is a first one; `ending` is set at the end.

    model: the tensors; check_layout: raises ConfigError for a layout that the model cannot have.
    """

    def __init__(
        self,
        config: RunConfig,
        model: ModelSpec,
        check_layout: Callable[[Layout], None] = lambda layout: None,
        place: Place = place,
    ) -> None:
        layouts = config.allowed_layouts(config.workers.initial)
        if not layouts:
            raise ConfigError(f"layouts: none for workers.initial = {config.workers.initial}")
        self.world: WorldRef | None = None
        self.ending: End | None = None
        self.last_event = ""
        self._config = config
        self._limits = config.deadlines
        self._clock = EventClock()
        self._out: list[Action] = []
        self._history: deque[tuple[RunState, object]] = deque(maxlen=HISTORY_EVENTS)
        self._state = STARTING
        self.agents = Agents(config.deadlines, self._clock, self._out)
        self.recorder = RunRecorder(self._record, self._clock, self.agents.node_of)
        held = HeldNodes(config.cluster.workers_per_node)
        self.handoffs = Handoffs(
            config.deadlines,
            self._clock,
            self.agents,
            held,
            self.recorder,
            Owner(self._handoff_ended, self._fail),
        )
        self.elastic = ElasticPolicy(
            config,
            self._clock,
            (
                RequestQueue(config, check_layout),
                NodesAtHand(held, self.agents, config.deadlines.exit_s),
                Estimates(
                    LayoutPolicy(config, model), HandoffEstimator(config, model), model, place
                ),
                NoticeBook(self._record),
            ),
            self.handoffs,
            self._out,
        )
        self._resumed: e.Resumed | None = None
        self._checkpoints = ""
        self._checkpointed: tuple[int, str] | None = None  # the newest one's step and directory
        self._checkpoint_failure = ""
        self._first_generation = 0
        self._first_layout = layouts[0]
        self._may_launch = False
        self._launched = False
        self._have_restored: set[int] = set()
        self._deadline: Deadline | None = None  # of the start, and of the end
        self._stop_reason = ""
        self._stop_as = Ending.STOPPED
        self._stop_saves = False
        self._steps_done = 0
        self._journal_error = ""

    # ---- one event

    def handle(self, event: e.Event, at_s: float) -> list[Action]:
        """The answer to one event at `at_s`, epoch seconds: what is to be done, in this order.

        Whatever is wrong with an event ends the run with the reason; nothing is raised.
        """
        self._clock.at_s = at_s
        state = self.state
        if not isinstance(event, e.Tick):  # of which the journal leaves out most
            self._history.append((state, event))
        try:
            handler = _TABLE.get((state, type(event)))
            if handler is None:
                raise ProtocolError(f"{type(event).__name__} while {state}; {self._story()}")
            handler(self, event)
            self._settle(event)
        except LiverError as error:
            self._fail(str(error))
        actions = list(self._out)
        self._out.clear()
        return actions

    def progress(self, message: m.Progress) -> None:
        """How far a transfer has come: for the status alone, and never in the journal."""
        self.handoffs.progress(message)

    @property
    def state(self) -> RunState:
        """TRAINING becomes HANDING_OVER for as long as an attempt is in progress."""
        if self._state is TRAINING and not self.handoffs.idle:
            return HANDING_OVER
        return self._state

    def check(self) -> None:
        """Asserts what must hold between any two events."""
        assert (self._state is ENDED) == (self.ending is not None), self._story()
        assert not self._out
        if self.ending is None:
            self.handoffs.check()
            assert self.world is not None or self._state is STARTING, self._story()
            assert self._state is not STOPPING or self._deadline or not self.handoffs.idle

    def _settle(self, event: e.Event) -> None:
        """What follows from the event for nodes, launches and handoffs. A step changes none of
        that, unless the run file asks for something after it, and there are many of them."""
        if self._state is ENDED or (isinstance(event, m.StepDone) and not self.elastic.queue):
            return
        if self._state is STARTING and self._may_launch and not self._launched:
            self._launch_first()
        if self._state is TRAINING and not self._journal_error:
            assert self.world is not None
            to_disk = self.elastic.next_handoff(self.world)
            if to_disk is not None:
                self._stop(to_disk.reason, checkpoint=True, then=Ending.RESTART)
        if self._may_launch:
            busy = not self.handoffs.idle or bool(self.elastic.queue)
            self.elastic.look_after_nodes(busy)

    def _story(self) -> str:
        lines = (f"{state}: {str(event)[:EVENT_TEXT_LENGTH]!r}" for state, event in self._history)
        return "events so far: " + " | ".join(lines)

    def _record(self, row: Any) -> None:
        self._out.append(Record(row))

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    # ---- the start

    def _coordinator_started(self, event: e.CoordinatorStarted) -> None:
        self._checkpoints, self._resumed = event.checkpoints, event.resumed
        known = [event.memory.last_generation]
        if self._resumed is not None:
            step = self._resumed.step
            known.append(self._resumed.generation)
            self._steps_done = self.recorder.first_step = step
            self._checkpointed = step, self._resumed.path
            self.elastic.queue.skip(step)
            self._note(f"goes on from step {step}, saved at {self._resumed.layout}")
        # A generation's number stands for one world in all starts of a run. One is left out: it
        # may have been that of a world built anew, which recorded nothing.
        self._first_generation = max(known) + 2 if max(known) >= 0 else 0
        self.handoffs.generation = self._first_generation
        self.elastic.recall(event.memory)

    def _launch_allowed(self, event: e.LaunchAllowed) -> None:
        self._may_launch = True
        if not self._launch_first():
            self._note(f"waiting for nodes; held: {self.elastic.nodes.text()}")

    def _launch_first(self) -> bool:
        """Once there are nodes enough; false before."""
        layout = self.elastic.first_layout(self._first_layout, self._resumed is not None)
        if layout is None:
            return False
        self._first_layout, self._launched = layout, True
        self._note(f"launching {layout.workers} workers for {layout}")
        seats = self.elastic.nodes.held.seats(layout.workers, self.agents.taken())
        self.agents.launch(self._first_generation, layout, seats)
        self._set_deadline(self._limits.boot_s + self._limits.meet_s)
        return True

    def _launch_failed(self, event: e.LaunchFailed) -> None:
        generation, workers = self.agents.launch_failed(event.agents, event.lost)
        what = f"cannot launch {workers} workers: {event.reason}"
        if self._state is ENDED:
            return
        if self._state is STARTING and generation == self._first_generation:
            self._start_failed(what)  # a node may be gone, which nobody has been told yet
        elif generation == self.handoffs.generation and self.handoffs.attempt is not None:
            self.handoffs.cancel_boot(what)

    def _begin(self) -> None:
        """The first world: ranks in the order of the workers' ids."""
        generation, resumed = self._first_generation, self._resumed
        rank_map = RankMap(self._first_layout, self.agents.arrived(generation))
        self.world = WorldRef(generation, rank_map)
        begin = m.Begin(
            generation=generation,
            rank_map=m.WireRankMap.of(rank_map),
            checkpoint=None if resumed is None else resumed.path,
        )
        self.agents.send(rank_map.workers, begin)
        if resumed is None:
            self._train()
        else:
            self._note(f"reading {resumed.path}: {self.world}")
            self._set_deadline(self._limits.prepare_s + self._limits.transfer_s)

    def _restored(self, message: m.Restored) -> None:
        """A worker holds what it read; whether that is what was saved is found out elsewhere."""
        self._have_restored.add(message.worker)

    def _state_restored(self, event: e.StateRestored) -> None:
        assert self.world is not None
        self.agents.send(self.world.rank_map.workers, m.Proceed(generation=event.generation))
        self._train()

    def _train(self) -> None:
        self._state, self._deadline = TRAINING, None
        self.elastic.training_begins()
        self._note(f"training begins: {self.world}")

    def _start_failed(self, reason: str) -> None:
        """A start without a worker: from a checkpoint it is tried again, maybe on other nodes."""
        if self._resumed is None:
            self._fail(reason)
        else:
            self._end(Ending.RESTART, reason)

    # ---- agents and workers

    def _agent_met(self, event: e.AgentMet) -> None:
        try:
            workers = self.agents.meet(event.agent, event.workers)
        except MeetingError as error:
            self._out.append(TurnAway(event.agent, str(error)))
        else:
            self._out.append(Admit(event.agent, workers))

    def _agent_listens(self, event: e.AgentListens) -> None:
        self.agents.listens(event.agent)

    def _agent_ended(self, event: e.AgentEnded) -> None:
        agent = self.agents.ended(event.agent, event.exit_code)
        if agent is None or agent.complete or self._state is ENDED:
            return
        fallen = self.agents.fallen(agent.generation)
        if self._state is STARTING and agent.generation == self._first_generation:
            if self.agents.fallen_told(agent.generation):
                self._end(Ending.RESTART, fallen)  # its node is being taken away
            else:
                self._start_failed(fallen)
        elif fallen and agent.generation == self.handoffs.generation:
            self.handoffs.cancel_boot(fallen)

    def _rendezvous_failed(self, event: e.RendezvousFailed) -> None:
        if self._state is STARTING:
            self._fail(event.reason)
        else:
            self.handoffs.cancel_boot(event.reason)

    def _hello(self, hello: m.Hello) -> None:
        """A worker has booted."""
        if not self.agents.expects(hello.worker):
            return
        generation = self.agents.join(hello)
        if self.world is not None:
            self.handoffs.joined(hello, generation)
        elif self._launched and not self.agents.missing(self._first_generation):
            self._begin()

    def _worker_gone(self, event: e.WorkerGone) -> None:
        if self.agents.leave(event.worker):
            self._lost(event.worker, event.reason)

    def _lost(self, worker: int, reason: str) -> None:
        """A worker has gone: as it should, or to the cost of a handoff, or of the run."""
        if self._state is ENDED or self.agents.finished((worker,)):
            return
        if self._state is STARTING:
            self._start_failed(f"worker {worker} lost before training began: {reason}")
        elif self.world is not None and (
            self.handoffs.involves(worker) or worker in self.world.rank_map.workers
        ):
            self.handoffs.lost(worker, reason)
        else:
            self._out.append(Log(f"worker {worker} has ended: {reason}"))

    def _step_done(self, message: m.StepDone) -> None:
        """A step, and with it perhaps scripted notices."""
        record = self.recorder.step_done(message)
        if record.phase:
            self._out.append(StepPhase(record.phase))
        if self.world is not None:
            self.elastic.step_done(self.world, record)
        for notice in self.elastic.queue.due(message.step):
            try:
                self._ask(self.elastic.queue.of_notice(notice, self._clock.now_s()))
            except RequestRefused as error:
                self._note(f"notice of step {notice.at_step} refused: {error}")

    def _transports(self, message: m.Transports) -> None:
        self.recorder.connected(message)

    def _of_attempt(self, message: OfAttempt) -> None:
        ours = self.world is not None and message.generation == self.world.generation
        if isinstance(message, m.Failed) and ours:
            self._fail(f"worker {message.worker}: {message.reason}")
        else:
            self.handoffs.message(message)

    def _finished(self, message: m.Finished) -> None:
        """A worker has done its last step; the others are about to."""
        self.agents.finish(message.worker)
        self._steps_done = message.step
        if self._state is TRAINING:
            self._state = STOPPING
            self._set_deadline(self._limits.boundary_s)
        self.handoffs.finished(message)
        self._end_if_all_finished()

    # ---- nodes

    def _node_granted(self, event: NodeGranted) -> None:
        self.elastic.granted(event, at_start=self.world is None)

    def _node_warned(self, event: NodeWarned) -> None:
        if not self.elastic.warned(event):
            return
        if self._state is STARTING:
            if event.deadline_s is not None and self._begins_on(event.node):
                self._end(Ending.RESTART, f"node {event.node} goes before training began")
        elif self._state is TRAINING and self.world is not None:
            self.elastic.overtake(self.world)

    def _node_gone(self, event: NodeGone) -> None:
        reason = f"node {event.node} is gone: {event.reason}"
        if self._begins_on(event.node):
            self._end(Ending.RESTART, f"{reason}, before training began")
        elif self.agents.launched_on({event.node}, self.handoffs.generation):
            self.handoffs.cancel_boot(reason)  # whoever has not come by now will not
        for worker in self.elastic.gone(event):
            if self.agents.leave(worker):  # what else is heard of it is heard too late
                self._lost(worker, f"its {reason}")

    def _begins_on(self, node: str) -> bool:
        """Whether the run is starting, on this node among others."""
        starting = self._state is STARTING
        return starting and self.agents.launched_on({node}, self._first_generation)

    def _end_near(self, event: EndNear) -> None:
        """The coordinator's own allocation ends soon: state to disk, and again from there, unless
        its job may not be queued again."""
        again = self._config.cluster.slurm.requeue
        then = Ending.REQUEUE if again else Ending.STOPPED
        self._stop(event.reason, checkpoint=True, then=then)

    def _pool_note(self, event: PoolNote) -> None:
        self._note(event.text)

    # ---- operators

    def _operator_asked(self, event: e.OperatorAsked) -> None:
        try:
            ok, text = True, self._reply(event.request)
        except RequestRefused as error:
            ok, text = False, str(error)
        self._out.append(Answer(event.number, ok, text))

    def _reply(
        self, request: m.ResizeRequest | m.ReplaceRequest | m.DrainRequest | m.StopRequest
    ) -> str:
        """What an operator is told; RequestRefused when the answer is no."""
        if isinstance(request, m.StopRequest):
            return self._stop(OPERATORS_STOP, request.checkpoint)
        if isinstance(request, m.DrainRequest):
            self._check_open()
            if request.undo:
                return self.elastic.undo_drain(request.node, self.world)
            reply = self.elastic.drain(request.node, request.within_s, self.world)
            if self._begins_on(request.node):
                self._end(Ending.RESTART, f"node {request.node} goes before training began")
            return reply
        return self._ask(self.elastic.queue.of_operator(request, self._clock.now_s()))

    def _ask(self, request: ReconfigurationRequest) -> str:
        self._check_open()
        training = self._state is TRAINING
        busy = self.handoffs.describe() if training else "the start of the run"
        return self.elastic.ask(request, self.world, busy)

    def _check_open(self) -> None:
        if self._state not in (STARTING, TRAINING):
            raise RequestRefused("the run is about to end")

    # ---- checkpoints and the journal

    def _checkpoint_written(self, event: e.CheckpointWritten) -> None:
        self._checkpointed, self._checkpoint_failure = (event.step, event.path), ""
        self.elastic.estimates.handoffs.observe_checkpoint(event.largest_bytes, event.took_s)
        self._note(f"checkpoint of step {event.step}: {event.total_bytes} bytes")

    def _checkpoint_failed(self, event: e.CheckpointFailed) -> None:
        self._checkpoint_failure = event.reason
        self._note(event.reason)

    def _journal_failed(self, event: e.JournalFailed) -> None:
        """Training goes on. No handoff begins that nobody could find out about afterwards."""
        if event.reason and not self._journal_error and self.handoffs.can_be_cancelled:
            self.handoffs.cancel(f"the journal cannot be written: {event.reason}")
        self._journal_error = event.reason

    def _shell_failed(self, event: e.ShellFailed) -> None:
        self._fail(event.reason)

    # ---- time

    def _tick(self, event: e.Tick) -> None:
        if self._state is not ENDED:
            self.handoffs.tick()
        for worker in self.agents.reap():
            self._lost(worker, "did not end by itself")
        if self._state is ENDED or self._deadline is None or not self._deadline.expired():
            return
        late = f"waited {self._deadline.limit_s:g} s for {self._waits_for()}"
        if self._state is STARTING:
            self._start_failed(late)
        else:
            self._fail(late)

    def _set_deadline(self, limit_s: float) -> None:
        self._deadline = Deadline.after(self._clock, limit_s, "workers")

    def _waits_for(self) -> str:
        if self.world is None:
            return self.agents.missing(self._first_generation)
        workers = self.world.rank_map.workers
        if self._state is STARTING:
            return f"Restored of workers {sorted({*workers} - self._have_restored)}"
        return f"Finished of workers {sorted({*workers} - {*self.agents.finished(workers)})}"

    # ---- how handoffs end

    def _handoff_ended(self, ended: Ended) -> None:
        assert self.world is not None
        for generation in sorted({self.world.generation, ended.generation}):
            if generation != ended.world.generation:
                self._out.append(ForgetGeneration(generation))
        self.world = ended.world
        self.elastic.handoff_ended(ended, self.recorder.last_attempt)
        what = f"{ended.outcome}: {ended.detail}" if ended.detail else ended.outcome
        self._note(f"generation {ended.generation}: {what}; now {ended.world}")
        if ended.outcome == "failed":
            return
        if self._stop_reason:
            self._tell_to_stop()
        self._end_if_all_finished()

    # ---- the end

    def _stop_signalled(self, event: e.StopSignalled) -> None:
        # Whoever cancels a job may want to go on from where it was.
        self._stop(event.reason, checkpoint=self._config.cluster.kind == "slurm")

    def _stop(self, why: str, checkpoint: bool, then: Ending = Ending.STOPPED) -> str:
        """Stops at the next common boundary and says when: a handoff is called off for it, or
        waited for once it has committed. The run ends as `then`, with or without the
        `checkpoint` that is to be written there; its reason says which."""
        asked = why == OPERATORS_STOP  # a bare SIGTERM is not: Slurm sends one at a time limit
        replaceable = (Ending.RESTART, Ending.REQUEUE) if asked else (Ending.RESTART,)
        if self._state is STOPPING and self._stop_as in replaceable:
            self._stop_as, self._stop_reason = then, why  # instead of going on later
            return "stopping at the next step boundary"
        if self._state not in (STARTING, TRAINING):
            return "the run is about to end already"
        self._note(f"stopping: {why}")
        self.elastic.queue.clear()
        if self._state is STARTING:
            self._end(then, why)
            return "stopped before training began"
        self._state, self._stop_reason, self._stop_as = STOPPING, why, then
        self._stop_saves = checkpoint
        busy = self.handoffs.describe()
        if self.handoffs.can_be_cancelled:
            self.handoffs.cancel(f"the run is to stop: {why}")
        elif not busy:
            self._tell_to_stop()
        return f"stopping after {busy}" if busy else "stopping at the next step boundary"

    def _tell_to_stop(self) -> None:
        assert self.world is not None
        directory = self._checkpoints if self._stop_saves else None
        self.agents.send(self.world.rank_map.workers, m.Stop(checkpoint=directory))
        writes_s = self._limits.transfer_s if self._stop_saves else 0.0
        self._set_deadline(self._limits.boundary_s + writes_s)

    def _end_if_all_finished(self) -> None:
        if self.world is None or not self.handoffs.idle or self._state is ENDED:
            return
        workers = self.world.rank_map.workers
        if len(self.agents.finished(workers)) < len(workers):
            return
        steps, done = self._config.train.steps, self._steps_done
        if done >= steps:
            self._end(Ending.FINISHED, f"all {steps} steps are done")
        elif self._stop_reason:
            saved = f"; {self._saved(done)}" if self._stop_saves else ""
            self._end(self._stop_as, self._stop_reason + saved)
        else:
            self._fail(f"the workers ended after {done} of {steps} steps")

    def _saved(self, step: int) -> str:
        """What a run that was to end with a checkpoint of `step` has on disk."""
        newest = self._checkpointed
        if newest is not None and newest[0] == step:
            return f"checkpoint of step {step} in {newest[1]}"
        before = "there is none" if newest is None else f"the last is {newest[0]}"
        failure = self._checkpoint_failure or f"checkpoint of step {step} is not complete"
        return f"{failure}; {before}"

    def _fail(self, reason: str) -> None:
        """Ends the run, unless it has ended already, and the handoff attempt with it.

        One that has trained and has a checkpoint begins again from there, unless it was about to
        end anyway; one that was to be queued again still is.
        """
        if self._state is ENDED:
            return
        attempt = self.recorder.attempt
        if attempt is not None:
            source = attempt.request.source
            self.recorder.attempt_ended(Ended(attempt.generation, "failed", reason, source))
        step = None if self._checkpointed is None else self._checkpointed[0]
        requeued = bool(self._stop_reason) and self._stop_as is Ending.REQUEUE
        if self._state is STARTING or (step is None and not requeued):
            self._end(Ending.FAILED, reason)
            return
        which = "no checkpoint" if step is None else f"the checkpoint of step {step}"
        left = f"{reason}; {which} is left"
        if self._stop_reason:
            self._end(self._stop_as, f"{self._stop_reason}; {left}")
        else:
            self._end(Ending.RESTART, left)

    def _end(self, ending: Ending, reason: str) -> None:
        if self._state is ENDED:
            return
        self._state = ENDED
        steps = max(self._steps_done, self.recorder.steps_done)
        self.ending = End(ending, reason, steps)
        if ending in (Ending.REQUEUE, Ending.RESTART):
            self.elastic.notices.restarts(str(ending), reason, self._clock.now_s())
        self.elastic.notices.close()
        if self.elastic.queue:
            never = "; ".join(self.elastic.queue.texts())
            self._out.append(Log(f"never granted: {never}"))
        self._note(f"{ending}: {reason}")
        self.agents.send(self.agents.present(), m.Exit(reason=f"{ending}: {reason}"))
        self._out.append(self.ending)

    def _nothing(self, event: e.Event) -> None:
        """Too late to matter."""

    def _turned_away(self, event: e.AgentMet) -> None:
        self._out.append(TurnAway(event.agent, "the run has ended"))

    def _refused(self, event: e.OperatorAsked) -> None:
        self._out.append(Answer(event.number, False, "the run is about to end"))

    # ---- what is seen of it

    @property
    def memory(self) -> e.Memory:
        """What the next start is to know."""
        elastic = self.elastic
        return e.Memory(self.handoffs.generation, elastic.queue.ceiling, tuple(elastic.drained))

    def expects(self, worker: int) -> bool:
        """Whether a worker that says Hello now is let in."""
        return self._state is not ENDED and self.agents.expects(worker)

    @property
    def awaits_joiners(self) -> bool:
        """Whether somebody is to come to the rendezvous."""
        attempt = self.handoffs.attempt
        return self._state is STARTING or (attempt is not None and attempt.target is None)

    @property
    def steps_done(self) -> int:
        return self.recorder.steps_done

    def world_of(self, generation: int) -> WorldRef | None:
        """The world of a generation: the one that trains, or the one that has just committed."""
        worlds = (self.handoffs.committed_world, self.world)
        return next((w for w in worlds if w is not None and w.generation == generation), None)

    def identity(self) -> str:
        """Where the run stands, for its log: "gen 4 TRANSFER"."""
        if self.world is None:
            return str(self.state)
        return self.handoffs.identity() or f"gen {self.world.generation}"

    def snapshot(self, now_s: float, last_event: str, metrics_error: str) -> StatusSnapshot:
        """The run at one moment, for people; `last_event` is the newest note."""
        last = self.recorder.last_step
        world = self.handoffs.committed_world or self.world
        took_s = last.ended_s - last.started_s if last else None
        state = TRAINING if self.state is HANDING_OVER else self.state
        return StatusSnapshot(
            run=self._config.name,
            state=str(state if self.ending is None else self.ending.state),
            step=self.recorder.steps_done,
            steps=self._config.train.steps,
            loss=last.loss if last else None,
            grad_norm=last.grad_norm if last else None,
            tokens_per_s=last.tokens / took_s if last and took_s else None,
            step_s=took_s,
            generation=world.generation if world else 0,
            layout=str(world.rank_map.layout if world else self._first_layout),
            workers=world.rank_map.workers if world else (),
            handoffs_done=self.recorder.completed,
            handoffs_aborted=self.recorder.aborted,
            queued=self.elastic.queue.texts(),
            handoff=self.handoffs.status(),
            last_event=last_event,
            metrics_error=metrics_error,
            now_s=now_s,
            nodes=tuple(self.elastic.nodes.held.lines(self.agents.taken())),
            transports=self.recorder.transports.get(world.generation, ()) if world else (),
        )


Handler = Callable[[Run, Any], None]
OPEN = (STARTING, TRAINING, HANDING_OVER, STOPPING)
WITH_WORLD = (TRAINING, HANDING_OVER, STOPPING)


def _in(states: tuple[RunState, ...], handlers: dict[type, Handler]) -> dict[Any, Handler]:
    return {(state, event): handler for state in states for event, handler in handlers.items()}


_TABLE: dict[tuple[RunState, type], Handler] = {
    **_in(
        (STARTING,),
        {
            e.CoordinatorStarted: Run._coordinator_started,
            e.LaunchAllowed: Run._launch_allowed,
            e.StateRestored: Run._state_restored,
            m.Restored: Run._restored,
        },
    ),
    **_in(
        OPEN,
        {
            NodeGranted: Run._node_granted,
            NodeWarned: Run._node_warned,
            NodeGone: Run._node_gone,
            EndNear: Run._end_near,
            PoolNote: Run._pool_note,
            e.AgentMet: Run._agent_met,
            e.AgentListens: Run._agent_listens,
            e.AgentEnded: Run._agent_ended,
            e.LaunchFailed: Run._launch_failed,
            e.RendezvousFailed: Run._rendezvous_failed,
            e.OperatorAsked: Run._operator_asked,
            e.StopSignalled: Run._stop_signalled,
            e.WorkerGone: Run._worker_gone,
            e.CheckpointWritten: Run._checkpoint_written,
            e.CheckpointFailed: Run._checkpoint_failed,
            e.JournalFailed: Run._journal_failed,
            e.ShellFailed: Run._shell_failed,
            e.Tick: Run._tick,
            m.Hello: Run._hello,
            m.Transports: Run._transports,
            m.Failed: Run._of_attempt,
        },
    ),
    **_in(
        WITH_WORLD,
        {
            m.StepDone: Run._step_done,
            m.Finished: Run._finished,
            m.Prepared: Run._of_attempt,
            m.AtBoundary: Run._of_attempt,
            m.Vote: Run._of_attempt,
            m.FirstStep: Run._of_attempt,
            m.Released: Run._of_attempt,
            m.Aborted: Run._of_attempt,
        },
    ),
    **_in(
        (ENDED,),
        {
            **dict.fromkeys(
                (NodeGranted, NodeWarned, EndNear, PoolNote, e.LaunchAllowed),
                Run._nothing,
            ),
            **dict.fromkeys(
                (e.RendezvousFailed, e.StopSignalled, e.StateRestored),
                Run._nothing,
            ),
            **dict.fromkeys(
                (e.CheckpointWritten, e.CheckpointFailed, e.JournalFailed, e.ShellFailed),
                Run._nothing,
            ),
            **dict.fromkeys(
                (m.Hello, m.Transports, m.StepDone, m.Finished, m.Prepared, m.AtBoundary, m.Vote),
                Run._nothing,
            ),
            **dict.fromkeys(
                (m.FirstStep, m.Released, m.Aborted, m.Failed, m.Restored), Run._nothing
            ),
            NodeGone: Run._nothing,
            e.LaunchFailed: Run._launch_failed,
            e.AgentListens: Run._agent_listens,
            e.AgentEnded: Run._agent_ended,
            e.WorkerGone: Run._worker_gone,
            e.AgentMet: Run._turned_away,
            e.OperatorAsked: Run._refused,
            e.Tick: Run._tick,
        },
    ),
}
