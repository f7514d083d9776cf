"""What a Slurm job of submitit's runs, with a coordinator and commands of Slurm that are played."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from liver_hpc.cli import launch
from liver_hpc.cli.launch import CoordinatorJob, JobSignals, coordinate_here, coordinate_locally
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.orphaned import note_environment, script_environment
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.cluster.slurm.run_job import OwnJob
from liver_hpc.config.schema import SlurmSection
from liver_hpc.coordinator import hosting
from liver_hpc.coordinator.connections import Control, Inbox
from liver_hpc.coordinator.hosting import MOST_KILLED_IN_VAIN, HostedCoordinator, _told
from liver_hpc.errors import LiverError
from liver_hpc.recipes import specs
from liver_hpc.recipes.base import load_recipe
from liver_hpc.run.directory import RunDirectory, create_run_directory
from liver_hpc.run.epoch import NotTakenOver, Superseded, claim_epoch, newest_epoch
from liver_hpc.run.events import StopSignalled
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome
from tests.unit.cli.test_run_here import PLAYED
from tests.unit.config.runs import minimal

OUT_OF_TIME = Outcome("failed", "its job's time was up before its state was on disk", 0)
LIMIT_S = 10.0
Ends = Callable[[Path], Outcome | None]
Coordinator = Callable[[Ends], None]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made in the working directory, as runs are, is not made in the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    """Puts a function of the run directory in the place of the coordinator."""

    def put(ends: Ends) -> None:
        module = types.ModuleType("liver_hpc.coordinator.main")
        vars(module)["run_coordinator"] = lambda directory, control: ends(directory)
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
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_TASK_PID", str(os.getpid()))
    numbers = (*launch._END_SIGNALS, *launch._STOP_SIGNALS, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield log
    for number, handler in before.items():
        signal.signal(number, handler)


def a_run(requeue: bool, end_window_s: float = 0.2, **given: Any) -> RunDirectory:
    slurm = {"components": [{"name": "main"}], "requeue": requeue, "end_window_s": end_window_s}
    return create_run_directory(minimal(cluster={"kind": "slurm", "slurm": slurm}, **given))


def ends_as(state: str, reason: str = "so it was") -> Ends:
    """On a disk that is full: there is no file that says so."""
    return lambda directory: Outcome(state, reason, 3)


@pytest.fixture
def hangs() -> Iterator[Ends]:
    """A coordinator that does not end by itself, in a job that is told of its end."""
    over = threading.Event()

    def run(directory: Path) -> Outcome | None:
        (directory / "coordinator.json").write_text("{}")
        os.kill(os.getppid(), signal.SIGUSR2)
        over.wait(LIMIT_S)
        return None

    yield run
    over.set()


def test_a_coordinator_that_is_killed_is_followed_by_another_one(
    coordinator: Coordinator, asked: Path
) -> None:
    def ends(directory: Path) -> Outcome:
        lives = sorted(directory.glob("life-*"))
        (directory / f"life-{len(lives)}").touch()
        if len(lives) < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome("finished", "at last", 3)

    coordinator(ends)
    run = a_run(requeue=True)
    assert CoordinatorJob()(str(run.path)) == 0
    assert len([*run.path.glob("life-*")]) == 3


@pytest.mark.parametrize("way", ["unread", "stale"])
def test_it_is_followed_where_nobody_reads_what_is_printed_or_the_disk_errs_once(
    coordinator: Coordinator, asked: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def ends(directory: Path) -> Outcome:
        lives = sorted(directory.glob("life-*"))
        (directory / f"life-{len(lives)}").touch()
        if not lives:
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome("finished", "at last", 3)

    coordinator(ends)
    run = a_run(requeue=True)
    monkeypatch.setattr(
        hosting, "newest_epoch", stale(newest_epoch, call=2 if way == "stale" else 0)
    )
    with contextlib.ExitStack() as stack:
        if way == "unread":
            monkeypatch.setattr(sys, "stderr", stack.enter_context(unread()))
        assert CoordinatorJob()(str(run.path)) == 0
    assert len([*run.path.glob("life-*")]) == 2


def test_one_that_was_superseded_looks_again_for_the_end_behind_an_error_of_the_disk(
    coordinator: Coordinator, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(directory: Path) -> Outcome:
        Outcome("finished", "by the other one", 3).write(directory)
        raise Superseded(1)

    def answers(run: RunDirectory) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    coordinator(ends)
    run = a_run(requeue=True)
    hosted = HostedCoordinator(run.path)
    hosted.start()
    monkeypatch.setattr(launch, "answers", answers)
    monkeypatch.setattr(launch, "_ASK_EVERY_S", 0.05)
    monkeypatch.setattr(RunDirectory, "last_outcome", stale(RunDirectory.last_outcome, call=1))
    launch._wait_for_the_end(hosted, run)
    assert hosted.outcome == Outcome("finished", "by the other one", 3)


def stale(ask: Callable[[Any], Any], call: int) -> Callable[[Any], Any]:
    """`ask`, one of whose calls has an error of NFS's."""
    calls = itertools.count(1)

    def asked(of: Any) -> Any:
        if next(calls) == call:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return ask(of)

    return asked


