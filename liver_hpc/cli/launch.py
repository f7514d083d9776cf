"""The coordinator in a process: of a job that submitit starts, or of `liver run`.

`python -m liver_hpc.cli.launch RUN` hands a run to submitit, which starts a local job's controller
in the session of the process that submits, and with its output. Started from here, the run has a
session of its own and its output in a file: Ctrl-C, a closed terminal and `$(liver submit ...)`
leave it alone.

In a Slurm job that begins again `liver run` goes on with the run that the job began by the same
request: the same run file, whatever stands in it by now, and the same overrides.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from liver_hpc.cli.client import answers, coordinator_lives
from liver_hpc.cli.submission import checked_run, new_run, note_latest
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.cluster.slurm.orphaned import (
    end_without_script,
    note_environment,
    script_environment,
    warn_of_the_end,
)
from liver_hpc.cluster.slurm.replies import RUNNING
from liver_hpc.cluster.slurm.run_job import OwnJob, step_text
from liver_hpc.config.load import parse_values, read_text
from liver_hpc.config.schema import RunConfig, SlurmSection
from liver_hpc.coordinator.hosting import HostedCoordinator, checkpoint_in_time, requeue
from liver_hpc.errors import ConfigError, LiverError, problems_of
from liver_hpc.recipes.completion import parse_users_run
from liver_hpc.run.directory import RunDirectory, runs_in
from liver_hpc.run.epoch import replay_limit_s
from liver_hpc.run.outcome import REQUEUE, Outcome

_END_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TIME_LIMIT = "its time limit, cluster.timeout_min"
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_ASK_EVERY_S = 1.0
_ASK_S = 2.0


# ---- by submitit


def submit_to_cluster(run: RunDirectory, config: RunConfig) -> str:
    if config.cluster.kind == "slurm":
        from submitit.core.utils import DelayedSubmission

        from liver_hpc.cluster.slurm.submit import submit_call

        call = DelayedSubmission(CoordinatorJob(), str(run.path))
        return submit_call(config.cluster, run, call)
    import submitit

    executor = submitit.LocalExecutor(run.jobs_path)
    timeout_min = config.cluster.timeout_min
    window_s = min(math.ceil(config.cluster.slurm.end_window_s), 60 * timeout_min // 2)
    executor.update_parameters(
        timeout_min=timeout_min, signal_delay_s=window_s, stderr_to_stdout=True
    )
    os.environ["PYTHONSAFEPATH"] = "1"  # -P, which submitit's two processes cannot be given
    devices = os.environ.get(_VISIBLE_DEVICES)
    return str(executor.submit(coordinate_locally, str(run.path), devices).job_id)


class CoordinatorJob:
    """What a Slurm job runs, by submitit's protocol: called, or asked for a checkpoint where the
    job's end is near before that."""

    def __call__(self, run_directory: str) -> int:
        """Runs a run's coordinator. Does not return when the job is queued again."""
        signals = JobSignals()
        signals.listen()  # in the place of submitit, which knows no end but its own
        run = RunDirectory(Path(run_directory))
        if signals.job is not None:
            with contextlib.suppress(OSError):  # a full disk: the job is known by its id alone
                signals.job.note(run.path)
        outcome = signals.coordinate(run)
        if outcome is None:
            sys.exit(0)  # without a result: as far as submitit knows, the job is not over
        if outcome.state == "failed":
            # For Slurm the job has failed, and what depends on its success does not start.
            raise LiverError(outcome.reason)
        return 0

    def checkpoint(self, run_directory: str) -> None:
        """In a signal handler. Does not return when the job is queued again: by ourselves, for
        submitit would write to the disk first, which may be full."""
        run = RunDirectory(Path(run_directory))
        slurm = run.config().cluster.slurm
        if slurm.requeue:
            requeue(slurm, os.environ["SLURM_JOB_ID"])
            sys.exit(0)
        HostedCoordinator(run.path).give_up()


