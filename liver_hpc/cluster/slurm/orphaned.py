"""A job whose batch script went with its node, and with it the run's coordinator: Slurm lets a job
that is submitted with --no-kill go on with the nodes that are left, idle until its time is up."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.run.directory import RunDirectory

_LOOK_S = 10.0
_MARGIN_S = 60.0
"""Of Slurm, to drop a node from its jobs after the time that it may be silent."""

log = logging.getLogger(__name__)


def begin_again_without_script(run_directory: Path, commands: SlurmCommands | None = None) -> None:
    """Called by an agent that has no coordinator any more. Has the run's job queued again, or ended
    where it may not be, once Slurm has dropped the node of its batch script.

    Waits for that as long as Slurm may take to notice (SlurmdTimeout). Returns at once where the
    run has ended, or is not on Slurm, and as soon as the job runs no more. Raises SlurmError.
    """
    run = RunDirectory(run_directory)
    cluster, job = run.config().cluster, run.job_id()
    if cluster.kind != "slurm" or job is None or run.outcome() is not None:
        return
    slurm, clock = cluster.slurm, SystemClock()
    commands = commands or SlurmCommands(slurm.command_s, slurm.unreachable_s)
    found = re.match(r"\d+", commands.setting("SlurmdTimeout"))
    limit_s = float(found[0] if found else 0) + _MARGIN_S
    limit = Deadline.after(clock, limit_s, f"Slurm to drop the batch script's node of job {job}")
    while (lost := commands.has_lost_its_script(job)) is False and not limit.expired():
        threading.Event().wait(_LOOK_S)
    if not lost:
        return
    if slurm.requeue:
        log.warning("the node of job %s's batch script is lost: the job is queued again", job)
        commands.requeue(job)
    else:
        log.warning("the node of job %s's batch script is lost: the job is cancelled", job)
        commands.cancel(job)
