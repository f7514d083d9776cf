"""A job whose batch script went with its node, and with it the run's coordinator: Slurm lets a job
that is submitted with --no-kill go on with the nodes that are left.

An agent on one of these has another coordinator begin there, which takes over. It runs in a step of
the job, and does for the job what its script would have done. Where none comes, the job is queued
again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.cluster.slurm.holdings import own_allocations
from liver_hpc.cluster.slurm.launcher import srun_words
from liver_hpc.cluster.slurm.script import python_words
from liver_hpc.cluster.slurm.together import STEP_VARIABLE
from liver_hpc.config.schema import ClusterSection, SlurmSection
from liver_hpc.errors import LiverError
from liver_hpc.host.child import Child, Command
from liver_hpc.host.process import clean_environment, quiet_thread
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.epoch import MISSED_AFTER, claim_succession, last_sign, newest_epoch
from liver_hpc.run.outcome import write_private_json

ENVIRONMENT_FILE = "job-environment.json"
_PYTHON = "LIVER_PYTHON"
"""In that file: what starts Python on the host. The image of an agent has another one."""
_OF_A_JOB = ("SLURM_JOB_", "SLURM_HET_", "SLURM_ARRAY_", "SLURM_CLUSTER_", "SLURM_RESTART_COUNT")
_STEP = "liver-coordinator"
_COORDINATE = ("liver_hpc", "coordinate", "--script-lost")
_LOOK_S = 10.0
_AGAIN_S = 3.0
_MARGIN_S = 60.0
"""Of Slurm, to drop a node from its jobs after the time that it may be silent."""

log = logging.getLogger(__name__)


# ---- what Slurm tells the batch script alone


def note_environment(run: RunDirectory, environ: Mapping[str, str]) -> None:
    """For a coordinator that begins in a step. Raises OSError."""
    told = {name: value for name, value in environ.items() if name.startswith(_OF_A_JOB)}
    write_private_json(run.path / ENVIRONMENT_FILE, {**told, _PYTHON: sys.executable})


def script_environment(run: RunDirectory, environ: Mapping[str, str]) -> dict[str, str]:
    """What the script of the run's job was told of it; nothing outside of that job."""
    told = _noted(run)
    told.pop(_PYTHON, None)
    ids = [value for name, value in told.items() if name.startswith("SLURM_JOB_ID")]
    return told if environ.get("SLURM_JOB_ID") in ids else {}


def _noted(run: RunDirectory) -> dict[str, str]:
    with suppress(OSError, ValueError):
        return dict(json.loads((run.path / ENVIRONMENT_FILE).read_bytes()))
    return {}


def _hosts_python(run: RunDirectory, cluster: ClusterSection) -> list[str]:
    noted = _noted(run).get(_PYTHON)
    return [noted, "-P"] if noted and not cluster.slurm.python else python_words(cluster)


# ---- another coordinator


def begin_coordinator(run_directory: Path, attempt: int) -> bool:
    """Called by agents that miss the coordinator, for the first time or again. Has another one take
    over in a step on this node, in the first that calls.

    False in the others; where the run has ended, is not on Slurm, or this node is not of its own
    job; and where there is no srun, as in most images. Raises LiverError, OSError.
    """
    run = RunDirectory(run_directory)
    config = run.config()
    if run.outcome() is not None or not shutil.which("srun"):
        return False
    if not (told := script_environment(run, os.environ)):
        return False
    commands = SlurmCommands(config.cluster.slurm.command_s, 0.0)
    own = own_allocations(told, config, commands.hostnames, commands.nodes_of)
    node = os.environ.get("SLURMD_NODENAME", "")
    here = next((held for held in own if node in held.nodes), None)
    if here is None:
        return False
    if os.environ.get("SLURM_STEPMGR") == own[0].nodes[0] != node:
        raise LiverError(f"the steps of this job are made by {own[0].nodes[0]} (enable_stepmgr)")
    epoch = newest_epoch(run_directory)
    if not claim_succession(run_directory, attempt):
        return False
    name = f"{_STEP}-{epoch + 1}"
    step = srun_words(here, name, [node], accelerated=False)
    command = Command(
        f"srun of step {name}",
        [*step, *_hosts_python(run, config.cluster), "-u", "-m", *_COORDINATE, str(run)],
        orphan_signal=None,
        environment={**clean_environment(os.environ), STEP_VARIABLE: name},
        log=run.path / "logs" / f"srun-{name.removeprefix('liver-')}.log",
        apart="session",
    )
    patience_s = config.deadlines.coordinator_s * MISSED_AFTER  # then another agent may
    limit = Deadline.after(SystemClock(), patience_s, f"step {name}")
    quiet_thread(partial(_begin, command, run, epoch, limit), "coordinator")
    return True