def coordinate_locally(run_directory: str, visible_devices: str | None) -> int:
    """What a local job runs. submitit hides all accelerators from it: they are shown again."""
    if visible_devices is None:
        os.environ.pop(_VISIBLE_DEVICES, None)
    else:
        os.environ[_VISIBLE_DEVICES] = visible_devices
    hosted = HostedCoordinator(Path(run_directory))
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda number, frame: hosted.stop(signal.Signals(number).name))
    # Before the job's time is up, for which submitit would requeue it or raise.
    signal.signal(signal.SIGUSR2, lambda number, frame: hosted.stop(_TIME_LIMIT, checkpoint=True))
    hosted.start()
    _wait_for_the_end(hosted, RunDirectory(Path(run_directory)))
    return int(hosted.outcome is None or hosted.outcome.state == "failed")


# ---- by `liver run`


def run_here(config_path: Path, overrides: Sequence[str]) -> tuple[RunDirectory, Outcome | None]:
    """Runs to the end of the run, or of this job; the run's directory, and how it ended.

    No outcome: the run goes on when the job, which has been queued again, starts again. SIGUSR1
    and SIGUSR2 say that the job's end is near, SIGTERM, SIGINT and SIGHUP stop the run. The run
    directory is printed as soon as there is one. Raises ConfigError before anything is started.
    """
    _check_task()
    signals = JobSignals()
    signals.listen()
    with contextlib.ExitStack() as held:
        with problems_of(config_path):
            asked = Asked(config_path, read_text(config_path), overrides)
            if signals.job is not None:
                run = _open_run(asked, signals.job, held)
            else:
                config = asked.config()
                run = _new_run(config, _kind_of(config, None), None)
        return run, signals.coordinate(run)


def coordinate_here(run: RunDirectory, script_lost: bool = False) -> Outcome | None:
    """Takes over a run whose coordinator is gone, or stands still, and coordinates it to its end,
    as `run_here` does; of a run on Slurm, on a node of its job.

    script_lost: the job has no batch script any more, and is seen to here.

    Raises LiverError where the run is over, its coordinator answers or will come by itself, and
    where this is not the place for one, which could not take the run's agents over.
    """
    _check_task()
    if (outcome := run.outcome()) is not None:
        raise LiverError(f"run {run} is over: {outcome}; `liver submit --resume` begins it again")
    address = run.coordinator()
    if address is not None and answers(run):
        raise LiverError(
            f"run {run}: its coordinator answers (process {address.pid} on {address.hostname})"
        )
    os.environ.update(script_environment(run, os.environ))
    signals = JobSignals(script_lost)
    _check_place(run, signals.job, script_lost)
    signals.listen()
    if signals.job is not None and script_lost:
        warn_of_the_end(run.config().cluster.slurm, signals.job.job_id)
    outcome = signals.coordinate(run)
    if outcome is not None and script_lost:
        end_without_script(run.path)
    return outcome


def _check_place(run: RunDirectory, own: OwnJob | None, script_lost: bool) -> None:
    address, job_id, config = run.coordinator(), run.job_id(), run.config()
    if config.cluster.kind == "slurm":
        if own is None or own.job_id != job_id:
            here = "outside of a job" if own is None else f"in job {own.job_id}"
            step = ""
            if job_id is not None:
                words = f"liver coordinate {'--script-lost ' if script_lost else ''}{run}"
                step = (
                    f"; `{step_text(config, job_id)} --nodes=1 --ntasks=1 {words}` begins it there"
                )
            raise LiverError(
                f"run {run} is of job {job_id}, and this is {here}: its coordinator wants the "
                f"environment of that job's batch script{step}"
            )
    elif address is not None and not address.is_here:
        raise LiverError(
            f"run {run}: its coordinator was process {address.pid} on {address.hostname}, where "
            "its agents are; that is where another one can take over"
        )
    if address is None and not script_lost and coordinator_lives(run):
        raise LiverError(f"run {run}: what starts its coordinator may live, and starts another one")


def _check_task() -> None:
    """By its number in the step alone: what else Slurm says of a step may be of one from within
    which the job was submitted."""
    if (task := os.environ.get("SLURM_PROCID", "")) not in ("", "0"):
        raise ConfigError(
            f"this is task {task} of a step (SLURM_PROCID), and a run wants one process; start it "
            "without srun, or by `srun -n1`"
        )


