"""A job that goes on without its batch script."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from liver_hpc.cluster.slurm import orphaned
from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.cluster.slurm.orphaned import (
    begin_coordinator,
    end_without_script,
    note_environment,
    script_environment,
    warn_of_the_end,
)
from liver_hpc.errors import LiverError
from liver_hpc.run.directory import RunDirectory, create_run_directory
from liver_hpc.run.epoch import claim_epoch
from liver_hpc.run.outcome import Outcome
from tests.unit.config.runs import minimal

JOB = (
    "JobId=77 JobName=a b JobState={state} Requeue=1 BatchFlag={batch} ReqNodeList=(null) "
    "NodeList={nodes} BatchHost=n1 NumNodes=2\nJobId=78 JobState=RUNNING BatchFlag=0 NodeList=n9\n"
)
WHOLE = JOB.format(state="RUNNING", batch=1, nodes="n[1-3]")
LOST = JOB.format(state="RUNNING", batch=1, nodes="n[2-3]")


TOLD = {
    "SLURM_JOB_ID": "77",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "77",
    "SLURM_JOB_ID_HET_GROUP_1": "78",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n9",
}
LED = "77.1|liver-coordinator-2\n"


class Slurm:
    """Plays what `scontrol show job` and `squeue --steps` say, one after the other, the last for
    ever."""

    state = "mixed"  # of the batch script's node

    def __init__(self, *jobs: str, steps: Sequence[str] = ("",)) -> None:
        self.jobs = list(jobs)
        self.steps = list(steps)
        self.done: list[Sequence[str]] = []

    def __call__(self, words: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        said = ""
        if words[-2:] == ["show", "config"]:
            said = "SlurmdTimeout           = 300 sec\n"
        elif "hostnames" in words:
            said = {"n[1-3]": "n1\nn2\nn3\n", "n[2-3]": "n2\nn3\n"}[words[-1]]
        elif words[0] == "sinfo":
            said = f"n1|{self.state}|\n"
        elif "--steps" in words:
            said = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        elif "step" in words:
            said = "No steps"
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


def done(run: RunDirectory, *jobs: str, steps: Sequence[str] = ("",)) -> list[Sequence[str]]:
    slurm = Slurm(*jobs, steps=steps)
    end_without_script(run.path, SlurmCommands(5.0, 0.0, run=slurm))
    return slurm.done


def test_it_is_queued_again_once_slurm_has_dropped_the_scripts_node(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which it may take SlurmdTimeout, 300 s here."""
    monkeypatch.setattr(orphaned, "_MARGIN_S", -270.0)
    assert done(run, WHOLE, WHOLE, LOST) == [["scontrol", "requeue", "77"]]


def test_so_it_is_where_its_script_could_not_be_launched_at_first(run: RunDirectory) -> None:
    again = JOB.format(state="RUNNING", batch=2, nodes="n[2-3]")
    assert done(run, again) == [["scontrol", "requeue", "77"]]


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
    """Nobody else ends it."""
    Outcome("finished", "", 7).write(run.path)
    assert done(run, WHOLE, LOST, steps=(LED,)) == [["scancel", "77"]]


def test_a_job_is_left_alone_while_a_step_of_it_has_the_coordinator(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This agent alone was cut off from it. One that was begun by hand may have any name."""
    assert done(run, LOST, steps=(LED, LED, "")) == [["scontrol", "requeue", "77"]]
    monkeypatch.setattr(orphaned, "_MARGIN_S", -300.0)
    assert done(run, LOST, steps=(LED,)) == []
    signs = iter([(2, 1), (2, 2), (2, 2)])
    monkeypatch.setattr(orphaned, "last_sign", lambda path: next(signs))
    monkeypatch.setattr(orphaned, "_MARGIN_S", 60.0)
    assert done(run, LOST) == [["scontrol", "requeue", "77"]]
    assert next(signs, None) is None


@pytest.mark.parametrize(("state", "lost"), [("allocated+not_responding", True), ("mixed", False)])
def test_a_run_that_has_ended_leaves_no_job_whose_script_does_not_answer(
    run: RunDirectory, state: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm drops its node later, or never. Who has not led it to its end waits for that."""
    monkeypatch.setattr(Slurm, "state", state)
    monkeypatch.setattr(orphaned, "_MARGIN_S", -300.0)
    assert done(run, WHOLE) == []
    Outcome("finished", "", 7).write(run.path)
    assert done(run, WHOLE) == ([["scancel", "77"]] if lost else [])


def on_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, node: str, job: str = "77") -> Path:
    """In a step there, where srun writes down what it is told. Returns that file's path."""
    told = tmp_path / f"srun-{node}"
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir(exist_ok=True)
    lines = f'printf "%s\\n" "$@" "$LIVER_STEP" > {told}.part; mv {told}.part {told}'
    srun.write_text(f"#!/bin/sh\n{lines}\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURMD_NODENAME", node)
    monkeypatch.setenv("LIVER_STEP", "liver-a1")  # of the agent
    monkeypatch.setattr(orphaned, "_AGAIN_S", 0.1)
    return told


