"""The global batch of each step is Megatron's own, over whole ramps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from liver_hpc.config.schema import RampupSection, ScheduleSection, TrainSection
from liver_hpc.layout.batch import batch_fault
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.ramp import (
    batch_of,
    batches_of,
    decay_steps,
    samples_before,
    schedule_steps,
    step_of,
    stretches,
)
from tests.unit.megatron_ramp import has_ramp, ramp_calculator

AFTER = 3
"""Steps after a ramp that are looked at, too."""
MOST_STEPS = 2000


def ramped(start: int, increment: int, whole: int, samples: int, steps: int = 100) -> TrainSection:
    ramp = RampupSection(start=start, increment=increment, samples=samples)
    return TrainSection(steps=steps, global_batch=whole, rampup=ramp)


@st.composite
def ramps(draw: st.DrawFn) -> TrainSection:
    start, increment = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    whole = start + increment * draw(st.integers(1, 60))
    samples = draw(st.integers(1, 20_000))
    assume(samples // start < MOST_STEPS)
    return ramped(start, increment, whole, samples)


def megatrons(train: TrainSection) -> list[tuple[int, int]]:
    """(samples before, batch) of each step of the ramp and some after it, step by step."""
    ramp = train.rampup
    assert ramp is not None
    calculator = ramp_calculator(ramp.start, ramp.increment, ramp.samples, train.global_batch)
    found, consumed, after = list[tuple[int, int]](), 0, 0
    while after < AFTER:
        calculator.update(consumed, consistency_check=True)
        batch = calculator.get_current_global_batch_size()
        found.append((consumed, batch))
        after += consumed > ramp.samples
        consumed += batch
    return found


@has_ramp
@given(ramps())
def test_the_batch_of_each_step_is_megatrons(train: TrainSection) -> None:
    wanted = megatrons(train)
    steps = range(len(wanted))
    assert [(samples_before(train, step), batch_of(train, step)) for step in steps] == wanted


@has_ramp
@pytest.mark.parametrize(
    ("start", "increment", "whole", "samples"),
    [
        (32, 32, 1536, 1_953_125),  # 47 increments in shares that are broken
        (16, 8, 64, 30),  # shares that are smaller than a batch: some are passed over
        (1, 1, 8, 7 * 3),
        (9, 1, 16, 9),  # 9 / (9 / 7) is less than 7 in floating-point arithmetic: 15 comes first
        (4, 4, 8, 1),
    ],
)
def test_whole_ramps(start: int, increment: int, whole: int, samples: int) -> None:
    train = ramped(start, increment, whole, samples)
    wanted = megatrons(train)
    steps = range(len(wanted))
    assert [(samples_before(train, step), batch_of(train, step)) for step in steps] == wanted
    assert len(stretches(train)) <= (whole - start) // increment + 1


@given(ramps(), st.integers(0, 3000))
def test_each_sample_is_in_one_batch(train: TrainSection, sample: int) -> None:
    step = step_of(train, sample)
    assert samples_before(train, step) <= sample < samples_before(train, step + 1)
    assert samples_before(train, step + 1) - samples_before(train, step) == batch_of(train, step)


@given(ramps())
def test_stretches_follow_each_other_and_grow(train: TrainSection) -> None:
    found = stretches(train)
    assert found[0][:2] == (0, 0)
    assert found[-1].batch == train.global_batch
    for one, other in itertools.pairwise(found):
        assert one.batch < other.batch
        steps = other.first_step - one.first_step
        assert other.first_sample - one.first_sample == steps * one.batch > 0


def test_without_a_ramp_up_the_batch_is_the_same_at_every_step() -> None:
    train = TrainSection(steps=10, global_batch=8)
    assert stretches(train) == ((0, 0, 8),)
    assert [samples_before(train, step) for step in (0, 1, 7)] == [0, 8, 56]
    assert (batch_of(train, 10**9), step_of(train, 55)) == (8, 6)
    assert (schedule_steps(train, 7), schedule_steps(train, 7, 16)) == (7, 5)
    assert decay_steps(ScheduleSection(), train) == 10


def test_a_ramp_of_any_length_takes_as_long_to_know() -> None:
    train = ramped(16, 16, 64, 3 * 10**12, steps=10**12)
    assert [stretch.batch for stretch in stretches(train)] == [16, 32, 48, 64]
    assert batch_of(train, 10**9) == 16
    assert batch_of(train, 10**12) == 64


def test_the_schedule_counts_samples() -> None:
    """Half a batch is half a step of it; where it is to end is where the run does."""
    train = ramped(4, 2, 8, 24, steps=10)  # 4 4 4, 6 6, 8 ...
    assert [batch_of(train, step) for step in range(7)] == [4, 4, 4, 6, 6, 8, 8]
    assert [schedule_steps(train, step) for step in (1, 3, 5, 6)] == [0.5, 1.5, 3.0, 4.0]
    assert [schedule_steps(train, step, 4) for step in (1, 3, 5, 6)] == [0.0, 1.0, 2.5, 3.5]
    assert decay_steps(ScheduleSection(), train) == 8.0
    assert decay_steps(ScheduleSection(decay_steps=5), train) == 5


def test_a_run_comes_to_the_batches_of_its_steps_and_to_that_of_validation() -> None:
    train = ramped(4, 2, 10, 36, steps=4)
    assert [stretch.batch for stretch in stretches(train)] == [4, 6, 8, 10]
    assert [stretch.batch for stretch in batches_of(train)] == [4, 6, 10]


@pytest.mark.parametrize(
    ("micro_batch", "layout", "said"),
    [
        (1, "dp4", ""),
        (1, "dp6", "train.rampup: global batch of step 0, 4: 4 micro-batches in the global batch "
         "are too few for dp=6"),
        (2, "dp3", "train.rampup: global batch of step 0, 4: 2 micro-batches in the global batch "
         "are too few for dp=3"),
        (4, "dp1", "train.rampup: global batch of step 3, 6 is not a multiple of micro_batch 4"),
        (1, "pp2 vpp2 dp2", "train.rampup: global batch of step 3, 6: an interleaved pipeline wants"
         " 6 micro-batches in the global batch to be a multiple of dp x pp = 2 x 2"),
    ],
)  # fmt: skip
def test_every_batch_must_be_possible_in_a_layout(micro_batch: int, layout: str, said: str) -> None:
    train = ramped(4, 2, 8, 24).model_copy(update={"micro_batch": micro_batch})
    assert batch_fault(train, Layout.parse(layout)) == said


def test_how_many_batches_are_not_possible_is_told() -> None:
    fault = batch_fault(ramped(4, 2, 14, 24), Layout.parse("dp9"))
    assert fault.startswith("train.rampup: global batch of step 0, 4: 4 micro-batches")
    assert fault.endswith("too few for dp=9; 2 further batches cannot be shared either")


def test_ramps_that_are_none() -> None:
    with pytest.raises(ValueError, match="start is 8, wanted less than global_batch, 8"):
        ramped(8, 2, 8, 24)
    with pytest.raises(ValueError, match="increment is 3, which does not divide"):
        ramped(4, 3, 8, 24)