def unread() -> io.TextIOWrapper:
    """What is written there has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)


def test_one_that_could_not_take_over_is_followed_by_another_one_a_little_later(
    coordinator: Coordinator, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "_AGAIN_S", 0.2)

    def ends(directory: Path) -> Outcome:
        lives = sorted(directory.glob("life-*"))
        (directory / f"life-{len(lives)}").touch()
        if len(lives) < 2:
            raise NotTakenOver("No space left on device")
        return Outcome("finished", "at last", 3)

    coordinator(ends)
    run, began_s = a_run(requeue=True), time.monotonic()
    assert CoordinatorJob()(str(run.path)) == 0
    assert len([*run.path.glob("life-*")]) == 3
    assert time.monotonic() - began_s > 0.4


def test_one_that_is_killed_behind_its_outcome_is_followed_by_none(
    coordinator: Coordinator, asked: Path
) -> None:
    """Another one would begin the run again, which is over."""

    def ends(directory: Path) -> Outcome:
        claim_epoch(directory)
        (directory / f"life-{len([*directory.glob('life-*')])}").touch()
        Outcome("finished", "all steps are done", 3).write(directory)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    coordinator(ends)
    run = a_run(requeue=True)
    assert CoordinatorJob()(str(run.path)) == 0
    assert len([*run.path.glob("life-*")]) == 1
    assert run.last_outcome() == Outcome("finished", "all steps are done", 3)


def test_one_that_is_killed_again_and_again_is_the_end(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its loop turned each time, without a step done."""

    def ends(directory: Path, control: Control) -> Outcome:
        if len([*directory.glob("life-*")]) > MOST_KILLED_IN_VAIN:
            return Outcome("finished", "once more", 0)
        (directory / f"life-{os.getpid()}").touch()
        control.turns = 1
        time.sleep(0.2)  # the parent is told
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    module = types.ModuleType("liver_hpc.coordinator.main")
    vars(module)["run_coordinator"] = ends
    monkeypatch.setitem(sys.modules, "liver_hpc.coordinator.main", module)
    monkeypatch.setattr(hosting, "_LOOK_S", 0.01)
    run = a_run(requeue=True)
    with pytest.raises(LiverError, match="ended without an outcome"):
        CoordinatorJob()(str(run.path))
    assert len([*run.path.glob("life-*")]) == MOST_KILLED_IN_VAIN + 1


def test_a_job_notes_its_cluster_in_the_run(
    coordinator: Coordinator, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alps")
    coordinator(ends_as("finished"))
    run = a_run(requeue=True)
    assert CoordinatorJob()(str(run.path)) == 0
    noted = OwnJob.noted(run.path)
    assert noted is not None
    assert (noted.job_id, noted.cluster) == ("77", "alps")


def test_one_that_was_superseded_waits_for_the_end_of_the_run(
    coordinator: Coordinator, asked: Path
) -> None:
    def ends(directory: Path) -> Outcome:
        Outcome("finished", "by the other one", 3).write(directory)
        raise Superseded(1)

    coordinator(ends)
    assert CoordinatorJob()(str(a_run(requeue=True).path)) == 0


def test_one_that_was_superseded_ends_when_it_is_told_to(
    coordinator: Coordinator, asked: Path
) -> None:
    """The other one may have been killed: nobody would say how the run has ended."""

    def ends(directory: Path) -> Outcome:
        raise Superseded(1)

    coordinator(ends)
    hosted = HostedCoordinator(a_run(requeue=False).path)
    hosted.start()
    assert not hosted.wait(1.0)
    hosted.stop("SIGTERM")
    assert hosted.wait(1.0)
    assert hosted.outcome is None


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("", "1"), ("8", "8")])
def test_what_is_imported_for_a_coordinator_starts_a_thread_per_core_only_where_asked_to(
    given: str | None, wanted: str, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, given or "")
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    coordinator(lambda directory: Outcome("finished", os.environ["OPENBLAS_NUM_THREADS"], 1))
    hosted = HostedCoordinator(a_run(requeue=False).path)
    hosted.start()
    assert hosted.wait(LIMIT_S)
    assert hosted.outcome == Outcome("finished", wanted, 1)


