"""What an operator does to a run that exists: wait for it, ask it, watch it, stop it."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmError
from liver_hpc.cluster.slurm.replies import RUNNING, SUSPENDED, JobInfo
from liver_hpc.cluster.slurm.run_job import (
    JOB_POLL_S,
    OwnJob,
    RunJob,
    check_over,
    gone,
    job_of,
    noted_job,
    step_text,
)
from liver_hpc.errors import ConfigError, DeadlineError, LiverError, RequestRefused
from liver_hpc.host.interfaces import is_loopback
from liver_hpc.protocol.messages import FromOperator, Reply, StatusRequest, StopRequest
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.rendezvous.channel import (
    Channel,
    ChannelClosed,
    ChannelRefused,
    connect,
    reason_of,
)
from liver_hpc.run.directory import CoordinatorAddress, RunDirectory, process_lives
from liver_hpc.run.entries import JOURNAL_FILE, last_end
from liver_hpc.run.outcome import Outcome
from liver_hpc.run.secret import read_secret

CONNECT_S = 10.0
REPLY_S = 30.0
_OUTCOME_S = 30.0
"""How long a coordinator that has hung up may take to write its outcome."""
_QUEUE_POLL_S = 2.0
_LOCAL_POLL_S = 0.02


class RunWaits(LiverError):
    """The run has no coordinator yet, or none for now: its Slurm job is queued, or starts."""

    def __init__(self, run: RunDirectory, info: JobInfo) -> None:
        super().__init__(f"run {run}: {info}")
        self.queued = info.queued


def request(run: RunDirectory, message: FromOperator) -> Reply:
    """Sends one request; returns the coordinator's reply.

    Raises RequestRefused with the reply's text when it declined, RunWaits while the run's job is
    in Slurm's queue, LiverError when nobody answers, with the reason: the run is over, has not
    started, its coordinator is gone, or is not reached from here.
    """
    if (outcome := run.outcome()) is not None:
        raise LiverError(f"run {run} is over: {outcome}")
    address = run.coordinator()
    if address is None:
        raise _silence(run)
    _check_place(run, address)
    try:
        channel = _open(run, address)
    except ChannelRefused as error:
        raise LiverError(f"run {run}: {error}") from error
    except ChannelClosed as error:
        raise _unreached(run, error) or _silence(run) from error
    except DeadlineError as error:
        if (unreached := _unreached(run, error)) is None and not address.is_here and job_of(run):
            raise _silence(run) from error  # its node may be gone
        raise unreached or error from None
    with closing(channel):
        try:
            return _ask(channel, message)
        except ChannelClosed as error:
            raise LiverError(f"run {run}: the coordinator hung up: {error}") from error


def answers(run: RunDirectory) -> bool:
    """Whether the run's coordinator says how the run stands."""
    address = run.coordinator()
    if address is None or run.outcome() is not None:
        return False
    try:
        with closing(_open(run, address)) as channel:
            _ask(channel, StatusRequest())
    except LiverError:
        return False
    return True


def check_ended(run: RunDirectory) -> None:
    """As `check_over`; also of a run whose coordinator answers, whatever is known of its job."""
    check_over(run)
    if (address := run.coordinator()) is not None and answers(run):
        where = f"{address.host}:{address.port}"
        raise ConfigError(f"run {run} is not over: its coordinator answers at {where}")


def stop(run: RunDirectory, timeout_s: float | None = None, checkpoint: bool = False) -> Outcome:
    """Has the run stop at its next step boundary, and waits until it is over. With `checkpoint`
    the state is written to disk there; the outcome's reason says whether it could be.

    A run whose job is queued, or that has no coordinator and has not trained yet, is cancelled; one
    whose coordinator was killed is stopped by the next one. Without `timeout_s` it waits as long as
    the coordinator says that a stop may take, and for exits. On the local cluster the run's
    processes are gone too on return, and on Slurm its job, unless that goes on for more than
    `exit_s` after the run. Raises what `request` raises, and DeadlineError.
    """
    config, clock = run.config(), SystemClock()
    limits = config.limits
    ends_s = limits.release_s + limits.exit_s
    address, process, job = run.coordinator(), run.job_id(), job_of(run)
    try:
        reply = request(run, StopRequest(checkpoint=checkpoint))
    except RunWaits as waits:
        its_job = job or noted_job(run)
        assert its_job is not None
        if waits.queued or run.world() is None:
            return its_job.cancel(limits.boundary_s + ends_s if timeout_s is None else timeout_s)
        # Training goes on while the next one reads what a killed one has left.
        who = f"another coordinator of {run} (`scancel {its_job.job_id}` ends its job without one)"
        limit_s = limits.successor_s if timeout_s is None else timeout_s
        next_by = Deadline.after(clock, limit_s, who)
        _await_next(run, its_job, next_by)
        left_s = None if timeout_s is None else next_by.remaining_s()
        return stop(run, left_s, checkpoint)
    if timeout_s is None:
        timeout_s = reply.data.get("stops_within_s", limits.boundary_s) + ends_s
    deadline = Deadline.after(clock, timeout_s, f"run {run} to stop")
    if job is not None:
        poll_until(lambda: run.outcome() is not None or job.is_over(), deadline, JOB_POLL_S)
        with suppress(DeadlineError):  # a batch script may do more after `liver run`
            exit_s = min(limits.exit_s, deadline.remaining_s())
            exits = Deadline.after(clock, exit_s, f"job {job.job_id} to end")
            poll_until(job.is_over, exits, JOB_POLL_S)
    elif config.cluster.kind == "local" and address is not None and process is not None:
        pids = (address.pid, int(process))
        poll_until(lambda: not any(map(process_lives, pids)), deadline)
    else:
        poll_until(lambda: run.outcome() is not None, deadline)
    outcome = run.outcome()
    if outcome is None:
        raise gone(run, job)
    return outcome


