"""Which runs go on in a new job, and which may not."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cli import main as cli
from liver_hpc.cli import submission
from liver_hpc.cli.list_runs import list_runs
from liver_hpc.cli.submission import resume_run
from liver_hpc.cluster.slurm.run_job import OwnJob, check_over
from liver_hpc.errors import CheckpointError, ConfigError, LiverError
from liver_hpc.recipes.base import load_recipe
from liver_hpc.run.directory import (
    RunDirectory,
    claim_checkpoints,
    create_run_directory,
    find_run,
)
from liver_hpc.run.outcome import Outcome
from tests.unit.checkpoint.disk import Disk, opened
from tests.unit.checkpoint.test_checkpoints import TWO
from tests.unit.config.runs import minimal
from tests.unit.layout.models import TIED
from tests.unit.standin import StandIn

STOPPED = Outcome("stopped", "asked to", 7)
TIME_IS_UP = Outcome("requeue", "its job is about to end", 7)
SQUEUE = """#!/bin/sh
test ! -e cancelled || exit 0
test -z "{state}" || echo "77|77|{state}|None|N/A|n1|run-slurm"
test -n "{state}" || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }}
"""
SQUEUE_AWAY = "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"


class Launches:
    """In the place of `launch_detached`: what was launched, and with which files in the run."""

    def __init__(self) -> None:
        self.runs: list[RunDirectory] = []
        self.found: list[str] = []
        self.error: LiverError | None = None
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self, run: RunDirectory) -> str:
        self.runs.append(run)
        self.found += [path.name for path in run.path.glob("*.json")]
        self.begun.set()
        assert self.go_on.wait(10.0)
        if self.error is not None:
            raise self.error
        run.note_job_id("78")
        return "78"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(submission, "launch_detached", launches)
    monkeypatch.setattr(submission, "await_coordinator", lambda run: None)
    return launches


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/programs:{os.environ['PATH']}")
    squeue_says("")


def squeue_says(state: str) -> None:
    """The state of job 77; empty once it is over."""
    write_squeue(SQUEUE.format(state=state))


def write_squeue(script: str) -> None:
    path = Path("programs/squeue")
    path.write_text(script)
    path.chmod(0o755)


def ended(
    outcome: Outcome | None = STOPPED, kind: str = "slurm", steps: tuple[int, ...] = (7,)
) -> RunDirectory:
    """A run that was job 77, with checkpoints of these steps."""
    cluster: dict[str, Any] = {"kind": kind}
    if kind == "slurm":
        cluster["slurm"] = {"components": [{"name": "main"}]}
    run = create_run_directory(minimal(cluster=cluster), f"run-{kind}")
    if kind == "slurm":
        run.note_job_id("77")
    if outcome is not None:
        outcome.write(run.path)
    for step in steps:
        Disk(TIED, run.path).save(TWO, step)
    return run


@pytest.mark.parametrize(
    "outcome",
    [STOPPED, Outcome("failed", "a worker was lost", 8), Outcome("requeue", "its end", 7), None],
)
def test_an_ended_run_goes_on_from_its_newest_checkpoint(
    launches: Launches, outcome: Outcome | None
) -> None:
    run = ended(outcome, steps=(3, 7))
    (run.path / "coordinator.json").write_text('{"host": "n1", "port": 1, "pid": 1}')
    assert resume_run(run) == 7
    assert launches.runs == [run]
    assert launches.found == [], "what the last life said of itself is gone before the next one"
    assert run.job_id() == "78"
    assert find_run("latest", Path("runs")).path == run.path.resolve()


def test_two_runs_do_not_share_a_directory_of_checkpoints(
    launches: Launches, tmp_path: Path
) -> None:
    """One that is over may be followed by another, and go on after that."""
    config = minimal(
        cluster={"kind": "slurm", "slurm": {"components": [{"name": "main"}]}},
        checkpoint={"directory": tmp_path / "scratch"},
    )
    recipe = load_recipe(config)
    first = submission.new_run(config, recipe, "first")
    first.note_job_id("77")
    squeue_says("PENDING")
    with pytest.raises(ConfigError, match=r"another run's, .*: run runs/first is not over: job 77"):
        submission.new_run(config, recipe, "second")
    assert not Path("runs/second").exists()
    squeue_says("")
    second = submission.new_run(config, recipe, "second")
    Disk(TIED, second.path).save(TWO, 7)
    STOPPED.write(first.path)
    with pytest.raises(ConfigError, match=r"iter_0000007, is of another run, .*/second: resume"):
        resume_run(first)
    with pytest.raises(ConfigError, match="is of another run"):  # it may have been requeued
        opened(config, TIED, first.path).open()
    assert not launches.runs
    Disk(TIED, first.path, elsewhere=config.checkpoint.directory).save(TWO, 9)
    assert resume_run(first) == 9
    first.note_job_id("77")
    squeue_says("RUNNING")
    with pytest.raises(ConfigError, match=r"another run's, .*: run runs/first is not over: job 77"):
        claim_checkpoints(second, config, check_over)


def test_a_run_in_whose_own_directory_another_one_has_gone_on_does_not(
    launches: Launches,
) -> None:
    first = ended(STOPPED)
    place = first.checkpoints_path.absolute()
    section = {"directory": place, "load": place}
    config = minimal(cluster=first.config().cluster.model_dump(), checkpoint=section)
    second = create_run_directory(config, "second")
    claim_checkpoints(second, config, check_over)
    Disk(TIED, second.path).save(TWO, 900)
    with pytest.raises(ConfigError, match=r"iter_0000900, is of another run, .*/second: resume"):
        resume_run(first)
    assert not launches.runs


def test_a_finished_run_does_not(launches: Launches) -> None:
    run = ended(Outcome("finished", "all 10 steps are done", 10))
    with pytest.raises(ConfigError, match=r"^run runs/run-slurm is complete: all 10 steps are d"):
        resume_run(run)
    assert (launches.runs, run.outcome() is not None) == ([], True)


def test_a_run_without_a_checkpoint_does_not(launches: Launches) -> None:
    run = ended(steps=())
    said = r"has no checkpoint in .*/checkpoints to go on from; `liver stop --checkpoint`"
    with pytest.raises(ConfigError, match=said):
        resume_run(run)
    assert (launches.runs, run.outcome()) == ([], STOPPED)


def test_a_run_whose_checkpoint_is_damaged_does_not(launches: Launches) -> None:
    run = ended()
    next((run.path / "checkpoints").glob("iter_*/__*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        resume_run(run)
    assert (launches.runs, run.outcome()) == ([], STOPPED)


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    launches: Launches,
) -> None:
    run = ended(steps=(3, 7))
    next((run.path / "checkpoints").glob("iter_0000007/__*.distcp")).unlink()
    assert resume_run(run) == 3


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED"])
def test_a_run_whose_job_is_not_over_is_bad_input(
    launches: Launches, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended()
    squeue_says(state)
    assert cli.main(["submit", "--resume", run.path.name]) == cli.EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert said == f"liver: error: run runs/run-slurm is not over: job 77 is {state}\n"
    assert (launches.runs, run.outcome()) == ([], STOPPED)


def test_another_job_that_has_the_number_by_now_is_left_alone(
    launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(None)
    Path("programs/scancel").symlink_to("/usr/bin/false")
    squeue_says("PENDING")
    run.note_job_id("77", "run-slurm")
    with pytest.raises(ConfigError, match="is not over: job 77 is PENDING"):
        resume_run(run)
    run.note_job_id("77", "run-slurm-of-another-cluster")
    assert cli.main(["stop", run.path.name]) == cli.EXIT_FAILED
    assert "its job 77 is over and left no outcome" in capsys.readouterr().err
    assert resume_run(run) == 7


def test_a_run_of_another_cluster_is_judged_there(launches: Launches) -> None:
    """Its job is none that this one knows; where it has said how it ended nobody need be asked."""
    run = ended(None)
    OwnJob(job_id="77", cluster="alps").note(run.path)
    scontrol = Path("programs/scontrol")
    scontrol.write_text("#!/bin/sh\necho 'ClusterName = daint'\n")
    scontrol.chmod(0o755)
    said = (
        r"its job 77 is one of cluster alps, and here is daint; .* remove runs/run-slurm/job\.json"
    )
    with pytest.raises(ConfigError, match=said):
        resume_run(run)
    assert launches.runs == []
    STOPPED.write(run.path)
    assert resume_run(run) == 7
    run.note_job_id("77")
    run.path.joinpath("outcome.json").unlink(missing_ok=True)
    OwnJob(job_id="77", cluster="daint").note(run.path)
    assert resume_run(run) == 7


def test_a_run_goes_on_in_no_other_cluster_than_sbatch_would_submit_to(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended()
    scontrol = Path("programs/scontrol")
    scontrol.write_text("#!/bin/sh\necho 'ClusterName = daint'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("SLURM_CLUSTERS", "alps")
    with pytest.raises(ConfigError, match="SLURM_CLUSTERS names cluster alps"):
        resume_run(run)
    assert (launches.runs, run.outcome()) == ([], STOPPED)
    monkeypatch.setenv("SLURM_CLUSTERS", "daint")
    assert resume_run(run) == 7


def test_a_run_whose_coordinator_answers_does_not(launches: Launches) -> None:
    """Whatever Slurm knows of its job here."""
    run = ended(None)
    with (
        StandIn(run.path),
        pytest.raises(ConfigError, match=r"is not over: its coordinator answers at 127\.0\.0\.1:"),
    ):
        resume_run(run)
    assert launches.runs == []
    assert resume_run(run) == 7


def test_where_slurm_does_not_answer_nothing_is_launched(
    launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended()
    write_squeue(SQUEUE_AWAY)
    assert cli.main(["submit", "--resume", "latest"]) == cli.EXIT_BAD_INPUT  # none is latest yet
    assert cli.main(["submit", "--resume", run.path.name]) == cli.EXIT_FAILED
    assert "Unable to contact slurm controller" in capsys.readouterr().err
    assert (launches.runs, run.outcome()) == ([], STOPPED)


def test_a_run_that_was_refused_has_ended_as_before(launches: Launches) -> None:
    run = ended()
    launches.error = LiverError("submitit: sbatch: error: invalid account")
    with pytest.raises(LiverError, match="invalid account"):
        resume_run(run)
    assert run.outcome() == STOPPED
    launches.error = None
    assert resume_run(run) == 7


def test_of_two_at_once_the_second_finds_the_job_of_the_first(
    launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended()
    launches.go_on.clear()
    first = threading.Thread(target=resume_run, args=(run,))
    first.start()
    assert launches.begun.wait(10.0)
    errors: list[Exception] = []

    def again() -> None:
        try:
            resume_run(run)
        except ConfigError as error:
            errors.append(error)

    second = threading.Thread(target=again)
    second.start()
    second.join(1.0)
    assert second.is_alive(), "it waits for the first"
    assert len(launches.runs) == 1
    said = "its job 77 is over and it is being resumed just now; its logs"
    for command in ("status", "stop"):
        assert cli.main([command, run.path.name]) == 1
        assert said in capsys.readouterr().err
    write_squeue(SQUEUE.format(state="PENDING").replace("77", "78"))
    launches.go_on.set()
    first.join(10.0)
    second.join(10.0)
    assert [str(error) for error in errors] == [f"run {run} is not over: job 78 is PENDING"]
    assert len(launches.runs) == 1


# ---- on this machine


def address_of(pid: int, hostname: str) -> str:
    return f'{{"host": "127.0.0.1", "port": 1, "pid": {pid}, "hostname": "{hostname}"}}'


def test_a_local_run_that_lives_does_not(launches: Launches) -> None:
    run = ended(None, kind="local")
    run.note_job_id(str(os.getpid()))
    with pytest.raises(ConfigError, match=rf"is not over: process {os.getpid()} lives"):
        resume_run(run)
    run.job_id_path.unlink()
    (run.path / "coordinator.json").write_text(address_of(os.getpid(), socket.gethostname()))
    with pytest.raises(ConfigError, match=rf"is not over: process {os.getpid()} lives"):
        resume_run(run)
    assert launches.runs == []


def test_a_local_run_of_another_machine_does_not(launches: Launches) -> None:
    run = ended(None, kind="local")
    (run.path / "coordinator.json").write_text(address_of(1 << 22, "elsewhere"))
    with pytest.raises(ConfigError, match=r"may not be over: .* on elsewhere, which is where"):
        resume_run(run)
    assert launches.runs == []


def test_a_local_run_that_was_killed_goes_on(launches: Launches) -> None:
    run = ended(None, kind="local")
    run.note_job_id(str(1 << 22))  # above what Linux gives out
    (run.path / "coordinator.json").write_text(address_of(1 << 22, socket.gethostname()))
    assert resume_run(run) == 7


# ---- on one node, in a job of Slurm


def in_a_job(
    outcome: Outcome | None = TIME_IS_UP, job_name: str = "run-slurm", array_task: str = ""
) -> RunDirectory:
    run = ended(outcome, kind="local")
    OwnJob(job_id="77", job_name=job_name, array_task=array_task).note(run.path)
    return run


def test_a_local_run_whose_job_is_queued_to_go_on_with_it_does_not(launches: Launches) -> None:
    run = in_a_job()
    squeue_says("PENDING")
    assert list_runs(Path("runs"))[0][0].state == "waiting for Slurm"
    with pytest.raises(ConfigError, match=r"^run runs/run-local is not over: job 77 is PENDING$"):
        resume_run(run)
    squeue_says("RUNNING")  # its coordinator is about to listen
    with pytest.raises(ConfigError, match=r"is not over: job 77 is RUNNING$"):
        resume_run(run)
    assert (launches.runs, run.last_outcome()) == ([], TIME_IS_UP)


@pytest.mark.parametrize("array_task", ["", "77_4"])
def test_a_local_run_whose_job_is_queued_is_cancelled_there(
    array_task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the coordinator of before was killed. Of an array its task alone."""
    run = in_a_job(array_task=array_task)
    (run.path / "coordinator.json").write_text(address_of(1 << 22, "elsewhere"))
    squeue_says("PENDING")
    scancel = Path("programs/scancel")
    scancel.write_text('#!/bin/sh\necho "$*" > cancelled\n')
    scancel.chmod(0o755)
    assert list_runs(Path("runs"))[0][0].state == "waiting for Slurm"
    assert cli.main(["status", run.path.name]) == cli.EXIT_OK
    assert "queued as job 77: PENDING" in capsys.readouterr().out
    assert cli.main(["stop", run.path.name]) == cli.EXIT_OK
    assert "stopped at step 7: cancelled in the queue" in capsys.readouterr().out
    assert Path("cancelled").read_text().strip() == (array_task or "77")