def test_one_whose_successor_answers_no_more_takes_over_again(
    coordinator: Coordinator, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would: the job would hold its nodes until its time is up."""
    answered = [True, True, False]

    def answers(run: RunDirectory) -> bool:
        return answered.pop(0) if answered else False

    def ends(directory: Path) -> Outcome:
        epoch = claim_epoch(directory)
        if epoch.number == 1:
            claim_epoch(directory)  # the other one's
            raise Superseded(1)
        return Outcome("finished", f"by coordinator {epoch.number}", 3)

    coordinator(ends)
    monkeypatch.setattr(launch, "answers", answers)
    monkeypatch.setattr(launch, "_ASK_EVERY_S", 0.05)
    run = a_run(requeue=True, deadlines={"coordinator_s": 0.4})
    hosted: list[HostedCoordinator] = []
    take_over = HostedCoordinator.take_over
    monkeypatch.setattr(
        HostedCoordinator, "take_over", lambda one: (hosted.append(one), take_over(one))
    )
    assert CoordinatorJob()(str(run.path)) == 0
    assert answered == []
    assert hosted[0].outcome == Outcome("finished", "by coordinator 3", 3)


def test_one_whose_job_was_queued_again_takes_over_from_nobody(
    coordinator: Coordinator, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start of the job does, however long it is in the queue."""
    scontrol = asked.parent / "programs" / "scontrol"
    scontrol.write_text(f"{PLAYED.format(log=asked)}echo JobId=77 JobState=PENDING Restarts=1\n")

    def ends(directory: Path) -> Outcome:
        assert claim_epoch(directory).number == 1
        raise Superseded(1)

    def answers(run: RunDirectory) -> bool:
        if asked.read_text().count("scontrol") > 2:
            Outcome("finished", "by the next start", 3).write(run.path)
        return False

    coordinator(ends)
    monkeypatch.setattr(launch, "answers", answers)
    monkeypatch.setattr(launch, "_ASK_EVERY_S", 0.05)
    run = a_run(requeue=True, deadlines={"coordinator_s": 0.4, "boot_s": 0.4})
    assert CoordinatorJob()(str(run.path)) == 0
    assert newest_epoch(run.path) == 1


def test_one_that_is_killed_after_another_has_taken_over_is_not_followed(
    coordinator: Coordinator, asked: Path
) -> None:
    def ends(directory: Path) -> Outcome:
        (directory / f"life-{os.getpid()}").touch()
        claim_epoch(directory)
        claim_epoch(directory)  # the other one's
        Outcome("finished", "by the other one", 3).write(directory)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    coordinator(ends)
    run = a_run(requeue=True)
    assert CoordinatorJob()(str(run.path)) == 0
    assert len([*run.path.glob("life-*")]) == 1


KEPT_ENDED = "scontrol update JobId=77 Requeue=0\n"
"""Slurm may queue a job again that it has preempted before, and does so with expedite."""


def test_a_job_whose_run_has_failed_fails(coordinator: Coordinator, asked: Path) -> None:
    coordinator(ends_as("failed", "worker 1 lost"))
    with pytest.raises(LiverError, match=r"^worker 1 lost$"):
        CoordinatorJob()(str(a_run(requeue=True).path))
    assert asked.read_text() == KEPT_ENDED


def test_a_job_whose_coordinator_leaves_nothing_fails(
    coordinator: Coordinator, asked: Path
) -> None:
    coordinator(lambda directory: None)
    with pytest.raises(LiverError, match="ended without an outcome; its logs are"):
        CoordinatorJob()(str(a_run(requeue=True).path))


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_job_whose_run_has_ended_well_does_too(
    coordinator: Coordinator, asked: Path, state: str
) -> None:
    coordinator(ends_as(state))
    assert CoordinatorJob()(str(a_run(requeue=True).path)) == 0
    assert asked.read_text() == KEPT_ENDED


def test_a_job_whose_script_does_more_may_be_queued_again(
    coordinator: Coordinator, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that calls `liver run` several times: a later run could not have it queued again."""
    monkeypatch.setenv("SLURM_TASK_PID", str(os.getppid()))
    coordinator(ends_as("finished"))
    signals = JobSignals()
    assert signals.coordinate(a_run(requeue=True)) == Outcome("finished", "so it was", 3)
    assert asked.read_text() == ""


@pytest.mark.parametrize(("restarts", "goes_on"), [(1, True), (0, False)])
def test_a_run_goes_on_whose_job_somebody_else_has_queued_again(
    restarts: int, goes_on: bool, coordinator: Coordinator, asked: Path
) -> None:
    """As by `scontrol requeue`, or after the loss of a node. Slurm may do so once more."""
    scontrol = asked.parent / "programs" / "scontrol"
    scontrol.write_text(f"{PLAYED.format(log=asked)}echo JobId=77 Requeue=1 Restarts={restarts}\n")
    ended = Outcome("stopped", "SIGTERM; checkpoint of step 3", 3)

    def ends(directory: Path) -> Outcome:
        ended.write(directory)
        return ended

    coordinator(ends)
    run = a_run(requeue=True)
    assert JobSignals().coordinate(run) == (None if goes_on else ended)
    assert run.outcome() == (None if goes_on else ended)
    assert ("Requeue=0" in asked.read_text()) != goes_on


def test_a_job_whose_run_goes_on_is_queued_again(coordinator: Coordinator, asked: Path) -> None:
    coordinator(ends_as("requeue"))
    with pytest.raises(SystemExit) as ended:
        CoordinatorJob()(str(a_run(requeue=True).path))
    assert ended.value.code == 0
    assert asked.read_text() == "scontrol requeue 77\n"


@pytest.mark.parametrize(
    ("window_s", "is_known", "least_s", "most_s"),
    [(4.0, True, 3.0, 3.0), (120.0, True, 4.5, 6.0), (120.0, False, 117.0, 117.0)],
)
def test_time_is_kept_to_be_queued_again(
    window_s: float, is_known: bool, least_s: float, most_s: float, asked: Path
) -> None:
    """Of the window, or of the eight seconds that Slurm leaves."""
    if not is_known:
        (asked.parent / "programs" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    hosted, waited = HostedCoordinator(asked.parent), list[float | None]()
    hosted.started = True
    hosted.wait = lambda limit_s=None: bool(waited.append(limit_s))  # type: ignore[method-assign]
    hosting.checkpoint_in_time(hosted, SlurmSection(end_window_s=window_s), "77")
    (limit_s,) = waited
    assert limit_s is not None
    assert least_s <= limit_s <= most_s


def test_a_missed_window_has_the_job_queued_again(
    coordinator: Coordinator, asked: Path, hangs: Ends
) -> None:
    """By ourselves: submitit would write to the disk first, which may be full."""
    coordinator(hangs)
    run = a_run(requeue=True)
    with pytest.raises(SystemExit) as ended:
        CoordinatorJob()(str(run.path))
    assert ended.value.code == 0
    assert asked.read_text().splitlines()[-1] == "scontrol requeue 77"
    assert run.last_outcome() is None


def test_a_missed_window_is_the_end_where_the_job_may_not_be_queued_again(
    coordinator: Coordinator, asked: Path, hangs: Ends
) -> None:
    coordinator(hangs)
    run = a_run(requeue=False)
    with pytest.raises(LiverError, match=OUT_OF_TIME.reason):
        CoordinatorJob()(str(run.path))
    assert run.outcome() == OUT_OF_TIME
    assert not (run.path / "coordinator.json").exists()
    assert "requeue" not in asked.read_text()


def test_a_job_that_ends_before_its_coordinator_began_is_queued_again(asked: Path) -> None:
    with pytest.raises(SystemExit):
        CoordinatorJob().checkpoint(str(a_run(requeue=True).path))
    assert asked.read_text() == "scontrol requeue 77\n"


def test_a_job_that_ends_before_its_coordinator_began_fails_where_it_may_not_be(
    asked: Path,
) -> None:
    run = a_run(requeue=False)
    CoordinatorJob().checkpoint(str(run.path))
    assert run.outcome() == OUT_OF_TIME
    assert asked.read_text() == ""


def test_a_coordinator_that_ends_in_the_window_has_the_last_word(
    coordinator: Coordinator, asked: Path
) -> None:
    """Also when the job is told once more while submitit writes its result."""
    reason = "its job is about to end; checkpoint of step 3"

    def ends(directory: Path) -> Outcome:
        os.kill(os.getppid(), signal.SIGUSR2)
        outcome = Outcome("stopped", reason, 3)
        outcome.write(directory)
        return outcome

    coordinator(ends)
    run = a_run(requeue=False, end_window_s=LIMIT_S)
    assert CoordinatorJob()(str(run.path)) == 0
    os.kill(os.getpid(), signal.SIGUSR2)
    assert run.outcome() == Outcome("stopped", reason, 3)
    assert asked.read_text().count("requeue") == 0


def test_a_job_that_is_cancelled_in_its_window_is_not_queued_again(
    coordinator: Coordinator, asked: Path
) -> None:
    """Slurm queues a job again also while it is being cancelled."""

    def ends(directory: Path) -> Outcome:
        os.kill(os.getppid(), signal.SIGUSR2)
        deadline = Deadline.after(SystemClock(), LIMIT_S, "the parent to hear it")
        poll_until(lambda: "squeue" in asked.read_text(), deadline)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.5)
        return Outcome("requeue", "its job is about to end; checkpoint of step 3", 3)

    coordinator(ends)
    assert CoordinatorJob()(str(a_run(requeue=True, end_window_s=LIMIT_S).path)) == 0
    assert "scontrol requeue" not in asked.read_text()


def test_a_cancelled_job_stops_its_run(coordinator: Coordinator, asked: Path) -> None:
    def ends(directory: Path) -> Outcome:
        os.kill(os.getppid(), signal.SIGTERM)
        deadline = Deadline.after(SystemClock(), LIMIT_S, "the parent to hear it")
        poll_until(lambda: (directory / "told").exists(), deadline)
        return Outcome("stopped", "SIGTERM", 3)

    stop, run = HostedCoordinator.stop, a_run(requeue=True)

    def stopped(hosted: HostedCoordinator, why: str, checkpoint: bool) -> None:
        stop(hosted, why, checkpoint)
        assert (why, checkpoint) == ("SIGTERM", True)
        (run.path / "told").touch()

    coordinator(ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostedCoordinator, "stop", stopped)
        assert CoordinatorJob()(str(run.path)) == 0


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (signal.SIGTERM, StopSignalled("SIGTERM")),
        (signal.SIGINT, StopSignalled("SIGINT")),
        (signal.SIGUSR2, StopSignalled("its time limit, cluster.timeout_min", checkpoint=True)),
    ],
)
def test_a_signal_to_a_local_job_stops_its_run(
    number: signal.Signals,
    wanted: StopSignalled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who ends it wants no more of it; whose time is up goes on another time."""
    signals_parent(monkeypatch, number)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = create_run_directory(minimal(cluster={"kind": "local"}))
    assert coordinate_locally(str(run.path), None) == 0
    assert run.last_outcome() == Outcome("stopped", str(wanted), 0)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def signals_parent(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """The coordinator signals the process that hosts it, and ends with what it is told then."""

    def signalled(directory: Path, control: Control) -> Outcome:
        os.kill(os.getppid(), number)
        inbox = Inbox()
        control.reach(inbox)
        outcome = Outcome("stopped", str(inbox.get(LIMIT_S)), 0)
        outcome.write(directory)
        return outcome

    module = types.ModuleType("liver_hpc.coordinator.main")
    vars(module)["run_coordinator"] = signalled
    monkeypatch.setitem(sys.modules, "liver_hpc.coordinator.main", module)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("number", "job_id", "saves"),
    [(signal.SIGTERM, "77", True), (signal.SIGTERM, "", False), (signal.SIGHUP, "", True)],
)
def test_a_local_run_that_is_signalled_saves_its_state_where_it_may_go_on(
    number: signal.Signals, job_id: str, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who cancels a job, as Slurm does at its time limit, or loses a terminal, may want it."""
    signals_parent(monkeypatch, number)
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    signals = JobSignals()
    signals.listen()
    outcome = signals.coordinate(create_run_directory(minimal(cluster={"kind": "local"})))
    assert outcome == Outcome("stopped", str(StopSignalled(number.name, checkpoint=saves)), 0)


@pytest.mark.usefixtures("asked")
def test_a_coordinator_is_told_when_its_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the window that was asked for."""
    signals_parent(monkeypatch, signal.SIGUSR2)
    signals = JobSignals()
    signals.listen()
    outcome = signals.coordinate(a_run(requeue=False, end_window_s=LIMIT_S))
    assert outcome is not None
    told = re.fullmatch(r"EndNear\(reason='(.*)', at_s=(.*), deadline_s=(.*)\)", outcome.reason)
    assert told is not None
    assert told[1] == "its job is about to end"
    assert float(told[3]) - float(told[2]) == pytest.approx(LIMIT_S, abs=0.1)


def test_under_nohup_a_lost_terminal_is_nothing_to_a_run(
    coordinator: Coordinator, asked: Path
) -> None:
    """Nor to what its coordinator starts."""
    coordinator(lambda _: Outcome("finished", f"{signal.getsignal(signal.SIGHUP)!r}", 3))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = JobSignals()
        signals.listen()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        outcome = signals.coordinate(a_run(requeue=False))
        assert outcome == Outcome("finished", repr(signal.SIG_IGN), 3)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("timeout_min", "end_window_s", "wanted_s"), [(60, 600.5, 601), (60, 5.0, 5), (1, 120.0, 30)]
)
def test_a_local_job_is_told_of_its_time_limit_as_long_before_as_the_run_file_has_it(
    timeout_min: int,
    end_window_s: float,
    wanted_s: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a checkpoint fits; but not before it begins."""
    given: dict[str, Any] = {}

    class Executor:
        def __init__(self, folder: Path) -> None: ...

        def update_parameters(self, **parameters: Any) -> None:
            given.update(parameters)

        def submit(self, *call: Any) -> types.SimpleNamespace:
            return types.SimpleNamespace(job_id="8")

    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setattr("submitit.LocalExecutor", Executor)
    slurm = {"end_window_s": end_window_s}
    config = minimal(cluster={"kind": "local", "timeout_min": timeout_min, "slurm": slurm})
    assert launch.submit_to_cluster(create_run_directory(config), config) == "8"
    assert (given["timeout_min"], given["signal_delay_s"]) == (timeout_min, wanted_s)


def test_an_outcome_is_known_while_its_metrics_are_written(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a job whose time is up then does not call the run failed, whatever it had to say."""
    run, ended = a_run(requeue=False), Outcome("stopped", "asked to; " + "x" * 100_000, 7)

    def ends(directory: Path, control: Control) -> Outcome:
        ended.write(directory)
        control.outcome = ended
        time.sleep(LIMIT_S)
        raise AssertionError("it was not ended")

    module = types.ModuleType("liver_hpc.coordinator.main")
    vars(module)["run_coordinator"] = ends
    monkeypatch.setitem(sys.modules, "liver_hpc.coordinator.main", module)
    hosted = HostedCoordinator(run.path)
    hosted.start()
    deadline = Deadline.after(SystemClock(), LIMIT_S, "the outcome")
    poll_until(lambda: hosted.wait(0.1) or hosted.outcome is not None, deadline)
    hosted.give_up()
    assert run.outcome() == ended
    assert hosted.outcome is not None
    assert (hosted.outcome.state, hosted.outcome.step) == ("stopped", 7)
    os.kill(hosted._pid, signal.SIGKILL)
    hosted.wait(LIMIT_S)


def test_coordinators_that_follow_each_other_are_of_one_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is imported before the first one is forked."""
    monkeypatch.setitem(sys.modules, "liver_hpc.coordinator.main", None)
    hosted = HostedCoordinator(a_run(requeue=False).path)
    with pytest.raises(ImportError):
        hosted.start()
    assert (hosted.started, hosted._pid) == (False, 0)


def test_they_are_of_one_recipe_also_where_it_was_edited_meanwhile(
    coordinator: Coordinator, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have the spec that workers train by."""
    recipe = tmp_path / "edited.py"
    recipe.write_text("from liver_hpc.recipes.gpt import GPT\n\nclass Mine(GPT): ...\n")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def ends(directory: Path) -> Outcome:
        lives = sorted(directory.glob("life-*"))
        key = specs._key(load_recipe(RunDirectory(directory).config()))
        (directory / f"life-{len(lives)}").write_text(key)
        if not lives:
            recipe.write_text("class Mine(")
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome("finished", "at last", 3)

    coordinator(ends)
    data = {"text": "python-stdlib"}
    run = a_run(requeue=True, recipe="edited:Mine", recipe_directory=tmp_path, data=data)
    try:
        assert CoordinatorJob()(str(run.path)) == 0
    finally:
        sys.modules.pop("edited", None)
    assert len({life.read_text() for life in run.path.glob("life-*")}) == 1


def test_a_last_word_counts_though_a_handler_hears_the_end_before_it_is_read(asked: Path) -> None:
    hosted, ended = HostedCoordinator(a_run(requeue=False).path), Outcome("stopped", "so", 3)

    class Line:
        def recv(self, size: int, flags: int) -> bytes:
            hosted._line = None
            return _told(ended)

    line: Any = Line()
    hosted._line = line
    hosted._hear(line)
    assert hosted.outcome == ended


def test_a_coordinator_that_waits_for_a_disk_is_left_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot be killed meanwhile, and the next one would wait for the same disk."""
    module = types.ModuleType("liver_hpc.coordinator.main")
    vars(module)["run_coordinator"] = lambda directory, control: time.sleep(LIMIT_S)
    monkeypatch.setitem(sys.modules, "liver_hpc.coordinator.main", module)
    hosted = HostedCoordinator(a_run(requeue=False).path)
    hosted.start()
    child = psutil.Process(hosted._pid)
    states = [psutil.STATUS_DISK_SLEEP, psutil.STATUS_IDLE, psutil.STATUS_STOPPED]
    monkeypatch.setattr(psutil.Process, "status", lambda process: states.pop(0))
    hosted.kill_stuck()
    hosted.kill_stuck()
    assert not hosted.wait(0.5)
    assert child.is_running()
    monkeypatch.setattr("liver_hpc.coordinator.hosting.MOST_KILLED_IN_VAIN", 0)
    hosted.kill_stuck()
    assert hosted.wait(LIMIT_S)


def test_one_that_begins_is_not_held_for_one_that_stands_still(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop has not turned, however often that of the one before did."""

    def ends(directory: Path, control: Control) -> Outcome:
        if not (directory / "life").exists():
            (directory / "life").touch()
            control.turns = 7
            time.sleep(LIMIT_S)
        goes_on = Deadline.after(SystemClock(), LIMIT_S, "the test")
        poll_until(lambda: (directory / "goes-on").exists(), goes_on)
        return Outcome("finished", "at last", 3)

    module = types.ModuleType("liver_hpc.coordinator.main")
    vars(module)["run_coordinator"] = ends
    monkeypatch.setitem(sys.modules, "liver_hpc.coordinator.main", module)
    run = a_run(requeue=False)
    hosted = HostedCoordinator(run.path)
    hosted.start()
    deadline = Deadline.after(SystemClock(), LIMIT_S, "its turns")
    poll_until(lambda: hosted.wait(0.1) or hosted.turns == 7, deadline)
    first = hosted._pid
    os.kill(first, signal.SIGKILL)
    poll_until(lambda: hosted.wait(0.1) or hosted._pid != first, deadline)
    assert hosted.turns == 0
    (run.path / "goes-on").touch()
    assert hosted.wait(LIMIT_S)
    assert hosted.outcome == Outcome("finished", "at last", 3)


def test_nobody_coordinates_a_run_where_its_agents_cannot_be_taken_over(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would end the run, whose own coordinator may only be slow."""
    run = a_run(requeue=True)
    run.note_job_id("78", run.path.name)
    with pytest.raises(LiverError, match="is of job 78, and this is in job 77: its coord"):
        coordinate_here(run)
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(LiverError, match="is of job 78, and this is outside of a job"):
        coordinate_here(run)
    run = create_run_directory(minimal(cluster={"kind": "local"}), "elsewhere")
    address = {"host": "127.0.0.1", "port": 1, "pid": 1, "hostname": "far", "epoch": 1}
    (run.path / COORDINATOR_FILE).write_text(json.dumps(address))
    with pytest.raises(LiverError, match="was process 1 on far, where its agents are"):
        coordinate_here(run)
    assert newest_epoch(run.path) == 0


@pytest.mark.parametrize(("components", "of"), [(1, ""), (2, " --het-group=0")])
def test_who_takes_over_from_elsewhere_is_told_the_line_that_does(
    monkeypatch: pytest.MonkeyPatch, components: int, of: str
) -> None:
    """Slurm begins no step in a job of several components unless it is told in which."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    sections = [{"name": f"c{index}"} for index in range(components)]
    slurm = {"kind": "slurm", "slurm": {"components": sections}}
    run = create_run_directory(minimal(cluster=slurm))
    run.note_job_id("78", run.path.name)
    line = f"srun --jobid=78{of} --overlap --nodes=1 --ntasks=1 liver coordinate"
    with pytest.raises(LiverError, match=re.escape(f"`{line} {run}` begins it there")):
        coordinate_here(run)
    with pytest.raises(LiverError, match=re.escape(f"`{line} --script-lost {run}` begins it")):
        coordinate_here(run, script_lost=True)


def test_who_coordinates_in_the_place_of_a_lost_script_sees_to_its_job(
    asked: Path, monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    """With what the script was told of the job, which a step is not; it is not done for others."""
    coordinator(ends_as("finished"))
    done: list[str] = []
    monkeypatch.setattr(launch, "warn_of_the_end", lambda slurm, job: done.append(f"warn {job}"))
    monkeypatch.setattr(launch, "end_without_script", lambda path: done.append("end"))
    run = a_run(requeue=True)
    run.note_job_id("77", run.path.name)
    note_environment(run, {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-4]"})
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n3")
    assert coordinate_here(run, script_lost=True) == Outcome("finished", "so it was", 3)
    assert done == ["warn 77", "end"]
    assert os.environ["SLURM_JOB_NODELIST"] == "n[1-4]"


def test_what_a_script_is_told_of_its_job_is_noted(asked: Path, coordinator: Coordinator) -> None:
    coordinator(ends_as("finished"))
    run = a_run(requeue=True)
    CoordinatorJob()(str(run.path))
    assert script_environment(run, os.environ)["SLURM_JOB_ID"] == "77"


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_preempted_job_goes_on_whose_coordinator_is_in_a_step(
    asked: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Slurm signals steps, and no batch script, as it preempts; and all as a job is cancelled."""
    heard: list[str] = []

    class Hosted:
        def stop(self, why: str, checkpoint: bool) -> None:
            heard.append(f"stop {checkpoint}")

    info = JobInfo("77", "", state, "", ("n1",), None, "")
    monkeypatch.setattr(SlurmCommands, "jobs", lambda commands, ids: {"77": info})
    for script_lost in (True, False):
        signals = JobSignals(script_lost)
        hosted: Any = Hosted()
        signals._hosted = hosted
        signals._end_near = lambda hosted, job: heard.append("end near")  # type: ignore[method-assign]
        signals._hear(signal.SIGTERM, None)
    assert heard == ["end near" if state == "RUNNING" else "stop True", "stop True"]


def test_nobody_is_waited_for_who_went_with_the_script(
    asked: Path, monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    """It had lost its coordinator, too, and had not another one yet."""
    coordinator(ends_as("finished"))
    monkeypatch.setattr(launch, "coordinator_lives", lambda run: True)
    monkeypatch.setattr(launch, "warn_of_the_end", lambda slurm, job: None)
    monkeypatch.setattr(launch, "end_without_script", lambda path: None)
    run = a_run(requeue=True)
    run.note_job_id("77", run.path.name)
    with pytest.raises(LiverError, match="what starts its coordinator may live"):
        coordinate_here(run)
    assert coordinate_here(run, script_lost=True) == Outcome("finished", "so it was", 3)


def test_no_handler_runs_while_a_coordinator_is_forked(
    coordinator: Coordinator, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait, until the time is up, for a coordinator that it has no line to yet."""
    fork, blocked = os.fork, []

    def noted() -> int:
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return fork()

    monkeypatch.setattr(os, "fork", noted)
    coordinator(lambda _: Outcome("finished", str(signal.pthread_sigmask(signal.SIG_BLOCK, ())), 3))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    outcome = JobSignals().coordinate(a_run(requeue=False))
    assert outcome == Outcome("finished", "set()", 3)  # nor are they blocked in what it starts
    assert {*launch._END_SIGNALS, *launch._STOP_SIGNALS} <= blocked[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_coordinator_ends_with_the_process_that_hosts_it(
    coordinator: Coordinator, asked: Path
) -> None:
    def ends(directory: Path) -> None:
        (directory / "made").write_text(str(os.getpid()))
        (directory / "made").rename(directory / "pid")
        time.sleep(4 * LIMIT_S)

    coordinator(ends)
    run = a_run(requeue=False)
    host = os.fork()
    if host == 0:
        try:
            HostedCoordinator(run.path).start()
            time.sleep(4 * LIMIT_S)
        finally:
            os._exit(1)
    deadline = Deadline.after(SystemClock(), LIMIT_S, "it to begin")
    poll_until((run.path / "pid").exists, deadline)
    child = psutil.Process(int((run.path / "pid").read_text()))
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)

    def is_gone() -> bool:
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    try:
        poll_until(is_gone, Deadline.after(SystemClock(), LIMIT_S, "it to end"))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_what_a_coordinator_said_counts_that_ended_before_it_had_heard_all(tmp_path: Path) -> None:
    """For its end of the line that is a connection that was reset."""
    hosted = HostedCoordinator(tmp_path)
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    hosted._line = ours
    outcome = Outcome("stopped", "its job is about to end; checkpoint of step 3", 3)
    theirs.send(_told(outcome))
    hosted.stop("SIGTERM")
    theirs.close()
    hosted._hear(ours)
    hosted._hear(ours)
    assert hosted.outcome == outcome
    ours.close()
