"""submitit for heterogeneous jobs: one batch job of several components, asked about by squeue.

submitit knows neither components nor a Slurm without accounting: its own job class asks sacct.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from liver_hpc.cluster.slurm.commands import (
    ControllerUnreachable,
    SlurmCommands,
    SlurmError,
    run_command,
)
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.cluster.slurm.script import (
    Submission,
    batch_script,
    coordinator_command,
    job_options,
    sbatch_environment,
)
from liver_hpc.errors import ConfigError

OVER = "OVER"
"""The state of a job that squeue does not list any more; how it ended, its result says."""
_MOST_REQUEUES = 1_000_000
"""A run that makes no progress ends by itself; submitit need not count."""
_WATCH_S = 30.0
_COMMAND_S = 30.0


@dataclass(frozen=True)
class HetComponent:
    """One component of a submitted job. state: Slurm's word, OVER once it is listed no more.

    log: where its output goes; steps write to files of their own.
    """

    offset: int
    name: str
    state: str
    reason: str
    nodes: tuple[str, ...]
    log: Path


class SqueueWatcher(SlurmInfoWatcher):
    """States of jobs by squeue; a job that it does not list is over."""

    def __init__(self, commands: SlurmCommands, delay_s: float = _WATCH_S) -> None:
        super().__init__(delay_s=int(delay_s))
        self._commands = commands

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """A Slurm state of the job's first component, OVER, or UNKNOWN."""
        return str(self.get_info(job_id, mode=mode).get("State", "UNKNOWN"))

    def update(self) -> None:
        """Asks about all registered jobs at once; keeps the last answer when there is none."""
        asked = sorted(self._registered - self._finished)
        if not asked:
            return
        self._num_calls += 1
        self._last_status_check = time.time()
        try:
            listed = self._commands.jobs(asked, retry=False)
        except ControllerUnreachable:
            return
        for job_id in asked:
            info = listed.get(job_id)
            self._info_dict[job_id] = {"JobID": job_id, "State": info.state if info else OVER}
            if info is None:
                self._finished.add(job_id)


class HetJob(SlurmJob[Any]):
    """A submitted heterogeneous job; its id is the first component's, its leader's."""

    watcher = SqueueWatcher(SlurmCommands(_COMMAND_S, unreachable_s=0.0))
    component_names: tuple[str, ...] = ()

    @property
    def components(self) -> tuple[HetComponent, ...]:
        """What squeue says of each component now, in their order.

        Raises SlurmError when it cannot be asked.
        """
        listed = self._commands.jobs([self.job_id])
        by_offset = {info.het_offset or 0: info for info in listed.values()}
        names = self.component_names or tuple(map(str, range(len(by_offset) or 1)))
        return tuple(
            self._component(offset, name, by_offset.get(offset))
            for offset, name in enumerate(names)
        )

    def cancel(self, check: bool = True, component: int | None = None) -> None:
        """Ends the job, or one component of it that is not the first.

        A queued job is cancelled as a whole or not at all. Raises SlurmError, with `check`.
        """
        if component == 0:
            raise ConfigError("the first component is where the coordinator is: cancel the job")
        if component is not None and component >= len(self.component_names):
            raise ConfigError(
                f"job {self.job_id} has no component {component}; there are "
                f"{', '.join(self.component_names)}"
            )
        which = self.job_id if component is None else f"{self.job_id}+{component}"
        try:
            self._commands.cancel(which)
        except SlurmError:
            if check:
                raise

    def _component(self, offset: int, name: str, info: JobInfo | None) -> HetComponent:
        state, reason, nodes = (
            (info.state, info.reason, info.nodes) if info is not None else (OVER, "", ())
        )
        return HetComponent(offset, name, state, reason, nodes, self.paths.stdout)

    @property
    def _commands(self) -> SlurmCommands:
        return self.watcher._commands


class HetExecutor(SlurmExecutor):
    """Submits a call as a heterogeneous job; it runs once, on the first node of the first
    component, and starts steps on the others itself.

    All options come from the submission: there is nothing to update. `submit` raises SlurmError
    when Slurm refuses.
    """

    job_class = HetJob

    def __init__(self, submission: Submission, commands: SlurmCommands | None = None) -> None:
        super().__init__(submission.folder, max_num_timeout=_MOST_REQUEUES)
        self._submission = submission
        slurm = submission.cluster.slurm
        environment = sbatch_environment(os.environ, job_options(submission))
        self._commands = commands or SlurmCommands(
            slurm.command_s,
            slurm.unreachable_s,
            run=partial(run_command, environment=environment),
        )
        self.parameters["time"] = submission.cluster.timeout_min

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        raise ConfigError(
            f"{sorted(kwargs)}: the options of this job are its components' in the run file"
        )

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(coordinator_command(self._submission))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return batch_script(self._submission, shlex.split(command))

    def _submit_command(self, command: str) -> HetJob:
        script = self._submission.script_path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(self._make_submission_file_text(command, ""), encoding="utf-8")
        job_id = submit_once(self._commands, script, self._submission.name)
        job = HetJob(folder=self.folder, job_id=job_id)
        components = self._submission.cluster.slurm.components
        job.component_names = tuple(component.name for component in components)
        return job

    def _num_tasks(self) -> int:
        return 1


def submit_once(commands: SlurmCommands, script: Path, name: str) -> str:
    """Submits a script whose job's name is its own alone; returns the job id.

    A controller that does not answer may have taken the job all the same: before another attempt
    it is asked for a job of that name.
    """
    try:
        return commands.sbatch([], script, retry=False)
    except ControllerUnreachable:
        queued = commands.named(name)  # returns once the controller is back
    if not queued:
        return commands.sbatch([], script)
    first = min(queued.values(), key=lambda info: int(info.job_id))
    return first.het_leader or first.job_id
