"""How long a handoff, or a checkpoint, will take: measured where it can be, else assumed."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from statistics import median, median_high
from typing import NamedTuple

from liver_hpc.layout.budget import Budget
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.memory import worker_bytes
from liver_hpc.layout.plan import Handoff
from liver_hpc.layout.ramp import batch_of
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.run.records import ReconfigurationRecord

ASSUMED_BOOT_S = 30.0
"""Imports take 5 s alone, several times that from a shared file system beside other joiners; then
the device's context and a rehearsal."""
ASSUMED_PREPARE_S = 10.0
"""Groups take milliseconds, buffers and the warm-up of a model that fills a device some seconds."""
ASSUMED_STEP_S = 5.0
"""A long step of a large model; used until the first step is done."""
ASSUMED_RELEASE_S = 5.0
"""A process with a device's context takes seconds to end."""
ASSUMED_BYTES_PER_S = 200e6
"""A fifth of what gloo moves over loopback, a sixth of what 10 Gbit/s Ethernet carries."""
ASSUMED_DISK_BYTES_PER_S = 200e6
"""One plain disk; a parallel file system gives each writer as much when all write at once."""

ASSUMED_SLOWDOWN = 0.1
"""Share of PREPARE and of joiners' boots that training loses beside them. Where all workers share
the processors it is more, which the first handoff shows."""

ASSUMED_FORWARD = 1 / 3
"""Share of a step that its forward takes: the backward has two multiplications for each of its."""

BOUNDARY_STEPS = 2
"""A handoff begins at the end of the next step but one: the ready flag rides on a reduction."""
ALLOWED_STEPS = 3
"""Those up to the boundary, and one more, as the first ones of a world are slow."""
REMEMBERED_HANDOFFS = 4
REMEMBERED_STEPS = 16
EXACT_PARTS = 4096
"""Up to this many (worker, tensor) pairs of the target the plan's moves are counted, which takes
tens of milliseconds; beyond, an upper bound is used."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of a handoff's busiest worker, in and out together: bandwidth is a worker's, so it
    decides how long it takes."""

    parameter_bytes: int
    all_bytes: int


class Price(NamedTuple):
    """What a change of layout takes. ready_s: until the target trains. cost_s: of training time:
    while the state moves, and by the slower steps beside PREPARE."""

    ready_s: float
    cost_s: float


@lru_cache(maxsize=256)
def traffic_of(model: ModelSpec, source: RankMap, target: RankMap) -> Traffic:
    """What a handoff moves: counted, or for large worlds bounded from above."""
    layout = target.layout
    if layout.tp * layout.replicas * len(model.tensors) <= EXACT_PARTS:
        return _counted(model, source, target)
    return _bounded(model, source, target)


def _counted(model: ModelSpec, source: RankMap, target: RankMap) -> Traffic:
    plan = Handoff(model, source, target)
    parameters, everything = Counter[int](), Counter[int]()
    for to in target.layout.coordinates():
        for index in model.held_tensors(target.layout, to):
            # What goes where of one kind of optimizer state goes there of all.
            for kinds in ((PARAMETER,), model.optimizer_kinds):
                element_bytes = sum(model.element_bytes(kind, index) for kind in kinds)
                for move in plan.incoming(kinds[0], index, to):
                    if move.sender == move.receiver:
                        continue
                    size_bytes = move.box.elements * element_bytes
                    for worker in (move.sender, move.receiver):
                        everything[worker] += size_bytes
                        parameters[worker] += size_bytes if kinds[0] == PARAMETER else 0
    return Traffic(max(parameters.values(), default=0), max(everything.values(), default=0))


def _bounded(model: ModelSpec, source: RankMap, target: RankMap) -> Traffic:
    """As if whoever changes seats held nothing of the new one, but for parameters where the share
    stays; senders share evenly, which is what the plan's rule comes to."""
    layout = target.layout
    stages = [_stage_bytes(model, layout, stage) for stage in range(layout.pp)]
    seats = dict(zip(source.workers, source.layout.coordinates(), strict=True))
    alike = source.layout.split == layout.split
    arrivals = []
    for worker, to in zip(target.workers, layout.coordinates(), strict=True):
        at = seats.get(worker)
        if source.layout == layout and at == to:
            continue
        parameters, state = stages[to.pp]
        keeps = at is not None and (at.tp, at.pp, at.replica % layout.ep) == (
            *(to.tp, to.pp),
            to.replica % layout.ep,
        )
        arrivals.append((0 if alike and keeps else parameters, state))
    senders = len(source.workers)

    def busiest(each: list[int]) -> int:
        return max(each, default=0) + math.ceil(sum(each) / senders)

    return Traffic(
        busiest([parameters for parameters, _ in arrivals]),
        busiest([parameters + state for parameters, state in arrivals]),
    )


def _stage_bytes(model: ModelSpec, layout: Layout, stage: int) -> tuple[int, int]:
    """Parameters and optimizer state of a stage's fullest worker, in bytes."""
    held = worker_bytes(model, layout, Coordinate(0, stage, 0))
    return held[PARAMETER], sum(held[kind] for kind in model.optimizer_kinds)


