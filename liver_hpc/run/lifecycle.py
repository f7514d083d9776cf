"""One start of a run: what it consists of, and the ways in which it begins, stops and ends.

    STARTING -> TRAINING <-> HANDING_OVER, RECOVERING
        |           |             |
        +-----------+-------------+--> STOPPING --> ENDED

`machine.py` says on which event which way is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from enum import StrEnum

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError
from liver_hpc.layout.budget import Budget, RehearsalBytes
from liver_hpc.layout.coordinates import Layout, ids_text
from liver_hpc.layout.placement import first_rank_map, place
from liver_hpc.layout.policy import LayoutPolicy
from liver_hpc.layout.ramp import steps_between
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import WorkerLost, WorldRef
from liver_hpc.protocol.machine import HandoffMachine
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.run import events as e
from liver_hpc.run.actions import (
    Action,
    AttemptBegins,
    End,
    Ending,
    ForgetGeneration,
    Log,
    Note,
    Record,
    RecordAll,
)
from liver_hpc.run.agents import Agents
from liver_hpc.run.decide import Estimates, Place
from liver_hpc.run.elastic import ElasticPolicy
from liver_hpc.run.estimates import HandoffEstimator
from liver_hpc.run.event_clock import EventClock
from liver_hpc.run.handoffs import Handoffs
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.notices import NoticeBook
from liver_hpc.run.outcome import OPERATORS_STOP, TOO_FEW_NODES, TOO_LITTLE_TIME
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.records import ReconfigurationRecord
from liver_hpc.run.recovery import Recoveries
from liver_hpc.run.requests import RequestQueue
from liver_hpc.run.standbys import Standbys
from liver_hpc.run.stragglers import Stragglers

HISTORY_EVENTS = 40
EVENT_TEXT_LENGTH = 200
MOST_STARTS_IN_VAIN = 3
"""So often in a row a run may start, in its job that is queued again, with too few nodes, or too
little time."""
MOST_RESTARTS_IN_VAIN = 3
"""So often in a row a run may restart without progress: it has come no further than ever before,
and its newest checkpoint is the one that it resumed from, neither damaged nor followed by another.
"""
MOST_READ_S = 6 * 3600.0
"""So long a checkpoint's files may be read, to find out which has changed."""


class RunState(StrEnum):
    """Where a start of the run stands."""

    STARTING = "starting"
    TRAINING = "training"
    HANDING_OVER = "handing over"  # the source world trains on for most of it
    RECOVERING = "recovering"  # a worker was lost: a world is filled from snapshots
    STOPPING = "stopping"  # told to stop, or the first worker has done its last step
    ENDED = "ended"


STARTING, TRAINING, HANDING_OVER, RECOVERING, STOPPING, ENDED = RunState


