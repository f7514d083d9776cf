"""What a Slurm job of submitit's runs, with a coordinator and commands of Slurm that are played."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from submitit.core.utils import UncompletedJobError
from submitit.helpers import DelayedSubmission

from liver_hpc.cli.launch import CoordinatorJob
from liver_hpc.coordinator.hosting import HostedCoordinator
from liver_hpc.errors import LiverError
from liver_hpc.run.directory import RunDirectory, create_run_directory
from liver_hpc.run.outcome import Outcome
from tests.unit.cli.test_run_here import PLAYED
from tests.unit.config.runs import minimal
from tests.unit.standin import StandInControl

OUT_OF_TIME = Outcome("failed", "its job's time was up before its state was on disk", 7)
LIMIT_S = 10.0
Lives = Callable[[Callable[[Path], int]], None]


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    """Puts a function of the run directory in the place of the coordinator."""

    def put(live: Callable[[Path], int]) -> None:
        module = types.ModuleType("liver_hpc.coordinator.main")
        vars(module)["Control"] = StandInControl
        vars(module)["run_coordinator"] = lambda directory, control: live(Path(directory))
        monkeypatch.setitem(sys.modules, "liver_hpc.coordinator.main", module)

    return put


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As if in job 77; what was asked of Slurm. Signal handlers are as before afterwards."""
    log = tmp_path / "asked"
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("squeue", "scontrol"):
        (programs / name).write_text(PLAYED.format(log=log))
        (programs / name).chmod(0o755)
    log.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield log
    for number, handler in before.items():
        signal.signal(number, handler)


def a_run(requeue: bool, end_window_s: float = 0.2) -> RunDirectory:
    slurm = {"components": [{"name": "main"}], "requeue": requeue, "end_window_s": end_window_s}
    return create_run_directory(minimal(cluster={"kind": "slurm", "slurm": slurm}))


def ends_as(state: str, reason: str = "so it was") -> Callable[[Path], int]:
    def live(directory: Path) -> int:
        Outcome(state, reason, 3).write(directory)
        return 1 if state == "failed" else 0

    return live


@pytest.fixture
def hangs() -> Iterator[Callable[[Path], int]]:
    """A coordinator that does not end by itself."""
    over = threading.Event()
    ended = threading.Event()

    def live(directory: Path) -> int:
        (directory / "coordinator.json").write_text("{}")
        over.wait(LIMIT_S)
        ended.set()
        return 0

    yield live
    over.set()


def running(run: RunDirectory) -> CoordinatorJob:
    """A job that has called its coordinator, as far as `checkpoint` sees."""
    job = CoordinatorJob()
    job._hosted = HostedCoordinator(str(run.path))
    job._hosted.start()
    return job


def test_a_job_whose_run_has_failed_fails(lives: Lives, asked: Path) -> None:
    lives(ends_as("failed", "worker 1 lost"))
    with pytest.raises(LiverError, match=r"^worker 1 lost$"):
        CoordinatorJob()(str(a_run(requeue=True).path))
    assert asked.read_text() == ""


def test_a_job_whose_coordinator_leaves_nothing_fails(lives: Lives, asked: Path) -> None:
    lives(lambda directory: 1)
    with pytest.raises(LiverError, match="there is no outcome"):
        CoordinatorJob()(str(a_run(requeue=True).path))


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_job_whose_run_has_ended_well_does_too(lives: Lives, asked: Path, state: str) -> None:
    lives(ends_as(state))
    assert CoordinatorJob()(str(a_run(requeue=True).path)) == 0
    assert asked.read_text() == ""


def test_a_job_whose_run_goes_on_is_queued_again(lives: Lives, asked: Path) -> None:
    lives(ends_as("requeue"))
    with pytest.raises(SystemExit) as ended:
        CoordinatorJob()(str(a_run(requeue=True).path))
    assert ended.value.code == 0
    assert asked.read_text() == "scontrol requeue 77\n"


def test_a_missed_window_is_left_to_submitit_where_the_job_may_be_queued_again(
    lives: Lives, asked: Path, hangs: Callable[[Path], int]
) -> None:
    lives(hangs)
    run = a_run(requeue=True)
    again = running(run).checkpoint(str(run.path))
    assert isinstance(again, DelayedSubmission)
    assert again.args == (str(run.path),)
    assert run.last_outcome() is None


def test_a_missed_window_is_the_end_where_the_job_may_not_be_queued_again(
    lives: Lives, asked: Path, hangs: Callable[[Path], int]
) -> None:
    lives(hangs)
    run = a_run(requeue=False)
    assert running(run).checkpoint(str(run.path)) is None
    assert run.outcome() == OUT_OF_TIME
    assert not (run.path / "coordinator.json").exists()
    assert "requeue" not in asked.read_text()


@pytest.mark.parametrize("requeue", [True, False])
def test_a_job_that_ends_before_its_coordinator_began(asked: Path, requeue: bool) -> None:
    run = a_run(requeue)
    again = CoordinatorJob().checkpoint(str(run.path))
    assert (again is not None) == requeue
    assert (run.outcome() is None) == requeue


def test_submitits_word_that_the_job_ends_makes_it_fail(
    lives: Lives,
    asked: Path,
    hangs: Callable[[Path], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lives(hangs)
    run = a_run(requeue=False)
    job = CoordinatorJob()

    def signalled(hosted: HostedCoordinator, limit_s: float | None = None) -> bool:
        """As submitit's handler does, while the job waits for the coordinator."""
        if limit_s is not None:
            return False
        assert job.checkpoint(str(run.path)) is None
        raise UncompletedJobError("not requeued")

    monkeypatch.setattr(HostedCoordinator, "wait", signalled)
    with pytest.raises(UncompletedJobError):
        job(str(run.path))
    assert run.outcome() == OUT_OF_TIME
    assert "requeue" not in asked.read_text()


def test_a_coordinator_that_ends_in_the_window_has_the_last_word(lives: Lives, asked: Path) -> None:
    lives(ends_as("stopped", "its job is about to end; checkpoint of step 3"))
    run = a_run(requeue=False, end_window_s=LIMIT_S)
    assert running(run).checkpoint(str(run.path)) is None
    outcome = json.loads((run.path / "outcome.json").read_text())
    assert (outcome["state"], outcome["step"]) == ("stopped", 3)


def test_giving_up_does_not_overwrite_what_the_coordinator_said(lives: Lives, asked: Path) -> None:
    run = a_run(requeue=False)
    Outcome("stopped", "a moment before", 5).write(run.path)
    HostedCoordinator(str(run.path)).give_up()
    assert run.outcome() == Outcome("stopped", "a moment before", 5)
