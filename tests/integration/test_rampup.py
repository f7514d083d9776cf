"""A batch that grows with the step: training does not depend on the layouts that it goes through,
nor on where it is taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from liver_hpc.checkpoint.torch_dist.contents import read_contents
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE
from liver_hpc.config.schema import TrainSection
from liver_hpc.errors import ConfigError
from liver_hpc.layout.ramp import batch_of, samples_before, stretches
from liver_hpc.report.store import RunRecords
from tests.integration.elastic import elastic_run, losses
from tests.integration.moves import moved_and_stayed
from tests.integration.random_tokens import RandomTokenGPT
from tests.integration.runs import finish, run_config, start, worst_difference
from tests.integration.test_checkpoint import by_step, checkpoint_of, go_on, stop_with_checkpoint
from tests.integration.worlds import Case, apart, recipe_of

pytestmark = pytest.mark.timeout(400)

EQUAL = 1e-4

# ---- worlds, whose handoffs are where a test wants them

TRAIN: dict[str, Any] = {
    "steps": 100,
    "global_batch": 8,
    "rampup": {"start": 4, "increment": 2, "samples": 20},
}
BATCHES = [4, 4, 4, 6, 6, 8, 8, 8]
DROPOUT = {"dropout": 0.1}
"""Whose masks within attention depend on tp, as Megatron's do."""
FORTH = [("dp4", range(2)), ("tp2 dp2", range(2, 3)), ("dp3", range(3, 5)), ("pp2", range(5, 8))]
"""Handoffs before the batch grows, and at both steps at which it does."""
BACK = [("pp2 dp2", range(4)), ("dp3", range(4, 6)), ("tp2", range(6, 8))]
"""Handoffs after each of them."""
WITHOUT_TP = [
    ("dp4", range(3)),
    ("pp2 dp2", range(3, 4)),
    ("dp3", range(4, 5)),
    ("pp2", range(5, 8)),
]


@pytest.mark.parametrize(
    ("course", "model"),
    [(FORTH, {}), (BACK, {}), (WITHOUT_TP, DROPOUT)],
    ids=["at a change", "beside it", "dropout"],
)
def test_a_course_through_layouts_trains_as_one_that_stays(
    course: list[tuple[str, range]], model: dict[str, Any], tmp_path: Path
) -> None:
    """Some of its batches are shared unevenly."""
    section = TrainSection.model_validate(TRAIN)
    assert [batch_of(section, step) for step in range(8)] == BATCHES
    layouts, steps = zip(*course, strict=True)
    moved, stay = moved_and_stayed(Case("dp1", model, TRAIN), layouts, tmp_path, steps)
    assert len(stay["course"]) == 8
    assert apart(moved["course"], stay["course"]) <= EQUAL


def test_a_recipe_that_gives_another_number_of_samples_is_told(device: Any) -> None:
    """As one that knows of no ramp-up does."""
    from tests.integration.toys import build_world

    class Unaware(RandomTokenGPT):
        def batch(self, step: int) -> range:
            size = self.config.train.global_batch
            return range(step * size, (step + 1) * size)

    world = build_world(recipe_of(Case("dp1", {}, TRAIN, Unaware), 0), device)
    try:
        with pytest.raises(
            ConfigError, match=r"Unaware: batch\(0\) gives 8 samples, the global batch .* has 4"
        ):
            world.forward_backward(0)
    finally:
        world.close()


# ---- whole runs

RAMP = {"global_batch": 12, "rampup": {"start": 4, "increment": 1, "samples": 192}}
QUIET_STEPS = 150
SHORT = 24
SCHEDULE = {"decay_steps": 40, "warmup_steps": 4.5}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """The same training in one layout."""
    directory = tmp_path_factory.mktemp("quiet")
    config = run_config(directory, QUIET_STEPS, initial=1, train=RAMP, schedule=SCHEDULE)
    return finish(start(config))


def check_steps(records: RunRecords) -> None:
    """What is told of each step is of its batch."""
    train = TrainSection.model_validate({"steps": 1, **RAMP})
    for record in records.steps:
        assert record.tokens == batch_of(train, record.step) * 32


def check_alike(records: RunRecords, quiet: RunRecords) -> None:
    assert worst_difference(by_step(records), by_step(quiet)) <= EQUAL
    rates = {record.step: record.learning_rate for record in quiet.steps}
    assert all(record.learning_rate == rates[record.step] for record in records.steps)


@pytest.mark.long
def test_a_run_with_handoffs_during_its_ramp_up_matches_a_fixed_run(
    tmp_path: Path, quiet: RunRecords, unhurried_steps: None
) -> None:
    notices = [
        {"at_step": 2, "layout": {"tp": 2}},
        {"at_step": 3, "layout": {"tp": 2, "dp": 2}},
        {"at_step": 4, "layout": {"dp": 4}},
    ]
    records = elastic_run(tmp_path, notices, at_least=60, train=RAMP, schedule=SCHEDULE)
    assert [r.outcome for r in records.reconfigurations] == ["completed"] * 3
    train = TrainSection.model_validate({"steps": 1, **RAMP})
    ramp_ends = stretches(train)[-1].first_step
    assert records.reconfigurations[0].step < ramp_ends
    check_steps(records)
    assert len(losses(records)) > ramp_ends
    check_alike(records, quiet)


@pytest.mark.long
def test_what_megatrons_schedule_has_for_the_same_samples(quiet: RunRecords) -> None:
    """Which counts them: warm-up of 54 samples, decay until 480."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    class Optimizer:
        param_groups = [{"max_lr": 1e-3, "min_lr": 1e-4}]  # noqa: RUF012

    train = TrainSection.model_validate({"steps": 1, **RAMP})
    scheduler = OptimizerParamScheduler(
        Optimizer(),
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=54,
        lr_decay_steps=480,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    for record in quiet.steps[:60]:
        wanted = scheduler.get_lr(Optimizer.param_groups[0])
        assert record.learning_rate == pytest.approx(wanted, rel=1e-12)
        scheduler.step(increment=batch_of(train, record.step))


@pytest.mark.long
def test_a_run_that_is_taken_up_again_in_the_midst_of_its_ramp_up(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """By itself in another layout; and as another run that begins with what is saved."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIVER_TEST_STEP_S", "0.2")
        run = start(run_config(tmp_path, SHORT, train=RAMP, schedule=SCHEDULE))
        stop_with_checkpoint(run)
    outcome, path = run.outcome(), checkpoint_of(run)
    assert outcome is not None
    train = TrainSection.model_validate({"steps": SHORT, **RAMP})
    step = outcome.step
    assert 4 < batch_of(train, step - 1) < 12
    saved = read_contents(path)
    assert (saved.step, saved.consumed_samples) == (step, samples_before(train, step))
    go_on(run, tp=2)
    records = finish(run)
    assert [record.step for record in records.steps] == [*range(SHORT)]
    check_steps(records)
    check_alike(records, quiet)
    (path.parent / TRACKER_FILE).write_text(str(step))
    other = run_config(
        tmp_path / "other",
        SHORT,
        train=RAMP,
        schedule=SCHEDULE,
        checkpoint={"load": path.parent},
        workers={"initial": 4, "max": 4},
    )
    continued = finish(start(other))
    assert [record.step for record in continued.steps] == [*range(step, SHORT)]
    mine = [(record.loss, record.grad_norm) for record in continued.steps]
    assert worst_difference(mine, by_step(quiet)[step:]) <= EQUAL