@pytest.fixture
def het(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose first coordinator is number 1."""
    monkeypatch.chdir(tmp_path)
    slurm = {"components": [{"name": "main"}, {"name": "spare", "gpus_per_node": 2}]}
    run = create_run_directory(minimal(cluster={"kind": "slurm", "slurm": slurm}))
    run.note_job_id("77", run.path.name)
    note_environment(run, {**TOLD, "HOME": "/root", "SLURM_STEP_ID": "0"})
    claim_epoch(run.path)
    return RunDirectory(run.path.absolute())  # as threads outlive the test


def test_the_first_agent_that_misses_the_coordinator_has_another_one_begin(
    het: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a step on its own node, of the component that this one is in; and no other agent does."""
    told = on_node(monkeypatch, tmp_path, "n9")
    assert begin_coordinator(het.path, 1)
    _await(told)
    words = told.read_text().split()
    assert {"--jobid=77", "--het-group=1", "--nodelist=n9", "--overlap"} <= {*words}
    assert "--gres=none" in words  # the workers of that node have its GPUs
    assert words[-6:-1] == ["-m", "liver_hpc", "coordinate", "--script-lost", str(het)]
    assert words[-1] == "liver-coordinator-2"  # who kills what the agent has started spares it
    told.unlink()
    _await(told)  # it did not begin
    (log := het.path / "logs" / "srun-coordinator-2.log").unlink()
    log.mkdir()
    _await_that(lambda: str(log) in caplog.text)  # srun could not be started
    log.rmdir()
    told.unlink(missing_ok=True)
    _await(told)
    on_node(monkeypatch, tmp_path, "n1")
    assert not begin_coordinator(het.path, 1)
    claim_epoch(het.path)
    assert begin_coordinator(het.path, 1)  # that one is gone, too
    claim_epoch(het.path)


BEGINS = """
import os, signal, sys, time
from pathlib import Path
from liver_hpc.cluster.slurm.orphaned import begin_coordinator
assert begin_coordinator(Path(sys.argv[1]), 1)
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
os.killpg(0, signal.SIGKILL)
"""


def test_it_outlives_the_agent_that_has_begun_it(
    het: RunDirectory, repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which ends as soon as its node is given back, and with all of its group if it is killed."""
    told, srun = on_node(monkeypatch, tmp_path, "n9"), tmp_path / "bin" / "srun"
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    waits = f"touch {begun}\nwhile [ ! -e {go_on} ]; do sleep 0.05; done\n"
    srun.write_text(srun.read_text().replace("\n", f"\n{waits}", 1))
    monkeypatch.setenv("PYTHONPATH", str(repository))
    words = [sys.executable, "-c", BEGINS, str(het.path), str(begun)]
    agent = subprocess.run(words, timeout=60.0, start_new_session=True, check=False)
    go_on.touch()
    assert agent.returncode == -signal.SIGKILL
    _await(told)


def test_it_begins_by_the_hosts_python(
    het: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An agent in an image has another one, at a path that the host may lack."""
    file = het.path / orphaned.ENVIRONMENT_FILE
    noted = json.loads(file.read_bytes())
    assert noted["LIVER_PYTHON"] == sys.executable
    file.write_text(json.dumps({**noted, "LIVER_PYTHON": "/host/python"}))
    told = on_node(monkeypatch, tmp_path, "n9")
    assert begin_coordinator(het.path, 1)
    _await(told)
    claim_epoch(het.path)
    words = told.read_text().split()
    assert words[words.index("-u") - 2 :][:2] == ["/host/python", "-P"]


def _await(path: Path) -> None:
    _await_that(path.exists)


def _await_that(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_none_begins_where_it_would_be_of_no_use(
    het: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a burst node, without srun, after the run's end, where the lost node makes all steps."""
    on_node(monkeypatch, tmp_path, "n40", job="90")
    assert not begin_coordinator(het.path, 1)
    on_node(monkeypatch, tmp_path, "n9")
    monkeypatch.setenv("SLURM_STEPMGR", "n1")
    with pytest.raises(LiverError, match="the steps of this job are made by n1"):
        begin_coordinator(het.path, 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not begin_coordinator(het.path, 1)
    on_node(monkeypatch, tmp_path, "n1")
    Outcome("stopped", "", 7).write(het.path)
    assert not begin_coordinator(het.path, 1)


def test_what_the_script_was_told_is_for_steps_of_that_job(het: RunDirectory) -> None:
    assert (het.path / orphaned.ENVIRONMENT_FILE).stat().st_mode & 0o777 == 0o600
    assert script_environment(het, {"SLURM_JOB_ID": "77"}) == TOLD
    assert script_environment(het, {"SLURM_JOB_ID": "78"}) == TOLD
    assert script_environment(het, {"SLURM_JOB_ID": "90"}) == {}
    assert script_environment(het, {}) == {}
    (het.path / orphaned.ENVIRONMENT_FILE).unlink()
    assert script_environment(het, {"SLURM_JOB_ID": "77"}) == {}


def test_a_step_is_signalled_before_the_job_ends(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the window begins, and whether or not Slurm answers at first."""
    heard = threading.Event()
    asked: list[float] = []
    began_s = time.time()

    class Info:
        ends_s = began_s + 2.0

    class Commands:
        def __init__(self, *times_s: float) -> None:
            pass

        def jobs(self, ids: Sequence[str]) -> dict[str, Info]:
            asked.append(time.time())
            if len(asked) == 1:
                raise SlurmError(["squeue"], 1, "no")
            return dict.fromkeys(ids, Info())

    monkeypatch.setattr(orphaned, "SlurmCommands", Commands)
    monkeypatch.setattr(orphaned, "_LOOK_S", 0.1)
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        slurm = run.config().cluster.slurm.model_copy(update={"end_window_s": 1.0})
        warn_of_the_end(slurm, "77")
        assert heard.wait(10.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.time() - began_s > 0.9
