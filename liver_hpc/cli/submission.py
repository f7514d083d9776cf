"""`liver submit`: check a run as a whole, then launch it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

from liver_hpc.cli.launch import launch_detached, resolve_cluster
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.cluster.slurm.run_job import RunJob, gone, is_queued, job_of, job_text
from liver_hpc.config.check import check_run
from liver_hpc.config.indexed_data import read_indexed_data
from liver_hpc.config.load import absolute_paths, dump_run
from liver_hpc.config.problems import joined, parts
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.layout.candidates import resolve_layouts
from liver_hpc.recipes.base import Recipe, load_recipe
from liver_hpc.recipes.text_data import pinned, prefix_of
from liver_hpc.run.directory import (
    RunDirectory,
    create_run_directory,
    outcome_text,
    point_latest,
    process_lives,
)
from liver_hpc.run.outcome import Outcome

_QUEUE_POLL_S = 2.0
_START_POLL_S = 0.5


def checked_run(config: RunConfig, cluster: str | None = None) -> tuple[RunConfig, Recipe]:
    """The run with its cluster decided and its paths absolute, and its recipe.

    `cluster` beats the run file. Raises ConfigError with everything that is wrong.
    """
    wanted = {"kind": cluster} if cluster is not None else {}
    kind, found = resolve_cluster(config.cluster.model_copy(update=wanted))
    section = config.cluster.model_copy(update={"kind": kind})
    config = absolute_paths(config.model_copy(update={"cluster": section}))
    try:
        config = resolve_layouts(config, load_recipe(config))
        recipe = load_recipe(config)  # it knows the run as it is resolved
    except ConfigError as error:
        raise ConfigError(joined([*found, *parts(error)])) from error
    if config.data is not None:
        try:
            prefix_of(config.data)  # text that is not there is noticed
        except ConfigError as error:
            found += parts(error)
    check_run(config, recipe, found)
    return config, recipe


def submit_run(config: RunConfig, cluster: str | None = None) -> RunDirectory:
    """Checks, prepares data where needed, launches; returns once the coordinator listens.

    On Slurm it returns when the job is queued. The run does not depend on this process.
    Raises ConfigError before anything is launched, LiverError when the launch failed.
    """
    config, _ = checked_run(config, cluster)
    if config.cluster.kind == "slurm":
        check_partitions(config)
    config = with_prepared_data(config)
    run = create_run_directory(config)
    try:
        launch_detached(run)
    except LiverError as error:
        Outcome("failed", f"it was not launched: {error}", 0).write(run.path)
        raise
    finally:
        if run.job_id() is not None:  # also when Ctrl-C came in between
            point_latest(run)
    if config.cluster.kind == "local":
        await_coordinator(run)
    return run


def check_partitions(config: RunConfig, commands: SlurmCommands | None = None) -> None:
    """Raises ConfigError for partitions that Slurm does not have, or that are too small.

    SlurmError when Slurm does not answer.
    """
    slurm = config.cluster.slurm
    commands = commands or SlurmCommands(slurm.command_s, slurm.unreachable_s)
    known = commands.partitions()
    problems = []

    def check(where: str, name: str, together: int, in_all: int) -> None:
        """A job gets its nodes from one of several partitions, the next job from another one."""
        parts = name.split(",")
        if any(part not in known for part in parts):
            there = ", ".join(sorted(known)) or "none"
            problems.append(f"{where}.partition: Slurm has no partition {name!r}; it has {there}")
            return
        nodes = [commands.hostnames(known[part].nodes) for part in parts]
        for wanted, has in (
            (together, max(map(len, nodes))),
            (in_all, len({node for some in nodes for node in some})),
        ):
            if wanted > has:
                problems.append(f"{where}: wanted {wanted} nodes, partition {name} has {has}")
                return

    for index, part in enumerate(slurm.components):
        if part.partition is not None:
            where = f"cluster.slurm.components.{index}"
            check(where, part.partition, part.nodes, part.nodes)
    if (burst := slurm.burst) is not None:
        where = "cluster.slurm.burst"
        check(where, burst.partition, burst.nodes_per_request, burst.max_nodes)
    if problems:
        raise ConfigError(joined(problems))


def await_coordinator(run: RunDirectory, tell: Callable[[str], None] = lambda text: None) -> None:
    """Returns once the coordinator listens, or the run is over already.

    On Slurm it waits for as long as the job is queued; `tell` hears what Slurm says of it,
    whenever that changes. Raises LiverError if the coordinator died, DeadlineError when it did not
    come within `deadlines.boot_s`.
    """
    config, process = run.config(), run.job_id()
    limit_s = config.deadlines.boot_s
    job = job_of(run)
    if job is not None:
        _await_job(run, job, limit_s, tell)
        return
    local = config.cluster.kind == "local"

    def started() -> bool:
        if run.coordinator() is not None or run.outcome() is not None:
            return True
        if local and process is not None and not process_lives(int(process)) and not run.outcome():
            raise LiverError(f"the coordinator of {run} ended at once; {run.where_logs_are()}")
        return False

    poll_until(started, Deadline.after(SystemClock(), limit_s, f"the coordinator of {run}"))


def _await_job(run: RunDirectory, job: RunJob, limit_s: float, tell: Callable[[str], None]) -> None:
    """Until the job runs and its coordinator listens. A controller that is away is asked again."""
    told, pause = "", threading.Event()
    deadline: Deadline | None = None
    while run.outcome() is None:
        text, queued = _state(run, job)
        if text != told:
            tell(text)
            told = text
        if queued:
            deadline = None
        elif run.coordinator() is not None:  # while it is queued, an earlier one may have left this
            return
        else:
            deadline = deadline or Deadline.after(
                SystemClock(), limit_s, f"the coordinator of {run}"
            )
            deadline.check()
        pause.wait(_QUEUE_POLL_S if queued else _START_POLL_S)


def _state(run: RunDirectory, job: RunJob) -> tuple[str, bool]:
    """What Slurm says of a run's job, and whether it is queued; LiverError once it is over."""
    try:
        info = job.find()
    except ControllerUnreachable as error:
        return f"job {job.job_id}: {error.complaint}", True
    if info is not None:
        return job_text(info), is_queued(info)
    outcome = run.outcome()
    if outcome is None:
        raise gone(run, job.job_id)
    return outcome_text(outcome), False


def prepare_data(config: RunConfig) -> str:
    """Turns `data.text` into an indexed `.bin/.idx` pair, unless that has been done.

    In a process of its own, since Megatron's writer imports torch. Returns a line about the data.
    Raises ConfigError for text that cannot be used, LiverError for everything else.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump_run(config))
        file.flush()
        command = [sys.executable, "-P", "-m", "liver_hpc.recipes.text_data", "--config", file.name]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    if done.returncode == 0:
        return done.stdout.strip()
    said = done.stderr.strip().rpartition("error: ")[2] or f"exit code {done.returncode}"
    raise (ConfigError if done.returncode == 2 else LiverError)(f"preparing the data: {said}")


def with_prepared_data(config: RunConfig) -> RunConfig:
    """The same run on indexed data: the text may change while the run goes on."""
    if config.data is None or config.data.text is None:
        return config
    data = pinned(config.data)
    try:
        read_indexed_data(prefix_of(data))
    except ConfigError:
        prepare_data(config)
    return config.model_copy(update={"data": data})
