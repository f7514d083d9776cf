"""State on disk: runs that stop with a checkpoint, or are killed, and go on in any layout."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.checkpoint.newest import newest_checkpoint
from liver_hpc.checkpoint.torch_dist.files import Reader, read_table
from liver_hpc.cli.client import stop
from liver_hpc.cli.submission import resume_run
from liver_hpc.config.load import dump_run
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE
from liver_hpc.config.schema import RunConfig
from liver_hpc.report.derive import run_figures
from liver_hpc.report.store import RunRecords, read_run
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.outcome import Outcome
from tests.integration.runs import (
    ENDLESS,
    finish,
    kill_host,
    processes_of,
    run_config,
    start,
    tails,
    wait_for_end,
    wait_until,
    watch,
    worst_difference,
)

pytestmark = pytest.mark.timeout(400)

STEPS = 24
STEP_S = "0.1"
FAULTY = "tests.integration.dies_writing:DiesWriting"
SAVED_AT = 8
"""Where the run stops that the others go on from, at the earliest."""


def short_run(tmp_path: Path, steps: int = STEPS, **sections: Any) -> RunConfig:
    return run_config(tmp_path, steps, **sections)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run on dp2 that was stopped with a checkpoint in the middle; tests go on with copies."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIVER_TEST_STEP_S", STEP_S)
        run = start(short_run(tmp_path_factory.mktemp("stopped")))
        stop_with_checkpoint(run)
    return run


@pytest.fixture
def copied(stopped: RunDirectory, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(stopped.path, tmp_path / stopped.path.name))


@pytest.fixture
def unhurried_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take long enough to stop a run between them."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", STEP_S)


def checkpoint_of(run: RunDirectory) -> Path:
    newest = newest_checkpoint(run.path / "checkpoints")
    assert newest is not None
    return newest.path


def go_on(run: RunDirectory, **layout: int) -> None:
    """Another life of the run, in this layout: what a job that is queued again does."""
    workers = math.prod(layout.values())
    sections: dict[str, Any] = {
        "workers": {"initial": workers, "max": 4},
        "layouts": {workers: layout},
    }
    config = RunConfig.model_validate({**run.config().model_dump(), **sections})
    run.config_path.write_text(dump_run(config))
    (run.path / "outcome.json").unlink(missing_ok=True)  # of a run that is complete, too
    assert resume_run(run) >= 1


def stop_with_checkpoint(run: RunDirectory) -> Outcome:
    watch(run, lambda status: status.step >= SAVED_AT, 60.0)
    outcome = stop(run, checkpoint=True)
    assert outcome.state == "stopped", f"{outcome.reason}\n{tails(run)}"
    return outcome


def by_step(records: RunRecords) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, of one that was done twice the later."""
    done = {record.step: (record.loss, record.grad_norm) for record in records.steps}
    assert sorted(done) == list(range(len(done)))
    return [done[step] for step in sorted(done)]


def test_the_outcome_of_a_stop_says_where_the_checkpoint_is(stopped: RunDirectory) -> None:
    outcome, path = stopped.outcome(), checkpoint_of(stopped)
    assert outcome is not None
    assert SAVED_AT <= outcome.step < STEPS
    assert path.name == f"iter_{outcome.step:07d}"
    assert outcome.reason == f"an operator's request; checkpoint of step {outcome.step} in {path}"


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        *(pytest.param(each, marks=pytest.mark.long) for each in ({"dp": 2}, {"pp": 2}, {"dp": 1})),
    ],
    ids=str,
)
def test_a_run_that_stopped_with_a_checkpoint_goes_on_in_any_layout(
    copied: RunDirectory, quiet: RunRecords, layout: dict[str, int]
) -> None:
    """As if it had never stopped: bit-equal in the same layout, else within 1e-4."""
    step = len(read_run(copied.path).steps)
    go_on(copied, **layout)
    records = finish(copied)
    assert [record.step for record in records.steps] == list(range(STEPS))
    assert {r.generation for r in records.steps[:step]} == {0}
    assert {r.generation for r in records.steps[step:]} == {2}
    if layout == {"dp": 2}:
        assert by_step(records) == by_step(quiet)[:STEPS]
    assert worst_difference(by_step(records), by_step(quiet)) <= 1e-4
    rates = [record.learning_rate for record in records.steps]
    assert rates == [record.learning_rate for record in quiet.steps[:STEPS]]


@pytest.mark.long
def test_a_file_in_which_a_byte_has_changed_is_refused_by_name(copied: RunDirectory) -> None:
    path = checkpoint_of(copied) / "__1_0.distcp"
    tensors = read_table(path.parent).tensors
    places = [
        place
        for key, tensor in tensors.items()
        if key.startswith("optimizer.state.exp_avg.")
        for _, place in tensor.chunks
        if place.file == path.name
    ]
    with Reader(path.parent) as reader:
        value = reader.read(places[0]).numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(value, places[0].start) + 5] ^= 1
    path.write_bytes(data)
    before = len(read_run(copied.path).steps)
    go_on(copied, pp=2)
    outcome = wait_for_end(copied, 60.0)
    assert outcome.state == "failed"
    assert f"{path} has changed on the disk" in outcome.reason
    assert len(read_run(copied.path).steps) == before
    wait_until(lambda: not processes_of(copied), 20.0, f"processes {processes_of(copied)}")


@pytest.mark.long
def test_a_run_of_another_model_is_refused(copied: RunDirectory) -> None:
    config = copied.config()
    other = config.model_copy(update={"model": {**config.model, "hidden": 128}})
    copied.config_path.write_text(dump_run(other))
    go_on(copied, dp=1)
    outcome = wait_for_end(copied, 60.0)
    assert outcome.state == "failed"
    assert "is of another model: 'embedding.word_embeddings.weight' is" in outcome.reason


