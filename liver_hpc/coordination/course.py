"""The course of a run: starting, training, stopping, ended; which world trains, and what is wished.

Decides; the event loop in `loop.py` brings the events.
"""

from __future__ import annotations

import logging
from enum import StrEnum

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordination.crew import Crew
from liver_hpc.coordination.handoffs import Handoffs
from liver_hpc.coordination.records import RunRecorder
from liver_hpc.coordination.run_files import Outcome
from liver_hpc.coordination.services import Services
from liver_hpc.coordination.store import StoreService
from liver_hpc.coordination.wishes import Wish, WishList
from liver_hpc.errors import ConfigError, RequestRefused
from liver_hpc.layout.coordinates import Roster
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import World
from liver_hpc.protocol.messages import (
    Begin,
    Finished,
    Hello,
    ReplaceRequest,
    ResizeRequest,
    StepDone,
    Stop,
    WireRoster,
)
from liver_hpc.protocol.status import StatusSnapshot

log = logging.getLogger(__name__)


class RunState(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    STOPPING = "stopping"  # told to stop, or the first worker has done its last step
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


class Course:
    """One run. `outcome` is set once it has ended; `world` is None until training begins."""

    def __init__(
        self, config: RunConfig, services: Services, crew: Crew, store: StoreService
    ) -> None:
        layouts = config.allowed_layouts(config.workers.initial)
        if not layouts:
            raise ConfigError(f"layouts: none for workers.initial = {config.workers.initial}")
        self.state = RunState.STARTING
        self.outcome: Outcome | None = None
        self.world: World | None = None
        self.recorder = RunRecorder(services.metrics, services.clock)
        self.handoffs = Handoffs(config, services, crew, self.recorder, self)
        self._config = config
        self._limits = config.deadlines
        self._services = services
        self._clock = services.clock
        self._crew = crew
        self._store = store
        self._wishes = WishList(config, services.recipe)
        self._first_layout = layouts[0]
        self._deadline: Deadline | None = None  # of the start, and of the end
        self._stop_reason = ""
        self._steps_done = 0
        self._last_event = ""

    # ---- start

    def launch(self) -> None:
        """Starts the first workers."""
        self.note(f"launching {self._config.workers.initial} workers for {self._first_layout}")
        self._crew.launch(0, self._config.workers.initial, self._first_layout)
        self._set_deadline(self._limits.boot_s + self._limits.meet_s)

    def arrived(self, hello: Hello, generation: int) -> None:
        """A worker that was launched for `generation` has booted."""
        if self.world is not None:
            self.handoffs.joined(hello, generation)
        elif not self._crew.missing(0):
            self._begin()

    def _begin(self) -> None:
        """The first world: ranks in the order of the workers' ids."""
        self.world = World(0, Roster(self._first_layout, self._crew.arrived(0)))
        self.state, self._deadline = RunState.TRAINING, None
        roster = WireRoster.of(self.world.roster)
        self._crew.send(self.world.roster.workers, Begin(generation=0, roster=roster))
        self.note(f"training begins: {self.world}")
        self._grant()

    # ---- what workers report

    def step_done(self, message: StepDone) -> None:
        """A step, and with it perhaps a scripted notice."""
        self.recorder.step_done(message)
        for notice in self._wishes.due(message.step):
            try:
                self.ask_for(self._wishes.of_notice(notice, self._clock.now_s()))
            except RequestRefused as error:
                self.note(f"notice of step {notice.at_step} refused: {error}")

    def finished(self, message: Finished) -> None:
        """A worker has done its last step; the others are about to."""
        self._crew.finish(message.worker)
        self._steps_done = message.step
        if self.state is RunState.TRAINING:
            self.state = RunState.STOPPING
            self._set_deadline(self._limits.boundary_s)
        self.handoffs.finished(message)
        self._end_if_all_finished()

    def lost(self, worker: int, reason: str) -> None:
        """A worker has gone: as it should, or to the cost of a handoff, or of the run."""
        if self._crew.finished((worker,)):
            return
        if self.world is None:
            self.run_failed(f"worker {worker} lost before training began: {reason}")
        elif self.handoffs.involves(worker) or worker in self.world.roster.workers:
            self.handoffs.lost(worker, reason)
        else:
            log.info("worker %d has ended: %s", worker, reason)

    def tick(self) -> None:
        """Deadlines, and agents that have died."""
        self.handoffs.tick()
        if self.state is RunState.STARTING:
            self._services.front_desk.check()
            fallen = self._crew.fallen(0)
            if fallen:
                self.run_failed(fallen)
        if self._deadline is not None and self._deadline.expired():
            self.run_failed(f"waited {self._deadline.limit_s:g} s for {self._waits_for()}")

    def _waits_for(self) -> str:
        if self.world is None:
            return self._crew.missing(0)
        workers = self.world.roster.workers
        return f"Finished of workers {sorted({*workers} - {*self._crew.finished(workers)})}"

    # ---- what operators ask

    def wish_of(self, request: ResizeRequest | ReplaceRequest) -> Wish:
        """What a request wishes for; RequestRefused where the run file does not allow it."""
        return self._wishes.of_request(request, self._clock.now_s())

    def ask_for(self, wish: Wish) -> str:
        """Grants a wish now or queues it, and says which; RequestRefused when it does neither."""
        if self.state not in (RunState.STARTING, RunState.TRAINING):
            raise RequestRefused("the run is about to end")
        busy = self.handoffs.describe() if self.world else "the start of the run"
        self._check_point(wish, busy)
        replaced = self._wishes.add(wish)
        self._grant()
        if not busy:
            return f"started: {wish}"
        if replaced is not None:
            return f"merged: replaces queued {replaced}; {wish} waits behind {busy}"
        return f"queued: {wish} waits behind {busy}"

    def _check_point(self, wish: Wish, busy: str) -> None:
        """Of a wish that has to wait, only its turn will show whether there is a point in it."""
        if self.world is None:
            return
        if busy and (wish.replace is None or self.handoffs.involves(wish.replace)):
            return
        pointless = wish.pointless(self.world.roster)
        if pointless:
            raise RequestRefused(pointless)

    def _grant(self) -> None:
        """Starts the next wish that still has a point, unless a handoff runs."""
        while self.state is RunState.TRAINING and self.handoffs.idle and self._wishes:
            assert self.world is not None
            wish = self._wishes.pop()
            pointless = wish.pointless(self.world.roster)
            if pointless:
                self.note(f"dropped: {wish}: {pointless}")
            else:
                self.handoffs.start(wish, self.world)

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
            layout=str(world.roster.layout if world else self._first_layout),
            workers=world.roster.workers if world else (),
            handoffs_done=self.recorder.completed,
            handoffs_aborted=self.recorder.aborted,
            queued=self._wishes.texts(),
            handoff=self.handoffs.status(),
            last_event=self._last_event,
            metrics_error=self.recorder.metrics_error,
            now_s=self._clock.now_s(),
        )

    # ---- how handoffs end

    def handoff_ended(self, ended: Ended) -> None:
        assert self.world is not None
        for generation in {self.world.generation, ended.generation} - {ended.world.generation}:
            self._store.forget(f"g{generation}/")
        self.world = ended.world
        what = f"{ended.outcome}: {ended.detail}" if ended.detail else ended.outcome
        self.note(f"generation {ended.generation}: {what}; now {ended.world}")
        if ended.outcome == "failed":
            return
        if self._stop_reason:
            self._tell_to_stop()
        self._end_if_all_finished()
        self._grant()

    def note(self, text: str) -> None:
        log.info("%s", text)
        self._last_event = text

    # ---- the end

    def stop(self, why: str) -> str:
        """Stops at the next common boundary and says when: a handoff is called off for it, or
        waited for once it has committed."""
        if self.state not in (RunState.STARTING, RunState.TRAINING):
            return "the run is about to end already"
        self.note(f"stopping: {why}")
        self._wishes.clear()
        if self.world is None:
            self._end(RunState.STOPPED, why)
            return "stopped before training began"
        self.state, self._stop_reason = RunState.STOPPING, why
        busy = self.handoffs.describe()
        if self.handoffs.can_be_cancelled:
            self.handoffs.cancel(f"the run is to stop: {why}")
        elif not busy:
            self._tell_to_stop()
        return f"stopping after {busy}" if busy else "stopping at the next step boundary"

    def _tell_to_stop(self) -> None:
        assert self.world is not None
        self._crew.send(self.world.roster.workers, Stop())
        self._set_deadline(self._limits.boundary_s)

    def _end_if_all_finished(self) -> None:
        if self.world is None or not self.handoffs.idle:
            return
        workers = self.world.roster.workers
        if len(self._crew.finished(workers)) < len(workers):
            return
        steps, done = self._config.train.steps, self._steps_done
        if done >= steps:
            self._end(RunState.FINISHED, f"all {steps} steps are done")
        elif self._stop_reason:
            self._end(RunState.STOPPED, self._stop_reason)
        else:
            self.run_failed(f"the workers ended after {done} of {steps} steps")

    def run_failed(self, reason: str) -> None:
        """Ends the run, unless it has ended already, and the handoff attempt with it."""
        attempt = self.recorder.attempt
        if attempt is not None:
            source = attempt.request.source
            self.recorder.attempt_ended(Ended(attempt.generation, "failed", reason, source))
        self._end(RunState.FAILED, reason)

    def _end(self, state: RunState, reason: str) -> None:
        if self.outcome is None:
            self.state = state
            steps = max(self._steps_done, self.recorder.steps_done)
            self.outcome = Outcome(str(state), reason, steps)
            if self._wishes:
                log.info("never granted: %s", "; ".join(self._wishes.texts()))
            self.note(f"{state}: {reason}")

    def _set_deadline(self, limit_s: float) -> None:
        self._deadline = Deadline.after(self._clock, limit_s, "workers")
