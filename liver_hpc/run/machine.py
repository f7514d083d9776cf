"""The run as a state machine: events go in, actions come out; no I/O.

One start of a run is one `Run`; what the next start needs to know is in `Memory`. What `handle`
returns depends on the events and their times alone: a journal of them gives the same actions again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from liver_hpc.clock import Deadline
from liver_hpc.errors import LiverError, ProtocolError, RequestRefused
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.events import WorkerLost
from liver_hpc.protocol.votes import Side, disagreements
from liver_hpc.run import events as e
from liver_hpc.run.actions import Action, Answer, Ending, Log, StepPhase, TurnAway
from liver_hpc.run.agents import STANDBY, Agent
from liver_hpc.run.lifecycle import (
    ENDED,
    HANDING_OVER,
    MOST_READ_S,
    RECOVERING,
    STARTING,
    STOPPING,
    TRAINING,
    Lifecycle,
    RunState,
)
from liver_hpc.run.outcome import OPERATORS_STOP, PREEMPTED
from liver_hpc.run.requests import ReconfigurationRequest


class Run(Lifecycle):
    """One start of a run, on every event that there is; see `Lifecycle` for what it is made of."""

    # ---- one event

    def handle(self, event: e.Event, at_s: float) -> list[Action]:
        """The answer to one event at `at_s`, epoch seconds: what is to be done, in this order.

        Whatever is wrong with an event ends the run with the reason; nothing is raised.
        """
        before_s, self._clock.at_s = self._clock.at_s, at_s
        if isinstance(event, e.TookOver):
            self._clock.present.stands_still(before_s)
        elif isinstance(event, e.StoodStill):
            self._clock.present.leave_out(event.since_s)
        for each in event.messages if isinstance(event, e.SaidTogether) else (event,):
            self._handle(each)
        actions = list(self._out)
        self._out.clear()
        return actions

    def _handle(self, event: e.Event) -> None:
        state = self.state
        if not isinstance(event, e.Tick):  # of which the journal leaves out most
            self._history.append((state, event))
        try:
            handler = _TABLE.get((state, type(event)))
            if handler is not None:
                handler(self, event)
                self._settle(event)
            elif state is not ENDED:
                raise ProtocolError(f"{type(event).__name__} while {state}; {self._story()}")
        except LiverError as error:
            self._fail(str(error))

    def _settle(self, event: e.Event) -> None:
        """What follows from the event for nodes, launches and handoffs. A step changes none of
        that, nor does an evaluation, unless the run file asks for something after it, nor what one
        of many workers says in a start, handoff or recovery that goes on, and there are many."""
        of_training = isinstance(event, _OF_TRAINING)
        goes_on = not self.handoffs.idle or self._state in (STARTING, RECOVERING)
        of_many = goes_on and isinstance(event, _OF_MANY)
        if self._state is ENDED or of_many or (of_training and not self.elastic.queue.waiting):
            return
        if self._state is STARTING and self._may_launch and not self._launched:
            self._launch_first()
        comes = isinstance(event, m.Hello | e.AgentMet | e.AgentListens)
        has_nodes = self._may_launch and not (comes and self._state is STARTING)
        if has_nodes:  # first, as what is decided next may be to wait for who goes
            self.elastic.let_spares_go()
        if self._state is TRAINING and not self._journal_error:
            assert self.world is not None
            step = self.recorder.steps_done
            catching_up = self.recoveries.catching_up(step)
            redone_steps = self.recoveries.redone_steps(self.world, step)
            to_disk = self.elastic.next_handoff(self.world, step, catching_up, redone_steps)
            if to_disk is not None:
                self._stop(to_disk.reason, checkpoint=True, then=Ending.RESTART)
            elif self.handoffs.idle and not catching_up:
                self.standbys.look_after(self.world.rank_map.layout)
        if has_nodes:
            self.elastic.look_after_nodes()

    # ---- the start

    def _coordinator_started(self, event: e.CoordinatorStarted) -> None:
        self._checkpoints, self._resumed = event.checkpoints, event.resumed
        self._evaluated_step, self._in_vain = event.memory.evaluated, event.memory.in_vain
        self._wrote, self._furthest = event.memory.wrote, event.memory.furthest
        self._vain_restarts = event.memory.vain_restarts
        known = [event.memory.last_generation]
        if self._resumed is not None and self._resumed.weights:
            self._note(f"begins with the weights of {self._resumed.path}")
        elif self._resumed is not None:
            step = self._resumed.step
            known.append(self._resumed.generation)
            self._steps_done = self.recorder.first_step = step
            self._checkpointed = self._resumed_from = step, self._resumed.path
            self.recoveries.note_checkpoint(step)
            self.elastic.queue.skip(step)
            self.elastic.estimates.policy.at_step(step)
            self._note(f"goes on from step {step}, saved at {self._resumed.layout}")
            # A run that begins with another's checkpoint was evaluated by that one.
            if event.memory.last_generation >= 0:
                self._owes_evaluation = self._misses_evaluation(step)
        # A generation's number stands for one world in all starts of a run. One is left out: it
        # may have been that of a world built anew, which recorded nothing.
        self._first_generation = max(known) + 2 if max(known) >= 0 else 0
        self.handoffs.generation = self._first_generation
        self.elastic.recall(event.memory)
        self.agents.started = event.memory.agents

    def _launch_allowed(self, event: e.LaunchAllowed) -> None:
        self._may_launch = True
        if not self._launch_first():
            self._note(f"waiting for nodes; held: {self.elastic.nodes.describe()}")

    def _took_over(self, event: e.TookOver) -> None:
        self.elastic.took_over()
        self._journal_error = ""  # until the journal of this coordinator cannot be written, either

    def _regained(self, event: e.Regained) -> None:
        absent_s = self._clock.present.goes_on()
        self._note(f"another coordinator has taken over; there was none for {absent_s:.1f} s")
        self.agents.end_again()

    def _stood_still(self, event: e.StoodStill) -> None:
        for_s = self._clock.at_s - event.since_s
        self._out.append(Log(f"the coordinator stood still for {for_s:.1f} s"))

    def _launch_failed(self, event: e.LaunchFailed) -> None:
        generation, workers = self.agents.launch_failed(event.agents, event.lost)
        what = f"cannot launch {workers} workers: {event.reason}"
        if self._state is ENDED:
            return
        if generation == STANDBY and workers:
            self.standbys.failed(what)
            return
        if self._state is STARTING and generation == self._first_generation:
            self._start_failed(what)  # a node may be gone, which nobody has been told yet
        elif generation == self.handoffs.generation and self.handoffs.attempt is not None:
            self.handoffs.cancel_boot(what)

    def _restored(self, message: m.Restored) -> None:
        """A worker holds what it read; whether that is what was saved is found out elsewhere."""
        self._have_restored.add(message.worker)

    def _state_restored(self, event: e.StateRestored) -> None:
        assert self.world is not None
        self.agents.send(self.world.rank_map.workers, m.Proceed(generation=event.generation))
        self._train()

    def _checkpoint_doubted(self, event: m.NotRestored | e.CheckpointDoubted) -> None:
        """Which file is at fault is found out elsewhere. That may take long: no worker is needed
        for it, and nothing that becomes of them ends this start before."""
        if self._doubted or self._resumed is None:
            return
        who = f"worker {event.worker}: " if isinstance(event, m.NotRestored) else ""
        why = f"reading all files of {self._resumed.path}: {who}{event.reason}"
        self._doubted = True
        self._set_deadline(MOST_READ_S)
        self._note(why)
        self.agents.send(self.agents.present(), m.Exit(reason=why))

    def _checkpoint_damaged(self, event: e.CheckpointDamaged) -> None:
        self._doubted = False
        if not event.again:
            self._checkpointed = None
        self._start_failed(event.reason)

    # ---- agents

    def _agent_ended(self, event: e.AgentEnded) -> None:
        agent = self.agents.ended(event.agent, event.exit_code, event.said)
        if agent is None or agent.complete or self._state is ENDED:
            return
        if agent.generation == STANDBY:
            self._standby_ended(agent, event)
            return
        fallen = self.agents.fallen(agent.generation)
        if self._state is STARTING and agent.generation == self._first_generation:
            if self.agents.fallen_told(agent.generation):
                self._end(Ending.RESTART, fallen)  # its node is being taken away
            else:
                self._start_failed(fallen)
        elif fallen and agent.generation == self.handoffs.generation:
            self.handoffs.cancel_boot(fallen)

    def _standby_ended(self, agent: Agent, event: e.AgentEnded) -> None:
        """One has ended that had not booted: it failed, unless it was told to."""
        if agent.end_by is None:
            self.agents.launch_failed((event.agent,), lost=(event.agent,))
            why = f"agent {event.agent} ended in boot with exit code {event.exit_code}"
            self.standbys.failed(f"{why}: {event.said}" if event.said else why)

    def _rendezvous_failed(self, event: e.RendezvousFailed) -> None:
        if self._state is STARTING:
            self._fail(event.reason)
        else:
            self.handoffs.cancel_boot(event.reason)

    # ---- workers

    def _hello(self, hello: m.Hello) -> None:
        """A worker has booted."""
        if not self.agents.expects(hello.worker):
            return
        generation = self.agents.join(hello)
        if other := self.agents.other_code(hello):
            self._refuse(hello.worker, generation, other)
        elif generation == STANDBY:
            self.agents.keep((hello.worker,), aborting=False)
        elif self.world is not None:
            self.handoffs.joined(hello, generation)
        elif self._launched and self.agents.completes(hello.worker):
            self._begin()

    def _refuse(self, worker: int, generation: int, why: str) -> None:
        """A worker has booted that may not train with the others: as if it had not."""
        self.agents.send((worker,), m.Exit(reason=why))
        if self._state is STARTING:
            self._start_failed(why)
        elif generation == STANDBY:
            self.agents.dismiss(STANDBY, why)
            self.standbys.failed(why)
        elif generation == self.handoffs.generation:
            self.handoffs.cancel_boot(why)

    def _worker_gone(self, event: e.WorkerGone) -> None:
        spare = event.worker in self.agents.kept
        if self.agents.leave(event.worker):
            self._lost(event.worker, event.reason)
            if spare and self._state is not ENDED:
                self.standbys.failed(f"worker {event.worker} ended: {event.reason}")

    def _lost(self, worker: int, reason: str) -> None:
        """A worker has gone: as it should, or to the cost of a handoff, or of the run."""
        if self._state is ENDED or worker in self.agents.finished:
            return
        if self._state is STARTING:
            self._start_failed(f"worker {worker} lost before training began: {reason}")
        elif self.recoveries.involves(worker):
            self.recoveries.lost(worker, reason)
        elif self._state is RECOVERING:
            self._out.append(Log(f"worker {worker}, without which the run goes on: {reason}"))
        elif self.world is not None and (
            self.handoffs.involves(worker) or worker in self.world.rank_map.workers
        ):
            if self.handoffs.attempt is None:
                self._lost_world(f"worker {worker} lost: {reason}")
            else:
                self.handoffs.feed(WorkerLost(worker, reason))
        else:
            self._out.append(Log(f"worker {worker} has ended: {reason}"))

    def _step_done(self, message: m.StepDone) -> None:
        """A step, and with it perhaps scripted notices."""
        phase = self.recorder.step_done(message)
        self.elastic.estimates.policy.at_step(message.step + 1)
        world = self.world
        ours = world is not None and message.generation == world.generation
        if ours and message.snapshot is not None:
            self.recoveries.note_snapshot(message.generation, message.snapshot)
            self.agents.end_lingering(f"the snapshots of generation {message.generation} stand")
            failed = self._unprotected
            if failed is not None and message.snapshot > failed.step:
                self._unprotected = None
                self._note(f"snapshots again, from that of step {message.snapshot} on")
        self.elastic.estimates.handoffs.observe_done(message.step + 1)
        if phase:
            self._out.append(StepPhase(phase))
        if world is not None and ours and phase in ("", "prepare"):
            self.elastic.step_done(message, world, slowed=bool(phase))
        for notice in self.elastic.queue.due(message.step):
            try:
                answer = self._ask(self.elastic.queue.of_notice(notice, self._clock.now_s()))
            except RequestRefused as error:
                answer = f"refused: {error}"
            self._note(f"notice of step {notice.at_step}: {answer}")

    def _evaluated(self, message: m.Evaluated) -> None:
        last = self.recorder.last_evaluation
        if last is not None and (last.generation, last.step) == (message.generation, message.step):
            return  # told again after a loss, by another worker
        self.recorder.evaluated(message)
        self._evaluated_step = max(self._evaluated_step, message.step)
        self.elastic.estimates.handoffs.observe_evaluation(message.started_s, message.ended_s)

    def _verified(self, message: m.Verified) -> None:
        """Once all have told their digests, copies are compared; of two steps the later one's."""
        world = self.world_of(message.generation)
        if world is None:
            return
        of, rank_map = (message.generation, message.step), world.rank_map
        if of < self._verified_of:
            return  # of others the later one was heard first, as after a connection has broken
        if of != self._verified_of:
            self._verified_of, self._digests = of, {}
        self._digests[message.worker] = message.digests
        if len(self._digests) == len(rank_map.workers) and {*rank_map.workers} == {*self._digests}:
            differ = "; ".join(disagreements(Side("world", rank_map, self._digests)))
            if differ:
                self._fail(f"copies of the state differ after step {message.step}: {differ}")

    def _of_attempt(self, message: m.OfAttempt) -> None:
        world = self.world
        ours = (
            world is not None
            and message.generation == world.generation
            and message.worker in world.rank_map.workers
        )
        if isinstance(message, m.Failed) and ours:
            reason = f"worker {message.worker}: {message.reason}"
            if self._state is RECOVERING:
                self._out.append(Log(f"{reason}; that world is let go"))
            elif self.handoffs.attempt is not None and self.recoveries.possible:
                self.handoffs.feed(WorkerLost(message.worker, message.reason))
            else:
                self._lost_world(reason)
            return
        if isinstance(message, m.Aborted):
            self.agents.cleared(message.worker)
        if isinstance(message, m.Failed) and message.no_room:
            self.elastic.no_room(message)
        self.handoffs.message(message)

    def _broken(self, message: m.Broken) -> None:
        """A step has failed, as when a peer is gone of which nobody has told yet."""
        reason = f"worker {message.worker}: {message.reason}"
        if self._state is RECOVERING:
            self.recoveries.broken(message)
        elif self.world is None or self._state is STARTING:
            self._start_failed(reason)
        elif self.handoffs.attempt is not None:
            self._out.append(Log(f"{reason}; its peer's end, if it is that, comes next"))
            if self._broken_off is None or self._broken_off[0].generation < message.generation:
                limit_s = self._limits.heartbeat_s
                known = Deadline.after(self._clock.present, limit_s, "the end of a peer")
                self._broken_off = message, known
        elif message.worker in self.world.rank_map.workers:
            self._lost_world(reason)  # also of an older world: whoever says so trains in none

    def _snapshot_failed(self, told: m.Unprotected) -> None:
        """Until another one is complete, more steps can be lost than the run file has it."""
        self._unprotected = told
        where = f"the snapshot of step {told.step} in generation {told.generation}"
        self._note(f"{where} failed, others will be tried: worker {told.worker}: {told.reason}")

    def _finished(self, message: m.Finished) -> None:
        """A worker has done its last step; the others are about to."""
        limits = self._limits
        self.agents.finished.add(message.worker)
        self._steps_done = message.step
        if self._state is TRAINING:
            self._state = STOPPING
            writes_s = 0.0 if self.config.checkpoint.every_steps is None else limits.checkpoint_s
            self._set_deadline(limits.boundary_s + writes_s)
        elif self.recoveries.involves(message.worker):  # it hears of no world any more
            self.recoveries.lost(message.worker, "it has done its last step")
        self.handoffs.feed(message)
        self._end_if_all_finished()

    # ---- nodes

    def _node_granted(self, event: e.NodeGranted) -> None:
        self.elastic.granted(event, at_start=self.world is None)
        if not self._launched:
            self._deadline = None  # others may follow

    def _node_warned(self, event: e.NodeWarned) -> None:
        if not self.elastic.warned(event):
            return
        if self._state is STARTING:
            if event.deadline_s is not None and self._begins_on(event.node):
                self._end(Ending.RESTART, f"node {event.node} goes before training began")
        elif self._state is TRAINING and self.world is not None:
            self.elastic.overtake(self.world)

    def _node_gone(self, event: e.NodeGone) -> None:
        reason = f"node {event.node} is gone: {event.reason}"
        self.stragglers.named.discard(event.node)
        self.agents.dismiss(STANDBY, reason, {event.node})
        if self._begins_on(event.node):
            self._end(Ending.RESTART, f"{reason}, before training began")
        elif self.agents.launched_on({event.node}, self.handoffs.generation):
            self.handoffs.cancel_boot(reason)  # whoever has not come by now will not
        for worker in self.elastic.gone(event):
            if self.agents.leave(worker):  # what else is heard of it is heard too late
                self._lost(worker, f"its {reason}")

    def _node_straggles(self, event: e.NodeStraggles) -> None:
        """Of a world that trains; a node that is gone by now straggles no more."""
        if self._state is TRAINING and self.world is not None and event.node in self.elastic.nodes:
            self.stragglers.straggles(event, self.world, self.recorder.steps_done)

    def _begins_on(self, node: str) -> bool:
        """Whether the run is starting, on this node among others."""
        starting = self._state is STARTING and not self._doubted
        return starting and self.agents.launched_on({node}, self._first_generation)

    def _end_near(self, event: e.EndNear) -> None:
        """The coordinator's own allocation ends soon: state to disk, and again from there, unless
        its job may not be queued again."""
        again = self.config.cluster.slurm.requeue
        then = Ending.REQUEUE if again else Ending.STOPPED
        if self._state is STARTING and again and event.reason != PREEMPTED:
            self._too_little_time(event.reason)
        else:
            self._stop(event.reason, checkpoint=True, then=then)

    # ---- operators

    def _operator_asked(self, event: e.OperatorAsked) -> None:
        try:
            ok, text = True, self._reply(event.request)
        except RequestRefused as error:
            ok, text = False, str(error)
        stops = ok and isinstance(event.request, m.StopRequest)
        within_s = self.stops_within_s if stops else None
        self._out.append(Answer(event.number, ok, text, within_s))

    def _reply(self, request: m.OperatorEvent) -> str:
        """What an operator is told; RequestRefused when the answer is no."""
        if isinstance(request, m.StopRequest):
            return self._stop(OPERATORS_STOP, request.checkpoint)
        if isinstance(request, m.DrainRequest):
            self._check_open()
            if request.undo:
                reply = self.elastic.undo_drain(request.node, self.world)
                self.stragglers.named.discard(request.node)  # it counts as repaired
                return reply
            reply = self.elastic.drain(request.node, request.within_s, self.world)
            if self._begins_on(request.node):
                self._end(Ending.RESTART, f"node {request.node} goes before training began")
            return reply
        return self._ask(self.elastic.queue.of_operator(request, self._clock.now_s()))

    def _ask(self, request: ReconfigurationRequest) -> str:
        self._check_open()
        busy = "the start of the run" if self._state is STARTING else self.handoffs.describe()
        busy = busy or self.recoveries.describe()
        return self.elastic.ask(request, self.world, busy)

    def _check_open(self) -> None:
        if self._state not in (STARTING, TRAINING, RECOVERING):
            raise RequestRefused("the run is about to end")

    # ---- checkpoints and the journal

    def _checkpoint_written(self, event: e.CheckpointWritten) -> None:
        self._checkpointed, self._checkpoint_failure = (event.step, event.path), ""
        self._wrote = event.step
        self.recoveries.note_checkpoint(event.step)
        self.elastic.estimates.handoffs.observe_checkpoint(event.largest_bytes, event.took_s)
        took = f"{event.total_bytes} bytes in {event.took_s:.2f} s"
        self._note(f"checkpoint of step {event.step}: {took}")
        self.handoffs.saved(event.step)

    def _checkpoint_failed(self, event: e.CheckpointFailed) -> None:
        self._checkpoint_failure = event.reason
        self._note(event.reason)
        self.handoffs.saved(event.step, event.reason)

    def _journal_failed(self, event: e.JournalFailed) -> None:
        """Training goes on. No handoff begins that nobody could find out about afterwards."""
        if event.reason and not self._journal_error and self.handoffs.can_be_cancelled:
            self.elastic.call_off(f"the journal cannot be written: {event.reason}")
        self._journal_error = event.reason

    # ---- time

    def _tick(self, event: e.Tick) -> None:
        if self._state is not ENDED:
            self.handoffs.tick()
            self.recoveries.tick()
            self._look_at_broken_off()
        standbys = self.elastic.nodes.standbys()[: self.config.workers.standby]
        for worker in self.agents.reap(standbys):
            self._lost(worker, "did not end by itself")
        if self._state is ENDED or self._deadline is None or not self._deadline.expired():
            return
        if self._state is STARTING and not self._launched:
            self._too_few_nodes()
            return
        late = f"waited {self._deadline.limit_s:g} s for {self._waits_for()}"
        if self._state is STARTING:
            self._doubted = False
            self._start_failed(late)
        else:
            self._fail(late)

    def _stop_signalled(self, event: e.StopSignalled) -> None:
        self._stop(event.reason, event.checkpoint)

    # ---- after the end

    def _turned_away(self, event: e.AgentMet) -> None:
        self._out.append(TurnAway(event.agent, "the run has ended"))

    def _refused(self, event: e.OperatorAsked) -> None:
        self._out.append(Answer(event.number, False, "the run is about to end"))


