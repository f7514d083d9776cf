"""Checkpoint and restart with real workers: the state comes back bit by bit, training goes on as
if nothing had happened."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.baseline.job import RestartJob
from benchmarks.baseline.methods import Method
from benchmarks.baseline.workers import Surroundings
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import LiverError
from liver_hpc.host.marks import marked_processes
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.store import read_run
from liver_hpc.run.directory import RunDirectory, create_run_directory
from liver_hpc.run.records import RunRecords, StepRecord
from tests.integration.agents import TEST_MARK
from tests.integration.runs import ENDLESS, run_config

pytestmark = pytest.mark.timeout(400)

START = Layout.parse("dp2")
CHAIN = [
    (Layout.parse("tp2 dp2"), Method.MEGATRON),
    (Layout.parse("pp2"), Method.MEGATRON),
    (Layout.parse("pp2"), Method.MEGATRON),
    (Layout.parse("dp2"), Method.MEGATRON_WARM),
]
"""Either method, every axis grown and shrunk, and a restart in the same layout."""


def new_run(tmp_path: Path) -> RunDirectory:
    return create_run_directory(run_config(tmp_path, ENDLESS))


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """A job that went through CHAIN; every restart's state was held against what was saved."""
    directory = tmp_path_factory.mktemp("restarted")
    run, mark = new_run(directory), str(directory)
    with pytest.MonkeyPatch.context() as patch, RestartJob(run.path, digests=True) as job:
        patch.setenv(TEST_MARK, mark)
        patch.setenv("LIVER_TEST_STEP_S", "0.2")  # few steps beside processes that are booting
        job.begin(START)
        job.train(3)
        for target, method in CHAIN:
            job.restart(target, method, steps=3)
            assert job.layout == target
        job.stop()
    assert not (run.path / "restarts").exists() or not any((run.path / "restarts").iterdir())
    gone = Deadline.after(SystemClock(), 10.0, "all of the job's processes to end")
    poll_until(lambda: not marked_processes(TEST_MARK, mark), gone, 0.1)
    return read_run(run.path)


@pytest.fixture(scope="module")
def uninterrupted(
    restarted: RunRecords, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, StepRecord]:
    """The same training in the first layout, from start to end, by step."""
    run = new_run(tmp_path_factory.mktemp("uninterrupted"))
    with RestartJob(run.path) as job:
        job.begin(START)
        job.train(1 + max(record.step for record in restarted.steps))
        job.stop()
    return {record.step: record for record in read_run(run.path).steps}


@pytest.mark.long
def test_training_goes_on_as_if_nothing_had_happened(
    restarted: RunRecords, uninterrupted: dict[int, StepRecord]
) -> None:
    """Losses and gradient norms of every step, also of the second after each restart."""
    for record in restarted.steps:
        quiet = uninterrupted[record.step]
        assert record.loss == pytest.approx(quiet.loss, rel=1e-4)
        assert record.grad_norm == pytest.approx(quiet.grad_norm, rel=1e-3)
        assert record.learning_rate == quiet.learning_rate


@pytest.mark.long
def test_no_step_is_left_out_and_none_is_done_again(restarted: RunRecords) -> None:
    by_generation: dict[int, list[int]] = defaultdict(list)
    for record in restarted.steps:
        by_generation[record.generation].append(record.step)
    assert sorted(by_generation) == list(range(len(CHAIN) + 1))
    steps = [step for generation in sorted(by_generation) for step in by_generation[generation]]
    assert steps == list(range(len(steps)))


@pytest.mark.long
def test_every_restart_is_recorded_with_all_its_phases(restarted: RunRecords) -> None:
    found = restarted.baselines
    assert [b.method for b in found[::2]] == [method.value for _, method in CHAIN]
    assert [b.target for b in found[::2]] == [str(target) for target, _ in CHAIN]
    for whole, exists in zip(found[::2], found[1::2], strict=True):
        phases = [whole.stop_s, whole.launch_s, whole.import_s, whole.groups_s, whole.load_s]
        assert min(phases) > 0
        assert whole.save_s + sum(phases) + whole.first_step_s == pytest.approx(whole.total_s)
        assert 0 < whole.lost_s < whole.total_s
        assert exists.method == f"{whole.method}, exists"
        assert exists.lost_s == pytest.approx(whole.lost_s - whole.save_s)
        assert not math.isnan(exists.total_s)


@pytest.mark.long
def test_processes_that_were_there_before_have_neither_to_start_nor_to_import(
    restarted: RunRecords,
) -> None:
    cold, warm = restarted.baselines[0], restarted.baselines[-2]
    assert warm.method == Method.MEGATRON_WARM
    assert warm.launch_s + warm.import_s < 0.5 * (cold.launch_s + cold.import_s)


@pytest.mark.long
def test_a_slow_storage_makes_save_and_load_as_long_as_its_bytes_take(tmp_path: Path) -> None:
    around = Surroundings(storage_bytes_per_s=5e5)
    with RestartJob(new_run(tmp_path).path, around=around) as job:
        job.begin(Layout.parse("dp1"))
        job.train(1)
        done = job.restart(Layout.parse("dp1"), Method.MEGATRON, steps=1)
        job.stop()
    takes_s, record = done.num_bytes / 5e5, done.record()
    assert takes_s > 1.0
    assert record.save_s >= takes_s
    assert record.load_s >= takes_s


@pytest.mark.long
def test_the_lost_time_is_that_of_the_recorded_steps(restarted: RunRecords) -> None:
    """From the steps alone; of a restart without time set aside."""
    steps = restarted.steps
    last = max(record.ended_s for record in steps if record.generation == 0)
    first, *later = (record for record in steps if record.generation == 1)
    took_s = sorted(record.ended_s - record.started_s for record in later[:3])
    lost_s = first.ended_s - last - took_s[1]
    assert restarted.baselines[0].lost_s == pytest.approx(lost_s, abs=0.05)


@pytest.mark.long
def test_nothing_is_left_of_a_job_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = str(tmp_path)
    monkeypatch.setenv(TEST_MARK, mark)
    with RestartJob(new_run(tmp_path).path) as job:
        job.begin(START)
        job.train(1)
        assert len(marked_processes(TEST_MARK, mark)) >= START.workers
    gone = Deadline.after(SystemClock(), 10.0, "all of the job's processes to end")
    poll_until(lambda: not marked_processes(TEST_MARK, mark), gone, 0.1)


def test_a_worker_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    """A layout that the model cannot take: the workers fail, nothing is left."""
    run = new_run(tmp_path)
    with RestartJob(run.path) as job, pytest.raises(LiverError, match=r"restart-0\.log"):
        job.begin(Layout.parse("pp3"))
