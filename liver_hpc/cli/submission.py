"""`liver submit`: check a run as a whole, then launch it; or launch an ended one again."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from liver_hpc.checkpoint.newest import check_own, newest_checkpoint, to_load
from liver_hpc.cli.check import check_run
from liver_hpc.cli.client import await_coordinator, check_ended, goes_on_text
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.config.load import absolute_paths
from liver_hpc.config.schema import (
    AUTO,
    BurstSection,
    ClusterSection,
    ComponentSection,
    RunConfig,
)
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.files import file_lock
from liver_hpc.layout.candidates import resolve_layouts
from liver_hpc.recipes.base import Recipe, load_recipe
from liver_hpc.recipes.specs import derive_spec, keep_spec
from liver_hpc.recipes.text_data import prepare
from liver_hpc.run.directory import (
    LATEST,
    RunDirectory,
    check_free,
    claim_checkpoints,
    create_run_directory,
    point_latest,
)
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome, begin_again

_LAUNCH_S = 120.0
_GIVE_CPUS = {"cpus-per-gpu", "exclusive", "extra-node-info", "mincpus"}
"""Options of sbatch by which a node's task has more than one core without `cpus_per_node`."""
_DEFERRED = tuple(
    f"not checked here, but before a worker boots, on the run's nodes: {what}"
    for what in (
        "whether the model can be built, and says what each worker holds",
        "options and state of the model that no handoff could move",
        "whether it can be had in each of the run's layouts",
        "whether what a worker holds, also during a handoff, fits policy.memory_bytes",
    )
)


def checked_run(config: RunConfig, cluster: str | None = None) -> tuple[RunConfig, Recipe]:
    """The run with its cluster decided and its paths absolute, and its recipe.

    `cluster` beats the run file. Raises ConfigError with everything that is wrong.
    """
    kind, found = cluster or config.cluster.kind, list[str]()
    has_slurm = shutil.which("sbatch") is not None
    if kind == "auto":  # Slurm where there is sbatch and the run file has components for a job
        kind = "slurm" if has_slurm and config.cluster.slurm.components else "local"
    elif kind == "slurm" and not has_slurm:
        found.append("cluster slurm: there is no sbatch on the path")
    section = config.cluster.model_copy(update={"kind": kind})
    config = _without_latest(absolute_paths(config.model_copy(update={"cluster": section})))
    try:
        recipe = load_recipe(config)
        for line in recipe.notes(recipe.options):
            print(f"liver: note: {line}", file=sys.stderr)
        if config.layouts != AUTO:  # what is wrong anyway is told before a model is built
            check_run(config, recipe, found)
        recipe.spec = derive_spec(config)
        config = resolve_layouts(config, recipe.spec, recipe.check_layout)
        resolved = load_recipe(config)  # it knows the run as it is resolved
        resolved.spec = recipe.spec
    except ConfigError as error:
        raise ConfigError(*dict.fromkeys((*found, *error.args))) from error
    except LiverError as error:
        if config.layouts == AUTO or kind == "local":
            raise
        # Torch may be of no use on a login node, or not there.
        for line in (str(error), *_DEFERRED):
            print(f"liver: note: {line}", file=sys.stderr)
        return config, recipe
    check_run(config, resolved, found)
    return config, resolved


def _without_latest(config: RunConfig) -> RunConfig:
    """The same run, whose checkpoints lie in the run that `latest` names now: once it is launched,
    that is the run itself."""
    keys = ("directory", "load", "weights")
    given = {key: getattr(config.checkpoint, key) for key in keys}
    named = {key: _named_by_latest(path) for key, path in given.items() if path is not None}
    checkpoint = config.checkpoint.model_copy(update=named)
    return config.model_copy(update={"checkpoint": checkpoint})


def _named_by_latest(path: Path) -> Path:
    for link in path.parents:
        if link.name == LATEST and link.is_symlink():
            return link.parent / os.readlink(link) / path.relative_to(link)
    return path


def run_to_submit(config: RunConfig, cluster: str | None = None) -> tuple[RunConfig, Recipe]:
    """As `checked_run`; what a batch script of liver's own lacks is noted, and burst nodes that
    would stand idle."""
    config, recipe = checked_run(config, cluster)
    for line in (*_cpu_notes(config.cluster), *_burst_notes(config), *_image_notes(config)):
        print(f"liver: note: {line}", file=sys.stderr)
    return config, recipe