def test_what_a_local_runs_job_does_after_it_is_no_matter(launches: Launches) -> None:
    """As an allocation in which one run after the other is begun."""
    run = in_a_job(STOPPED)
    squeue_says("RUNNING")
    assert resume_run(run) == 7


@pytest.mark.parametrize("case", ["job over", "of another name", "submitted since", "no Slurm"])
def test_a_local_run_whose_job_will_not_go_on_with_it_does(
    launches: Launches, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = in_a_job(job_name="another" if case == "of another name" else "run-slurm")
    squeue_says("" if case == "job over" else "PENDING")
    if case == "submitted since":
        run.note_job_id(str(1 << 22))
    if case == "no Slurm":
        monkeypatch.setenv("PATH", "")
    assert resume_run(run) == 7


def test_a_local_run_whose_job_was_lost_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    run = in_a_job(None)
    assert cli.main(["status", run.path.name]) == cli.EXIT_FAILED
    assert "its job 77 is over and left no outcome" in capsys.readouterr().err
    assert list_runs(Path("runs"))[0][0].state == "lost"
    (run.path / "coordinator.json").write_text(address_of(1 << 22, "n1"))
    assert cli.main(["status", run.path.name]) == cli.EXIT_FAILED
    assert "on n1, job 77) is gone and left no outcome" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [("--set", "train.steps=20"), ("--cluster", "local"), ("--dry-run",)]
)
def test_a_run_is_taken_as_it_is(
    launches: Launches, option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended()
    assert cli.main(["submit", "--resume", run.path.name, *option]) == cli.EXIT_BAD_INPUT
    assert "--resume takes the run as it is" in capsys.readouterr().err
    assert launches.runs == []


def test_the_command_tells_the_step(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    run = ended()
    assert cli.main(["submit", "--no-follow", "--resume", run.path.name]) == cli.EXIT_OK
    assert capsys.readouterr().out == "run runs/run-slurm goes on from step 7\n"
