"""A job that goes on without its batch script."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from liver_hpc.cluster.slurm import orphaned
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.orphaned import begin_again_without_script
from liver_hpc.run.directory import RunDirectory, create_run_directory
from liver_hpc.run.outcome import Outcome
from tests.unit.config.runs import minimal

JOB = (
    "JobId=77 JobName=a b JobState={state} Requeue=1 BatchFlag={batch} ReqNodeList=(null) "
    "NodeList={nodes} BatchHost=n1 NumNodes=2\nJobId=78 JobState=RUNNING BatchFlag=0 NodeList=n9\n"
)
WHOLE = JOB.format(state="RUNNING", batch=1, nodes="n[1-3]")
LOST = JOB.format(state="RUNNING", batch=1, nodes="n[2-3]")


class Slurm:
    """Plays what `scontrol show job` says, one after the other, the last for ever."""

    def __init__(self, *jobs: str) -> None:
        self.jobs = list(jobs)
        self.done: list[Sequence[str]] = []

    def __call__(self, words: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        said = ""
        if words[-2:] == ["show", "config"]:
            said = "SlurmdTimeout           = 300 sec\n"
        elif "hostnames" in words:
            said = {"n[1-3]": "n1\nn2\nn3\n", "n[2-3]": "n2\nn3\n"}[words[-1]]
        elif "show" in words:
            said = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        else:
            self.done.append(list(words))
        return subprocess.CompletedProcess(words, 0, said, "")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(orphaned, "_LOOK_S", 0.0)
    return a_run(requeue=True)


def a_run(requeue: bool) -> RunDirectory:
    slurm = {"components": [{"name": "main"}], "requeue": requeue}
    run = create_run_directory(minimal(cluster={"kind": "slurm", "slurm": slurm}))
    run.note_job_id("77", run.path.name)
    return run


def done(run: RunDirectory, *jobs: str) -> list[Sequence[str]]:
    slurm = Slurm(*jobs)
    begin_again_without_script(run.path, SlurmCommands(5.0, 0.0, run=slurm))
    return slurm.done


def test_it_is_queued_again_once_slurm_has_dropped_the_scripts_node(run: RunDirectory) -> None:
    assert done(run, WHOLE, WHOLE, LOST) == [["scontrol", "requeue", "77"]]


def test_it_is_cancelled_where_it_may_not_be_queued_again(run: RunDirectory) -> None:
    assert done(a_run(requeue=False), LOST) == [["scancel", "77"]]


@pytest.mark.parametrize(
    "job",
    [
        JOB.format(state="COMPLETING", batch=1, nodes="n[2-3]"),
        JOB.format(state="PENDING", batch=1, nodes=""),
        JOB.format(state="RUNNING", batch=0, nodes="n[2-3]"),
        "",
    ],
)
def test_a_job_that_ends_or_has_no_script_is_left_alone(run: RunDirectory, job: str) -> None:
    assert done(run, WHOLE, job) == []


def test_a_script_whose_node_lives_is_left_alone(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may do something else by now."""
    monkeypatch.setattr(orphaned, "_MARGIN_S", -300.0)
    assert done(run, WHOLE) == []


def test_a_run_that_has_ended_wants_its_job_no_more(run: RunDirectory) -> None:
    Outcome("finished", "", 7).write(run.path)
    assert done(run, LOST) == []