@dataclass(frozen=True)
class Asked:
    """A request: a run file with its text, and what beats it. Everything may raise ConfigError."""

    path: Path
    text: str
    overrides: Sequence[str]

    def config(self) -> RunConfig:
        return parse_users_run(self.text, str(self.path), self.overrides)

    def place(self) -> tuple[Path, str]:
        """The directory of runs and the run's name, also of a file that is wrong otherwise: who
        goes on with a run does not need it."""
        values = parse_values(self.text, str(self.path), self.overrides)
        defaults = RunConfig.model_fields
        runs, name = (values.get(key, defaults[key].default) for key in ("runs_directory", "name"))
        with contextlib.suppress(TypeError, RuntimeError):
            return Path(runs).expanduser().absolute(), str(name)
        self.config()  # says that this is no directory
        raise AssertionError(runs)


def _open_run(asked: Asked, job: OwnJob, held: contextlib.ExitStack) -> RunDirectory:
    """The directory of this job's run of this request, made where it is not there yet; held: what
    keeps other processes of the job from it."""
    job = job.asking(asked.path, asked.overrides, asked.text)
    runs, name = asked.place()
    held.enter_context(job.alone(runs, *job.request, job.run_file))
    made = [run for run in runs_in(runs)[0] if f"-{job.job_id}" in run.path.name]
    made = [run for run in made if job.made(run.path)]
    known = _known_run(made, name, job)
    config = asked.config() if known is None else known.config()
    kind = _kind_of(config, job)
    if kind == "slurm":
        held.enter_context(job.alone(runs))
    _check_silent([run for run in made if run == known or kind == "slurm"], job)
    if known is None:
        return _new_run(config, kind, job)
    changed = f", as it began: {asked.path} was changed" if job.finds_changed(known.path) else ""
    print(f"run {known} goes on{changed}", flush=True)
    with contextlib.suppress(OSError):  # a full disk: an earlier start stays noted
        job.note(known.path)
    return known


def _known_run(made: Sequence[RunDirectory], name: str, job: OwnJob) -> RunDirectory | None:
    """Of directories that this job made the one of its request: one that has its name before a copy
    of it, one of the same text before all others. It has a number behind its name where another run
    of the job, or a job of the same id, came first."""
    mine = [run for run in made if job.asks_for(run.path, name)]
    named = re.compile(rf".*-{job.job_id}(-\d+)?")

    def fits(run: RunDirectory) -> tuple[bool, bool, float]:
        is_named = named.fullmatch(run.path.name) is not None
        return is_named, not job.finds_changed(run.path), OwnJob.noted_s(run.path)

    return max(mine, key=fits, default=None)


def _check_silent(runs: Sequence[RunDirectory], job: OwnJob) -> None:
    """Raises ConfigError where one of these runs is under way in this start of the job: whoever
    takes its job's nodes, or its directory, would end it."""
    for run in runs:
        if job.made_now(run.path) and answers(run):
            raise ConfigError(
                f"run {run} of this job, {job.job_id}, is under way: its coordinator answers; one "
                "`liver run` at a time has a run, and one run on Slurm its job's nodes"
            )


def _kind_of(config: RunConfig, job: OwnJob | None) -> str:
    """Of cluster. Raises ConfigError where a run on Slurm has no place."""
    kind = config.cluster.kind
    if kind == "slurm" and job is None:
        raise ConfigError(
            "cluster slurm: `liver run` belongs into a Slurm job (SLURM_JOB_ID is not set); "
            "`liver submit` makes one"
        )
    if kind == "auto":
        kind = "slurm" if job is not None and config.cluster.slurm.components else "local"
    if kind == "slurm" and job is not None and job.array_task:
        raise ConfigError(
            f"cluster slurm: this is task {job.array_task} of a job array, and what a "
            "run asks of Slurm for its job would befall the other tasks, too; give each "
            "run a job of its own, as by a loop of `liver submit`"
        )
    return kind


