"""The nodes that are examined: an allocation of the doctor's own, or the job that it runs in."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.doctor.order import ALLOCATION_MIN, Order
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.environment import clean_environment
from liver_hpc.host.lifeline import guarded

_POLL_S = 0.2
_RETURN_S = 30.0
_STOP_S = 5.0
_KILL_S = 10.0


@dataclass(frozen=True)
class Allocation:
    """A job, and the nodes of it that are examined."""

    job: str
    nodes: tuple[str, ...]
    own: bool


def job_around(commands: SlurmCommands) -> Allocation | None:
    """The job that this process runs in; None outside of one."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    nodelist = os.environ.get("SLURM_JOB_NODELIST", "")
    return Allocation(job, commands.hostnames(nodelist), own=False)


@contextlib.contextmanager
def taken(order: Order, commands: SlurmCommands) -> Iterator[Allocation]:
    """Nodes for a while; whatever happens in between, they are given back.

    salloc keeps them for as long as a `cat` of ours reads: should this process be killed, the
    pipe closes, and Slurm has them back; a salloc that does not end by that is killed. Raises
    LiverError when they are refused, DeadlineError when they are not granted in `order.grant_s`.
    """
    name = f"liver-doctor-{secrets.token_hex(4)}"
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            # SIGTERM: a salloc that still waits takes its request back.
            guarded(_salloc(order, name), signal.SIGTERM),
            env=clean_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            start_new_session=True,  # Ctrl-C is for this process, which gives the nodes back
        )
        try:
            yield _granted(order, commands, name, process, complaints.fileno())
        finally:
            _give_back(commands, name, process)


def _salloc(order: Order, name: str) -> list[str]:
    program, keeper, limiter = map(shutil.which, ("salloc", "cat", "timeout"))
    if program is None or keeper is None or limiter is None:
        raise LiverError("salloc is not on the path")
    longest_s = order.grant_s + 60 * ALLOCATION_MIN
    words = [limiter, f"--kill-after={_KILL_S:g}", f"{longest_s:g}"]  # it passes a SIGTERM on
    words += [program, f"--nodes={order.nodes}", "--ntasks-per-node=1", f"--job-name={name}"]
    words += [f"--time={ALLOCATION_MIN}", "--no-bell"]
    if order.partition is not None:
        words.append(f"--partition={order.partition}")
    if order.account is not None:
        words.append(f"--account={order.account}")
    if order.gpus_per_node:
        words.append(f"--gres=gpu:{order.gpus_per_node}")
    return [*words, keeper]


def _granted(
    order: Order,
    commands: SlurmCommands,
    name: str,
    process: subprocess.Popen[bytes],
    complaints: int,
) -> Allocation:
    reason, found = "no answer", list[Allocation]()

    def look() -> bool:
        nonlocal reason
        if process.poll() is not None:
            said = os.pread(complaints, 4096, 0).decode(errors="replace").strip()
            raise LiverError(f"salloc: {said or f'exit code {process.returncode}'}")
        for job in commands.named(name, retry=False).values():
            reason = f"{job.state.lower()}, {job.reason}"
            if job.state == "RUNNING":
                found.append(Allocation(job.job_id, job.nodes, own=True))
        return bool(found)

    where = f"partition {order.partition}" if order.partition else "the default partition"
    waits_for = f"{order.nodes} nodes of {where}"
    deadline = Deadline.after(SystemClock(), order.grant_s, waits_for)
    try:
        poll_until(look, deadline, _POLL_S)
    except DeadlineError as error:
        raise DeadlineError(f"{error} (the request is {reason})") from None
    return found[0]


def _give_back(commands: SlurmCommands, name: str, process: subprocess.Popen[bytes]) -> None:
    """Returns once Slurm knows of no such job; raises LiverError when it still does."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: timeout, salloc, cat
        process.wait(_STOP_S)

    cancelled = False

    def gone() -> bool:
        nonlocal cancelled
        with contextlib.suppress(ControllerUnreachable):
            if not cancelled:
                commands.cancel_named(name, retry=False)
                cancelled = True
            return not commands.named(name, retry=False)
        return False

    deadline = Deadline.after(SystemClock(), _RETURN_S, f"job {name} to end")
    poll_until(gone, deadline, _POLL_S)