def _cpu_notes(cluster: ClusterSection) -> Iterator[str]:
    slurm = cluster.slurm
    parts: dict[str, ComponentSection | BurstSection] = {
        f"cluster.slurm.components.{index}": part for index, part in enumerate(slurm.components)
    }
    if slurm.burst is not None:
        parts["cluster.slurm.burst"] = slurm.burst
    for where, part in parts.items() if cluster.kind == "slurm" else ():
        slots, settled = cluster.slots(part), part.cpus_per_node or part.options.keys() & _GIVE_CPUS
        if slots > 1 and not settled:
            yield (
                f"{where}.cpus_per_node is not given: where nodes are shared, Slurm may give all "
                f"{slots} workers of a node the one core of one task"
            )


def _burst_notes(config: RunConfig) -> Iterator[str]:
    """Where the first request's nodes lead to no layout without the next one's."""
    slurm, slots = config.cluster.slurm, config.cluster.slots
    burst, counts = slurm.burst, config.worker_counts
    if config.cluster.kind != "slurm" or burst is None or config.layouts == AUTO:
        return
    room = sum(each.nodes * slots(each) for each in slurm.components if each.join == "auto")
    larger = [count for count in counts if count > room]
    nodes = math.ceil((larger[0] - room) / slots(burst)) if larger else 0
    if burst.nodes_per_request < nodes <= burst.max_nodes:
        yield (
            f"cluster.slurm.burst.nodes_per_request is {burst.nodes_per_request}, and it takes "
            f"{nodes} burst nodes from the {room} workers of the components to the next count in "
            f"layouts, {larger[0]}: those that come first wait, idle and paid for; {nodes} has "
            "them come together"
        )


def _image_notes(config: RunConfig) -> Iterator[str]:
    """Where one of another kind would be warned, or would start sooner."""
    container = config.cluster.slurm.container
    if config.cluster.kind != "slurm" or container is None:
        return
    image, where = container.image, "cluster.slurm.container.image"
    if container.runtime == "charliecloud":
        if Path(image).is_file():
            yield (
                f"{where} is a file: what serves it (ch-run) ends when Slurm signals the step, and "
                "all workers of the node with it: without their grace time, and without a "
                "checkpoint; a directory has both (ch-convert)"
            )
    elif not image.startswith(("/", ".")) and (container.runtime == "pyxis" or "://" in image):
        yield (
            f"{where} is fetched on each node, with pyxis by each step anew: deadlines.boot_s, "
            f"{config.deadlines.boot_s:g} s, counts that; a file has it done once"
        )


# ---- a launch


def submit_run(config: RunConfig, cluster: str | None = None) -> RunDirectory:
    """Checks, prepares data where needed, launches; returns once the coordinator listens.

    On Slurm it returns when the job is queued. The run does not depend on this process.
    Raises ConfigError before anything is launched, LiverError when the launch failed.
    """
    config, recipe = run_to_submit(config, cluster)
    if config.cluster.kind == "slurm":
        _slurm(config).check_cluster(os.environ)
        check_partitions(config)
    run = new_run(config, recipe)
    with _saying_what_goes_on(run):
        try:
            _launch(run)
        except LiverError as error:
            Outcome("failed", f"it was not launched: {error}", 0).write(run.path)
            raise
        if config.cluster.kind == "local":
            await_coordinator(run)
    return run


@contextmanager
def _saying_what_goes_on(run: RunDirectory) -> Iterator[None]:
    """Ctrl-C says whether the run was launched by then."""
    before = run.job_id()
    try:
        yield
    except KeyboardInterrupt:
        if run.job_id() == before:
            raise
        raise KeyboardInterrupt(goes_on_text(run)) from None


def resume_run(run: RunDirectory) -> int:
    """Launches an ended run again in its directory; the step from which it goes on.

    Raises ConfigError for a run that is still there, that is complete, that has no checkpoint, or
    in whose directory another run has gone on; CheckpointError when all are damaged; LiverError
    when the launch failed.
    """
    with file_lock(run.resume_lock_path):  # whoever comes second finds the job
        config, last = run.config(), run.last_outcome()
        check_ended(run)
        if last is not None and last.state == "finished":
            raise ConfigError(f"run {run} is complete: {last.reason}")
        if config.cluster.kind == "slurm":
            _slurm(config).check_cluster(os.environ)
        directory = claim_checkpoints(run, config, check_ended)
        newest = newest_checkpoint(directory)
        check_own(newest, run.path, config.checkpoint)
        loaded = to_load(config, directory, newest)
        if newest is None and (loaded is None or loaded.weights):
            raise ConfigError(
                f"run {run} has no checkpoint in {directory} to go on from; `liver stop "
                "--checkpoint` and `checkpoint.every_steps` write one"
            )
        begin_again(run.path)
        (run.path / COORDINATOR_FILE).unlink(missing_ok=True)
        with _saying_what_goes_on(run):
            try:
                _launch(run)
            except LiverError:
                if last is not None:
                    last.write(run.path)
                raise
            if config.cluster.kind == "local":
                await_coordinator(run)
        if loaded is not None:
            return loaded.step
        assert newest is not None
        return newest.index.scalars.step


