"""`liver run` with a stand-in for the coordinator, and commands of Slurm that are played."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from liver_hpc.cli import launch
from liver_hpc.cli import main as cli
from liver_hpc.cli.launch import JobSignals, run_here
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import ConfigError
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.outcome import Outcome
from tests.unit.config.runs import MINIMAL, write_minimal
from tests.unit.standin import StandIn, sitecustomize_in

LIMIT_S = 60.0
SLURM = {"components": [{"name": "main", "nodes": 4}], "end_window_s": 30.0}

# Notes its words; squeue says that the job ends in 8 s.
PLAYED = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
test "$(basename $0)" != squeue || echo "77|77|RUNNING|None|$(($(date +%s) + 8))|n1|liver"
"""


@pytest.fixture(autouse=True)
def _with_the_standin(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{repository}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    sitecustomize_in(tmp_path, repository)


@pytest.fixture
def in_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As if in job 77; what was asked of Slurm. Signal handlers are as before afterwards."""
    log = tmp_path / "asked"
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scontrol"):
        (programs / name).write_text(PLAYED.format(log=log))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NAME", "liver")
    numbers = (*launch._END_SIGNALS, *launch._STOP_SIGNALS, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield log
    for number, handler in before.items():
        signal.signal(number, handler)


class Here:
    """`liver run` in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "liver_hpc", "run", "--config", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def await_coordinator(self, run: Callable[[], Path]) -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "the coordinator")
        poll_until(lambda: (run() / "coordinator.json").exists(), deadline)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """The exit code after a signal, and what was printed."""
        self.process.send_signal(number)
        shown, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, shown


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Here]]:
    lives: list[Here] = []

    def start(**cluster: Any) -> Here:
        lives.append(Here(write_minimal(tmp_path, cluster=cluster)))
        return lives[-1]

    yield start
    for here in lives:
        here.process.kill()
        here.process.wait()


def only_run() -> Path:
    found = list(Path("runs").glob("run-*"))
    return found[0] if found else Path("nowhere")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGINT, signal.SIGUSR2)),
    ],
)
def test_outside_of_a_job_every_signal_stops_the_run(
    started: Callable[..., Here], number: signal.Signals
) -> None:
    here = started(kind="local")
    here.await_coordinator(only_run)
    code, shown = here.end(number)
    run = only_run()
    assert shown == f"run {run}\nrun {run}: stopped at step 7: {number.name}\n"
    assert code == cli.EXIT_OK
    assert Path("runs/latest").resolve() == run.resolve()