Handler = Callable[[Run, Any], None]
_OF_TRAINING = (m.StepDone, m.Evaluated, m.Verified, m.Saved)
_OF_MANY = m.OfManyAtOnce | m.Restored
OPEN = (STARTING, TRAINING, HANDING_OVER, RECOVERING, STOPPING)
WITH_WORLD = (TRAINING, HANDING_OVER, RECOVERING, STOPPING)


def _in(states: tuple[RunState, ...], handlers: dict[type, Handler]) -> dict[Any, Handler]:
    return {(state, event): handler for state in states for event, handler in handlers.items()}


_TABLE: dict[tuple[RunState, type], Handler] = {
    **_in(
        (STARTING,),
        {
            e.CoordinatorStarted: Run._coordinator_started,
            e.LaunchAllowed: Run._launch_allowed,
            e.StateRestored: Run._state_restored,
            e.CheckpointDoubted: Run._checkpoint_doubted,
            e.CheckpointDamaged: Run._checkpoint_damaged,
            m.Restored: Run._restored,
            m.NotRestored: Run._checkpoint_doubted,
        },
    ),
    **_in(
        OPEN,
        {
            e.TookOver: Run._took_over,
            e.Regained: Run._regained,
            e.StoodStill: Run._stood_still,
            e.NodeGranted: Run._node_granted,
            e.NodeWarned: Run._node_warned,
            e.NodeGone: Run._node_gone,
            e.EndNear: Run._end_near,
            e.PoolNote: lambda run, event: run._note(event.text),
            e.BurstOver: lambda run, event: run.elastic.no_more_burst(event.reason),
            e.AgentMet: lambda run, met: run._out.append(run.agents.meet(met.agent, met.workers)),
            e.AgentListens: lambda run, event: run.agents.listens(event.agent),
            e.AgentEnded: Run._agent_ended,
            e.LaunchFailed: Run._launch_failed,
            e.RendezvousFailed: Run._rendezvous_failed,
            e.OperatorAsked: Run._operator_asked,
            e.StopSignalled: Run._stop_signalled,
            e.WorkerGone: Run._worker_gone,
            e.CheckpointWritten: Run._checkpoint_written,
            e.CheckpointFailed: Run._checkpoint_failed,
            e.JournalFailed: Run._journal_failed,
            e.HeldUp: lambda run, event: run._note(event.text),
            e.NodeStraggles: Run._node_straggles,
            e.NodeKeepsUp: lambda run, event: run.stragglers.keeps_up(event),
            e.ShellFailed: lambda run, event: run._fail(event.reason),
            e.Tick: Run._tick,
            m.Hello: Run._hello,
            m.Transports: lambda run, event: run.recorder.connected(event),
            m.Failed: Run._of_attempt,
            m.Broken: Run._broken,
            m.Unprotected: Run._snapshot_failed,
        },
    ),
    **_in(
        WITH_WORLD,
        {
            m.StepDone: Run._step_done,
            m.Evaluated: Run._evaluated,
            m.Verified: Run._verified,
            m.Finished: Run._finished,
            # Of a worker that was given up meanwhile they come when nobody waits any more.
            m.Halted: lambda run, event: run.recoveries.halted(event),
            m.Refilled: lambda run, event: run.recoveries.refilled(event),
            m.Saved: lambda run, event: None,  # what it comes to is found out elsewhere
            **dict.fromkeys(get_args(m.OfAttempt), Run._of_attempt),
        },
    ),
    **_in(
        (ENDED,),
        {
            e.LaunchFailed: Run._launch_failed,
            e.AgentListens: lambda run, event: run.agents.listens(event.agent),
            e.AgentEnded: Run._agent_ended,
            e.WorkerGone: Run._worker_gone,
            e.AgentMet: Run._turned_away,
            e.OperatorAsked: Run._refused,
            e.Tick: Run._tick,
        },
    ),
}
"""What is done on which event. After the end every other event is too late to matter."""
