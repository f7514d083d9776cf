"""What an operator does to a run that exists: ask it, reshape it, watch it, stop it."""

from __future__ import annotations

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.coordination.run_files import Outcome
from liver_hpc.errors import DeadlineError, LiverError, RequestRefused
from liver_hpc.protocol.messages import FromOperator, Reply, StatusRequest, StopRequest
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ChannelRefused, connect
from liver_hpc.rendezvous.secret import read_secret
from liver_hpc.run_directory import RunDirectory, outcome_text, process_lives

CONNECT_S = 10.0
REPLY_S = 30.0
_OUTCOME_S = 30.0
"""How long a coordinator that has hung up may take to write its outcome."""


def request(run: RunDirectory, message: FromOperator) -> Reply:
    """Sends one request; returns the coordinator's reply.

    Raises RequestRefused with the reply's text when it declined, LiverError when nobody answers,
    with the reason: the run is over, has not started, or its coordinator is gone.
    """
    channel = _connect(run)
    try:
        return _ask(channel, message)
    except ChannelClosed as error:
        raise LiverError(f"run {run}: the coordinator hung up: {error}") from error
    finally:
        channel.close()


def stop(run: RunDirectory, timeout_s: float | None = None, checkpoint: bool = False) -> Outcome:
    """Has the run stop at its next step boundary, and waits until it is over. With `checkpoint`
    the state is written to disk there; the outcome's reason says whether it could be.

    Without `timeout_s` it waits as long as the run file lets boundaries and exits take. On the
    local cluster the run's processes are gone too on return. Raises what `request` raises, and
    DeadlineError.
    """
    config = run.config()
    if timeout_s is None:
        limits = config.deadlines
        timeout_s = limits.boundary_s + limits.release_s + limits.exit_s
        timeout_s += limits.transfer_s if checkpoint else 0.0
    address, job = run.coordinator(), run.job_id()
    request(run, StopRequest(checkpoint=checkpoint))
    deadline = Deadline.after(SystemClock(), timeout_s, f"run {run} to stop")
    local = config.cluster.kind == "local" and address is not None and job is not None
    pids = (address.pid, int(job)) if local and address and job else ()

    def over() -> bool:
        living = any(process_lives(pid) for pid in pids)
        if pids and not living and run.outcome() is None:
            raise LiverError(f"run {run} ended without an outcome; {run.where_logs_are()}")
        return run.outcome() is not None and not living

    poll_until(over, deadline)
    outcome = run.outcome()
    assert outcome is not None
    return outcome


class Watch:
    """Snapshots of a run over one connection, made anew when it breaks."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._channel: Channel | None = None

    def snapshot(self) -> StatusSnapshot | None:
        """The run's state now; None once nobody answers any more.

        Raises DeadlineError when the coordinator takes too long.
        """
        for _ in range(2):
            if self._run.outcome() is not None or self._run.coordinator() is None:
                return None
            try:
                if self._channel is None:
                    self._channel = _open(self._run)
                return StatusSnapshot.model_validate(_ask(self._channel, StatusRequest()).data)
            except RequestRefused:  # it is about to end
                return None
            except ChannelClosed:
                self.close()
        return None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def final_outcome(run: RunDirectory) -> Outcome | None:
    """The outcome of a run whose coordinator has hung up; None when it was killed."""
    deadline = Deadline.after(SystemClock(), _OUTCOME_S, f"the outcome of {run}")
    local = run.config().cluster.kind == "local"

    def settled() -> bool:
        address = run.coordinator()
        dead = local and address is not None and not process_lives(address.pid)
        return dead or run.outcome() is not None

    try:
        poll_until(settled, deadline)
    except DeadlineError:
        return None
    return run.outcome()


def _ask(channel: Channel, message: FromOperator) -> Reply:
    channel.send(message)
    reply = channel.receive(REPLY_S)
    if not isinstance(reply, Reply):
        raise LiverError(f"wanted a reply to {message.type!r}, got {reply.type!r}")
    if not reply.ok:
        raise RequestRefused(reply.text)
    return reply


def _connect(run: RunDirectory) -> Channel:
    """A channel to the coordinator; raises LiverError that says why there is none."""
    outcome = run.outcome()
    if outcome is not None:
        raise LiverError(f"run {run} is over: {outcome_text(outcome)}")
    try:
        return _open(run)
    except ChannelRefused as error:
        raise LiverError(f"run {run}: {error}") from error
    except ChannelClosed as error:
        address = run.coordinator()
        pid = "" if address is None else f" (process {address.pid})"
        if address is not None and process_lives(address.pid):
            raise LiverError(f"run {run} is ending; its outcome is not written yet") from error
        raise LiverError(
            f"run {run}: its coordinator{pid} is gone and left no outcome; {run.where_logs_are()}"
        ) from error


def _open(run: RunDirectory) -> Channel:
    address = run.coordinator()
    if address is None:
        raise LiverError(f"run {run} has no coordinator: it is queued, starting or ending")
    secret = read_secret(run.secret_path)
    where = f"the coordinator of {run} at {address.host}:{address.port}"
    return connect((address.host, address.port), secret, CONNECT_S, where)