def test_how_its_coordinator_ends_is_heard_where_whoever_starts_it_ignores_children(
    started: Callable[..., Here],
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a new process has it likewise
    try:
        here = started(kind="local")
    finally:
        signal.signal(signal.SIGCHLD, before)
    here.await_coordinator(only_run)
    code, shown = here.end(signal.SIGTERM)
    assert shown.endswith(": stopped at step 7: SIGTERM\n")
    assert code == cli.EXIT_OK


def test_a_job_that_is_about_to_end_is_queued_again_and_goes_on(
    started: Callable[..., Here], in_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    run = Path("runs/run-77")
    here = started(kind="auto", slurm=SLURM)
    here.await_coordinator(lambda: run)
    began_s = time.monotonic()
    code, shown = here.end(signal.SIGUSR1)
    assert time.monotonic() - began_s < 8.0
    assert code == cli.EXIT_OK
    assert shown == f"run {run}\nrun {run} goes on when its job starts again\n"
    assert in_job.read_text().splitlines()[-1] == "scontrol requeue 77"
    assert json.loads((run / "outcome.json").read_text())["state"] == "requeue"
    assert RunDirectory(run).job_id() == "77"
    assert RunDirectory(run).job_name() == "liver"

    # The run file may have changed meanwhile.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_START_TIME", "2000")
    before = (run / "run.yaml").read_bytes()
    again = started(kind="slurm", slurm={**SLURM, "poll_s": 9.0})
    again.await_coordinator(lambda: run)
    code, shown = again.end(signal.SIGTERM)
    changed = f"as it began: {tmp_path / 'run.yaml'} was changed"
    assert shown == f"run {run} goes on, {changed}\nrun {run}: stopped at step 7: SIGTERM\n"
    assert code == cli.EXIT_OK
    assert (run / "run.yaml").read_bytes() == before
    assert yaml.safe_load(before)["cluster"]["kind"] == "slurm"


@pytest.fixture
def in_array(in_job: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Job 77 is task 4 of array 77."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    return in_job


def test_of_a_job_array_one_task_alone_is_queued_again(
    started: Callable[..., Here], in_array: Path
) -> None:
    here = started(kind="local")
    here.await_coordinator(lambda: Path("runs/run-77"))
    code, shown = here.end(signal.SIGUSR1)
    assert (code, shown.splitlines()[-1]) == (
        0,
        "run runs/run-77 goes on when its job starts again",
    )
    assert in_array.read_text().splitlines()[-1] == "scontrol requeue 77_4"


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_the_job_from_within_which_this_one_was_submitted_is_left_alone(
    kind: str, started: Callable[..., Here], in_array: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "91")
    here = started(kind=kind, slurm=SLURM)
    here.await_coordinator(lambda: Path("runs/run-91"))
    assert here.end(signal.SIGUSR1)[0] == 0
    assert in_array.read_text().splitlines()[-1] == "scontrol requeue 91"


@pytest.mark.parametrize("kind", ["slurm", "auto"])
def test_a_run_on_slurm_is_no_task_of_a_job_array(
    kind: str, in_array: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_minimal(tmp_path, cluster={"kind": kind, "slurm": SLURM})
    assert cli.main(["run", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert "task 77_4 of a job array, and what" in said
    assert "a loop of `liver submit`" in said
    assert not Path("runs").exists()


def test_a_job_whose_state_is_not_on_disk_in_time_is_queued_again_all_the_same(
    started: Callable[..., Here], in_job: Path, tmp_path: Path, repository: Path
) -> None:
    there = 'pathlib.Path(run_directory, "coordinator.json").write_text("{}")'
    sitecustomize_in(tmp_path, repository, f"import pathlib, time; {there}; time.sleep(60.0)")
    run = Path("runs/run-77")
    here = started(kind="auto", slurm={**SLURM, "end_window_s": 2.0})
    here.await_coordinator(lambda: run)
    code, shown = here.end(signal.SIGUSR1)
    assert code == cli.EXIT_OK
    assert shown == f"run {run}\nrun {run} goes on when its job starts again\n"
    assert in_job.read_text().splitlines()[-1] == "scontrol requeue 77"
    assert not (run / "outcome.json").exists()


def test_a_job_that_may_not_be_queued_again_is_not(
    started: Callable[..., Here], in_job: Path
) -> None:
    here = started(kind="auto", slurm={**SLURM, "requeue": False})
    here.await_coordinator(lambda: Path("runs/run-77"))
    code, shown = here.end(signal.SIGUSR1)
    assert code == cli.EXIT_OK
    assert "requeue at step 7: its job is about to end" in shown
    assert "scontrol" not in in_job.read_text()


def test_a_job_that_may_not_be_queued_again_fails_when_its_window_was_too_short(
    started: Callable[..., Here], in_job: Path, tmp_path: Path, repository: Path
) -> None:
    there = 'pathlib.Path(run_directory, "coordinator.json").write_text("{}")'
    sitecustomize_in(tmp_path, repository, f"import pathlib, time; {there}; time.sleep(60.0)")
    run = Path("runs/run-77")
    here = started(kind="auto", slurm={**SLURM, "requeue": False, "end_window_s": 2.0})
    here.await_coordinator(lambda: run)
    code, shown = here.end(signal.SIGUSR1)
    assert code == cli.EXIT_FAILED
    reason = "its job's time was up before its state was on disk"
    assert f"run {run}: failed at step 0: {reason}\n" in shown
    assert "scontrol" not in in_job.read_text()
    assert not (run / "coordinator.json").exists()


@pytest.mark.parametrize(
    ("state", "reason"), [("finished", ""), ("stopped", "an operator's request; checkpoint of 10")]
)
def test_a_run_that_is_over_for_good_is_not_begun_again(
    state: str,
    reason: str,
    in_job: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = Path("runs/run-77")
    run.mkdir(parents=True)
    path = write_minimal(tmp_path)
    (run / "run.yaml").write_text(yaml.safe_dump(MINIMAL))
    outcome = Outcome(state, reason, 10)
    outcome.write(run)
    assert cli.main(["run", "--config", str(path)]) == 0
    assert capsys.readouterr().out == f"run {run} goes on\nrun {run}: {outcome}\n"


def test_a_new_job_of_an_old_id_does_not_go_on_with_the_old_run(
    started: Callable[..., Here], in_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    for name in ("run-77", "run-77-2"):
        run = Path("runs") / name
        here = started(kind="auto", slurm=SLURM)
        here.await_coordinator(lambda run=run: run)
        assert here.end(signal.SIGTERM)[1].startswith(f"run {run}\n")
        monkeypatch.setenv("SLURM_JOB_START_TIME", "2000")

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # of the second
    monkeypatch.setenv("SLURM_JOB_START_TIME", "3000")
    here = started(kind="auto", slurm=SLURM)
    here.await_coordinator(lambda: Path("runs/run-77-2"))
    assert here.end(signal.SIGTERM)[1].startswith("run runs/run-77-2 goes on\n")


def test_a_slurm_run_wants_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_minimal(tmp_path, cluster={"kind": "slurm", "slurm": SLURM})
    assert cli.main(["run", "--config", str(path)]) == cli.EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert "cluster slurm: `liver run` belongs into a Slurm job" in said
    assert not Path("runs").exists()


# ---- several in one job

Runs = Callable[..., str]


@pytest.fixture
def runs(in_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """`liver run` with overrides in this process, of a run that is over at once: its directory."""
    monkeypatch.setattr(JobSignals, "coordinate", lambda signals, run: Outcome("finished", "", 10))

    def run(*overrides: str, **changed: Any) -> str:
        path = tmp_path / "run.yaml"
        if changed or not path.exists():
            write_minimal(tmp_path, **changed)
        return run_here(path, overrides)[0].path.name

    return run


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The job is queued again, and starts."""

    def start() -> None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        monkeypatch.setenv("SLURM_JOB_START_TIME", "2000")

    return start


SWEEP = ["optimizer.lr=3e-3", "optimizer.lr=2e-3", "optimizer.lr=1e-3"]
DIRECTORIES = ["run-77", "run-77-2", "run-77-3"]


def test_each_request_of_a_job_is_a_run_and_finds_its_own_again(
    runs: Runs, again: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [runs(lr) for lr in SWEEP[:2]] == DIRECTORIES[:2]
    rates = [RunDirectory(Path("runs") / name).config().optimizer.lr for name in DIRECTORIES[:2]]
    assert rates == [3e-3, 2e-3]
    assert runs(SWEEP[0]) == "run-77"
    again()
    capsys.readouterr()
    assert [runs(lr) for lr in SWEEP] == DIRECTORIES
    shown = capsys.readouterr()
    lines = ["run runs/run-77 goes on", "run runs/run-77-2 goes on", "run runs/run-77-3"]
    assert shown.out.splitlines() == lines
    assert shown.err.count("job 77 was queued again, but began no run by this request before") == 1


def test_a_job_goes_on_with_its_run_and_not_with_a_later_copy_of_that(
    runs: Runs, again: Callable[[], None]
) -> None:
    assert runs() == "run-77"
    shutil.copytree("runs/run-77", "runs/run-77-before", copy_function=shutil.copyfile)
    os.utime("runs/run-77/job.json", (1000.0, 1000.0))
    again()
    assert runs() == "run-77"
    Path("runs/run-77").rename("runs/run-77-again")  # whoever renames it has it go on
    shutil.rmtree("runs/run-77-before")
    assert runs() == "run-77-again"


def test_a_run_file_that_a_script_writes_anew_is_a_request_of_its_own(
    runs: Runs, again: Callable[[], None]
) -> None:
    for _ in range(2):
        names = [runs(train={"steps": steps, "global_batch": 8}) for steps in (10, 20, 30)]
        assert names == DIRECTORIES
        again()


@pytest.mark.parametrize("changed", [{"name": "other"}, {"train": {"steps": "bad"}}])
def test_a_job_that_was_queued_again_goes_on_whatever_the_run_file_says_by_now(
    changed: dict[str, Any],
    runs: Runs,
    again: Callable[[], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert runs() == "run-77"
    again()
    capsys.readouterr()
    assert runs(**changed) == "run-77"
    changed_line = f"as it began: {tmp_path / 'run.yaml'} was changed"
    assert capsys.readouterr().out == f"run runs/run-77 goes on, {changed_line}\n"
    assert runs() == "run-77"  # of this text, in this start


def test_a_job_finds_its_run_where_an_override_has_put_it(
    runs: Runs, again: Callable[[], None]
) -> None:
    given = ["runs_directory=elsewhere", "name=other"]
    assert runs(*given) == "other-77"
    again()
    assert runs(*given) == "other-77"
    assert [run.name for run in Path("elsewhere").glob("*-77*")] == ["other-77"]


@pytest.mark.parametrize("given", ["5", "~nobody-of-that-name/runs"])
def test_a_directory_of_runs_that_is_none_is_told(given: str, runs: Runs) -> None:
    with pytest.raises(ConfigError, match="--set runs_directory"):
        runs(f"runs_directory={given}")


def test_by_its_name_where_an_earlier_release_noted_the_job(
    runs: Runs, again: Callable[[], None]
) -> None:
    assert runs() == "run-77"
    note = Path("runs/run-77/job.json")
    noted = json.loads(note.read_text())
    note.write_text(json.dumps({key: noted[key] for key in ("job_id", "cluster", "started")}))
    again()
    assert runs("train.steps=20") == "run-77"
    assert runs("train.steps=30") == "run-77-2"


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_no_request_takes_a_run_over_that_is_under_way(
    kind: str, runs: Runs, again: Callable[[], None]
) -> None:
    runs(cluster={"kind": kind, "slurm": SLURM})
    with StandIn(Path("runs/run-77")):
        with pytest.raises(ConfigError, match=r"run runs/run-77 of this job, 77, is under way"):
            runs()
        if kind == "slurm":
            with pytest.raises(ConfigError, match=r"run runs/run-77 of this job, 77, is under"):
                runs("train.steps=20")
        else:
            assert runs("train.steps=20") == "run-77-2"
        again()  # what an earlier start has left behind may answer still
        assert runs() == "run-77"


@pytest.mark.parametrize(
    ("kind", "other", "refused"),
    [("local", [], True), ("local", ["name=b"], False), ("slurm", ["name=b"], True)],
)
def test_of_two_that_start_side_by_side_the_second_is_refused(
    kind: str, other: list[str], refused: bool, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them has a coordinator yet that could answer."""
    said = list[str]()

    def beside(signals: JobSignals, run: RunDirectory) -> Outcome:
        monkeypatch.setattr(JobSignals, "coordinate", lambda signals, run: Outcome("", "", 0))
        try:
            said.append(runs(*other))
        except ConfigError as error:
            said.append(str(error))
        return Outcome("finished", "", 10)

    monkeypatch.setattr(JobSignals, "coordinate", beside)
    runs(cluster={"kind": kind, "slurm": SLURM})
    assert ("another `liver run` of job 77 is under way" in said[0]) == refused
    assert (said == ["b-77"]) != refused
    assert runs() == "run-77"


def test_one_task_of_a_step_alone_runs_a_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert runs() == "run-77"
    monkeypatch.setenv("SLURM_PROCID", "1")
    for command in (["run", "--config", "run.yaml"], ["coordinate", "run-77"]):
        assert cli.main(command) == cli.EXIT_BAD_INPUT
        said = capsys.readouterr().err
        assert "this is task 1 of a step (SLURM_PROCID)" in said
        assert "without srun, or by `srun -n1`" in said