def await_coordinator(run: RunDirectory) -> None:
    """Returns once the coordinator listens, or the run is over already.

    On Slurm it waits for as long as the job is queued; what Slurm says of it is printed whenever
    that changes. Raises LiverError if the coordinator died, DeadlineError when it did not come
    within `deadlines.boot_s`, and the `derive_s` that it may need for the model's spec.
    """
    config, job = run.config(), job_of(run)
    pid = int(run.job_id() or 0) if job is None and config.cluster.kind == "local" else 0
    told, pause = "", threading.Event()
    deadline: Deadline | None = None
    while run.outcome() is None:
        text, queued = _state(run, job) if job is not None else ("", False)
        if text != told:
            print(text, flush=True)
            told = text
        if not queued and run.coordinator() is not None:  # in the queue an earlier one's may lie
            return
        if pid and not process_lives(pid) and run.outcome() is None:  # it was launched just now
            raise LiverError(f"the coordinator of {run} ended at once; {run.where_logs_are()}")
        if queued:
            deadline = None
        elif deadline is None:
            limit_s = config.deadlines.boot_s + config.deadlines.derive_s
            deadline = Deadline.after(SystemClock(), limit_s, f"the coordinator of {run}")
        else:
            deadline.check()
        pause.wait(_LOCAL_POLL_S if job is None else _QUEUE_POLL_S if queued else JOB_POLL_S)


def _await_next(run: RunDirectory, job: RunJob, deadline: Deadline) -> None:
    """Returns once a run has a coordinator again, or does not go on in this start of its job.
    Raises DeadlineError."""

    def settled() -> bool:
        has_one = run.coordinator() is not None or run.outcome() is not None
        return has_one or job.is_over(or_queued=True)

    poll_until(settled, deadline, JOB_POLL_S)


def _state(run: RunDirectory, job: RunJob) -> tuple[str, bool]:
    """What Slurm says of a run's job, and whether it is queued; LiverError once it is over."""
    try:
        info = job.find()
    except ControllerUnreachable as error:
        return f"job {job.job_id}: {error.complaint}", True
    if info is not None:
        return str(info), info.queued
    outcome = run.outcome()
    if outcome is None:
        raise gone(run, job)
    return str(outcome), False


