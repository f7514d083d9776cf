"""`liver list`: what is told of runs in every state, from their small files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from liver_hpc.cli import list_runs
from liver_hpc.cli.list_runs import ListedRun
from liver_hpc.cluster.slurm.commands import JobInfo, SlurmCommands, SlurmError
from liver_hpc.cluster.slurm.run_job import OwnJob, gone, job_of
from liver_hpc.config.load import dump_run
from liver_hpc.run.directory import RunDirectory, create_run_directory, point_latest
from liver_hpc.run.entries import JOURNAL_FILE, encode
from liver_hpc.run.outcome import Outcome, WorldNote
from tests.unit.cli.test_main import Captured, liver
from tests.unit.config.runs import minimal

RUNS = Path("runs")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(name: str, age_s: int = 0, kind: str = "local", trains: bool = True) -> RunDirectory:
    """A run that was started so long ago, and has come to its first world."""
    run = create_run_directory(minimal(cluster={"kind": kind}), name)
    os.utime(run.config_path, (1e9 - age_s,) * 2)
    if trains:
        WorldNote(3, "tp2 pp1 dp2", 4, 5, 10, 1e9, kind).write(run.path)
    return run


def coordinated_by(run: RunDirectory, pid: int, hostname: str) -> None:
    address = {"host": "127.0.0.1", "port": 1, "pid": pid, "hostname": hostname}
    (run.path / "coordinator.json").write_text(json.dumps(address))


def step_done(number: int, step: int, at_s: float) -> bytes:
    return encode(number, at_s, {"type": "step_done", "worker": 0, "step": step})


def only() -> ListedRun:
    ((found,), _) = list_runs.list_runs(RUNS)
    return found


def dead_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_no_run_yet(capsys: Captured) -> None:
    assert liver("list") == 0
    assert capsys.readouterr().out == "there is no run under runs yet\n"
    assert liver("list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_newest_is_first_and_latest_is_no_run(capsys: Captured) -> None:
    for name, age_s in (("old", 200), ("new", 0), ("middle", 100)):
        Outcome("finished", "all 10 steps are done", 10).write(make(name, age_s).path)
    point_latest(RunDirectory(RUNS / "new"))
    (RUNS / "no-run").mkdir()
    assert liver("list") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "name", "state", "step", "layout", "workers", "last", "step", "started"
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["new", "middle", "old"]
    assert rows[0].split()[1:9] == ["finished", "10", "of", "10", "tp2", "dp2", "4", "-"]


def test_a_run_that_trains_is_as_far_as_its_journal() -> None:
    run = make("one")
    coordinated_by(run, os.getpid(), socket.gethostname())
    assert (only().state, only().step) == ("training", 5)  # of world.json: no step is recorded yet
    line = step_done(0, 6, 1001.0)
    (run.path / JOURNAL_FILE).write_bytes(line + encode(1, 1002.0, {"type": "tick"}) + line[:20])
    os.utime(run.path / JOURNAL_FILE, (5002.0,) * 2)  # the machine has slept since it began
    found = only()
    assert (found.state, found.step, found.steps) == ("training", 7, 10)
    assert (found.layout, found.workers, found.last_step_s) == ("tp2 pp1 dp2", 4, 5001.0)


def test_of_a_long_journal_the_tail_alone_is_read() -> None:
    run = make("one")
    coordinated_by(run, os.getpid(), socket.gethostname())
    many = b"".join(step_done(n, n, 1.0) for n in range(10_000))
    # What lies before the tail would be an error to whoever read it.
    (run.path / JOURNAL_FILE).write_bytes(b"damaged\n" * 100 + many)
    assert only().step == 10_000


def test_a_damaged_journal_does_not_stop_the_list() -> None:
    run = make("one")
    coordinated_by(run, os.getpid(), "")
    (run.path / JOURNAL_FILE).write_bytes(step_done(0, 6, 1.0).replace(b'"step":6', b'"step":9'))
    assert (only().state, only().step) == ("training", 5)


def test_before_the_first_world_it_starts() -> None:
    run = make("one", trains=False)
    coordinated_by(run, os.getpid(), "")
    found = only()
    assert (found.state, found.step, found.layout) == ("starting", None, None)


def test_a_coordinator_that_is_gone_is_lost() -> None:
    run = make("one")
    coordinated_by(run, dead_process(), socket.gethostname())
    assert only().state == "lost"
    assert "is gone and left no outcome" in only().reason


def test_a_local_run_whose_job_lives_has_a_coordinator_to_come() -> None:
    run = make("one", trains=False)
    run.note_job_id(str(os.getpid()))
    assert only().state == "starting"
    run.note_job_id(str(dead_process()))
    assert only().state == "lost"


def test_a_coordinator_elsewhere_cannot_be_seen() -> None:
    coordinated_by(make("one"), 1, "n1")
    assert (only().state, only().reason) == ("unknown", "its coordinator is process 1 on n1")


@pytest.mark.parametrize(
    ("jobs", "state"),
    [
        ({"7": ("PENDING", "Resources")}, "waiting for Slurm"),
        ({"7": ("RUNNING", "None")}, "training"),
        ({}, "lost"),
        ({"7": ("RUNNING", "None", "another")}, "lost"),
    ],
)
def test_slurm_is_asked_once_for_all_runs(
    jobs: dict[str, tuple[str, ...]], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(self: SlurmCommands, ids: list[str]) -> dict[str, JobInfo]:
        asked.append(ids)
        return {
            job: JobInfo(job, None, *said[:2], ("n1",), None, *(said[2:] or ["mine"]))
            for job, said in jobs.items()
        }

    monkeypatch.setattr(SlurmCommands, "jobs", answer)
    for name in ("one", "two"):
        run = make(name, kind="slurm")
        run.note_job_id("7", "mine")
        coordinated_by(run, 1, "n1")
    Outcome("failed", "why", 3).write(make("over", kind="slurm").path)
    states = {run.name: run.state for run in list_runs.list_runs(RUNS)[0]}
    assert states == {"one": state, "two": state, "over": "failed"}
    assert asked == [["7", "7"]]


def test_of_another_clusters_job_nothing_is_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmCommands, "jobs", lambda self, ids: {})
    monkeypatch.setattr(SlurmCommands, "setting", lambda self, name: "daint")
    run = make("one", kind="slurm")
    run.note_job_id("7", "mine")
    OwnJob(job_id="7", cluster="alps").note(run.path)
    assert only().state == "unknown"
    assert "its job 7 is one of cluster alps, and here is daint" in only().reason


def test_a_slurm_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: SlurmCommands, ids: list[str]) -> dict[str, JobInfo]:
        raise SlurmError(["squeue"], 1, "no")

    monkeypatch.setattr(SlurmCommands, "jobs", silent)
    make("one", kind="slurm", trains=False).note_job_id("7")
    assert only().state == "unknown"
    assert only().reason == "Slurm does not say what became of job 7"


def test_a_run_that_was_queued_again_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = {"7": JobInfo("7", None, "PENDING", "None", (), None)}
    monkeypatch.setattr(SlurmCommands, "jobs", lambda self, ids: pending)
    run = make("one", kind="slurm")
    run.note_job_id("7")
    Outcome("requeue", "its job is about to end", 5).write(run.path)
    assert only().state == "waiting for Slurm"


def test_of_a_run_that_was_cancelled_in_the_queue_its_last_word_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlurmCommands, "jobs", lambda self, ids: {})
    run = make("one", kind="slurm")
    run.note_job_id("7")
    Outcome("requeue", "its job is about to end", 5).write(run.path)
    word = "requeue at step 5: its job is about to end"
    said = f"its job 7 is over and was to be queued again ({word}); `liver submit --resume` goes on"
    assert (only().state, only().reason) == ("lost", said)
    assert f"run {run}: {said}; its logs are" in str(gone(run, job_of(run)))


def test_a_damaged_file_is_told_of_its_run_alone() -> None:
    (make("one").path / "outcome.json").write_text("{}")
    (make("a-directory").path / "outcome.json").mkdir()
    make("no-text", trains=False).config_path.write_bytes(b"\xff")
    make("no-yaml", trains=False).config_path.write_bytes(b"\0")
    make("no-number").job_id_path.write_text("seven")
    Outcome("stopped", "asked to", 3).write(make("two").path)
    runs = {run.name: run for run in list_runs.list_runs(RUNS)[0]}
    assert (runs.pop("two").state, len(runs)) == ("stopped", 5)
    for run in runs.values():
        assert run.state == "damaged"
        assert f"runs/{run.name}/" in run.reason


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_where_a_run_is_to_run_is_found_in_what_is_dumped(kind: str) -> None:
    """Without reading all of it."""
    run = make("one", kind=kind)
    text = dump_run(run.config())
    assert list_runs._KIND.findall(text) == [kind]


def test_a_directory_that_cannot_be_listed(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").touch()
    assert liver("list", "--runs-directory", "file") == 2
    assert "file: Not a directory" in capsys.readouterr().err