def checkpoint_bytes(model: ModelSpec, layout: Layout) -> int:
    """What the fullest worker of a layout holds of the state that a checkpoint keeps."""
    return max(sum(_stage_bytes(model, layout, stage)) for stage in range(layout.pp))


class HandoffEstimator:
    """Learns from completed handoffs, steps and checkpoints. Used by one thread.

    Of what differs from handoff to handoff the slowest of the last `REMEMBERED_HANDOFFS` counts:
    an estimate is asked for to keep a deadline. budget: says which are made in bounded memory.
    """

    def __init__(self, budget: Budget) -> None:
        config = budget.config
        self._budget = budget
        self._limits = config.deadlines
        self._spec = budget.model
        self._train = config.train
        self._steps = deque[tuple[float, int]](maxlen=REMEMBERED_STEPS)  # times and samples
        self._boot_s = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._prepare_s = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._boundary_s = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._first_steps = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._release_s = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._bytes_per_s = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._disk_bytes_per_s = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._slowdowns = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._slowed_s = 0.0  # by the attempt that is in progress
        self._without_room: dict[tuple[Layout, Layout], str] = {}
        self._validation = config.eval
        self._done = 0
        self._evaluating = False
        self._evaluations_s = deque[float](maxlen=REMEMBERED_HANDOFFS)
        self._last_evaluation = (-math.inf, -math.inf)

    # ---- learning

    def observe_step(self, step_s: float, batch: int) -> None:
        """One undisturbed step of the world in force. batch: its samples."""
        if step_s > 0 and math.isfinite(step_s):
            self._steps.append((step_s, batch))

    def observe_done(self, steps: int) -> None:
        """So many steps are done: an evaluation begins where one is due."""
        self._done = steps
        self._evaluating = self._validation is not None and bool(
            self._validation.batches_after(steps)
        )

    def observe_evaluation(self, started_s: float, ended_s: float) -> None:
        """An evaluation is over."""
        self._evaluating, self._last_evaluation = False, (started_s, ended_s)
        _note(self._evaluations_s, ended_s - started_s)

    def observe_slowed(self, step_s: float, batch: int) -> None:
        """One step beside PREPARE."""
        self._slowed_s += max(0.0, step_s - self.usual_step_s(batch))

    def observe_no_room(self, source: RankMap, target: RankMap, why: str) -> None:
        """A device has had no room for both worlds of a handoff."""
        self._without_room[source.layout, target.layout] = why

    def observe_aborted(self) -> None:
        """The attempt that slowed steps down has come to nothing."""
        self._slowed_s = 0.0

    def observe_checkpoint(self, written_bytes: int, seconds: float) -> None:
        """A checkpoint was written; `written_bytes` are the fullest worker's."""
        if seconds > 0:
            _note(self._disk_bytes_per_s, written_bytes / seconds)

    def observe(self, record: ReconfigurationRecord, source: RankMap, target: RankMap) -> None:
        """A handoff has been completed."""
        if len({*target.workers} - {*source.workers}) > record.spares:
            _note(self._boot_s, record.boot_ended_s - record.began_s)
        _note(self._prepare_s, record.prepare_ended_s - record.prepare_started_s)
        evaluated_s, until_s = self._last_evaluation
        stopped_s, armed_s = record.source_last_step_ended_s, record.armed_s
        within_s = max(0.0, min(until_s, stopped_s) - max(evaluated_s, armed_s))
        _note(self._boundary_s, stopped_s - armed_s - within_s)
        _note(self._release_s, record.released_s - record.committed_s)
        beside_s = record.prepare_ended_s - record.began_s
        if beside_s > 0 and math.isfinite(beside_s):
            self._slowdowns.append(min(1.0, self._slowed_s / beside_s))
        self._slowed_s = 0.0
        bounded = math.isfinite(record.checkpointed_s)
        moves_s = record.checkpointed_s if bounded else record.source_last_step_ended_s
        transfer_s = record.transfer_ended_s - moves_s
        first_s = record.committed_s - record.transfer_ended_s
        batch = batch_of(self._train, record.step)
        _note(self._first_steps, first_s / self._step_s(source.layout, target.layout, batch))
        if transfer_s > 0:
            traffic = traffic_of(self._spec, source, target)
            num_bytes = traffic.all_bytes if bounded else traffic.parameter_bytes
            _note(self._bytes_per_s, num_bytes / transfer_s)

    # ---- answers

    @property
    def measured(self) -> bool:
        """Whether a handoff of this run has been seen; before, estimates are assumptions."""
        return bool(self._prepare_s)

    def estimate_s(self, source: RankMap, target: RankMap, to_boot: int) -> float:
        """A handoff from `source` to `target`, so many of whose workers must boot: from the notice
        to the exit of the last leaver."""
        prepare_s, transfer_s = self.prepare_s(to_boot), self.transfer_s(source, target)
        return prepare_s + self.boundary_s(prepare_s) + transfer_s + self.release_s()

    def price(self, source: RankMap, target: RankMap, to_boot: int) -> Price:
        """What a change takes that nobody hurries: until when, and of training time."""
        prepare_s, transfer_s = self.prepare_s(to_boot), self.transfer_s(source, target)
        slowed = median_high(self._slowdowns) if self._slowdowns else ASSUMED_SLOWDOWN
        return Price(
            prepare_s + self.boundary_s(prepare_s) + transfer_s,
            self.lost_s(source, target) + slowed * prepare_s,
        )

    def lost_s(self, source: RankMap, target: RankMap) -> float:
        """From the source's last step to the end of the target's first, but for a step."""
        usual_s = self._step_s(source.layout, target.layout)
        return max(0.0, self.transfer_s(source, target) - usual_s)

    def checkpoint_s(self, rank_map: RankMap) -> float:
        """From the decision to the end of writing."""
        return self.boundary_s() + self.written_s(rank_map)

    def written_s(self, rank_map: RankMap) -> float:
        """What a checkpoint takes at a boundary: that of the fullest worker."""
        rate = min(self._disk_bytes_per_s, default=ASSUMED_DISK_BYTES_PER_S)
        return checkpoint_bytes(self._spec, rank_map.layout) / rate

    def restart_s(self, rank_map: RankMap) -> float:
        """A start from disk, from the decision on: reading takes as long as writing."""
        return self.checkpoint_s(rank_map) + self.prepare_s(to_boot=1) + self.written_s(rank_map)

    def bounded_because(self, source: RankMap, target: RankMap) -> str:
        """Why a handoff is made in bounded memory; empty when both worlds are held."""
        known = self._budget.bounded_because(source.layout, target.layout)
        return known or self._without_room.get((source.layout, target.layout), "")

    # ---- parts of a handoff

    def prepare_s(self, to_boot: int) -> float:
        """The boot of so many joiners, and PREPARE."""
        assumed_boot_s = min(ASSUMED_BOOT_S, self._limits.boot_s)
        boot_s = max(self._boot_s, default=assumed_boot_s)
        prepare_s = max(self._prepare_s, default=min(ASSUMED_PREPARE_S, self._limits.prepare_s))
        return prepare_s + (boot_s if to_boot > 0 else 0.0)

    def boundary_s(self, after_s: float = 0.0) -> float:
        """Until the source's last step has ended, from a moment `after_s` from now; with the
        evaluation that may be due by then."""
        steps_s = BOUNDARY_STEPS * self.usual_step_s()
        boundary_s = max(steps_s, max(self._boundary_s, default=0.0))
        return boundary_s + self._evaluation_s(after_s)

    def _evaluation_s(self, within_s: float) -> float:
        """What an evaluation takes, where one is done or begins before the boundary that comes in
        so many seconds."""
        validation, step_s = self._validation, self.usual_step_s()
        if validation is None:
            return 0.0
        coming = validation.every_steps - self._done % validation.every_steps
        if not self._evaluating and coming > within_s / step_s + BOUNDARY_STEPS:
            return 0.0
        return max(self._evaluations_s, default=ASSUMED_FORWARD * validation.steps * step_s)

    def transfer_s(self, source: RankMap, target: RankMap) -> float:
        """TRANSFER and the target's first step, during which optimizer state still moves.

        Bytes cross at the rate at which parameters were seen to cross, which contains digests and
        votes; what crosses beside the first step is counted as if it came on top of it. In bounded
        memory it does, and a checkpoint is written first.
        """
        saved_s = self.written_s(source) if self.bounded_because(source, target) else 0.0
        first_s = self._step_s(source.layout, target.layout) * max(self._first_steps, default=1.0)
        rate = min(self._bytes_per_s, default=ASSUMED_BYTES_PER_S)
        return saved_s + first_s + traffic_of(self._spec, source, target).all_bytes / rate

    def release_s(self) -> float:
        """From the commit to the exit of the last leaver."""
        return max(self._release_s, default=min(ASSUMED_RELEASE_S, self._limits.release_s))

    # ---- steps

    def steps_s(self, source: RankMap, target: RankMap) -> float:
        """More than the steps up to the boundary, or the target's first one, will take; 0 until one
        is done."""
        if not self._steps:
            return 0.0
        slower = max([1.0, *self._first_steps])
        return ALLOWED_STEPS * self._step_s(source.layout, target.layout) * slower

    def _step_s(self, source: Layout, target: Layout, batch: int | None = None) -> float:
        """A step of the target's: the source's, with its work on fewer workers."""
        return self.usual_step_s(batch) * max(1.0, source.workers / target.workers)

    def usual_step_s(self, batch: int | None = None) -> float:
        """An undisturbed step of these days, of whatever layout; assumed until there was one.
        batch: its samples, to which steps of other batches are scaled; None: as many as the next
        step has."""
        if not self._steps:
            return ASSUMED_STEP_S
        samples = batch or batch_of(self._train, self._done)
        return median(step_s * (samples / its_own) for step_s, its_own in self._steps)


def _note(known: deque[float], value: float) -> None:
    """A time that was never reached is NaN, and a clock set back gives less than nothing."""
    if value > 0 and math.isfinite(value):
        known.append(value)