class Lifecycle:
    """One start of a run, and what it can become; `Run` in `machine.py` says on which event.

    `world` is None until there is a first one; `ending` is set at the end.

    model: the tensors; check_layout: raises ConfigError for a layout that the model cannot have.
    """

    def __init__(
        self,
        config: RunConfig,
        model: ModelSpec,
        check_layout: Callable[[Layout], None] = lambda layout: None,
        place: Place = place,
        rehearsal_bytes: RehearsalBytes = lambda _layout: None,
    ) -> None:
        layouts = config.allowed_layouts(config.workers.initial)
        if not layouts:
            raise ConfigError(f"layouts: none for workers.initial = {config.workers.initial}")
        self.world: WorldRef | None = None
        self.ending: End | None = None
        self.config = config
        self._limits = config.limits
        self._clock = EventClock()
        self._out: list[Action] = []
        self._history: deque[tuple[RunState, object]] = deque(maxlen=HISTORY_EVENTS)
        self._state = STARTING
        workers_per_agent = config.cluster.workers_per_node
        self.agents = Agents(
            config.deadlines,
            self._clock.present,
            self._out,
            agents_apart=workers_per_agent is not None,
        )
        self.recorder = RunRecorder(self._record, self._clock, self.agents.node_of)
        nodes = HeldNodes(self.agents, workers_per_agent)
        self.handoffs = Handoffs(
            HandoffMachine(config.limits, self._clock.present, self.agents.nodes_of),
            nodes,
            self.recorder,
            self._handoff_ended,
            lingers=config.snapshots.every_steps is not None,
        )
        estimator = HandoffEstimator(Budget(config, model, rehearsal_bytes))
        self.elastic = ElasticPolicy(
            config,
            self._clock,
            (
                RequestQueue(config, check_layout),
                nodes,
                Estimates(LayoutPolicy(config, model), estimator, model, place),
                NoticeBook(lambda row: self._record(Record(row))),
            ),
            self.handoffs,
            self._out,
        )
        self.recoveries = Recoveries(
            config,
            self._clock,
            self.elastic,
            self._out,
            owes_evaluation=self._misses_evaluation,
            ended=self._recovery_ended,
        )
        self._stop_later: tuple[str, bool, Ending] | None = None
        self._broken_off: tuple[m.Broken, Deadline] | None = None  # in a handoff
        self.standbys = Standbys(config, self._clock, nodes, self._out)
        self.stragglers = Stragglers(config, self._clock, self.elastic, self._out)
        self._resumed: e.Resumed | None = None
        self._verified_of = -1, -1  # the generation and step of the digests that came last
        self._digests: dict[int, tuple[m.ClassDigest, ...]] = {}
        self._unprotected: m.Unprotected | None = None  # until there is a newer snapshot
        self._evaluated_step = 0  # the most steps after which there was an evaluation
        self._owes_evaluation = False  # at the step that it goes on from
        self._checkpoints = ""
        self._checkpointed: tuple[int, str] | None = None  # the newest one's step and directory
        self._resumed_from: tuple[int, str] | None = None  # what that was as this start began
        self._checkpoint_failure = ""
        self._wrote: int | None = None  # the step of the newest one that the run itself has written
        self._first_generation = 0
        self.first_layout = layouts[0]
        self._may_launch = False
        self._launched = False
        self._in_vain = 0  # starts in a row that came to no training
        self._vain_restarts, self._furthest = 0, -1  # see `Memory`
        self._have_restored: set[int] = set()
        self._doubted = False  # the checkpoint's files are read, to find out which has changed
        self._deadline: Deadline | None = None  # of the start, and of the end
        self._stop_reason = ""
        self._stop_as = Ending.STOPPED
        self._stop_saves = False
        self._steps_done = 0
        self._journal_error = ""

    @property
    def _goes_on(self) -> bool:
        """Whether this start goes on from a checkpoint, and is no new run."""
        return self._resumed is not None and not self._resumed.weights

    @property
    def state(self) -> RunState:
        """TRAINING becomes HANDING_OVER for as long as an attempt is in progress."""
        if self._state is TRAINING and not self.handoffs.idle:
            return HANDING_OVER
        return self._state

    def _story(self) -> str:
        lines = (f"{state}: {str(event)[:EVENT_TEXT_LENGTH]!r}" for state, event in self._history)
        return "events so far: " + " | ".join(lines)

    def _record(self, what: Record | RecordAll | AttemptBegins) -> None:
        self._out.append(what)

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    # ---- the start

    def _launch_first(self) -> bool:
        """Once there are nodes enough; false before."""
        layout = self.elastic.first_layout(self.first_layout, self._goes_on)
        if layout is None:
            self._wait_for_nodes()
            return False
        self.first_layout, self._launched = layout, True
        self._note(f"launching {layout.workers} workers for {layout}")
        seats = self.elastic.nodes.seats(layout.workers)
        self.agents.launch(self._first_generation, layout, seats)
        self._set_deadline(self._limits.boot_s + self._limits.meet_s)
        return True

    def _wait_for_nodes(self) -> None:
        """For as long as burst nodes may come that are enough, else for a while."""
        coming = self.elastic.slots_to_come()
        if self.elastic.first_layout(self.first_layout, self._goes_on, coming) is not None:
            self._deadline = None
        elif self._deadline is None:
            self._set_deadline(self._limits.boot_s)

    def _too_few_nodes(self) -> None:
        """Ends a start that waited in vain: a run that goes on may have more in its job's next
        start, but not in one after the other; a new one is not begun over and over again."""
        elastic, cluster = self.elastic, self.config.cluster
        layouts = [self.first_layout]
        if self._goes_on:
            layouts = elastic.estimates.policy.choices(elastic.queue.bound)
        in_vain = self._in_vain + 1
        goes_on = self._goes_on and in_vain < MOST_STARTS_IN_VAIN
        again = goes_on and cluster.kind == "slurm" and cluster.slurm.requeue
        times = f", {in_vain} times in a row" if in_vain > 1 else ""
        over = f"; no burst nodes: {elastic.burst_over}" if elastic.burst_over else ""
        self._in_vain = in_vain if again else 0
        self._end(
            Ending.REQUEUE if again else Ending.FAILED,
            f"{TOO_FEW_NODES}{', '.join(map(str, layouts))}{times}, and none to come that are "
            f"enough{over}; held: {elastic.nodes.describe()}",
        )

    def _too_little_time(self, why: str) -> None:
        """Ends a start that the end of its job has overtaken; the next one may have more time."""
        in_vain = self._in_vain + 1
        again = in_vain < MOST_STARTS_IN_VAIN
        times = f", {in_vain} times in a row" if in_vain > 1 else ""
        self._in_vain = in_vain if again else 0
        self._end(Ending.REQUEUE if again else Ending.FAILED, f"{TOO_LITTLE_TIME}{times}: {why}")

    def _begin(self) -> None:
        """The first world: its groups within nodes, and on one node in the order of ids."""
        generation, resumed = self._first_generation, self._resumed
        workers = self.agents.arrived(generation)
        rank_map = first_rank_map(self.first_layout, workers, self.agents.nodes_of(workers))
        self.world = WorldRef(generation, rank_map)
        begin = m.Begin(
            generation=generation,
            rank_map=m.WireRankMap.of(rank_map),
            checkpoint=None if resumed is None else resumed.path,
            weights=resumed is not None and resumed.weights,
            evaluate=self._owes_evaluation,
        )
        self.agents.send(rank_map.workers, begin)
        if resumed is None:
            self._train()
        else:
            self._note(f"reading {resumed.path}: {self.world}")
            self._set_deadline(self._limits.prepare_s + self._limits.checkpoint_s)

    def _train(self) -> None:
        self._state, self._deadline, self._in_vain = TRAINING, None, 0
        # Nodes that came before count as granted now: nothing could join them earlier.
        self.elastic.nodes.granted_s = self._clock.now_s()
        self._note(f"training begins: {self.world}")

    def _start_failed(self, reason: str) -> None:
        """A start without a worker: from a checkpoint it is tried again, maybe on other nodes; but
        not while it is found out whether that one is damaged."""
        if self._doubted:
            self._out.append(Log(reason))
        elif not self._goes_on:
            self._fail(reason)
        else:
            self._end(Ending.RESTART, reason)

    # ---- how handoffs end

    def _handoff_ended(self, ended: Ended, record: ReconfigurationRecord) -> None:
        assert self.world is not None
        for generation in sorted({self.world.generation, ended.generation}):
            if generation != ended.world.generation:
                self._out.append(ForgetGeneration(generation))
        self.elastic.handoff_ended(ended, self.world, record)
        before, self.world = self.world, ended.world
        self._linger({*before.rank_map.workers} - {*self.world.rank_map.workers})
        if ended.outcome == "completed":
            self.standbys.handoff_completed()
        what = f"{ended.outcome}: {ended.detail}" if ended.detail else ended.outcome
        self._note(f"generation {ended.generation}: {what}; now {ended.world}")
        if ended.outcome == "failed":
            self._lost_world(f"handoff to generation {ended.generation}, {ended.detail}")
            return
        if self._stop_reason:
            self._tell_to_stop()
        self._end_if_all_finished()

    def _linger(self, unseated: Collection[int]) -> None:
        """Those that were not told to go stay until the world that trains has a snapshot, or their
        node is about to be taken."""
        assert self.world is not None
        rank_map = self.world.rank_map
        steps_s = self.elastic.estimates.handoffs.steps_s(rank_map, rank_map)
        stay_s = self._limits.beside_steps(steps_s).boundary_s
        self.elastic.nodes.linger(unseated, stay_s, self._clock.now_s())
        if rank_map.layout.workers == 1:
            self.agents.end_lingering(f"there are no snapshots in {self.world}")

    # ---- a worker is lost

    def _lost_world(self, reason: str) -> None:
        """The world that trains cannot go on: another one is filled from snapshots, if there are
        any. A run that was about to stop ends, unless it owes the disk its state and none of its
        workers has ended: it stops afterwards."""
        world = self.world
        owes = self._state is STOPPING and self._stop_saves and not self.agents.finished
        goes_on = self._state is TRAINING or owes
        if not goes_on or world is None or not self.recoveries.possible:
            self._fail(reason)
            return
        if owes:
            self._stop_later = self._stop_reason, True, self._stop_as
        self._state, self._broken_off, self._deadline = RECOVERING, None, None
        self.recoveries.begin(world, reason)

    def _look_at_broken_off(self) -> None:
        """A step that failed in a handoff is a lost world, too, where the end of a peer that would
        explain it has not become known."""
        if self._broken_off is None or not self._broken_off[1].expired():
            return
        message, deadline = self._broken_off
        world = self.handoffs.committed_world or self.world
        if world is None or message.worker not in world.rank_map.workers:
            return
        reason = f"{message.reason}, and no peer has ended within {deadline.limit_s:g} s"
        if self.handoffs.attempt is None:
            self._lost_world(f"worker {message.worker}: {reason}")
        else:
            self.handoffs.feed(WorkerLost(message.worker, reason))

    def _misses_evaluation(self, step: int) -> bool:
        validation = self.config.eval
        due = validation is not None and bool(validation.batches_after(step))
        return due and self._evaluated_step < step

    def _recovery_ended(self, came_to: WorldRef | str, unseated: Collection[int]) -> None:
        if isinstance(came_to, str):
            self._fail(came_to)
            return
        before, self.world = self.world, came_to
        self._linger(unseated)
        self._train()
        assert before is not None
        self.elastic.lost(before.rank_map.layout, came_to.rank_map.layout)
        if self._stop_later is not None:
            (why, checkpoint, then), self._stop_later = self._stop_later, None
            self._stop(why, checkpoint, then)

    # ---- the end

    def _stop(self, why: str, checkpoint: bool, then: Ending = Ending.STOPPED) -> str:
        """Stops at the next common boundary and says when: a handoff is called off for it, or
        waited for once it has committed. The run ends as `then`, with or without the
        `checkpoint` that is to be written there; its reason says which."""
        asked = why == OPERATORS_STOP  # a bare SIGTERM is not: Slurm sends one at a time limit
        replaceable = (Ending.RESTART, Ending.REQUEUE) if asked else (Ending.RESTART,)
        if self._state is STOPPING and self._stop_as in replaceable:
            self._stop_as, self._stop_reason = then, why  # instead of going on later
            return "stopping at the next step boundary"
        if self._state is RECOVERING:
            before = self._stop_later
            if before is None or before[2] in replaceable:
                saves = checkpoint or (before is not None and before[1])
                self._stop_later = (why, saves, then)
            return f"stopping after the {self.recoveries.describe()}"
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
        rank_map = self.world.rank_map
        directory = self._checkpoints if self._stop_saves else None
        self.agents.send(rank_map.workers, m.Stop(checkpoint=directory))
        self._set_deadline(self._stop_limit_s(self.world, self._stop_saves))

    def _stop_limit_s(self, world: WorldRef, saves: bool) -> float:
        """From the word to the last worker's end: steps, and what is written."""
        steps_s = self.elastic.estimates.handoffs.steps_s(world.rank_map, world.rank_map)
        writes_s = self._limits.checkpoint_s if saves else 0.0
        return self._limits.beside_steps(steps_s).boundary_s + writes_s

    @property
    def stops_within_s(self) -> float:
        """How long a run that has been told to stop may take until its workers end: what is under
        way comes first. Handoffs give back memory besides, within `release_s`."""
        world, limits = self.handoffs.committed_world or self.world, self._limits
        if world is None or self._state is ENDED:
            return 0.0
        saves, before_s = self._stop_saves, self.handoffs.limit_s
        if self._stop_later is not None:
            saves = self._stop_later[1]
            before_s = limits.boundary_s + limits.prepare_s + limits.transfer_s
        return before_s + self._stop_limit_s(world, saves)

    def _end_if_all_finished(self) -> None:
        if self.world is None or not self.handoffs.idle or self._state is ENDED:
            return
        workers = self.world.rank_map.workers
        finished = self.agents.finished
        if len(finished) < len(workers) or not finished.issuperset(workers):
            return
        steps, done = self.config.train.steps, self._steps_done
        every = self.config.train.stop_every_steps
        is_saved = self._checkpointed is not None and self._checkpointed[0] == done
        if done >= steps and not is_saved and self.config.checkpoint.every_steps is not None:
            self._fail(f"all {steps} steps are done, but not saved: {self._saved(done)}")
        elif done >= steps:
            self._end(Ending.FINISHED, f"all {steps} steps are done")
        elif self._stop_reason:
            saved = f"; {self._saved(done)}" if self._stop_saves else ""
            self._end(self._stop_as, self._stop_reason + saved)
        elif every is not None and done % every == 0:
            saves = self.config.checkpoint.every_steps is not None
            saved = f"; {self._saved(done)}" if saves else ""
            self._end(Ending.STOPPED, f"train.stop_every_steps is {every}{saved}")
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
        if self._stop_later is not None:  # the newest order, where there were several
            self._stop_reason, _, self._stop_as = self._stop_later
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
        if ending is Ending.RESTART:
            progress = steps > self._furthest or self._checkpointed != self._resumed_from
            self._vain_restarts = times = 0 if progress else self._vain_restarts + 1
            self._furthest = max(self._furthest, steps)
            if times >= MOST_RESTARTS_IN_VAIN:
                ending, reason = Ending.FAILED, f"restarted {times} times in vain: {reason}"
        self.ending = End(ending, reason, steps)
        if ending in (Ending.REQUEUE, Ending.RESTART):
            self.elastic.notices.restarts(str(ending), reason, self._clock.now_s())
        self.elastic.notices.close()
        if self.elastic.queue.not_granted:
            never = "; ".join(map(str, self.elastic.queue.not_granted))
            self._out.append(Log(f"never granted: {never}"))
        self._note(f"{ending}: {reason}")
        self.agents.send(self.agents.present(), m.Exit(reason=f"{ending}: {reason}"))
        self._out.append(self.ending)

    # ---- deadlines

    def _set_deadline(self, limit_s: float) -> None:
        self._deadline = Deadline.after(self._clock.present, limit_s, "workers")

    def _waits_for(self) -> str:
        if self.world is None:
            return self.agents.missing(self._first_generation)
        workers = self.world.rank_map.workers
        if self._doubted and self._resumed is not None:
            return f"all files of {self._resumed.path} to be read"
        if self._state is STARTING:
            return f"Restored of workers {ids_text({*workers} - self._have_restored)}"
        return f"Finished of workers {ids_text({*workers} - self.agents.finished)}"

    # ---- what is asked of it

    @property
    def memory(self) -> e.Memory:
        """What the next start is to know."""
        elastic = self.elastic
        drained = tuple(sorted(elastic.drained))
        return e.Memory(
            self.handoffs.generation,
            elastic.queue.asked,
            drained,
            self._evaluated_step,
            self.agents.started,
            self._in_vain,
            self._wrote,
            self._vain_restarts,
            self._furthest,
        )

    def expects(self, worker: int) -> bool:
        """Whether a worker that says Hello now is let in."""
        return self._state is not ENDED and self.agents.expects(worker)

    @property
    def awaits_joiners(self) -> bool:
        """Whether somebody is to come to the rendezvous."""
        attempt = self.handoffs.attempt
        return self._state is STARTING or (attempt is not None and attempt.target is None)

    @property
    def comparable_world(self) -> WorldRef | None:
        """The world that trains, while no handoff is under way by which some workers are slower,
        and none of its nodes is about to be left; else None."""
        if self.state is not TRAINING or self.world is None:
            return None
        nodes = self.elastic.nodes.items()
        left_soon = {name for name, held in nodes if held.deadline_s is not None}
        if left_soon and self.agents.workers_on(left_soon, self.world.rank_map.workers):
            return None
        return self.world

    def world_of(self, generation: int) -> WorldRef | None:
        """The world of a generation: the one that trains, or the one that has just committed."""
        worlds = (self.handoffs.committed_world, self.world)
        return next((w for w in worlds if w is not None and w.generation == generation), None)

    def _left_s(self, took_s: float | None) -> float | None:
        """How long training takes to the end, at the last step's speed; None before a step."""
        last, train = self.recorder.last_step, self.config.train
        if last is None or took_s is None:
            return None
        return took_s * (steps_between(train, last.step, train.last_step(last.step)) - 1)

    def snapshot(self, now_s: float, last_event: str, journal_error: str) -> StatusSnapshot:
        """The run at one moment, for people; `last_event` is the newest note."""
        recorder, last = self.recorder, self.recorder.last_step
        evaluation = recorder.last_evaluation
        world = self.handoffs.committed_world or self.world
        took_s = last.ended_s - last.started_s if last else None
        return StatusSnapshot(
            run=self.config.name,
            state=str(self._state if self.ending is None else self.ending.state),
            step=recorder.steps_done,
            steps=self.config.train.steps,
            loss=last.loss if last else None,
            grad_norm=last.grad_norm if last else None,
            validation_loss=evaluation.loss if evaluation else None,
            evaluated=evaluation.step if evaluation else 0,
            tokens_per_s=last.tokens / took_s if last and took_s else None,
            step_s=took_s,
            left_s=self._left_s(took_s),
            generation=world.generation if world else self._first_generation,
            layout=str(world.rank_map.layout if world else self.first_layout),
            workers=world.rank_map.workers if world else (),
            spares=tuple(sorted(self.agents.kept)),
            handoffs_done=recorder.completed,
            handoffs_aborted=recorder.aborted,
            handoffs_failed=recorder.failed,
            queued=tuple(map(str, self.elastic.queue.not_granted)),
            handoff=self.handoffs.status(),
            last_event=last_event,
            journal_error=journal_error,
            checkpointed=self._checkpointed[0] if self._checkpointed else None,
            checkpoint_error=self._checkpoint_failure,
            now_s=now_s,
            nodes=tuple(self.elastic.nodes.lines()),
            observed=self.elastic.observer.count,
            would_have=self.elastic.observer.last,
            transports=recorder.transports.get(world.generation, ()) if world else (),
        )

    def identity(self) -> str:
        """Where the run stands, for its log: "gen 4 TRANSFER"."""
        if self.world is None:
            return str(self.state)
        return self.handoffs.identity() or f"gen {self.world.generation}"