def _launch(run: RunDirectory) -> None:
    before = run.job_id()
    try:
        launch_detached(run)
    finally:
        if run.job_id() != before:  # also when Ctrl-C came in between
            note_latest(run)


def launch_detached(run: RunDirectory) -> None:
    """Submits the run's coordinator, from a process of its own (`launch`) that notes the job id.

    Ctrl-C does not come between a launch and its job id: it is raised once that is written.
    Raises LiverError with what submitit said.
    """
    log = run.jobs_path / "launch.log"
    cluster = run.config().cluster
    limit_s = _LAUNCH_S + (cluster.slurm.unreachable_s if cluster.kind == "slurm" else 0.0)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "liver_hpc.cli.launch", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise LiverError(f"waited {limit_s:g} s for submitit; see {log}") from None
    except KeyboardInterrupt:
        process.wait(limit_s)
        raise
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise LiverError(f"submitit: {lines[-1] if lines else f'exit code {code}'}; see {log}")


def note_latest(run: RunDirectory) -> None:
    """`latest` names the run from now on, or else a line says why it does not."""
    if problem := point_latest(run):
        print(f"liver: note: {problem}", file=sys.stderr)


# ---- what else a run needs


def new_run(config: RunConfig, recipe: Recipe, name: str | None = None) -> RunDirectory:
    """The directory of a run that has passed its checks, with its data and its model's spec, where
    that is known already."""
    config = with_prepared_data(config)
    check_free(config, check_ended)
    run = create_run_directory(config, name)
    if recipe.knows_spec:
        keep_spec(recipe, run.path)
    return run


def _slurm(config: RunConfig) -> SlurmCommands:
    return SlurmCommands(config.cluster.slurm.command_s, config.cluster.slurm.unreachable_s)


def check_partitions(config: RunConfig, commands: SlurmCommands | None = None) -> None:
    """Raises ConfigError for partitions that Slurm does not have, or that are too small.

    SlurmError when Slurm does not answer.
    """
    slurm, commands = config.cluster.slurm, commands or _slurm(config)
    asked = []
    for name in dict.fromkeys(part.partition for part in slurm.components if part.partition):
        # Components of one job have their nodes at the same time, and never share one.
        those = {i: part.nodes for i, part in enumerate(slurm.components) if part.partition == name}
        where = f"cluster.slurm.components.{','.join(map(str, those))}"
        asked.append((where, name, max(those.values()), sum(those.values())))
    if (burst := slurm.burst) is not None:
        where = "cluster.slurm.burst"
        asked.append((where, burst.partition, burst.nodes_per_request, burst.max_nodes))
    known = commands.partitions()
    problems = []
    for where, name, together, in_all in asked:
        # A job gets its nodes from one of several partitions, the next job from another one.
        parts = name.split(",")
        if any(part not in known for part in parts):
            there = ", ".join(sorted(known)) or "none"
            problems.append(f"{where}.partition: Slurm has no partition {name!r}; it has {there}")
            continue
        nodes = [set(commands.hostnames(known[part].nodes)) for part in parts]
        limits = (together, max(map(len, nodes))), (in_all, len(set.union(*nodes)))
        wanted, has = next((limit for limit in limits if limit[0] > limit[1]), (0, 0))
        if wanted:
            problems.append(f"{where}: wanted {wanted} nodes, partition {name} has {has}")
    if problems:
        raise ConfigError(*problems)


def with_prepared_data(config: RunConfig) -> RunConfig:
    """The same run on indexed data: text may change while a run goes on, and may differ between
    nodes. Raises ConfigError for text that cannot be used."""
    if config.data is None or config.data.text is None:
        return config
    named = {"prefix": prepare(config.data).prefix, "text": None}
    return config.model_copy(update={"data": config.data.model_copy(update=named)})
