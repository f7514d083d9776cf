"""Runs whose checkpoints are Megatron's: a worker dies while it writes one, one is damaged on the
disk, and another run begins with one."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.checkpoint.index import INDEX_FILE
from liver_hpc.checkpoint.newest import newest_checkpoint
from liver_hpc.config.megatron_checkpoint import COMMON_FILE, TRACKER_FILE, tracked_step
from liver_hpc.report.store import RunRecords, read_run
from liver_hpc.run.directory import RunDirectory
from tests.integration.runs import (
    ENDLESS,
    SCHEDULE,
    finish,
    run_config,
    start,
    watch,
    worst_difference,
)
from tests.integration.test_checkpoint import (
    FAULTY,
    by_step,
    go_on,
    short_run,
    stop_with_checkpoint,
)

pytestmark = pytest.mark.timeout(400)

EVERY, STEPS = 4, 12
DIES_AT = 8
SAVING = {"every_steps": EVERY, "keep": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run on dp2, of which a worker was killed in the middle of writing a checkpoint;
    tests go on with copies."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIVER_TEST_DIES_WRITING", f"1:{DIES_AT}")
        patched.setenv("LIVER_TEST_STEP_S", "0.1")
        config = short_run(
            tmp_path_factory.mktemp("saved"), STEPS, recipe=FAULTY, checkpoint=SAVING
        )
        run = start(config)
        finish(run)
    return run


@pytest.fixture
def copied(saved: RunDirectory, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(saved.path, tmp_path / saved.path.name))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_worker_killed_while_it_writes_leaves_nothing_half(
    saved: RunDirectory, quiet: RunRecords
) -> None:
    """The same job begins again from the checkpoint before, and does the same steps again."""
    records = read_run(saved.path)
    done = [record.step for record in records.steps]
    assert done == [*range(DIES_AT), *range(DIES_AT - EVERY, STEPS)]
    assert by_step(records) == by_step(quiet)[:STEPS]
    directory = saved.path / "checkpoints"
    assert tracked_step(directory) == STEPS
    newest = newest_checkpoint(directory)
    assert newest is not None
    assert newest.path.name == f"iter_{STEPS:07d}"
    further = {".metadata", "common.pt", "metadata.json"}
    assert {part.file for part in newest.index.further} == further
    for step in (STEPS - EVERY, STEPS):
        files = {*further, "__0_0.distcp", "__1_0.distcp", INDEX_FILE}
        assert names(directory / f"iter_{step:07d}") == files
    kept = {f"iter_{step:07d}" for step in (STEPS - EVERY, STEPS)}
    assert {name for name in names(directory) if name.startswith(("iter", "."))} == kept


@pytest.mark.parametrize("damage", ["truncated", pytest.param("a byte", marks=pytest.mark.long)])
def test_a_damaged_checkpoint_is_set_aside(copied: RunDirectory, damage: str) -> None:
    """The run goes on by itself from the one before, in another layout."""
    directory = copied.path / "checkpoints"
    file = directory / f"iter_{STEPS:07d}" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    before = by_step(read_run(copied.path))
    go_on(copied, tp=2)
    records = finish(copied)
    assert [record.step for record in records.steps[-EVERY:]] == [*range(STEPS - EVERY, STEPS)]
    assert worst_difference(by_step(records), before) <= 1e-4
    assert f"damaged-iter_{STEPS:07d}" in names(directory)
    log = (copied.path / "logs/coordinator.log").read_text()
    length = len(data)
    why = f"{file} is {length - 1} bytes long, wanted {length} bytes"
    assert (why if damage == "truncated" else f"{file} has changed on the disk") in log
    assert tracked_step(directory) == STEPS


def test_another_run_begins_with_what_is_saved(copied: RunDirectory, tmp_path: Path) -> None:
    directory, step = copied.path / "checkpoints", STEPS - EVERY
    (directory / TRACKER_FILE).write_text(str(step))
    section = {"load": directory}
    continued = finish(start(short_run(tmp_path / "other", STEPS, checkpoint=section)))
    assert [record.step for record in continued.steps] == [*range(step, STEPS)]
    mine = [(record.loss, record.grad_norm) for record in continued.steps]
    assert mine == by_step(read_run(copied.path))[step:]


@pytest.mark.long
def test_a_schedule_that_is_behind_stays_so_across_a_handoff(
    copied: RunDirectory, tmp_path: Path, device: Any
) -> None:
    """As that of a job of Megatron's that skipped updates, which it would load itself."""
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    path, skipped = copied.path / f"checkpoints/iter_{STEPS:07d}", 3 * 4
    common = torch.load(path / COMMON_FILE, weights_only=False)
    schedule = common["opt_param_scheduler"]
    schedule["num_steps"] -= skipped
    torch.save(common, path / COMMON_FILE)
    (path / INDEX_FILE).unlink()

    config = run_config(
        tmp_path / "other",
        ENDLESS,
        notices=[{"at_step": STEPS + 2, "layout": {"tp": 2}}],
        checkpoint={"load": path.parent},
    )
    run = start(config)
    watch(run, lambda status: status.handoffs_done == 1, 60.0)
    moved = read_run(run.path).reconfigurations[0].step
    watch(run, lambda status: status.step >= moved + 2, 60.0)
    stopped = stop_with_checkpoint(run)

    of_job = SimpleNamespace(param_groups=[{}])
    job = OptimizerParamScheduler(
        of_job,
        init_lr=0.0,
        max_lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=4 * SCHEDULE["warmup_steps"],
        lr_decay_steps=4 * SCHEDULE["decay_steps"],
        lr_decay_style=config.schedule.style,
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    job.step(schedule["num_steps"])
    for record in read_run(run.path).steps:
        assert record.learning_rate == pytest.approx(of_job.param_groups[0]["lr"], rel=1e-12)
        job.step(4)
    newest = newest_checkpoint(run.path / "checkpoints")
    assert newest is not None
    written = torch.load(newest.path / COMMON_FILE, weights_only=False)
    assert written["opt_param_scheduler"]["num_steps"] == 4 * stopped.step - skipped
    assert newest.index.scalars.unscheduled_samples == skipped


@pytest.mark.long
def test_another_run_begins_with_the_weights_alone(copied: RunDirectory, tmp_path: Path) -> None:
    """At step 0, in another layout; and goes on from a checkpoint of its own."""
    section = {"weights": copied.path / "checkpoints", **SAVING}
    layouts = {2: {"tp": 2}}
    run = start(short_run(tmp_path / "tp2", EVERY, checkpoint=section, layouts=layouts))
    begun = finish(run)
    assert [record.step for record in begun.steps] == [*range(EVERY)]
    assert "begins with the weights of " in (run.path / "logs/coordinator.log").read_text()
    assert begun.steps[0].loss < read_run(copied.path).steps[0].loss - 0.1
    newest = newest_checkpoint(run.path / "checkpoints")
    assert newest is not None
    assert newest.index.scalars.step == EVERY


def test_a_worker_lost_while_it_writes_the_last_checkpoint_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank waits for its file meanwhile, and longer than the run may take for it."""
    monkeypatch.setenv("LIVER_TEST_DIES_WRITING", f"1:{STEPS}")
    config = short_run(
        tmp_path,
        STEPS,
        recipe=FAULTY,
        checkpoint={"every_steps": ENDLESS},
        snapshots={"every_steps": 1},
        deadlines={"collective_s": 300.0},
    )
    records = finish(start(config))
    (recovery,) = records.recoveries
    assert recovery.steps_redone <= 1
    assert recovery.halted_s - recovery.noticed_s < 30.0
    assert not [notice for notice in records.notices if notice.kind == "restart"]
    assert [*records.steps][-1].step == STEPS - 1