def _begin(command: Command, run: RunDirectory, epoch: int, limit: Deadline) -> None:
    """Again where Slurm does not begin the step: its controller may be busy, or missing the node,
    too."""
    pause = threading.Event()
    while not limit.expired():
        try:
            srun = Child(command)
            while srun.exit_code() is None:
                pause.wait(1.0)  # it lasts for as long as the coordinator does
            if newest_epoch(run.path) > epoch:
                return
            log.error("%s: exit code %s, see its log", command.name, srun.exit_code())
        except (LiverError, OSError) as error:  # e.g. no memory for a process, or no directory
            log.error("%s", error)
        pause.wait(min(_AGAIN_S, limit.remaining_s()))


def warn_of_the_end(slurm: SlurmSection, job_id: str) -> None:
    """Has this process, which is in a step, signalled in time before its job ends, as Slurm signals
    the batch script alone."""
    commands, clock = SlurmCommands(slurm.command_s, slurm.unreachable_s), SystemClock()

    def watch() -> None:
        while True:
            info = None
            with suppress(SlurmError):
                info = commands.jobs([job_id]).get(job_id)
            left_s = float("inf")
            if info is not None and info.ends_s is not None:
                left_s = info.ends_s - clock.now_s()
            if left_s <= slurm.end_window_s:
                os.kill(os.getpid(), signal.SIGUSR1)
                return
            threading.Event().wait(min(left_s - slurm.end_window_s, _LOOK_S))

    quiet_thread(watch, "time limit")


# ---- the job's end


def end_without_script(run_directory: Path, commands: SlurmCommands | None = None) -> None:
    """Called by who has no coordinator any more, or was it to the end of the run. Ends the run's
    job once Slurm has dropped the node of its batch script. It is queued again where the run has
    not ended, and it may be.

    Waits for that as long as Slurm may take to notice (SlurmdTimeout), and while a step of the job
    has a coordinator. Returns at once where the run is not on Slurm, and as soon as the job runs no
    more. Raises SlurmError.
    """
    run = RunDirectory(run_directory)
    cluster, job = run.config().cluster, run.job_id()
    if cluster.kind != "slurm" or job is None:
        return
    slurm, clock = cluster.slurm, SystemClock()
    commands = commands or SlurmCommands(slurm.command_s, slurm.unreachable_s)
    found = re.match(r"\d+", commands.setting("SlurmdTimeout"))
    limit_s = float(found[0] if found else 0) + _MARGIN_S
    limit = Deadline.after(clock, limit_s, f"Slurm to drop the batch script's node of job {job}")

    ended, sign = run.outcome() is not None, last_sign(run.path)

    def is_led() -> bool:
        nonlocal sign
        if ended:
            return False
        before, sign = sign, last_sign(run.path)
        return before != sign or any(name.startswith(_STEP) for name in commands.steps([job]))

    # Who was it to the end knows that the script is gone; others believe Slurm's last word alone.
    while (lost := commands.has_lost_its_script(job, or_silent=ended)) is False or (
        lost and is_led()
    ):
        if limit.expired():
            log.error("job %s is left alone: %s", job, limit.error())
            return
        threading.Event().wait(_LOOK_S)
    if not lost:
        return
    if slurm.requeue and run.outcome() is None:
        log.warning("the node of job %s's batch script is lost: the job is queued again", job)
        commands.requeue(job)
    else:
        log.warning("the node of job %s's batch script is lost: the job is cancelled", job)
        commands.cancel(job)
