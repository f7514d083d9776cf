"""Whether training goes on, and who holds it up: workers that live, and stand still.

A worker whose data does not come, say, sends signs of life all the same. The others soon wait for
it in a collective, on the host or on the device, and say so; it does not. One whose GPU hangs seems
to wait as they do, and is not told from them.
"""

from __future__ import annotations

from liver_hpc.clock import Clock
from liver_hpc.config.schema import RunConfig
from liver_hpc.protocol import messages as m
from liver_hpc.run.events import HeldUp
from liver_hpc.run.lifecycle import TRAINING
from liver_hpc.run.machine import Run

USUAL_STEPS = 10
"""So many usual steps without one, and at least so many seconds, before anybody is named."""
LEAST_S = 60.0


class Progress:
    """Used by the event loop alone."""

    def __init__(self, config: RunConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._moved_s = clock.now_s()
        self._beats: dict[int, m.Heartbeat] = {}  # those since then
        self._told_step = -1

    def moved(self) -> None:
        """Something else than a sign of life has come, or nobody could be heard."""
        self._moved_s = self._clock.now_s()
        self._beats.clear()

    def beat(self, beat: m.Heartbeat) -> None:
        self._beats[beat.worker] = beat

    def held_up(self, core: Run) -> HeldUp | None:
        """Who holds the others up; once for a step, unless they are to be given up."""
        if core.state is not TRAINING or core.world is None or not core.handoffs.idle:
            self.moved()
            return None
        for_s, step = self._clock.now_s() - self._moved_s, core.recorder.steps_done
        given_up = self._config.deadlines.step_s is not None
        if for_s < self._limit_s(core, step) or (step == self._told_step and not given_up):
            return None
        members = core.world.rank_map.workers
        heard = [self._beats[w] for w in members if w in self._beats]
        stuck = [beat for beat in heard if not beat.waits]
        if len(heard) < len(members) or not 0 < len(stuck) < len(members):
            return None  # not all have been heard since, or all compute, or all wait
        self._told_step = step
        who = "; ".join(
            f"worker {beat.worker} on {core.agents.node_of(beat.worker) or 'this machine'} is at "
            f"{beat.stands}"
            for beat in stuck
        )
        text = f"no step for {for_s:.0f} s after step {step}: {who}; the others wait"
        return HeldUp(tuple(beat.worker for beat in stuck), text)

    def _limit_s(self, core: Run, step: int) -> float:
        limit_s = self._config.deadlines.step_s
        if limit_s is None:
            limit_s = max(LEAST_S, USUAL_STEPS * core.elastic.estimates.handoffs.usual_step_s())
        validation = self._config.eval
        evaluates = validation is not None and bool(validation.batches_after(step))
        return limit_s + (self._config.deadlines.evaluation_s if evaluates else 0.0)