def _new_run(config: RunConfig, kind: str, job: OwnJob | None) -> RunDirectory:
    name = f"{config.name}-{job.job_id}" if job is not None else None
    run = new_run(*checked_run(config, kind), name)
    if job is not None:
        job.note(run.path)
        if kind == "slurm":
            run.note_job_id(job.job_id, os.environ.get("SLURM_JOB_NAME", ""))
    note_latest(run)
    if job is not None and job.restarts:
        begins = f"job {job.job_id} was queued again, but began no run by this request before"
        print(f"liver: note: {begins}: a new one begins", file=sys.stderr)
    print(f"run {run}", flush=True)
    return run


# ---- a job's signals


def _wait_for_the_end(
    hosted: HostedCoordinator, run: RunDirectory, leaves: Callable[[], bool] = lambda: False
) -> None:
    """Of a run. The hosted coordinator may stand still, and is killed then, so that another one
    takes over before agents give up. Where another process's coordinator has the run, that one may
    be killed, too: once it has not answered for so long that it is gone, the hosted one takes
    over, unless it `leaves` the run to others."""
    clock, gone, limits = SystemClock(), None, run.config().deadlines
    turns, silent = 0, 0  # rounds, as this process may be suspended, too
    while not hosted.wait(_ASK_EVERY_S):
        if not hosted.is_superseded:
            gone = None
            silent = silent + 1 if hosted.turns == turns > 0 else 0
            turns = hosted.turns
            if silent * _ASK_EVERY_S >= limits.coordinator_s / 2:
                hosted.kill_stuck()
            continue
        there = False
        with contextlib.suppress(LiverError, OSError):  # its files cannot be read now
            there = answers(run)
        if there:
            gone = Deadline.after(clock, limits.coordinator_s / 2, "its coordinator")
        elif gone is None:  # it takes the run over: it reads the journal, and waits for agents
            longest_s = limits.successor_s + replay_limit_s(run.path)
            gone = Deadline.after(clock, longest_s, "its coordinator")
        elif gone.expired() and leaves():
            gone = None
        elif gone.expired():
            print("the other coordinator does not answer: takes over", file=sys.stderr, flush=True)
            hosted.take_over()


class _TimeIsUp(Exception):
    """The window was over before the state was on disk; the job begins again where it may."""


