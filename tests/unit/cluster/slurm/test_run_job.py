"""Which directory is this job's: not every job of the same id is the same job. And its end."""

from __future__ import annotations

import errno
import fcntl
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.cluster.slurm.run_job import OwnJob, RunJob
from liver_hpc.errors import ConfigError
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, Event, encode
from liver_hpc.run.outcome import Outcome, begin_again

END, NEVER_BEGAN = (
    encode(2, 1002.0, {}, [{"type": "end", "state": "stopped", "reason": "asked to", "step": step}])
    for step in (7, 0)
)


class Queued:
    """Job 77 waits until it is cancelled: in the place of what runs Slurm's commands."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def __call__(self, words: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        if words[0] == "scancel":
            self.cancelled += words[1:]
        waits = words[0] == "squeue" and not self.cancelled
        shown = "77|77|PENDING|Resources|N/A||run\n" if waits else ""
        return subprocess.CompletedProcess(list(words), 0, shown, "")


def a_queued_run(path: Path, *ends: bytes) -> RunJob:
    """A run that trained six steps, perhaps has ended, and begins again."""
    events: list[Event] = [{"type": "coordinator_started"}, {"type": "step_done", "step": 5}]
    lines = [encode(number, 1000.0, event) for number, event in enumerate(events)]
    (path / JOURNAL_FILE).write_bytes(b"".join([*lines, *ends]))
    Outcome("stopped", "asked to", 7).write(path)
    begin_again(path)
    return RunJob(RunDirectory(path), "77", SlurmCommands(1.0, 0.0, run=Queued()))


def job(
    job_id: str = "77", cluster: str = "c", started: str = "1000", restarts: str = ""
) -> OwnJob:
    found = OwnJob.of(
        {
            "SLURM_JOB_ID": job_id,
            "SLURM_CLUSTER_NAME": cluster,
            "SLURM_JOB_START_TIME": started,
            "SLURM_RESTART_COUNT": restarts,
        }
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("later", "same"),
    [
        (job(), True),  # the script runs it a second time
        (job(started="2000", restarts="1"), True),
        (job(started="2000"), False),  # the ids have begun again
        (job(started="2000", cluster="d", restarts="1"), False),
        (job(job_id="78", started="2000", restarts="1"), False),
    ],
)
def test_a_job_knows_its_directory_again(tmp_path: Path, later: OwnJob, same: bool) -> None:
    job().note(tmp_path)
    assert later.made(tmp_path) == same


def test_a_second_restart_is_told_from_the_first(tmp_path: Path) -> None:
    job(started="2000", restarts="1").note(tmp_path)
    assert job(started="3000", restarts="2").made(tmp_path)
    assert not job(started="3000", restarts="1").made(tmp_path)


def test_a_note_that_cannot_be_read_is_nobodys(tmp_path: Path) -> None:
    assert not job(restarts="1").made(tmp_path)
    (tmp_path / "job.json").write_text("{")
    assert not job(restarts="1").made(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "text", "restarts", "same"),
    [
        (["a=1"], "b: 2", "", True),
        (["a=2"], "b: 2", "", False),
        (["a=2"], "b: 2", "1", False),
        (["a=1"], "b: 3", "", False),  # a script has written the next of several
        (["a=1"], "b: 3", "1", True),  # somebody has edited it meanwhile
    ],
)
def test_a_job_knows_its_request_again(
    tmp_path: Path, overrides: list[str], text: str, restarts: str, same: bool
) -> None:
    file = tmp_path / "run.yaml"
    job().asking(file, ["a=1"], "b: 2").note(tmp_path)
    later = job(started="2000" if restarts else "1000", restarts=restarts)
    later = later.asking(file, overrides, text)
    assert later.made(tmp_path)
    assert later.asks_for(tmp_path, "run") == same
    assert later.finds_changed(tmp_path) == (text != "b: 2")
    assert later.made_now(tmp_path) == (not restarts)


TASK = {"JobId": "91", "ArrayJobId": "77", "ArrayTaskId": "4", "Restarts": "1"}
OF_ANOTHER = {
    "SLURM_JOB_ID": "91",
    "SLURM_ARRAY_JOB_ID": "77",
    "SLURM_ARRAY_TASK_ID": "4",
    "SLURM_RESTART_COUNT": "3",
}


@pytest.mark.parametrize(
    ("record", "array_task", "restarts"),
    [({"JobId": "91", "Restarts": "0"}, "", 0), (TASK, "77_4", 1), ({}, "", 3), (None, "", 3)],
)
def test_what_another_job_was_told_is_asked_of_slurm(
    record: dict[str, str] | None, array_task: str, restarts: int
) -> None:
    def ask(job_id: str) -> dict[str, str]:
        if record is None:
            raise ControllerUnreachable(["scontrol"], 1, "")
        assert job_id == "91"
        return record

    found = OwnJob.of(OF_ANOTHER, ask)
    assert found is not None
    assert (found.array_task, found.restarts) == (array_task, restarts)


def test_the_task_that_has_its_arrays_id_is_known_without_slurm() -> None:
    found = OwnJob.of({**OF_ANOTHER, "SLURM_JOB_ID": "77"})
    assert found is not None
    assert found.array_task == "77_4"


def test_a_job_that_slurm_tells_everything_is_not_asked_for() -> None:
    def ask(job_id: str) -> dict[str, str]:
        raise AssertionError(job_id)

    assert OwnJob.of({"SLURM_JOB_ID": "91"}, ask) is not None


def test_outside_of_a_job_there_is_none() -> None:
    assert OwnJob.of({}) is None


# ---- alone


def refuses(runs: Path, *what: str) -> bool:
    try:
        with job().alone(runs, *what):
            return False
    except ConfigError as error:
        return "another `liver run` of job 77 is under way" in str(error)


def test_one_process_does_one_thing_at_a_time(tmp_path: Path) -> None:
    with job().alone(tmp_path / "runs", "this"):
        assert refuses(tmp_path / "runs", "this")
        assert not refuses(tmp_path / "runs", "that")
        assert not refuses(tmp_path / "other", "this")
    assert not refuses(tmp_path / "runs", "this")
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_locked_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(stream: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    why = f"{tmp_path}: no lock can be had there: Function not implemented"
    with pytest.raises(ConfigError, match=re.escape(why)), job().alone(tmp_path):
        pytest.fail("it goes on")


# ---- cancelled


@pytest.mark.parametrize(("ends", "step"), [([END], 7), ([], 6), ([NEVER_BEGAN], 6)])
def test_a_run_that_waits_to_go_on_is_cancelled_where_it_was(
    tmp_path: Path, ends: list[bytes], step: int
) -> None:
    """Also after its coordinator was killed."""
    outcome = a_queued_run(tmp_path, *ends).cancel(5.0)
    said = "cancelled in the queue; `liver submit --resume` goes on from its newest checkpoint"
    assert outcome == Outcome("stopped", said, step)
    assert RunDirectory(tmp_path).last_outcome() == outcome


def test_a_run_that_has_not_trained_is_cancelled_at_step_0(tmp_path: Path) -> None:
    job = a_queued_run(tmp_path)
    (tmp_path / JOURNAL_FILE).unlink()
    assert job.cancel(5.0) == Outcome("stopped", "cancelled before it trained", 0)
