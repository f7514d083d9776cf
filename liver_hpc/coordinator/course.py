"""The course of a run: starting, training, stopping, ended; and which world trains.

Decides; the event loop in `loop.py` brings the events.
"""

from __future__ import annotations

import logging
from pathlib import Path

from liver_hpc.checkpoint.index import Checkpoint
from liver_hpc.clock import Deadline
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.checkpoints import Checkpoints
from liver_hpc.coordinator.fleet import Fleet
from liver_hpc.coordinator.handoffs import Handoffs
from liver_hpc.coordinator.registry import WorkerRegistry
from liver_hpc.coordinator.services import Services
from liver_hpc.coordinator.steering import Steering
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import (
    Begin,
    Finished,
    Hello,
    Proceed,
    Restored,
    Saved,
    StepDone,
    Stop,
    WireRankMap,
)
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.run.outcome import Outcome
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.state import RunState

log = logging.getLogger(__name__)

OPERATORS_STOP = "an operator's request"


class Course:
    """One run. `outcome` is set once it has ended; `world` is None until training begins."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        registry: WorkerRegistry,
        store: StoreService,
        run_directory: Path,
    ) -> None:
        layouts = config.allowed_layouts(config.workers.initial)
        if not layouts:
            raise ConfigError(f"layouts: none for workers.initial = {config.workers.initial}")
        self.state = RunState.STARTING
        self.outcome: Outcome | None = None
        self.world: WorldRef | None = None
        self.recorder = RunRecorder(services.metrics, services.clock, registry.node_of)
        self.fleet = Fleet(config, services, registry, self.recorder)
        self.handoffs = Handoffs(
            config, services, registry, self.fleet.capacity, self.recorder, self
        )
        self.steering = Steering(config, services, registry, self)
        self._config = config
        self._limits = config.deadlines
        self._services = services
        self._clock = services.clock
        self._registry = registry
        self._store = store
        self._checkpoints = Checkpoints(config, services.recipe, run_directory, services.clock)
        self._resumed: Checkpoint | None = None
        self._first_generation = 0
        self._first_layout = layouts[0]
        self._launched = False
        self._deadline: Deadline | None = None  # of the start, and of the end
        self._stop_reason = ""
        self._stop_as = RunState.STOPPED
        self._stop_saves = False
        self._steps_done = 0
        self._last_event = ""

    # ---- start

    def resume(self) -> None:
        """Finds out what the run goes on from; before anything else happens to it.

        Raises CheckpointError where it should go on from a checkpoint and cannot.
        """
        self._resumed = self._checkpoints.open()
        self._number_generations()
        if self._resumed is not None:
            scalars, saved = self._resumed.index.scalars, self._resumed.index.rank_map.rank_map()
            self.note(f"goes on from step {scalars.step}, saved at {saved.layout}")
            self._steps_done = self.recorder.first_step = scalars.step
            self.steering.skip(scalars.step)

    def launch(self) -> None:
        """Starts the first workers, or says that it waits for nodes to start them on; not where
        the run was stopped before."""
        if self.outcome is None and not self._launch_first():
            self.note(f"waiting for nodes; held: {self.fleet.text()}")

    def _number_generations(self) -> None:
        """A generation's number stands for one world in all lives of a run. One is left out: it
        may have been that of a world built anew, which recorded nothing."""
        known = [self._services.metrics.last_generation]
        if self._resumed is not None:
            known.append(self._resumed.index.generation)
        self._first_generation = max(known) + 2 if max(known) >= 0 else 0
        self.handoffs.first_generation(self._first_generation)

    @property
    def first_generation(self) -> int:
        """The number of the first world of this life."""
        return self._first_generation

    def begin_again(self, reason: str) -> None:
        """Ends this life before training began; the next one begins with other nodes."""
        self._end(RunState.RESTART, reason)

    def _launch_first(self) -> bool:
        """Once there are nodes enough; false before."""
        layout = self.fleet.first_layout(self._first_layout, self._resumed is not None)
        if layout is None:
            return False
        self._first_layout, self._launched = layout, True
        self.note(f"launching {layout.workers} workers for {layout}")
        seats = self.fleet.capacity.seats(layout.workers, self._registry.taken())
        try:
            self._registry.launch(self._first_generation, layout, seats)
        except LiverError as error:  # a node may be gone, which nobody has been told yet
            self._start_failed(f"cannot launch {layout.workers} workers: {error}")
        self._set_deadline(self._limits.boot_s + self._limits.meet_s)
        return True

    def arrived(self, hello: Hello, generation: int) -> None:
        """A worker that was launched for `generation` has booted."""
        if self.world is not None:
            self.handoffs.joined(hello, generation)
        elif self._launched and not self._registry.missing(self._first_generation):
            self._begin()

    def _begin(self) -> None:
        """The first world: ranks in the order of the workers' ids."""
        generation, resumed = self._first_generation, self._resumed
        rank_map = RankMap(self._first_layout, self._registry.arrived(generation))
        self.world = WorldRef(generation, rank_map)
        self._registry.send(
            rank_map.workers,
            Begin(
                generation=generation,
                rank_map=WireRankMap.of(rank_map),
                checkpoint=None if resumed is None else str(resumed.path),
            ),
        )
        if resumed is None:
            self._train()
        else:
            self.note(f"reading {resumed.path}: {self.world}")
            self._set_deadline(self._limits.prepare_s + self._limits.transfer_s)

    def _train(self) -> None:
        self.state, self._deadline = RunState.TRAINING, None
        self.fleet.training_begins()
        self.note(f"training begins: {self.world}")
        self.steering.grant()

    def restored(self, message: Restored) -> None:
        """A worker of the first world holds what it read; all train once all hold what was saved.

        Raises CheckpointError where they do not.
        """
        assert self.world is not None
        rank_map = self.world.rank_map
        if self.state is RunState.STARTING and self._checkpoints.restored(message, rank_map):
            self._registry.send(rank_map.workers, Proceed(generation=message.generation))
            self._train()

    # ---- what workers report

    def step_done(self, message: StepDone) -> None:
        """A step, and with it perhaps a scripted notice."""
        record = self.recorder.step_done(message)
        if self.world is not None:
            self.fleet.step_done(self.world, record)
        for notice in self.steering.due(message.step):
            self.steering.raise_notice(notice)

    def saved(self, message: Saved) -> None:
        """A worker's part of a checkpoint is on disk, or could not be written."""
        for world in (self.handoffs.committed_world, self.world):
            if world is not None and world.generation == message.generation:
                text = self._checkpoints.saved(message, world)
                if text:
                    self.note(text)
                    if not self._checkpoints.failure:
                        self.fleet.estimator.observe_checkpoint(*self._checkpoints.written)
                return
        log.warning("worker %d saved generation %d", message.worker, message.generation)

    def finished(self, message: Finished) -> None:
        """A worker has done its last step; the others are about to."""
        self._registry.finish(message.worker)
        self._steps_done = message.step
        if self.state is RunState.TRAINING:
            self.state = RunState.STOPPING
            self._set_deadline(self._limits.boundary_s)
        self.handoffs.finished(message)
        self._end_if_all_finished()

    def lost(self, worker: int, reason: str) -> None:
        """A worker has gone: as it should, or to the cost of a handoff, or of the run."""
        if self._registry.finished((worker,)):
            return
        if self.state is RunState.STARTING:
            self._start_failed(f"worker {worker} lost before training began: {reason}")
        elif self.world is None:
            log.info("worker %d has ended: %s", worker, reason)
        elif self.handoffs.involves(worker) or worker in self.world.rank_map.workers:
            self.handoffs.lost(worker, reason)
        else:
            log.info("worker %d has ended: %s", worker, reason)

    def tick(self) -> None:
        """Deadlines, agents that have died, nodes that are free or have to be left."""
        self.handoffs.tick()
        self.fleet.tick(busy=not self.handoffs.idle or bool(self.steering.queued))
        self.steering.grant()
        if self.state is RunState.STARTING:
            self._services.rendezvous.check()
            if not self._launched and not self._launch_first():
                return
            fallen = self._registry.fallen(self._first_generation)
            if fallen and self._registry.fallen_told(self._first_generation):
                self.begin_again(fallen)
            elif fallen:
                self._start_failed(fallen)
        if self._deadline is not None and self._deadline.expired():
            late = f"waited {self._deadline.limit_s:g} s for {self._waits_for()}"
            if self.state is RunState.STARTING:
                self._start_failed(late)
            else:
                self.run_failed(late)

    def _waits_for(self) -> str:
        if self.world is None:
            return self._registry.missing(self._first_generation)
        workers = self.world.rank_map.workers
        if self.state is RunState.STARTING:
            return self._checkpoints.missing(self.world.rank_map)
        return f"Finished of workers {sorted({*workers} - {*self._registry.finished(workers)})}"

    # ---- what is seen of it

    def snapshot(self) -> StatusSnapshot:
        last = self.recorder.last_step
        world = self.handoffs.committed_world or self.world
        took_s = last.ended_s - last.started_s if last else None
        return StatusSnapshot(
            run=self._config.name,
            state=str(self.state),
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
            queued=self.steering.queued,
            handoff=self.handoffs.status(),
            last_event=self._last_event,
            metrics_error=self.recorder.metrics_error,
            now_s=self._clock.now_s(),
            nodes=tuple(self.fleet.capacity.lines(self._registry.taken())),
            transports=self.recorder.transports.get(world.generation, ()) if world else (),
        )

    # ---- how handoffs end

    def handoff_ended(self, ended: Ended) -> None:
        assert self.world is not None
        for generation in {self.world.generation, ended.generation} - {ended.world.generation}:
            self._store.forget(f"g{generation}/")
        self.world = ended.world
        self.fleet.handoff_ended(self.handoffs.last_wish, ended)
        what = f"{ended.outcome}: {ended.detail}" if ended.detail else ended.outcome
        self.note(f"generation {ended.generation}: {what}; now {ended.world}")
        if ended.outcome == "failed":
            return
        if self._stop_reason:
            self._tell_to_stop()
        self._end_if_all_finished()
        self.steering.grant()

    def note(self, text: str) -> None:
        log.info("%s", text)
        self._last_event = text

    # ---- the end

    def stop_as_asked(self, checkpoint: bool) -> str:
        """An operator wants the run to be over, whatever was to become of it."""
        return self.stop(OPERATORS_STOP, checkpoint)

    def stop(self, why: str, checkpoint: bool = False, then: RunState = RunState.STOPPED) -> str:
        """Stops at the next common boundary and says when: a handoff is called off for it, or
        waited for once it has committed. The run's outcome is `then`, with or without the
        `checkpoint` that is to be written there; its reason says which."""
        asked = why == OPERATORS_STOP  # a bare SIGTERM is not: Slurm sends one at a time limit
        replaceable = (RunState.RESTART, RunState.REQUEUE) if asked else (RunState.RESTART,)
        if self._stop_as in replaceable and self.state is RunState.STOPPING:
            self._stop_as, self._stop_reason = then, why  # instead of going on later
            return "stopping at the next step boundary"
        if self.state not in (RunState.STARTING, RunState.TRAINING):
            return "the run is about to end already"
        self.note(f"stopping: {why}")
        self.steering.clear()
        if self.state is RunState.STARTING:
            self._end(then, why)
            return "stopped before training began"
        self.state, self._stop_reason, self._stop_as = RunState.STOPPING, why, then
        self._stop_saves = checkpoint
        busy = self.handoffs.describe()
        if self.handoffs.can_be_cancelled:
            self.handoffs.cancel(f"the run is to stop: {why}")
        elif not busy:
            self._tell_to_stop()
        return f"stopping after {busy}" if busy else "stopping at the next step boundary"

    def _tell_to_stop(self) -> None:
        assert self.world is not None
        directory = str(self._checkpoints.directory) if self._stop_saves else None
        self._registry.send(self.world.rank_map.workers, Stop(checkpoint=directory))
        writes_s = self._limits.transfer_s if self._stop_saves else 0.0
        self._set_deadline(self._limits.boundary_s + writes_s)

    def _end_if_all_finished(self) -> None:
        if self.world is None or not self.handoffs.idle:
            return
        workers = self.world.rank_map.workers
        if len(self._registry.finished(workers)) < len(workers):
            return
        steps, done = self._config.train.steps, self._steps_done
        if done >= steps:
            self._end(RunState.FINISHED, f"all {steps} steps are done")
        elif self._stop_reason:
            saved = f"; {self._checkpoints.outcome(done)}" if self._stop_saves else ""
            self._end(self._stop_as, self._stop_reason + saved)
        else:
            self.run_failed(f"the workers ended after {done} of {steps} steps")

    def run_failed(self, reason: str) -> None:
        """Ends the run, unless it has ended already, and the handoff attempt with it.

        One that has trained and has a checkpoint begins again from there, unless it was about to
        end anyway; one that was to be queued again still is.
        """
        attempt = self.recorder.attempt
        if attempt is not None:
            source = attempt.request.source
            self.recorder.attempt_ended(Ended(attempt.generation, "failed", reason, source))
        saved_step = self._checkpoints.last_step
        requeued = bool(self._stop_reason) and self._stop_as is RunState.REQUEUE
        if self.state is RunState.STARTING or (saved_step is None and not requeued):
            self._end(RunState.FAILED, reason)
            return
        which = "no checkpoint" if saved_step is None else f"the checkpoint of step {saved_step}"
        left = f"{reason}; {which} is left"
        if self._stop_reason:
            self._end(self._stop_as, f"{self._stop_reason}; {left}")
        else:
            self._end(RunState.RESTART, left)

    def _start_failed(self, reason: str) -> None:
        """A start without a worker: from a checkpoint it is tried again, maybe on other nodes."""
        if self._resumed is None:
            self.run_failed(reason)
        else:
            self.begin_again(reason)

    def _end(self, state: RunState, reason: str) -> None:
        if self.outcome is None:
            self.state = state
            steps = max(self._steps_done, self.recorder.steps_done)
            self.outcome = Outcome(str(state), reason, steps)
            if state in (RunState.REQUEUE, RunState.RESTART):
                self.fleet.notices.life_ended(str(state), reason, self._clock.now_s())
            if self.steering.queued:
                log.info("never granted: %s", "; ".join(self.steering.queued))
            self.note(f"{state}: {reason}")

    def _set_deadline(self, limit_s: float) -> None:
        self._deadline = Deadline.after(self._clock, limit_s, "workers")