class JobSignals:
    """What signals say, kept until there is a coordinator to hear it. job: the one that this
    process runs in; outside of a job nobody begins the run again. script_lost: in a step of it,
    which Slurm signals as it preempts the job, and does not signal a batch script."""

    def __init__(self, script_lost: bool = False) -> None:
        self._slurm = SlurmSection()
        self.job = OwnJob.of(os.environ, SlurmCommands(self._slurm.command_s, 0.0).record)
        self._script_lost = script_lost
        self._hosted: HostedCoordinator | None = None
        self._said: list[int] = []
        self._end_is_near = self._is_cancelled = self._time_is_up = False

    def listen(self) -> None:
        """To this process's end: after the coordinator's, nothing comes of what is said."""
        for number in (*_END_SIGNALS, *_STOP_SIGNALS):
            signal.signal(number, self._hear)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
            signal.signal(signal.SIGHUP, self._hear)

    def coordinate(self, run: RunDirectory) -> Outcome | None:
        """Runs the run's coordinator, which is told what signals say, also of before.

        Returns how it ended; None when its job has been queued again, where the run goes on. A run
        that was ended for good is not begun again by Slurm, as it queues a job that has lost a
        node. Raises LiverError when it has left no outcome.
        """
        last, config = run.last_outcome(), run.config()
        if self.job is not None and self.job.restarts and last is not None and last.is_last:
            return last
        if self.job is not None and config.cluster.kind == "slurm":
            with contextlib.suppress(OSError):  # a full disk: none begins on another node
                note_environment(run, os.environ)
        hosted = self._hosted = HostedCoordinator(run.path)
        self._slurm = config.cluster.slurm
        for number in self._said:
            self._hear(number, None)
        with contextlib.suppress(_TimeIsUp):
            hosted.start()
            _wait_for_the_end(hosted, run, leaves=self._is_queued_again)
        if self._time_is_up:
            return hosted.outcome
        if hosted.outcome is None:
            raise LiverError(f"run {run} ended without an outcome; {run.where_logs_are()}")
        if self.job is not None and hosted.outcome.goes_on(config) and not self._is_cancelled:
            requeue(self._slurm, self.job.array_task or self.job.job_id)
            return None
        ends = self._is_cancelled or hosted.outcome.reason.startswith(signal.SIGTERM.name)
        if ends and self._is_queued_again():
            with contextlib.suppress(OSError):  # a full disk: the next start goes on all the same
                replace(hosted.outcome, state=REQUEUE).write(run.path)
            return None
        if self.job is not None and config.cluster.kind == "slurm" and _is_batch_process():
            self._keep_ended(self.job)
        return hosted.outcome

    def _is_queued_again(self) -> bool:
        """By somebody else, as by `scontrol requeue`, or by Slurm, where a node is lost or a
        preempted job has no grace time: the batch script is signalled as that of a cancelled job,
        but where slurmd is gone."""
        limit_s = min(_ASK_S, self._slurm.command_s)
        return self.job is not None and self.job.is_queued_again(limit_s)

    def _keep_ended(self, job: OwnJob) -> None:
        """Slurm itself would queue a job again whose script fails (`expedite`), or that it has
        preempted in an earlier start (from 24.05 on). Not where a script may begin other runs after
        this one: they could not have the job queued again, either."""
        parts = [v for name, v in os.environ.items() if name.startswith("SLURM_JOB_ID_HET_GROUP_")]
        if self._slurm.requeue:
            with contextlib.suppress(SlurmError):
                commands = SlurmCommands(min(_ASK_S, self._slurm.command_s), unreachable_s=0.0)
                commands.keep_ended(parts if job.job_id in parts else [job.job_id])

    def _hear(self, number: int, frame: object) -> None:
        if self._hosted is None:
            self._said.append(number)
            if number not in _END_SIGNALS:
                raise KeyboardInterrupt
        elif self.job is not None and (number in _END_SIGNALS or self._is_preempted(number)):
            self._end_is_near = True
            self._end_near(self._hosted, self.job)
        else:
            # Before its time is up: Slurm would queue it again all the same.
            self._is_cancelled |= self._end_is_near
            # Whoever cancels a job, or lost the terminal, may want to go on from where it was.
            saves = self.job is not None or number == signal.SIGHUP
            self._hosted.stop(signal.Signals(number).name, checkpoint=saves)

    def _is_preempted(self, number: int) -> bool:
        """Whether a signal to a step comes while its job still runs: who cancels that ends it."""
        if not self._script_lost or number != signal.SIGTERM or self.job is None:
            return False
        commands = SlurmCommands(min(_ASK_S, self._slurm.command_s), unreachable_s=0.0)
        try:
            info = commands.jobs([self.job.job_id]).get(self.job.job_id)
        except SlurmError:
            return False
        return info is not None and info.state == RUNNING

    def _end_near(self, hosted: HostedCoordinator, job: OwnJob) -> None:
        """Raises _TimeIsUp where nobody is left to wait for."""
        checkpoint_in_time(hosted, self._slurm, job.job_id)
        if hosted.started and not hosted.wait(0.0):
            if not self._slurm.requeue:
                hosted.give_up()
            elif not self._is_cancelled:
                requeue(self._slurm, job.array_task or job.job_id)
            # Where a finalizer was interrupted nobody hears what is raised.
            self._time_is_up = True
            raise _TimeIsUp


def _is_batch_process() -> bool:
    """Whether this process is all that the job's batch script is by now, and no step of it."""
    own = os.environ.get("SLURM_TASK_PID") == str(os.getpid())
    return own and "SLURM_STEP_ID" not in os.environ


def main(arguments: list[str]) -> int:
    run = RunDirectory(Path(arguments[0]))
    run.note_job_id(submit_to_cluster(run, run.config()), run.path.name)
    return 0


if __name__ == "__main__":
    # Under its real name, so that submitit pickles what a job runs by reference.
    from liver_hpc.cli.launch import main as launch_main

    sys.exit(launch_main(sys.argv[1:]))
