"""The global batch of each step, and the samples before it: functions of the step alone.

With `train.rampup` the batch grows as Megatron-LM's does with `--rampup-batch-size`
(megatron.core.num_microbatches_calculator.RampupBatchsizeNumMicroBatchesCalculator): a step that
begins after c samples has

    global_batch                                        where c > samples
    start + floor(c / (samples / n)) increment          else, n = (global_batch - start) / increment

in Megatron's own floating-point arithmetic. Steps in a row that have the same batch make a stretch,
of which there are at most n + 1; a stretch is found without going through its steps.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from liver_hpc.config.schema import RampupSection, ScheduleSection, TrainSection


class Stretch(NamedTuple):
    """Steps in a row with the same global batch, up to where the next stretch begins.

    first_step: its first one. first_sample: the samples before that. batch: samples of each.
    """

    first_step: int
    first_sample: int
    batch: int


def stretches(train: TrainSection) -> tuple[Stretch, ...]:
    """All stretches of a run however long, in order; the last one has no end. It alone has the
    whole of `train.global_batch`, which a run that is shorter does not come to."""
    return _stretches(train.rampup, train.global_batch)


def batch_of(train: TrainSection, step: int) -> int:
    """Samples of global batch `step`."""
    return _stretch_of_step(train, step).batch


def samples_before(train: TrainSection, step: int) -> int:
    """Samples of all global batches before `step`: what is consumed once so many steps are done."""
    stretch = _stretch_of_step(train, step)
    return stretch.first_sample + (step - stretch.first_step) * stretch.batch


def step_of(train: TrainSection, sample: int) -> int:
    """The step whose global batch has the run's `sample`th sample, from 0."""
    found = stretches(train)
    stretch = found[bisect_right(found, sample, key=attrgetter("first_sample")) - 1]
    return stretch.first_step + (sample - stretch.first_sample) // stretch.batch


def first_step_after(train: TrainSection) -> int:
    """The first step that begins after more samples than the ramp-up has; 0 without one. It has the
    whole batch; one that begins after just as many may have it already."""
    if train.rampup is None:
        return 0
    return step_of(train, train.rampup.samples) + 1


def batches_of(train: TrainSection) -> tuple[Stretch, ...]:
    """The stretches that a run of `train.steps` comes to, and the last one, whose batch validation
    has whatever training has."""
    *ramp, last = stretches(train)
    return (*(each for each in ramp if each.first_step < train.steps), last)


def steps_between(train: TrainSection, step: int, until: int) -> float:
    """From `step` to `until` in steps of as many samples as global batch `step` has: how many times
    as long that takes as that step."""
    return (samples_before(train, until) - samples_before(train, step)) / batch_of(train, step)


# ---- the schedule


def schedule_steps(train: TrainSection, step: int, unscheduled_samples: int = 0) -> float:
    """How far the schedule is once `step` steps are done, in steps of `train.global_batch` samples:
    like Megatron's, it counts samples, but `unscheduled_samples`. Without these and without a
    ramp-up it is `step` itself."""
    if train.rampup is None and not unscheduled_samples:
        return step
    return (samples_before(train, step) - unscheduled_samples) / train.global_batch


def decay_steps(schedule: ScheduleSection, train: TrainSection) -> float:
    """`schedule.decay_steps`; where it is not given, the end of the run."""
    return schedule.decay_steps or schedule_steps(train, train.steps)


# ---- the ramp


def _stretch_of_step(train: TrainSection, step: int) -> Stretch:
    found = stretches(train)
    return found[bisect_right(found, step, key=attrgetter("first_step")) - 1]


@lru_cache(maxsize=16)
def _stretches(ramp: RampupSection | None, whole: int) -> tuple[Stretch, ...]:
    if ramp is None:
        return (Stretch(0, 0, whole),)
    found, step, sample = list[Stretch](), 0, 0
    while (batch := _batch_after(ramp, whole, sample)) < whole:
        found.append(Stretch(step, sample, batch))
        # How many begin with this batch, before the first one that has more.
        until = range(sample, sample + ramp.samples + 2 * batch, batch)
        steps = bisect_right(until, batch, key=lambda each: _batch_after(ramp, whole, each))
        step, sample = step + steps, sample + steps * batch
    return (*found, Stretch(step, sample, whole))


def _batch_after(ramp: RampupSection, whole: int, sample: int) -> int:
    """The batch of a step that begins after so many samples, to the last bit as Megatron has it."""
    if sample > ramp.samples:
        return whole
    share = ramp.samples / ((whole - ramp.start) // ramp.increment)
    return ramp.start + int(sample / share) * ramp.increment
