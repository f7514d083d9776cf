"""`liver list`: the runs of a directory, as their small files tell of them.

Nothing is asked over the network but Slurm, once for all runs: a live run's step is the newest in
the tail of its journal, its shape is in world.json, an ended run has an outcome.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.cluster.slurm.run_job import RunJob, left_text, noted_job_id, own_job
from liver_hpc.errors import LiverError
from liver_hpc.report.wording import NOTHING, duration_text, layout_text
from liver_hpc.run.directory import RunDirectory, runs_in
from liver_hpc.run.entries import JOURNAL_FILE, Entry, last_entry, last_step
from liver_hpc.run.outcome import Outcome, WorldNote

STARTING, TRAINING, WAITING, LOST = "starting", "training", "waiting for Slurm", "lost"
UNKNOWN, DAMAGED = "unknown", "damaged"
_SLURM_S = 2.0
"""The longest wait for Slurm's answer: a list is looked at, and asked for again."""
_HEADS = ("name", "state", "step", "layout", "workers", "last step", "started")
_KIND = re.compile(r"^cluster:\n  kind: (\w+)$", re.MULTILINE)
"""As `dump_run` writes it."""

Jobs = Mapping[str, JobInfo] | None


@dataclass(frozen=True)
class ListedRun:
    """One run. None stands for what is not known, as before the first world of a start.

    state: how it ended ("finished", "stopped", "failed"), or "starting", "training", "waiting for
    Slurm", "lost" (its coordinator is gone and left no outcome), "unknown" (that cannot be seen
    from here), "damaged". reason: more of that. last_step_s, started_s: epoch seconds.
    """

    name: str
    started_s: float
    state: str = UNKNOWN
    reason: str = ""
    step: int | None = None
    steps: int | None = None
    layout: str | None = None
    workers: int | None = None
    last_step_s: float | None = None


def runs_text(runs_directory: Path) -> str:
    """A table, the newest run first."""
    runs, foreign = list_runs(runs_directory)
    if not runs:
        return f"there is no run under {runs_directory} yet"
    now_s = time.time()
    rows = [_HEADS, *(_cells(run, now_s) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if foreign:
        lines.append(f"{foreign} directories are of other users")
    return "\n".join(lines)


def runs_json(runs_directory: Path) -> str:
    """The same for programs."""
    return json.dumps([asdict(run) for run in list_runs(runs_directory)[0]], indent=1)


def list_runs(runs_directory: Path) -> tuple[list[ListedRun], int]:
    """The runs, and how many directories there are another user's. Raises ConfigError."""
    runs, foreign = runs_in(runs_directory)
    read = [_Files.of(run) for run in runs]
    open_jobs = [each.job for each in read if each.job and not each.is_over]
    jobs = _jobs(open_jobs)
    found = [each.listed(jobs) for each in read]
    return sorted(found, key=lambda run: (run.started_s, run.name), reverse=True), foreign


def _jobs(job_ids: Sequence[str]) -> Jobs:
    """Those that Slurm knows; None where it does not answer."""
    try:
        return SlurmCommands(_SLURM_S, unreachable_s=0.0).jobs(job_ids)
    except LiverError:
        return None


@dataclass(frozen=True)
class _Files:
    """What a run's small files say. job: Slurm's, of a run there, or the one that may be queued to
    go on with a local run. problem: a file is damaged."""

    run: RunDirectory
    world: WorldNote | None = None
    outcome: Outcome | None = None
    job: str = ""
    problem: str = ""

    @classmethod
    def of(cls, run: RunDirectory) -> _Files:
        try:
            world, outcome = run.world(), run.outcome()
            if outcome is not None:
                return cls(run, world, outcome)
            kind = _kind(run) if world is None else world.cluster
            job = (run.job_id() or "") if kind == "slurm" else noted_job_id(run)
            return cls(run, world, None, job)
        except (LiverError, OSError) as error:
            return cls(run, problem=str(error))

    @property
    def is_over(self) -> bool:
        return self.outcome is not None or bool(self.problem)

    def listed(self, jobs: Jobs) -> ListedRun:
        run = ListedRun(self.run.path.name, (self.run.config_path).stat().st_mtime)
        if self.problem:
            return replace(run, state=DAMAGED, reason=self.problem)
        if (world := self.world) is not None:
            run = replace(run, layout=world.layout, workers=world.workers)
            run = replace(run, step=world.step, steps=world.steps)
        if self.outcome is not None:
            state, reason = self.outcome.state, self.outcome.reason
            return replace(run, state=state, reason=reason, step=self.outcome.step)
        journal = self.run.path / JOURNAL_FILE
        if (newest := last_step(journal)) is not None:
            recorded_s = _recorded_s(journal, newest)
            run = replace(run, step=newest.event["step"] + 1, last_step_s=recorded_s)
        try:
            state, reason = self._state(jobs)
        except (LiverError, OSError) as error:
            state, reason = DAMAGED, str(error)
        return replace(run, state=state, reason=reason)

    def _state(self, jobs: Jobs) -> tuple[str, str]:
        """Of a run that has not ended, and why it is thought to be so."""
        address = self.run.coordinator()
        lives = TRAINING if self.world is not None else STARTING
        if self.run.coordinators_process() is not None:
            return lives, ""
        info = own_job(self.run, (jobs or {}).get(self.job))
        is_job = self.run.job_id() is not None or address is None
        if self.job and (is_job or (info is not None and info.queued)):
            if jobs is None:
                return UNKNOWN, f"Slurm does not say what became of job {self.job}"
            if info is None or info.over:
                try:
                    RunJob(self.run, self.job, SlurmCommands(_SLURM_S, 0.0)).check_cluster()
                except LiverError as error:
                    return UNKNOWN, str(error)
                return LOST, f"its job {self.job} is over and {left_text(self.run)}"
            return (WAITING if info.queued else lives), str(info)
        if self.run.local_job() is not None:
            return lives, ""
        if address is None:
            begun = self.run.job_id() is not None
            return (LOST, "it left no outcome") if begun else (STARTING, "")
        if not address.is_here:
            return UNKNOWN, f"its coordinator is process {address.pid} on {address.hostname}"
        return LOST, f"its coordinator (process {address.pid}) is gone and left no outcome"


def _kind(run: RunDirectory) -> str:
    """Its `cluster.kind`, without all of run.yaml: of many runs that would take seconds."""
    with suppress(OSError, UnicodeDecodeError):  # `config` says what is wrong with it
        if found := _KIND.search(run.config_path.read_text(encoding="utf-8")):
            return found[1]
    return run.config().cluster.kind


def _recorded_s(journal: Path, step: Entry) -> float:
    """When a step was recorded, in epoch seconds: by the file's own time, for the clock of whoever
    wrote it does not see that a machine sleeps."""
    newest = last_entry(journal)
    since_s = newest.at_s - step.at_s if newest is not None else 0.0
    try:
        return journal.stat().st_mtime - since_s
    except OSError:
        return step.at_s


def _cells(run: ListedRun, now_s: float) -> tuple[str, ...]:
    step = NOTHING if run.step is None else str(run.step)
    age = NOTHING if run.last_step_s is None else f"{duration_text(now_s - run.last_step_s)} ago"
    return (
        run.name,
        run.state,
        step if run.steps is None else f"{step} of {run.steps}",
        NOTHING if run.layout is None else layout_text(run.layout),
        NOTHING if run.workers is None else str(run.workers),
        age,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_s)),
    )