@pytest.mark.long
def test_dropout_and_bf16_go_on_bit_equal(tmp_path: Path) -> None:
    """Saved at four workers, by the run file's own rhythm, and killed; twice, in one layout. The
    last step is saved whatever the rhythm."""
    model = {"dropout": 0.1, "dtype": "bf16"}
    sections: dict[str, Any] = {"model": model, "initial": 4, "layouts": {4: {"tp": 2, "dp": 2}}}
    seldom = {"every_steps": "auto"}
    whole = start(short_run(tmp_path / "fixed", steps=8, checkpoint=seldom, **sections))
    fixed = finish(whole)
    assert checkpoint_of(whole).name == "iter_0000008"
    run = start(short_run(tmp_path / "moved", 8, checkpoint={"every_steps": 4}, **sections))
    finish(run)
    newest = newest_checkpoint(run.path / "checkpoints")
    assert newest is not None
    assert newest.index.scalars.step == 8
    for path in newest.path.iterdir():
        path.unlink()
    newest.path.rmdir()
    go_on(run, tp=2, dp=2)
    records = finish(run)
    assert [r.step for r in records.steps] == [*range(8), *range(4, 8)]
    assert by_step(records) == by_step(fixed)
    figures = run_figures(records)
    assert (figures.steps, figures.missing_steps) == (8, 0)


@pytest.mark.usefixtures("unhurried_steps")
def test_checkpoints_and_handoffs_at_the_same_boundaries(tmp_path: Path) -> None:
    """With a checkpoint after every step, each is of one world or the other, and the last is
    gone on from."""
    notices = [
        {"at_step": 2, "layout": {"tp": 2, "dp": 2}},
        {"at_step": 3, "layout": {"pp": 2}},
    ]
    every = {"every_steps": 1, "keep": ENDLESS}
    run = start(short_run(tmp_path, ENDLESS, notices=notices, checkpoint=every))
    watch(run, lambda status: status.handoffs_done == 2, 90.0)
    watch(run, lambda status: status.handoff is None, 10.0)
    outcome = stop(run)
    first, second = (row.step for row in read_run(run.path).reconfigurations)
    names = {path.name for path in (run.path / "checkpoints").iterdir()}
    # The boundary at which a handoff went first is missing: its checkpoint came one step later.
    skipped = {first, second}
    wanted = {f"iter_{n:07d}" for n in range(1, outcome.step + 1) if n not in skipped}
    assert names == wanted | {TRACKER_FILE}
    newest = newest_checkpoint(run.path / "checkpoints")
    assert newest is not None
    assert newest.index.rank_map.rank_map().layout.pp == 2
    assert newest.index.generation == 2


@pytest.mark.long
@pytest.mark.usefixtures("unhurried_steps")
def test_a_worker_lost_while_it_writes_costs_that_checkpoint_and_no_restart(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on from memory, and write the next one."""
    monkeypatch.setenv("LIVER_TEST_DIES_WRITING", "3:8")
    config = short_run(
        tmp_path,
        recipe=FAULTY,
        initial=4,
        layouts={4: {"dp": 4}, 2: {"dp": 2}},
        checkpoint={"every_steps": 4},
        snapshots={"every_steps": 1},
    )
    run = start(config)
    records = finish(run)
    assert len(records.recoveries) == 1
    assert worst_difference(by_step(records), by_step(quiet)) <= 1e-4
    log = (run.path / "logs/coordinator.log").read_text()
    assert "checkpoint of step 8 given up: not all workers had written when their world" in log
    newest = newest_checkpoint(run.path / "checkpoints")
    assert newest is not None
    assert newest.index.scalars.step == STEPS
    assert "restarts after step" not in log


@pytest.mark.long
@pytest.mark.usefixtures("unhurried_steps")
def test_a_disk_that_is_full_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of a worker may become larger than a few kilobytes."""
    monkeypatch.setenv("LIVER_TEST_FILE_BYTES", "20000")
    run = start(short_run(tmp_path, recipe=FAULTY, checkpoint={"every_steps": 4}))
    outcome = stop_with_checkpoint(run)
    assert "; checkpoint of step " in outcome.reason
    assert "given up: worker 0: File too large (and 1 more); there is none" in outcome.reason
    assert list((run.path / "checkpoints").iterdir()) == []
    records = read_run(run.path)
    assert by_step(records) == by_step(quiet)[: outcome.step]


@pytest.mark.long
@pytest.mark.usefixtures("unhurried_steps")
def test_sigkill_of_all_that_coordinates_leaves_a_run_that_goes_on(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics of the life before are kept; the steps after its last checkpoint are there twice. The
    journal of both lives is played again by `finish`."""
    sections = {"checkpoint": {"every_steps": 5}, "deadlines": {"coordinator_s": 2.0}}
    run = start(short_run(tmp_path, **sections))
    watch(run, lambda status: len(read_run(run.path).steps) >= 7, 60.0)
    kill_host(run)
    wait_until(lambda: not processes_of(run), 20.0, f"processes {processes_of(run)}")
    monkeypatch.delenv("LIVER_TEST_STEP_S")
    go_on(run, dp=2)
    records = finish(run)
    numbers = [record.step for record in records.steps]
    again = next(at for at in range(1, len(numbers)) if numbers[at] <= numbers[at - 1])
    assert again >= 7
    assert numbers == [*range(again), *range(numbers[again], STEPS)]
    assert numbers[again] % 5 == 0
    assert by_step(records) == by_step(quiet)[:STEPS]