class Watch:
    """Snapshots of a run over one connection, made anew when it breaks."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._channel: Channel | None = None
        self._has_answered = False

    def snapshot(self) -> StatusSnapshot | None:
        """The run's state now; None once nobody answers any more. Where a coordinator was killed,
        the next one is waited for.

        Raises DeadlineError when the coordinator takes too long, LiverError where it is not reached
        from here; where one has answered before, once the next one must have come.
        """
        limit_s = self._run.config().deadlines.successor_s if self._has_answered else _OUTCOME_S
        deadline = Deadline.after(SystemClock(), limit_s, f"a coordinator of {self._run}")
        while self._run.outcome() is None:
            address = self._run.coordinator()
            try:
                if self._channel is None and address is not None:
                    _check_place(self._run, address)
                    self._channel = _open(self._run, address)
                if self._channel is not None:
                    data = _ask(self._channel, StatusRequest()).data
                    self._has_answered = True
                    return StatusSnapshot.model_validate(data)
            except RequestRefused:  # it is about to end
                return None
            except ChannelClosed as error:
                self.close()
                if deadline.expired() and (unreached := _unreached(self._run, error)) is not None:
                    raise unreached from error
            except DeadlineError as error:
                is_slow = self._channel is not None  # it is reached
                self.close()
                if deadline.expired() or not self._has_answered:
                    raise (None if is_slow else _unreached(self._run, error)) or error from None
            if deadline.expired() or not coordinator_lives(self._run):
                return None
            time.sleep(_LOCAL_POLL_S if job_of(self._run) is None else JOB_POLL_S)
        return None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def goes_on_text(run: RunDirectory) -> str:
    """What whoever has pressed Ctrl-C is to know."""
    return f"run {run} goes on; see `liver status {run}`, end it with `liver stop {run}`"


def goes_on(run: RunDirectory) -> bool:
    """Whether a run whose coordinator has hung up goes on with its job, which is queued again.

    Returns once that is known: otherwise its outcome is written by then, unless it was killed.
    """
    job = job_of(run)

    def settled() -> bool:
        return run.last_outcome() is not None or not coordinator_lives(run)

    deadline = Deadline.after(SystemClock(), _OUTCOME_S, f"the outcome of {run}")
    with suppress(DeadlineError):
        poll_until(settled, deadline, _LOCAL_POLL_S if job is None else JOB_POLL_S)
    if job is None or run.outcome() is not None:
        return False
    # Right after a coordinator has ended its job may be on its way to the queue still.
    deadline = Deadline.after(SystemClock(), _OUTCOME_S, f"job {job.job_id} to be queued again")
    try:
        poll_until(lambda: job.is_over(or_queued=True), deadline, JOB_POLL_S)
    except DeadlineError:  # it has come back within a moment
        return True
    return not job.is_over()


def coordinator_lives(run: RunDirectory) -> bool:
    """Or another one may come, as far as can be known: its process where that is one of this
    machine, else what starts it."""
    address, job, process = run.coordinator(), job_of(run), run.job_id()
    if run.coordinators_process() is not None:
        return True
    if job is not None:
        return not job.is_over(or_queued=True)
    if process is not None:
        return run.local_job() is not None
    return address is None or not address.is_here


def _ask(channel: Channel, message: FromOperator) -> Reply:
    channel.send(message)
    reply = channel.receive(REPLY_S)
    if not isinstance(reply, Reply):
        raise LiverError(f"wanted a reply to {message.type!r}, got {reply.type!r}")
    if not reply.ok:
        raise RequestRefused(reply.text)
    return reply


def _silence(run: RunDirectory) -> LiverError:
    """Why nobody answers for a run that is not over."""
    address, job = run.coordinator(), job_of(run)
    asked = job or noted_job(run)
    try:
        info = asked.find() if asked is not None else None
    except SlurmError as error:
        return LiverError(f"run {run}: its coordinator does not answer, and Slurm neither: {error}")
    if info is not None and (info.queued or (address is None and job is not None)):
        return RunWaits(run, info)
    if info is not None and info.state == SUSPENDED:
        return LiverError(f"run {run}: {info}, and so is its coordinator")
    is_over = asked is not None and info is None
    if address is None and is_over:
        return gone(run, asked)
    if address is None:
        return LiverError(f"run {run} has no coordinator: it is starting or ending")
    if not (is_over and not address.is_here) and coordinator_lives(run):
        return LiverError(f"run {run} is ending; its outcome is not written yet")
    who = f"process {address.pid}"
    if asked is not None:
        who += f" on {address.hostname}, job {asked.job_id}"
    return LiverError(
        f"run {run}: its coordinator ({who}) is gone and left no outcome; {run.where_logs_are()}"
    )


def _check_place(run: RunDirectory, address: CoordinatorAddress) -> None:
    """Raises LiverError where the coordinator listens on another machine's loopback: this machine's
    own would be asked. Not where its job is seen to wait, or to be over: then nobody listens."""
    if address.is_here or not is_loopback(address.host):
        return
    job = job_of(run) or noted_job(run)
    with suppress(SlurmError):
        if job is not None and job.is_over(or_queued=True):
            return
    noted = OwnJob.noted(run.path)
    step = ""
    if noted is not None and run.job_id() in (None, noted.job_id):
        step = f" ({step_text(run.config(), noted.job_id)} ...)"
    raise LiverError(
        f"run {run}: its coordinator listens on {address.host} of {address.hostname} alone; give "
        f"the command there{step}"
    )


def _unreached(run: RunDirectory, error: LiverError) -> LiverError | None:
    """That this machine does not reach a coordinator whose job runs; None where it is gone, or has
    said that it ends: it hangs up before its outcome is written. error: the connection's."""
    address, job, end = run.coordinator(), job_of(run), None
    with suppress(ConfigError):  # there is no journal yet, or it is damaged
        end = last_end(run.path / JOURNAL_FILE)
    if address is None or address.is_here or job is None or end is not None:
        return None
    try:
        info = job.find()
    except SlurmError:
        return None
    if info is None or info.state != RUNNING:
        return None
    why = reason_of(error.__cause__ if isinstance(error.__cause__, OSError) else error)
    return LiverError(
        f"run {run}: its coordinator does not answer at {address.host}:{address.port} ({why}), and "
        f"{info}; does this machine reach the interface there, `network.interface`?"
    )


def _open(run: RunDirectory, address: CoordinatorAddress) -> Channel:
    who = f"the coordinator of {run}"
    return connect((address.host, address.port), read_secret(run.secret_path), CONNECT_S, who)
